"""A run that is stopped anywhere and resumed equals one that was never stopped: weights, metrics, trajectories."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.console import Console
from baton.errors import Damaged, StorageFault, TrainingDiverged, UserError
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.recipe.changes import compare_for_resume, with_current_keys
from baton.recipe.recipe import Recipe
from baton.records.journal import Journal
from baton.records.metrics import read_metrics
from baton.records.predictions import FILE, Prediction, Predictions
from baton.records.run_directory import RunDirectory
from baton.run.assemble import build_loop, train_here
from baton.run.loop import LoopState
from baton.run.resume import LOOP_STATE, skip_batch, with_dtypes, with_paths_of, with_revisions
from baton.run.summary import summarise
from baton.run.trajectories import read_trajectories
from baton.stop import Stopped, StopRequest
from baton.trainer.checkpoint import list_checkpoints
from baton.types import FinishReason, Group, Message, Prompt, RewardResult, ScoredTrajectory, Segment, Trajectory
from baton.views.terminal.progress import TerminalObserver
from tests.fork_server import exit_code_of, start_process
from tests.run.stopping import StopWhen

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

NUM_KILLS = int(os.environ.get("BATON_TEST_KILLS", "20"))
TIMES = ("time/", "perf/")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model on disk."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = scratch_tokenizer(["1+2-3 <think>1+2=3</think><answer>0</answer>"], 300)
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def recipe(model: Path, directory: Path, **changes: Any) -> Recipe:
    """Nine steps with two minibatches each, evaluated every fourth and kept every second."""
    tree: dict[str, Any] = {
        "run": {"name": "r", "directory": str(directory), "steps": 9, "threads": 1, "seed": 3},
        "model": {"path": str(model), "device": "cpu"},
        "task": [
            {"name": "chain_sum", "form": "compact", "params": {"max_terms": 3, "max_digits": 1}},
            {"name": "rows", "path": str(directory / "rows.jsonl")},
        ],
        "answer": {"format": "last_line", "instruct": False},
        "reward": [
            {"kind": "format"},
            {"kind": "function", "function": "tests.run.test_resume:evenness", "isolate": False},
        ],
        "rollout": {"batch_groups": 4, "group_size": 4, "max_new_tokens": 12},
        "engine": {"slots": 16, "max_context_tokens": 64},
        "trainer": {"lr": 1e-3, "decay": "linear"},
        "algorithm": {"num_minibatches": 2},
        "eval": {"every": 4, "num_prompts": 4},
        "checkpoint": {"every": 2, "keep": 2},
        "weights": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section] = {**tree[section], name: value}
    directory.mkdir(exist_ok=True, parents=True)
    # eleven of the fourteen rows are on the training side: nine steps pass an epoch boundary
    (directory / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(30, 44)))
    return Recipe.model_validate(tree)


def evenness(response: str) -> float:
    """A reward that a random model varies in."""
    return len(response) % 5 / 5


def train(wanted: Recipe, *, resume: bool, stop: StopRequest | None = None) -> None:
    console = Console(file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with TerminalObserver(console, wanted.run.steps) as observer:
        loop = build_loop(wanted, observer, resume=resume, overwrite=False, stop=stop)
        try:
            loop.train()
        finally:
            loop.close()


def outcome(wanted: Recipe) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], list[Any], list[Any]]:
    """Weights, metrics without times, evaluations, and every trajectory of a finished run."""
    from safetensors.torch import load_file

    run = RunDirectory.open(wanted.run.path)
    last = list_checkpoints(run.checkpoints)[-1]
    rows = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(run.path)]
    groups = [run.groups(step) for step in run.recorded_steps()]
    return load_file(last / "model.safetensors"), rows, run.evaluations(), groups


def assert_equal_runs(one: Recipe, other: Recipe) -> None:
    (weights, *rest), (other_weights, *other_rest) = outcome(one), outcome(other)
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert rest == other_rest


@pytest.fixture(scope="session")
def unbroken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The run that nothing happens to."""
    wanted = recipe(tiny_model, tmp_path_factory.mktemp("unbroken"))
    train(wanted, resume=False)
    return wanted


