"""A real run of a random two-layer model: what it writes, what it logs, and that it can be repeated to the bit."""

from __future__ import annotations

import io
import math
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.console import Console
from baton.errors import Damaged, StorageFault, UserError
from baton.policy.load import load_model
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.journal import Journal
from baton.records.metrics import MetricsWriter, read_metrics
from baton.records.run_directory import RunDirectory
from baton.records.run_lock import RunLock
from baton.rewards.scorer import RewardScorer
from baton.rollout.transport import LocalTransport
from baton.run import assemble
from baton.run.assemble import build_loop
from baton.run.resume import resume_point, with_dtypes
from baton.run.summary import summarise
from baton.tasks.stream import TaskMixture
from baton.trainer.checkpoint import list_checkpoints
from baton.trainer.local_trainer import LocalTrainer
from baton.views.pages.report import write_page
from baton.views.terminal.progress import TerminalObserver
from baton.views.terminal.report import print_report
from tests.small_reward import evenness

pytestmark = pytest.mark.numerics

EVERY_STEP = {
    "reward/mean",
    "reward/std",
    "reward/zero_std_frac",
    "accuracy/mean",
    "response_length/mean",
    "response_length/max",
    "response_length/clip_ratio",
    "policy/loss",
    "policy/entropy",
    "policy/clip_frac",
    "policy/grad_norm",
    "policy/lr",
    "policy/mismatch_kl",
    "policy/logprob_diff_mean",
    "policy/logprob_diff_max",
    "staleness/mean",
    "staleness/max",
    "perf/throughput",
    "perf/step_time",
    "time/generate",
    "time/train",
    "time/weight_sync",
    "tokens/generated",
}
TIMES = ("time/", "perf/")


def load(small: Any, tmp_path: Path, *overrides: str) -> Recipe:
    return load_recipe(Recipe, small.recipe, [f"run.directory={tmp_path}", *overrides])


def train(recipe: Recipe, *, overwrite: bool = False) -> RunDirectory:
    observer = TerminalObserver(Console(quiet=True), recipe.run.steps)
    loop = build_loop(recipe, observer, resume=False, overwrite=overwrite)
    try:
        loop.train()
    finally:
        loop.close()
    return loop.run


@pytest.mark.parametrize("overwrite", [False, True])
def test_without_a_start_of_weights_and_biases_the_directory_stays_as_it_is(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, overwrite: bool
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        (tmp_path / "small" / "wandb").mkdir(exist_ok=True)  # as by Weights & Biases before it fails
        raise UserError("Weights & Biases did not start")

    recipe = load(small, tmp_path)
    if overwrite:
        shutil.copytree(small.run, tmp_path / "small")
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "start_wandb", refused)
        with pytest.raises(UserError, match="did not start"):
            train(recipe, overwrite=overwrite)
    assert bool(list((tmp_path / "small").glob("checkpoints/step_*"))) == overwrite
    assert (tmp_path / "small" / "run.json").exists() == overwrite
    if not overwrite:
        train(recipe)  # the same command again
        assert len(steps_of(tmp_path / "small")) == recipe.run.steps


def test_the_best_accuracy_begins_again_with_an_evaluation_that_cannot_be_compared(small: Any, tmp_path: Path) -> None:
    shutil.copytree(small.run, tmp_path / "small")
    observer = TerminalObserver(Console(quiet=True), 9)
    found = {
        key: resume_point(with_dtypes(load(small, tmp_path, "run.steps=9", key)), observer).state
        for key in ("eval.samples=2", "eval.temperature=0.5", "eval.num_prompts=4")
    }
    assert found["eval.samples=2"].best_accuracy >= 0
    for key in ("eval.temperature=0.5", "eval.num_prompts=4"):
        assert (found[key].best_accuracy, found[key].best_step) == (-1.0, found["eval.samples=2"].best_step)


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(path) if "reward/mean" in row]


def test_every_step_logs_the_neutral_names_and_they_are_documented(small: Any) -> None:
    rows = steps_of(small.run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert not EVERY_STEP - row.keys()
        assert all(math.isfinite(value) for value in row.values())
    assert not EVERY_STEP - documented_names()


def documented_names() -> set[str]:
    """Names in docs/metrics.md, where `a/b_mean`, `_max` and `a/mean`, `/max` stand for two names each."""
    names: set[str] = set()
    last = ""
    for name in re.findall(r"`([^`]+)`", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()):
        if name[0] in "/_":
            name = last.rpartition(name[0])[0] + name
        last = name
        names.add(name)
    return names


def test_engine_and_trainer_agree_on_every_token_and_no_token_is_stale(small: Any) -> None:
    for row in steps_of(small.run):
        assert row["policy/logprob_diff_mean"] <= row["policy/logprob_diff_max"] <= 1e-4
        assert abs(row["policy/mismatch_kl"]) <= 1e-6
        assert row["staleness/max"] == row["staleness/mean"] == 0
        assert row["policy/clip_frac"] == 0, "one update from the proximal policy clips nothing"


def test_a_run_with_shared_prompts_has_the_metrics_of_a_run_without(small: Any, tmp_path: Path) -> None:
    """The gradient is scaled down, so that rounding of the gradient stays rounding of the update."""
    found = []
    for shared in ("false", "true"):
        overrides = ["run.steps=2", "trainer.max_grad_norm=1e-8", f"trainer.share_prompts={shared}"]
        found.append(steps_of(train(load(small, tmp_path / shared, *overrides)).path))
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"tokens/padding_frac"}:
            if not name.startswith(TIMES):
                assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert [row["tokens/padding_frac"] for row in found[1]] == [0.0, 0.0], "prompts were shared"


def test_metrics_are_those_of_the_trajectories_that_were_kept(small: Any) -> None:
    run = RunDirectory.open(small.run)
    tokenizer = load_tokenizer(str(run.tokenizer))
    assert run.recorded_steps() == [1, 2, 3]
    for row in steps_of(small.run):
        groups = run.groups(row["step"])
        members = [member for group in groups for member in group.members]
        assert (len(groups), len(members)) == (4, 16)
        rewards = [member.judgement.reward for member in members]
        lengths = [member.trajectory.num_tokens for member in members]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / 16)
        assert row["accuracy/mean"] == pytest.approx(sum(m.judgement.is_correct for m in members) / 16)
        assert row["response_length/mean"] == pytest.approx(sum(lengths) / 16)
        assert row["response_length/max"] == max(lengths) <= 10
        assert row["tokens/generated"] == sum(lengths)
        cut = [member.trajectory.finish_reason == "length" for member in members]
        assert row["response_length/clip_ratio"] == pytest.approx(sum(cut) / 16)
        equal = [len({m.judgement.reward for m in group.members}) == 1 for group in groups]
        assert row["reward/zero_std_frac"] == pytest.approx(sum(equal) / 4)
        for group in groups:
            for member in group.members:
                trajectory, judgement = member.trajectory, member.judgement
                assert set(trajectory.policy_versions) == {row["step"] - 1}, "step v + 1 trains what version v wrote"
                assert trajectory.prompt_ids == tokenizer.prompt_ids(group.prompt.messages)
                text = tokenizer.text(trajectory.token_ids)
                assert judgement.parts["evenness"] == evenness(text)
                assert judgement.reward == judgement.parts["evenness"] + 0.5 * judgement.parts["correct"]


def test_groups_are_numbered_on_and_never_again(small: Any) -> None:
    run = RunDirectory.open(small.run)
    ids = [group.group_id for step in run.recorded_steps() for group in run.groups(step)]
    assert ids == list(range(12))


def test_held_out_prompts_are_evaluated_at_the_start_between_and_at_the_end(small: Any) -> None:
    run = RunDirectory.open(small.run)
    found = run.evaluations()
    assert sorted({e.step for e in found}) == [0, 2, 3]
    assert {(e.result.task, e.result.way) for e in found if e.step == 0} == {
        (task, way) for task in ("chain_sum", "basic_arithmetic", "all") for way in {e.result.way for e in found}
    }
    rows = {row["step"]: row for row in read_metrics(small.run) if "eval/all/greedy" in row}
    assert sorted(rows) == [0, 2, 3]
    assert {"eval/all/avg@2", "eval/all/pass@2", "eval/chain_sum/avg@2", "eval/all/response_length"} <= rows[0].keys()
    assert all(row["eval/all/avg@2"] <= row["eval/all/pass@2"] for row in rows.values())
    trained = {g.prompt.prompt_id for step in run.recorded_steps() for g in run.groups(step)}
    from baton.tasks.stream import TaskMixture

    recipe = load_recipe(Recipe, small.recipe)
    held_out = TaskMixture(recipe.task, recipe.answer).held_out(recipe.eval.num_prompts)
    assert trained.isdisjoint(p.prompt_id for p in held_out)


def test_a_run_without_the_evaluation_at_the_start_makes_the_others(small: Any, tmp_path: Path) -> None:
    run = train(load(small, tmp_path, "eval.at_start=false"))
    assert sorted({e.step for e in run.evaluations()}) == [2, 3]
    assert summarise(run).evaluated_steps == (2, 3)