def test_the_run_learns_something_that_could_differ(unbroken: Recipe) -> None:
    _, rows, evaluations, groups = outcome(unbroken)
    assert len([row for row in rows if "reward/mean" in row]) == 9
    assert len({row["reward/mean"] for row in rows if "reward/mean" in row}) > 3
    assert {e.step for e in evaluations} == {0, 4, 8, 9}
    assert len(groups) == 9
    assert any(row.get("policy/grad_norm", 0) > 0 for row in rows)


def test_stopping_after_any_step_and_resuming_changes_nothing(
    tiny_model: Path, tmp_path: Path, unbroken: Recipe
) -> None:
    wanted = recipe(tiny_model, tmp_path)
    for step in (1, 4, 5):

        def after(step: int = step) -> bool:
            steps = RunDirectory(wanted.run.path).recorded_steps() if wanted.run.path.exists() else []
            return bool(steps) and steps[-1] >= step

        train(wanted, resume=True, stop=StopWhen(after))
    train(wanted, resume=True)
    assert_equal_runs(unbroken, wanted)
    resumed = RunDirectory(wanted.run.path).facts()["resumed"]
    assert [r["step"] for r in resumed] == [1, 4, 5]


def _one_life(wanted: Recipe) -> None:
    try:
        train(wanted, resume=True)
    except UserError as error:
        if "is complete" not in str(error):  # killed between its last write and its end
            raise


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_unbroken(
    tiny_model: Path, tmp_path: Path, unbroken: Recipe
) -> None:
    dice = random.Random(20)
    kills, attempt = 0, 0
    while kills < NUM_KILLS:
        wanted = recipe(tiny_model, tmp_path / str(attempt))
        attempt += 1
        while True:
            child = start_process(_one_life, wanted)
            if dice.random() < 0.9:
                time.sleep(dice.uniform(0.02, 1.5))
                child.kill()
            code = exit_code_of(child)
            if code == -signal.SIGKILL:
                kills += 1
                continue
            assert code == 0, f"a resume failed after {kills} kills"
            break
        assert_equal_runs(unbroken, wanted)