def test_an_evaluation_that_cannot_be_judged_is_recorded_without_accuracy_and_the_run_goes_on(
    small: Any, tmp_path: Path
) -> None:
    """The reward raises until the first evaluation is over: nothing is known then, and nothing is made up."""
    is_down = tmp_path / "is_down"
    is_down.touch()
    (tmp_path / "rewards.py").write_text(
        f"from pathlib import Path\n\ndef f(prompt, response, answer):\n"
        f"    assert not Path({str(is_down)!r}).exists(), 'no answer from the service'\n    return len(response) % 5\n"
    )

    class Watching(TerminalObserver):
        def evaluated(self, step: int, results: Any) -> None:
            super().evaluated(step, results)
            is_down.unlink(missing_ok=True)

    function = f"reward.0.function={tmp_path / 'rewards.py'}:f"
    recipe = load(small, tmp_path, function, "reward.0.isolate=false")
    console = Console(record=True, width=200, file=io.StringIO())
    loop = build_loop(recipe, Watching(console, 3), resume=False, overwrite=False)
    try:
        loop.train()
    finally:
        loop.close()
    said = console.export_text()
    assert "accuracy after step 0, temperature 1: not scored on 6 prompts" in said
    assert "evaluation after step 0: 18 of 18 responses could not be scored (raised 18)" in said
    assert "no answer from the service" in said
    found = loop.run.evaluations()
    assert [e.result.accuracy is None for e in found] == [e.step == 0 for e in found]
    assert [row["step"] for row in read_metrics(loop.run.path) if "eval/all/greedy" in row] == [2, 3]
    assert loop.state.best_accuracy >= 0
    assert [row["step"] for row in steps_of(loop.run.path)] == [1, 2, 3]
    report = summarise(loop.run)
    assert all(change.points is None for change in report.changes)
    console = Console(record=True, width=120, file=io.StringIO())
    print_report(console, report)
    assert "not scored" in console.export_text()
    page = tmp_path / "report.html"
    write_page(loop.run, page)
    assert "not scored before training" in page.read_text()


def test_a_checkpoint_is_a_plain_hugging_face_model_with_other_weights_than_the_first(small: Any) -> None:
    last = list_checkpoints(small.run / "checkpoints")[-1]
    assert last.name == "step_000003"
    model = AutoModelForCausalLM.from_pretrained(last)
    tokenizer = AutoTokenizer.from_pretrained(last)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    before, after = load_file(small.model / "model.safetensors"), load_file(last / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "norm" not in name)


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_ones(small: Any, tmp_path: Path) -> None:
    def outcome(path: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        rows = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(path)]
        return rows, load_file(path / "checkpoints" / "step_000003" / "model.safetensors")

    rows, weights = outcome(small.run)
    again_rows, again = outcome(train(load(small, tmp_path)).path)
    assert again_rows == rows
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    _, other = outcome(train(load(small, tmp_path, "run.seed=6", "run.name=other")).path)
    assert not all(torch.equal(weights[name], other[name]) for name in weights)


def test_recipe_and_circumstances_are_written_before_the_first_step(small: Any, tmp_path: Path) -> None:
    recipe = load(small, tmp_path)
    loop = build_loop(recipe, TerminalObserver(Console(quiet=True), 3), resume=False, overwrite=False)
    loop.close()
    assert load_recipe(Recipe, loop.run.path / "recipe.toml") == with_dtypes(recipe)
    facts = loop.run.facts()
    assert (facts["seed"], facts["threads"]) == (5, 1)
    assert facts["packages"]["torch"] == version("torch")  # torch.__version__ may add the build
    assert {"commit", "started", "command", "python", "processor"} <= facts.keys()
    assert loop.run.recorded_steps() == []


def test_a_run_is_never_written_over_unless_asked_to(small: Any, tmp_path: Path) -> None:
    recipe = load(small, tmp_path, "run.steps=1", "eval.num_prompts=2")
    train(recipe)
    before = (recipe.run.path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"already holds a run: continue it with --resume, replace it with --overwrite"):
        train(recipe)
    assert (recipe.run.path / "metrics.jsonl").read_bytes() == before
    train(recipe, overwrite=True)
    assert len(steps_of(recipe.run.path)) == 1