def test_rows_written_after_the_checkpoint_are_cut(tiny_model: Path, tmp_path: Path, unbroken: Recipe) -> None:
    wanted = recipe(tiny_model, tmp_path)
    third = wanted.run.path / "trajectories/step_000003.jsonl.gz"
    train(wanted, resume=False, stop=StopWhen(third.exists))
    with (wanted.run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 9.0}\n{"step": 5, "rew')
    train(wanted, resume=True)
    assert_equal_runs(unbroken, wanted)


def test_a_recorded_batch_is_neither_generated_nor_judged_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Recipe
) -> None:
    wanted = recipe(tiny_model, tmp_path)
    console = Console(file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    loop = build_loop(wanted, TerminalObserver(console, 9), resume=False, overwrite=False)
    train_step = loop.trainer.step

    def dies_at_step_four(batch: Any) -> dict[str, float]:
        if batch.step == 4:
            raise RuntimeError("the process dies after step 4 was recorded, before it is trained on")
        return train_step(batch)

    monkeypatch.setattr(loop.trainer, "step", dies_at_step_four)
    with pytest.raises(RuntimeError, match="dies"):
        loop.train()
    loop.close()
    resumed = build_loop(wanted, TerminalObserver(console, 9), resume=True, overwrite=False)
    assert resumed.state.step == 2  # its checkpoint; steps 3 and 4 are recorded
    generated: list[int] = []
    next_batch = resumed.controller.next_batch

    def counted(*arguments: Any) -> list[Group]:
        groups = next_batch(*arguments)
        generated.extend(group.group_id for group in groups)
        return groups

    monkeypatch.setattr(resumed.controller, "next_batch", counted)
    resumed.train()
    resumed.close()
    assert generated == list(range(16, 36))  # four groups a step: steps 5 to 9 only
    assert_equal_runs(unbroken, wanted)


def test_a_checkpoint_whose_replacement_was_interrupted_is_the_resume_point(
    tiny_model: Path, tmp_path: Path, unbroken: Recipe
) -> None:
    wanted = recipe(tiny_model, tmp_path)
    train(wanted, resume=False, stop=StopWhen((wanted.run.path / "trajectories/step_000005.jsonl.gz").exists))
    checkpoints = RunDirectory(wanted.run.path).checkpoints
    last = list_checkpoints(checkpoints)[-1]
    last.rename(checkpoints / f".{last.name}.replaced")
    (checkpoints / f".{last.name}.unfinished").mkdir()
    train(wanted, resume=True)
    assert [resumed["step"] for resumed in RunDirectory(wanted.run.path).facts()["resumed"]] == [int(last.name[5:])]
    assert_equal_runs(unbroken, wanted)


@pytest.mark.parametrize(("path", "expected"), [
    ("runs/a/checkpoints/step_000100", "runs/a/checkpoints/step_000050"),
    (f"{Path.cwd()}/runs/a/checkpoints/step_000100", "runs/a/checkpoints/step_000050"),
    ("runs/b/checkpoints/step_000100", "runs/b/checkpoints/step_000100"),
    ("models/step_000100", "models/step_000100"),
])  # fmt: skip
def test_a_run_that_began_from_another_keeps_its_checkpoint_when_that_run_has_newer_ones(
    path: str, expected: str
) -> None:
    tree = {"run": {"name": "r"}, "model": {"path": path}, "task": [{"name": "chain_sum"}]}
    recorded = {"model": {"path": "runs/a/checkpoints/step_000050"}, "task": [{"path": None}]}
    found = with_revisions(Recipe.model_validate(tree), recorded)
    assert found.model.path == expected


def test_the_best_checkpoint_outlives_the_latest(tiny_model: Path, tmp_path: Path) -> None:
    wanted = recipe(tiny_model, tmp_path, checkpoint__keep=1, eval__every=1)
    train(wanted, resume=False)
    run = RunDirectory(wanted.run.path)
    sampled: dict[int, float] = {}
    for e in run.evaluations():
        if e.result.task == "all" and e.result.temperature:
            sampled[e.step] = e.result.accuracy.value
    best = max(sampled, key=lambda step: (sampled[step], -step))
    kept = {int(path.name[5:]) for path in list_checkpoints(run.checkpoints)}
    assert kept == {9, best} - {0}


@pytest.mark.parametrize("background", [False, True])
def test_a_kill_after_an_evaluation_that_a_resumed_run_repeats_keeps_the_best_accuracy(
    tiny_model: Path, tmp_path: Path, *, background: bool
) -> None:
    class Observer(TerminalObserver):
        """Stops the run in the evaluation, and later ends it after the evaluation."""

        def phase(self, name: str, total: int) -> Any:
            if name == "evaluate" and not wanted.run.path.joinpath("checkpoints/step_000001").exists():
                raise Stopped
            return super().phase(name, total)

        def evaluated(self, step: int, results: Any) -> None:
            raise KeyboardInterrupt

    wanted = recipe(tiny_model, tmp_path, run__steps=1, eval__at_start=False, checkpoint__background=background)
    observer = Observer(Console(quiet=True), 1)
    loop = build_loop(wanted, observer, resume=False, overwrite=False)
    loop.train()
    loop.close()
    assert not loop.run.evaluations()
    loop = build_loop(wanted, observer, resume=True, overwrite=False)
    with pytest.raises(KeyboardInterrupt):
        loop.train()
    (checkpoint,) = list_checkpoints(loop.run.checkpoints)
    found = msgspec.json.decode((checkpoint / LOOP_STATE).read_bytes(), type=LoopState)
    loop.close()
    assert loop.run.evaluations()
    assert found.best_step == 1
    assert found.best_accuracy >= 0


def test_the_resolved_recipe_of_an_earlier_baton_is_read_without_keys_removed_since() -> None:
    now = {"rollout": {"group_size": 8}, "weights": {"keep": 3}}
    assert with_current_keys({**now, "weights": {"keep": 3, "path": "chunks"}}) == now


def test_the_resolved_recipe_of_an_earlier_baton_is_read_under_the_keys_of_today() -> None:
    before = {"swarm": {"silence_s": 9.0, "workers": 2}, "weights": {"anchor_every": 4}}
    now = {"swarm": {"heartbeat_timeout_s": 9.0, "workers": 2}, "weights": {"keyframe_every": 4}}
    assert with_current_keys(before) == now
    assert compare_for_resume(before, now) == []


def test_a_run_is_resumed_with_other_paths_to_the_same_files(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_files_in(directory: str, steps: int) -> Recipe:
        tree = recipe(tiny_model, tmp_path, run__steps=steps).model_dump(mode="json")
        tree["task"][1]["path"] = f"{directory}rows.jsonl"
        tree["reward"] = [{"kind": "function", "function": f"{directory}own.py:length", "isolate": False}]
        return Recipe.model_validate(tree)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "own.py").write_text("def length(response):\n    return len(response) % 5\n")
    monkeypatch.chdir(tmp_path)
    train(with_files_in("", 1), resume=False)
    train(with_files_in(f"{tmp_path}/", 2), resume=True)
    train(with_files_in("", 3), resume=True)
    monkeypatch.chdir(elsewhere)
    train(with_files_in("../", 4), resume=True)
    run = RunDirectory.open(tmp_path / "r")
    assert [list(resumed["changed"]) for resumed in run.facts()["resumed"]] == [["run.steps"]] * 3
    for name in ("own.py", "rows.jsonl"):
        (elsewhere / name).write_bytes((tmp_path / name).read_bytes())
    with pytest.raises(UserError, match=r"this recipe changes task\.1\.path: .*; reward\.0\.function: "):
        train(with_files_in("", 5), resume=True)


@pytest.mark.parametrize("key", ["task.tools", "eval.task.tools"])
def test_paths_of_tools_may_also_be_written_differently(key: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    old, new = ["own.py:add", "own.py:sub"], [f"{tmp_path}/own.py:add", f"{tmp_path}/own.py:product"]
    assert with_paths_of(new, old, tmp_path, key) == [new[0], old[1]]


def test_a_run_keeps_the_published_files_of_another_run_with_its_name(tiny_model: Path, tmp_path: Path) -> None:
    shared, console = tmp_path / "shared", Console(quiet=True)
    shared.mkdir()
    first, second = (
        recipe(tiny_model, tmp_path / name, weights__files=str(shared), engine__processes=1) for name in "ab"
    )
    loop = build_loop(first, TerminalObserver(console, 1), resume=False, overwrite=False)
    weights = loop.trainer.publish()  # its file is removed with this object
    (published,) = shared.rglob("*.safetensors")
    build_loop(second, TerminalObserver(console, 1), resume=False, overwrite=False).close()
    assert published.exists(), weights
    loop.close()
    assert not list(shared.iterdir())


def dtypes(device: str, recorded: dict[str, Any] | None = None, **sections: Any) -> tuple[str, str]:
    tree = {"run": {"name": "r"}, "model": {"path": "m", "device": device}, "task": [{"name": "chain_sum"}], **sections}
    found = with_dtypes(Recipe.model_validate(tree), recorded)
    return found.trainer.dtype, found.engine.dtype


def test_a_run_records_the_dtype_of_its_device_and_keeps_it_on_another() -> None:
    assert dtypes("cpu") == ("float32", "float32")
    assert dtypes("cuda:1") == ("bfloat16", "bfloat16")
    assert dtypes("cuda", engine={"dtype": "float32"}) == ("bfloat16", "float32")
    before = {"trainer": {"dtype": "bfloat16"}, "engine": {"dtype": "float32"}}
    assert dtypes("cpu", before) == ("bfloat16", "float32")
    assert dtypes("cuda", before, engine={"dtype": "bfloat16"}) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("mode", "asked", "found"), [("sync", None, True), ("partial", None, None), ("sync", False, False)]
)
def test_a_mode_that_promises_bits_uses_deterministic_algorithms(mode: str, asked: Any, found: Any) -> None:
    tree = {"run": {"name": "r", "deterministic": asked}, "model": {"path": "m"}, "task": [{"name": "chain_sum"}]}
    assert Recipe.model_validate({**tree, "rollout": {"mode": mode}}).deterministic is found


def test_a_changed_key_is_refused_or_warned_about_by_name() -> None:
    before = {"run": {"steps": 9, "threads": 1}, "trainer": {"lr": 1e-3, "decay": "linear"}, "task": [{"weight": 1.0}]}
    same = {**before, "eval": {"every": 3}}
    assert compare_for_resume(before, same) == []
    removed = {**before, "weights": {"path": "object_store"}}
    assert compare_for_resume(removed, same) == [], "the run was begun by a Baton that had the key"
    threads = {**before, "run": {"steps": 9, "threads": 2}}
    assert ["run.threads" in w for w in compare_for_resume(before, threads)] == [True]
    longer = {**before, "run": {"steps": 12, "threads": 1}}
    assert compare_for_resume(before, longer) == [
        "resuming with run.steps = 12 instead of 9: takes effect at the next train step"
    ]
    faster = {**before, "trainer": {"lr": 1e-2, "decay": "linear"}}
    assert compare_for_resume(before, faster) == [
        "resuming with trainer.lr = 0.01 instead of 0.001: takes effect at the next train step"
    ]
    packed = {**before, "trainer": {**before["trainer"], "optimizer": "adamw8bit"}}
    with pytest.raises(UserError, match=r"this recipe changes trainer\.optimizer: was None, now 'adamw8bit'"):
        compare_for_resume(before, packed)
    critic = {**before, "algorithm": {"critic_lr": 1e-3}}
    assert ["algorithm.critic_lr = 0.001 instead of None" in w for w in compare_for_resume(before, critic)] == [True]
    weighted = [{**before, "reward": [{"kind": "correct", "weight": weight}]} for weight in (1.0, 0.5)]
    assert ["reward.0.weight = 0.5" in w for w in compare_for_resume(*weighted)] == [True]
    with pytest.raises(
        UserError, match=r"this recipe changes reward\.0\.kind: was None, now 'correct'; reward\.0\.weight"
    ):
        compare_for_resume(before, weighted[0])
    with pytest.raises(
        UserError, match=r"A resumed run may change: run\.steps, trainer\.lr, .* and the keys of .*checkpoint"
    ):
        compare_for_resume(before, {**before, "rollout": {"group_size": 4}})
    observed = {**before, "environments": {"timeout_s": 9.0}}
    assert compare_for_resume(before, observed) == []
    with pytest.raises(UserError, match=r"environments\.max_observation_chars: was None, now 9"):
        compare_for_resume(before, {**observed, "environments": {"max_observation_chars": 9}})
    with pytest.raises(UserError, match=r"task\.0\.weight: was 1\.0, now 2\.0"):
        compare_for_resume(before, {**before, "task": [{"weight": 2.0}]})


def test_a_diverged_step_names_the_batch_and_the_way_back(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipe(tiny_model, tmp_path)
    console = Console(file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    loop = build_loop(wanted, TerminalObserver(console, 9), resume=False, overwrite=False)
    poison = loop.trainer.step

    def step(batch: Any) -> dict[str, float]:
        if batch.step == 4:
            with torch.no_grad():
                next(iter(loop.trainer.model.parameters())).fill_(float("nan"))  # type: ignore[attr-defined]
        return poison(batch)

    monkeypatch.setattr(loop.trainer, "step", step)
    with pytest.raises(TrainingDiverged, match=r"train step 4.*groups.*step 4; the last good checkpoint is .*step_"):
        loop.train()


@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_a_batch_that_the_trainer_refuses_can_be_left_out(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    more = {} if mode == "sync" else {"rollout__mode": mode, "rollout__overprovision": 2.0}
    wanted = recipe(tiny_model, tmp_path, **more)
    console = Console(file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    poisoned: set[int] = set()

    def fails_at_step_four() -> None:
        loop = build_loop(wanted, TerminalObserver(console, 9), resume=True, overwrite=False)
        train_step = loop.trainer.step

        def step(batch: Any) -> dict[str, float]:
            if batch.step == 4 and not poisoned:
                poisoned.update(group.group_id for group in batch.groups)
            if poisoned & {group.group_id for group in batch.groups}:
                raise TrainingDiverged("the loss is nan")
            return train_step(batch)

        monkeypatch.setattr(loop.trainer, "step", step)
        try:
            loop.train()
        finally:
            loop.close()

    said: list[str] = []
    for _ in range(2):  # the resume fails as the run did
        with pytest.raises(TrainingDiverged, match=r"the loss is nan; its batch .*step 4; .*: --resume --skip-batch 4"):
            fails_at_step_four()
    for step, sentence in ((2, "step_000002 was trained on this batch"), (6, "no recorded batch .* allowed is 3 or 4")):
        with pytest.raises(UserError, match=sentence):
            skip_batch(wanted.run.path, step, said.append)
    skip_batch(wanted.run.path, 4, said.append)
    assert said == [f"the batch of step 4 is skipped: groups {', '.join(map(str, sorted(poisoned)))}"]
    skip_batch(wanted.run.path, 4, said.append)
    assert said[-1] == "the batch of step 4 is already skipped"
    fails_at_step_four()
    run = RunDirectory.open(wanted.run.path)
    ids = [group.group_id for step in run.recorded_steps() for group in run.groups(step)]
    assert run.recorded_steps() == list(range(1, 10))
    assert not poisoned & set(ids)
    assert len(set(ids)) == len(ids) == 36
    assert {group.group_id for group in run.groups(4, "skipped")} == poisoned
    assert len(read_trajectories(run.path, 4, limit=99, source="skipped")) == 16
    with pytest.raises(UserError, match=r"has no skipped trajectories of step 5; recorded: \[4\]"):
        read_trajectories(run.path, 5, limit=99, source="skipped")


def test_batches_after_a_skipped_one_are_generated_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their groups are open again, so that the records of an earlier process must not be trained on too."""
    wanted = recipe(tiny_model, tmp_path, checkpoint__every=100)

    def live(failing_step: int) -> list[str]:
        """Train until the step fails; return the lines for the user."""
        console = Console(record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
        loop = build_loop(wanted, TerminalObserver(console, 9), resume=True, overwrite=False)
        train_step = loop.trainer.step

        def step(batch: Any) -> dict[str, float]:
            if batch.step == failing_step:
                raise TrainingDiverged("the loss is nan")
            return train_step(batch)

        monkeypatch.setattr(loop.trainer, "step", step)
        try:
            loop.train()
        except TrainingDiverged:
            pass
        finally:
            loop.close()
        return console.export_text().splitlines()

    live(4)
    skip_batch(wanted.run.path, 3, lambda text: None)
    said = live(3)
    assert any("recorded batches after step 2 are removed" in line for line in said)
    live(100)
    run = RunDirectory.open(wanted.run.path)
    ids = [group.group_id for step in run.recorded_steps() for group in run.groups(step)]
    assert run.recorded_steps() == list(range(1, 10))
    assert len(set(ids)) == len(ids) == 36


def test_a_recorded_reward_that_is_not_finite_can_be_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "trajectories").mkdir()
    trajectory = Trajectory(0, 0, (5,), (Segment((7,), (-0.5,), 0),), FinishReason.STOP)
    judged = ScoredTrajectory(trajectory, RewardResult(float("inf"), {"score": float("nan")}, False))
    run.write_groups(1, [Group(0, Prompt("p", "t", (Message("user", "2"),)), (judged,))])
    ((group,),) = (run.groups(1),)
    assert math.isnan(group.members[0].judgement.reward)
    assert group.members[0].trajectory == trajectory


def test_a_full_disk_names_the_file_and_the_way_back(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Recipe
) -> None:
    wanted = recipe(tiny_model, tmp_path)
    console = Console(file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    loop = build_loop(wanted, TerminalObserver(console, 9), resume=False, overwrite=False)
    write = loop.run.write_groups

    def write_groups(step: int, groups: Any, source: Any = "batch") -> None:
        if step == 4:
            raise OSError(28, "No space left on device", "step_000004.jsonl.gz")
        write(step, groups, source)

    monkeypatch.setattr(loop.run, "write_groups", write_groups)
    with pytest.raises(StorageFault, match=r"full: step_000004.*after train step 3.*checkpoint is .*step_000002"):
        loop.train()
    loop.close()
    train(wanted, resume=True)
    assert_equal_runs(unbroken, wanted)


@pytest.mark.parametrize(
    ("rollout", "processes"),
    [
        ({"mode": "partial", "overprovision": 2.0, "max_staleness": 2}, 0),
        ({"mode": "partial", "overprovision": 2.0, "max_staleness": 2}, 2),
        ({"mode": "async", "max_staleness": 2}, 1),
        ({"mode": "async", "max_staleness": 2, "on_new_version": "keep"}, 1),
    ],
    ids=["partial", "partial-processes", "async", "keep"],
)
@pytest.mark.slow
def test_a_killed_run_that_carries_rollouts_loses_none_that_was_finished(
    tiny_model: Path, tmp_path: Path, rollout: dict[str, Any], processes: int
) -> None:
    """Every batch whole, no group in two of them, and what was on disk at a kill is in a later batch, to the token."""
    wanted = recipe(
        tiny_model,
        tmp_path,
        engine__processes=processes,
        engine__slots=8,
        **{f"rollout__{key}": value for key, value in rollout.items()},
    )
    dice = random.Random(5)
    found: dict[str, Any] = {}
    for life in range(9):
        child = start_process(_one_life, wanted)
        if life < 3:
            recorded = wanted.run.path / f"trajectories/step_{2 * life + 1:06d}.jsonl.gz"
            while not recorded.exists():
                assert child.is_alive(), f"it ended before it could be killed, with exit code {child.exitcode}"
                time.sleep(0.005)
            time.sleep(dice.uniform(0.0, 0.1))
            child.kill()
        code = exit_code_of(child)
        if code != -signal.SIGKILL:
            assert code == 0, f"life {life} failed"
            break
        if (wanted.run.path / "journal.sqlite").exists():
            journal = Journal(wanted.run.path / "journal.sqlite", keeps_partials=True)
            found |= {t.name: t for g in journal.open_groups() for t in g.members}
            journal.close()
    run = RunDirectory.open(wanted.run.path)
    batches = [run.groups(step) for step in run.recorded_steps()]
    assert [len(batch) for batch in batches] == [4] * 9
    ids = [group.group_id for batch in batches for group in batch]
    assert sorted(ids) == list(range(36)), "none skipped, none twice, none left at the end"
    members = {m.trajectory.name: m.trajectory for batch in batches for g in batch for m in g.members}
    assert any(t.num_tokens for t in found.values()), "there was something to lose"
    for name, before in found.items():
        assert members[name].token_ids[: before.num_tokens] == before.token_ids
        assert members[name].behavior_logprobs[: before.num_tokens] == before.behavior_logprobs
    for step, batch in enumerate(batches):
        versions = [v for group in batch for m in group.members for v in m.trajectory.policy_versions]
        assert max(versions) <= step
    metrics = {row["step"]: row for row in read_metrics(run.path) if "staleness/max" in row}
    assert sorted(metrics) == list(range(1, 10))
    assert max(row["staleness/max"] for row in metrics.values()) <= 2, "no gradient from older tokens"


class _DamagesPredictions(TerminalObserver):
    """Cuts the file of the predictions after the first step of a run."""

    def __init__(self, console: Console, steps: int, run: Path) -> None:
        super().__init__(console, steps)
        self._file = run / FILE

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        super().stepped(step, metrics)
        if step == 1:
            self._file.write_bytes(self._file.read_bytes()[:20])


def test_predictions_that_are_damaged_while_a_run_is_open_do_not_end_it(tiny_model: Path, tmp_path: Path) -> None:
    wanted = recipe(tiny_model, tmp_path, run__steps=3, eval__enabled=False)
    console = Console(file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    told = Predictions("plan.json", (Prediction("step", 10.0),))
    with _DamagesPredictions(console, 3, wanted.run.path) as observer:
        train_here(wanted, observer, StopRequest(), resume=False, overwrite=False, predictions=told)
    rows = [row for row in read_metrics(wanted.run.path) if "perf/step_time" in row]
    assert [row["measured_over_predicted/step"] * 10 for row in rows] == [
        pytest.approx(row["perf/step_time"]) for row in rows
    ]
    assert len(rows) == 3
    report = summarise(RunDirectory.open(wanted.run.path))
    assert report.predictions == ()
    assert f"{FILE} cannot be read" in report.warnings[0]
    with pytest.raises(Damaged, match=rf"{FILE} cannot be read: .*; delete it to continue without predictions"):
        train(recipe(tiny_model, tmp_path, run__steps=4, eval__enabled=False), resume=True)


def test_a_resumed_run_goes_on_with_a_changed_learning_rate_and_records_it(tiny_model: Path, tmp_path: Path) -> None:
    begun = recipe(tiny_model, tmp_path, run__steps=2, trainer__decay="constant")
    train(begun, resume=False)
    changed = recipe(tiny_model, tmp_path, run__steps=3, trainer__lr=5e-2, trainer__decay="constant")
    train(changed, resume=True)
    rates = {row["step"]: row["policy/lr"] for row in read_metrics(begun.run.path) if "policy/lr" in row}
    assert rates == {1: 1e-3, 2: 1e-3, 3: 5e-2}
    (resumed,) = RunDirectory.open(begun.run.path).facts()["resumed"]
    assert resumed["step"] == 2
    assert resumed["changed"] == {"run.steps": {"old": 2, "new": 3}, "trainer.lr": {"old": 1e-3, "new": 5e-2}}
    assert RunDirectory.open(begun.run.path).recipe()["trainer"]["lr"] == 5e-2


def test_a_resumed_run_follows_a_changed_schedule_evaluation_and_checkpoint_interval(
    tiny_model: Path, tmp_path: Path
) -> None:
    begun = recipe(tiny_model, tmp_path, run__steps=2, eval__every=0, eval__at_start=False)
    train(begun, resume=False)
    changed = {
        "trainer__warmup_steps": 4,
        "trainer__decay": "constant",
        "eval__every": 2,
        "eval__at_start": False,
        "checkpoint__every": 3,
        "checkpoint__keep": 9,
    }
    train(recipe(tiny_model, tmp_path, run__steps=5, **changed), resume=True)
    run = RunDirectory.open(begun.run.path)
    rates = {row["step"]: row["policy/lr"] for row in read_metrics(run.path) if "policy/lr" in row}
    assert {step: rates[step] for step in (3, 4, 5)} == pytest.approx({3: 3e-3 / 4, 4: 1e-3, 5: 1e-3})
    assert rates[2] == pytest.approx(1e-3 / 2), "the schedule of the run as it was begun"
    assert {e.step for e in run.evaluations()} == {2, 4, 5}
    assert {path.name for path in list_checkpoints(run.checkpoints)} >= {"step_000003", "step_000005"}
    (resumed,) = run.facts()["resumed"]
    assert resumed["step"] == 2
    assert resumed["changed"]["trainer.warmup_steps"]["new"] == 4
    assert resumed["changed"]["trainer.decay"] == {"old": "linear", "new": "constant"}


def test_under_changed_reward_weights_what_is_in_no_batch_yet_is_judged_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`partial` leaves groups open at a checkpoint: none mixes rewards of both weights."""
    monkeypatch.setattr("baton.run.assemble.STEPS", 1)  # in several steps, all open groups may become complete
    partial = {"rollout__mode": "partial", "rollout__overprovision": 2.0, "engine__slots": 24}
    begun = recipe(tiny_model, tmp_path, run__steps=5, **partial)
    # the answer's format is scored at once; a function is scored in the background, perhaps not before the stop
    begun = begun.model_copy(update={"reward": begun.reward[:1]})
    run = RunDirectory(begun.run.path)
    train(begun, resume=False, stop=StopWhen(lambda: len(run.recorded_steps()) >= 2))
    done = run.recorded_steps()
    with closing(Journal(run.journal, keeps_partials=True)) as journal:
        assert any(group.judged for group in journal.open_groups()), "some are judged and in no batch"
    heavier = tuple(part.model_copy(update={"weight": 3.0}) for part in begun.reward)
    train(begun.model_copy(update={"reward": heavier}), resume=True)
    weights = set()
    for step in range(1, 6):
        for member in (member for group in run.groups(step) for member in group.members):
            weight, points = 1.0 if step in done else 3.0, sum(member.judgement.parts.values())
            assert member.judgement.reward == pytest.approx(weight * points)
            weights |= {weight} if points else set()
    assert weights == {1.0, 3.0}, "responses of both weights have points"