def test_a_start_that_fails_leaves_no_run_in_the_way(small: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.slots: got 12"):
        train(load(small, tmp_path, "engine.slots=12"))
    train(load(small, tmp_path, "run.steps=1", "eval.num_prompts=2"))


@pytest.mark.parametrize("failing", ["Journal", "Evaluator"])
def test_a_start_that_fails_late_closes_what_was_opened(
    failing: str, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageFault("no")

    closed: list[str] = []
    for part in (MetricsWriter, LocalTransport, LocalTrainer):
        monkeypatch.setattr(part, "close", lambda self: closed.append(type(self).__name__))
    monkeypatch.setattr(assemble, failing, fail)
    with pytest.raises(StorageFault):
        train(load(small, tmp_path))
    assert closed == ["MetricsWriter", "LocalTransport", "LocalTrainer"]


def test_a_run_that_is_never_trained_closes_what_was_opened(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for part in (RunLock, TaskMixture, RewardScorer, LocalTrainer, LocalTransport, MetricsWriter, Journal):
        name = "release" if part is RunLock else "close"
        original = getattr(part, name)

        def recorded(self: Any, *values: Any, close: Any = original, **options: Any) -> None:
            closed.append(type(self).__name__)
            close(self, *values, **options)

        monkeypatch.setattr(part, name, recorded)
    observer = TerminalObserver(Console(quiet=True), 3)
    loop = build_loop(load(small, tmp_path), observer, resume=False, overwrite=False)
    assert closed == []
    loop.close()
    reversed_order = ["Journal", "MetricsWriter", "LocalTransport", "LocalTrainer", "RewardScorer", "TaskMixture"]
    assert closed == ["LocalTransport", *reversed_order, "RunLock"]


def test_records_that_cannot_be_read_at_the_end_leave_nothing_open(small: Any, tmp_path: Path) -> None:
    recipe = load(small, tmp_path, "run.steps=1", "eval.num_prompts=2")
    loop = build_loop(recipe, TerminalObserver(Console(quiet=True), 1), resume=False, overwrite=False)
    loop.train()
    (file,) = recipe.run.path.rglob("evaluations.jsonl")
    file.write_bytes(b"damaged\n" + file.read_bytes())
    with pytest.raises(Damaged, match="line 1 of"):
        loop.close()
    with pytest.raises(StorageFault, match="closed"):
        loop.journal.settle()
    assert RunLock.status(recipe.run.path) == "failed"


def test_the_report_adds_up(small: Any) -> None:
    report = summarise(RunDirectory.open(small.run))
    rows = steps_of(small.run)
    assert (report.steps, report.seed) == (3, 5)
    assert report.generated_tokens == sum(row["tokens/generated"] for row in rows)
    assert report.train_time_s == pytest.approx(sum(row["perf/step_time"] for row in rows))
    assert (report.reward_before, report.reward_after) == (rows[0]["reward/mean"], rows[2]["reward/mean"])
    for change in report.changes:
        assert change.points == pytest.approx(100 * (change.after.accuracy.value - change.before.accuracy.value))


def test_a_reference_model_that_does_not_fit_is_refused_before_anything_starts(small: Any, tmp_path: Path) -> None:
    def start(reference: Path) -> None:
        train(load(small, tmp_path, "algorithm.kl_coef=0.1", f"algorithm.reference={reference}"))

    with pytest.raises(UserError, match=r"algorithm\.reference: there is no directory"):
        start(tmp_path / "nowhere")
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64)
    tokenizer = scratch_tokenizer(["1+2"], 320)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(tmp_path / "other")
    with pytest.raises(
        UserError, match=r"algorithm\.reference: .* has a vocabulary of \d+ tokens and the policy one of"
    ):
        start(tmp_path / "other")
    assert not (tmp_path / "small").exists()


def test_adapters_and_a_critic_go_through_a_whole_run(small: Any, tmp_path: Path) -> None:
    """PPO on a LoRA adapter with a KL to the model without it: rolled out, evaluated, saved, and loaded again."""
    overrides = ["algorithm=ppo", "algorithm.num_minibatches=2", "algorithm.kl_coef=0.1", "lora.rank=2"]
    recipe = load(small, tmp_path, *overrides)
    run = train(recipe)
    rows = steps_of(run.path)
    assert {"value/loss", "kl/ref", "policy/ess"} <= rows[-1].keys()
    assert rows[-1]["policy/logprob_diff_max"] < 1e-4  # the engine serves what is trained
    assert rows[-1]["kl/ref"] != 0.0
    checkpoint = list_checkpoints(run.checkpoints)[-1]
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert (checkpoint / "baton" / "critic.safetensors").is_file()
    base = load_file(small.model / "model.safetensors")
    merged = load_model(str(checkpoint), dtype=torch.float32, device=torch.device("cpu")).state_dict()
    assert any(not torch.equal(merged[name], base[name]) for name in base)


def test_a_run_says_which_algorithm_it_is(small: Any, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = load(small, tmp_path, "algorithm=dr_grpo", "algorithm.clip_high=0.3")
    observer = TerminalObserver(Console(quiet=True), recipe.run.steps)
    observer.said = said.append  # type: ignore[method-assign]
    build_loop(recipe, observer, resume=False, overwrite=False).close()
    assert "algorithm dr_grpo, but with clip_high = 0.3" in said
    assert any("clipping has no effect" in text for text in said)
