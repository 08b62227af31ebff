"""The supervised warm start: it learns, microbatches do not matter, and what it writes is a model like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from io import StringIO
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.console import Console
from baton.environments.token_bridge import TokenBridge
from baton.errors import TaskExhausted, TrainingDiverged, UserError
from baton.policy.new_model import CHAT_TEMPLATE, END, scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import Tokenizer, load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import WarmStart
from baton.records.metrics import MetricsWriter, read_metrics
from baton.records.run_lock import RunLock
from baton.run import sft
from baton.run.sft import warm_start
from baton.tasks.demonstrations import DemonstrationSettings
from baton.tasks.demonstrations import demonstrations as demonstrations_of
from baton.tasks.stream import TaskMixture
from baton.trainer.settings import SftSettings
from baton.trainer.sft import Demonstration, fine_tune
from baton.types import Message
from baton.views.terminal.progress import SftProgress

WATCHED = SftProgress(Console(quiet=True), 1)

pytestmark = pytest.mark.numerics

SHAPE = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
ROWS = [("1+1", "2"), ("1+2", "<think>1+2=3</think>3"), ("2+2", "4"), ("3-1-1+2", "<think>so</think>3")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return scratch_tokenizer([" ".join(row) for row in ROWS], SHAPE.vocab_size)


def demonstrations(tokenizer: Tokenizer) -> list[Demonstration]:
    return [
        Demonstration(
            tokenizer.prompt_ids((Message("user", prompt),)), (*tokenizer.ids(text), tokenizer.hf.eos_token_id)
        )
        for prompt, text in ROWS
    ]


def tuned(tokenizer: Tokenizer, **changes: object) -> tuple[PreTrainedModel, list[float], list[int]]:
    settings = SftSettings(**{"steps": 1, "batch_size": 4, "warmup_steps": 0, "lr": 1e-2, **changes})  # type: ignore[arg-type]
    model = scratch_model(SHAPE, tokenizer, seed=0)
    losses: list[float] = []
    tokens: list[int] = []

    def on_step(step: int, loss: float, num_tokens: int) -> None:
        assert step == len(losses) + 1
        losses.append(loss)
        tokens.append(num_tokens)

    examples: Iterator[Demonstration] = cycle(demonstrations(tokenizer))
    fine_tune(model, examples, settings, on_step=on_step)
    return model, losses, tokens


def test_the_loss_is_the_cross_entropy_of_response_tokens_alone(tokenizer: Tokenizer) -> None:
    """Worked out one row at a time, without padding, from the model's own logits."""
    model = scratch_model(SHAPE, tokenizer, seed=0)
    total, count = 0.0, 0
    for row in demonstrations(tokenizer):
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        total -= float(logprobs[len(row.prompt_ids) - 1 :].sum())
        count += len(row.response_ids)
    _, losses, _ = tuned(tokenizer)
    assert losses[0] == pytest.approx(total / count, rel=1e-5)


def test_it_learns_its_demonstrations_by_heart(tokenizer: Tokenizer) -> None:
    """A random model is at ln 300 = 5.7 nats per token."""
    model, losses, _ = tuned(tokenizer, steps=60, warmup_steps=5)
    assert losses[0] == pytest.approx(5.7, abs=0.3)
    assert losses[-1] < 0.3
    for row in demonstrations(tokenizer):
        ids = torch.tensor([row.prompt_ids])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert tuple(made[0, len(row.prompt_ids) :].tolist()) == row.response_ids


def test_microbatches_do_not_change_the_update(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows in one pass, in passes of three and one, or one by one: the same gradient but for the last bits.

    It is scaled down to AdamW's epsilon, so that the update is a smooth function of it also where it is near zero."""
    monkeypatch.setattr("baton.trainer.sft.MAX_GRAD_NORM", 1e-8)
    smooth = {"steps": 3, "lr": 0.02}
    lengths = sorted((-(-row.num_tokens // 8) * 8 for row in demonstrations(tokenizer)), reverse=True)
    whole, whole_losses, whole_tokens = tuned(tokenizer, **smooth, max_tokens_per_microbatch=4096)
    assert whole_losses[2] < 0.99 * whole_losses[0], "something was learned"
    assert whole_tokens[0] == 4 * lengths[0], "padded to the longest"
    for budget, places in ((3 * lengths[0], 3 * lengths[0] + lengths[3]), (1, sum(lengths))):
        split, split_losses, split_tokens = tuned(tokenizer, **smooth, max_tokens_per_microbatch=budget)
        assert split_tokens[0] == places
        assert whole_losses == pytest.approx(split_losses, rel=1e-5)
        for (name, one), (_, other) in zip(whole.named_parameters(), split.named_parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5, rtol=1e-4), name


def test_the_same_seed_gives_the_same_bits(tokenizer: Tokenizer) -> None:
    one, other = (tuned(tokenizer, steps=2)[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def write_warm_start(path: Path, source: str, model: str = "") -> Path:
    scratch = "[scratch]\nvocab_size = 300\nhidden_size = 32\nnum_layers = 2\nnum_heads = 2\nintermediate_size = 64\n"
    path.write_text(
        f'{source}\noutput = "{path.parent / "made"}"\n'
        f'[run]\nname = "warm"\ndirectory = "{path.parent / "runs"}"\nthreads = 1\n'
        f"{model or scratch}\n[sft]\nsteps = 12\nbatch_size = 8\nwarmup_steps = 2\nlr = 1e-2\n"
    )
    return path


GENERATED = """
[[task]]
name = "chain_sum"
form = "compact"
params = { max_terms = 2, max_digits = 1 }
[answer]
instruct = false
[demonstrations]
direct_share = 1.0
direct_wrong_share = 0.0
"""


def test_a_generated_warm_start_makes_a_model_that_loads_and_reports_its_accuracy(tmp_path: Path) -> None:
    path = write_warm_start(tmp_path / "warm.toml", "")
    with path.open("a") as file:
        file.write(GENERATED)
    changes = ["sft.steps=6", "eval.num_prompts=8", "eval.samples=2", "eval.temperature=0.6"]
    result = warm_start(load_recipe(WarmStart, path, changes), WATCHED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert model.config.model_type == "qwen3"
    assert [(e.task, e.num_prompts) for e in result.evaluations] == [("chain_sum", 8)] * 2
    assert [(e.temperature, e.samples) for e in result.evaluations] == [(0.6, 2), (0.0, 1)]
    rows = read_metrics(tmp_path / "runs" / "warm")
    assert rows[-1]["step"] == 6
    assert rows[-1]["sft/loss"] == pytest.approx(result.loss)
    assert (tmp_path / "runs" / "warm" / "recipe.toml").is_file()
    assert RunLock.status(tmp_path / "runs" / "warm") == "finished"


def test_a_warm_start_that_fails_has_failed_but_not_the_run_that_it_would_have_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_warm_start(tmp_path / "warm.toml", "")
    with path.open("a") as file:
        file.write(GENERATED)
    recipe = load_recipe(WarmStart, path, ["sft.steps=2", "sft.warmup_steps=1", "eval.enabled=false"])
    warm_start(recipe, WATCHED)

    def fails(*_: object, **__: object) -> None:
        raise TrainingDiverged("the loss is not finite")

    for name, status in (("start_wandb", "finished"), ("fine_tune", "failed")):
        with monkeypatch.context() as patch:
            patch.setattr(sft, name, fails)
            with pytest.raises(TrainingDiverged):
                warm_start(recipe, WATCHED, overwrite=True)
        assert RunLock.status(tmp_path / "runs" / "warm") == status, name


def test_a_mistake_in_data_or_model_makes_no_run_and_replaces_none(tmp_path: Path, small: Any) -> None:
    data, run = tmp_path / "data.jsonl", tmp_path / "runs" / "warm"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    path = write_warm_start(tmp_path / "warm.toml", f'data = "{data}"', f'[model]\npath = "{small.model}"\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1"}\n')
    mistakes = {f"data={tmp_path}/bad.jsonl": "has no 'completion'", "model.device=meta:x": "model.device: got"}

    def attempt(*changes: str, overwrite: bool = False) -> None:
        warm_start(load_recipe(WarmStart, path, ["sft.steps=3", *changes]), WATCHED, overwrite=overwrite)

    for overwrite in (False, True):
        for change, complaint in mistakes.items():
            with pytest.raises(UserError, match=complaint):
                attempt(change, overwrite=overwrite)
        assert run.exists() == overwrite
        if not overwrite:
            attempt()
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    assert RunLock.status(run) == "finished"


ROOMS = """
[[task]]
name = "rooms"
environment = "sokoban"
params = { form = "compact", max_turns = 3, actions_per_turn = 2 }
max_turns = 3
max_turn_tokens = 3
[demonstrations]
"""


def test_random_play_is_tokenised_as_episodes_of_rl_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_warm_start(tmp_path / "warm.toml", "")
    with path.open("a") as file:
        file.write(ROOMS)
    shown: list[Demonstration] = []

    def kept(model: PreTrainedModel, examples: Iterator[Demonstration], *args: object, **more: object) -> None:
        shown.extend(islice(examples, 30))
        fine_tune(model, examples, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("baton.run.sft.fine_tune", kept)
    recipe = load_recipe(WarmStart, path, ["sft.steps=4", "eval.num_prompts=4"])
    result = warm_start(recipe, WATCHED)
    assert [(e.task, e.num_prompts) for e in result.evaluations] == [("rooms", 4)] * 2
    tokenizer = load_tokenizer(str(tmp_path / "made"))
    bridge = TokenBridge(tokenizer)
    lengths = set()
    for row, (prompt, texts) in zip(
        shown, demonstrations_of(TaskMixture(recipe.task, recipe.answer), DemonstrationSettings(), 0), strict=False
    ):
        ids = list(tokenizer.prompt_ids(prompt.messages))
        assert tuple(ids) == row.prompt_ids
        for place, text in enumerate(texts):
            turn = [*tokenizer.ids(text), tokenizer.hf.eos_token_id]
            ids += turn if place % 2 == 0 else bridge.suffix(ids, Message("user", text))
        assert tuple(ids) == row.prompt_ids + row.response_ids
        assert tokenizer.text(ids, keep_special=True) == tokenizer.hf.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in prompt.messages]
            + [{"role": ("assistant", "user")[place % 2], "content": text} for place, text in enumerate(texts)],
            tokenize=False,
        )
        lengths.add(len(texts))
    assert lengths == {1, 3, 5}, "episodes end when the room is solved"


def test_a_context_that_the_evaluation_exceeds_is_refused_before_the_training(tmp_path: Path) -> None:
    path = write_warm_start(tmp_path / "warm.toml", "")
    with path.open("a") as file:
        file.write(GENERATED)
    with pytest.raises(UserError, match=r"got 512, but evaluations of \[\[task\]\] use this context and need 1024"):
        load_recipe(WarmStart, path, ["scratch.max_context_tokens=512"])


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("hidden_size=0", r"scratch\.hidden_size: got 0, input should be greater than or equal to 1"),
        ("num_heads=3", r"num_heads: got 3 with hidden_size = 33, so a head has 11 values; allowed are even numbers"),
        ("num_heads=40", r"num_heads: got 40 with hidden_size = 33, so a head has 0 values; allowed are even numbers"),
        ("num_kv_heads=3", r"num_kv_heads: got 3 with num_heads = 4; allowed are divisors of it"),
    ],
)
def test_a_model_of_an_impossible_shape_is_refused(shape: str, reason: str, tmp_path: Path) -> None:
    path = write_warm_start(tmp_path / "warm.toml", 'data = "rows.jsonl"')
    shapes = {"hidden_size": "33", "num_heads": "4", "num_kv_heads": "2", **dict([shape.split("=")])}
    with pytest.raises(UserError, match=reason):
        load_recipe(WarmStart, path, [f"scratch.{key}={value}" for key, value in shapes.items()])


def test_a_warm_start_whose_evaluation_cannot_work_is_refused_before_the_training(tmp_path: Path) -> None:
    path = write_warm_start(tmp_path / "warm.toml", "")
    with path.open("a") as file:
        file.write(GENERATED)
    one_digit = "task.0.params={ min_terms = 1, max_terms = 1, min_digits = 1, max_digits = 1 }"
    with pytest.raises(TaskExhausted, match="'chain_sum' has only 0 distinct held-out problems"):
        warm_start(load_recipe(WarmStart, path, [one_digit]), WATCHED)
    assert not (tmp_path / "runs").exists()


def test_a_warm_start_on_a_file_continues_from_a_model(tmp_path: Path, small) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    path = write_warm_start(tmp_path / "warm.toml", f'data = "{data}"', f'[model]\npath = "{small.model}"\n')
    result = warm_start(load_recipe(WarmStart, path, ["model.head_dtype=float32"]), WATCHED)
    assert json.loads((tmp_path / "made" / "config.json").read_text())["head_dtype"] == "float32"
    assert result.evaluations == ()
    rows = read_metrics(tmp_path / "runs" / "warm")
    assert rows[-1]["sft/loss"] < 5.0
    before, after = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (small.model, tmp_path / "made"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


def test_a_model_whose_responses_could_not_end_is_refused(
    tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    data = f'data = "{tmp_path / "rows.jsonl"}"'
    path = write_warm_start(tmp_path / "warm.toml", data, f'[model]\npath = "{small.model}"\n')
    monkeypatch.setattr("baton.run.sft.end_ids", lambda *_: ())
    with pytest.raises(UserError, match=f"{small.model} has no end-of-sequence id.*set eos_token_id in its config"):
        warm_start(load_recipe(WarmStart, path), WATCHED)


@pytest.mark.parametrize(
    ("template_end", "eos", "ends", "expected"),
    [
        (END, "<|system|>", ["<|system|>", "<|user|>", END], END),
        ("{{ raise_exception('no') }}", "<|user|>", ["<|system|>", "<|user|>"], "<|user|>"),
        ("", "<|user|>", ["<|system|>", "<|user|>"], "<|user|>"),
        ("", None, ["<|system|>", "<|user|>"], "<|system|>"),
    ],
)
def test_a_response_ends_as_the_chat_template_ends_a_turn(
    template_end: str,
    eos: str | None,
    ends: list[str],
    expected: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Llama-3 and Gemma list several ids, and the first is not the one that their templates write."""
    scratch_model(SHAPE, tokenizer, seed=0).save_pretrained(tmp_path / "model")
    changed = deepcopy(tokenizer.hf)
    changed.chat_template, changed.eos_token = CHAT_TEMPLATE.replace(END, template_end), eos
    changed.save_pretrained(tmp_path / "model")
    ids = [tokenizer.hf.convert_tokens_to_ids(each) for each in ends]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    shown: list[Demonstration] = []
    monkeypatch.setattr(sft, "fine_tune", lambda model, examples, *_, **__: shown.append(next(examples)))
    monkeypatch.setattr(sft, "fmean", lambda losses: 0.0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    source = f'data = "{tmp_path / "rows.jsonl"}"'
    path = write_warm_start(tmp_path / "warm.toml", source, f'[model]\npath = "{tmp_path / "model"}"\n')
    warm_start(load_recipe(WarmStart, path), WATCHED)
    (row,) = shown
    assert tokenizer.text(row.response_ids, keep_special=True) == f"2{expected}"


def test_a_training_that_fails_closes_the_metrics(tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any, **__: Any) -> None:
        raise TrainingDiverged("no")

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    path = write_warm_start(tmp_path / "warm.toml", f'data = "{data}"', f'[model]\npath = "{small.model}"\n')
    closed: list[MetricsWriter] = []
    monkeypatch.setattr(MetricsWriter, "close", lambda self: closed.append(self))
    monkeypatch.setattr(sft, "fine_tune", diverge)
    with pytest.raises(TrainingDiverged):
        warm_start(load_recipe(WarmStart, path), WATCHED)
    assert len(closed) == 1


def test_an_output_or_a_run_that_is_there_is_replaced_only_when_that_is_asked(tmp_path: Path, small) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    path = write_warm_start(tmp_path / "warm.toml", f'data = "{data}"', f'[model]\npath = "{small.model}"\n')
    recipe = load_recipe(WarmStart, path, ["sft.steps=3"])

    def attempt(**more: bool) -> None:
        warm_start(recipe, WATCHED, **more)

    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="exists and is not a model"):
            attempt(overwrite=overwrite)
    (tmp_path / "made" / "thesis.tex").unlink()
    attempt()
    before = (tmp_path / "made" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="already contains a model: replace it with --overwrite"):
        attempt()
    (tmp_path / "made").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="already holds a run"):
        attempt()
    (tmp_path / "elsewhere").rename(tmp_path / "made")
    assert (tmp_path / "made" / "model.safetensors").read_bytes() == before
    (tmp_path / "made" / "old").write_text("")
    attempt(overwrite=True)
    assert not (tmp_path / "made" / "old").exists()
    assert (tmp_path / "made" / "model.safetensors").is_file()


@pytest.mark.parametrize(("output", "complaint"), [
    ("data.jsonl/made", "cannot write .*data.jsonl/made: Not a directory"),
    ("runs/warm", "runs/warm would replace the run's directory .*runs/warm: choose another output"),
    ("runs", "runs would replace the run's directory .*runs/warm: choose another output"),
])  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused_before_the_training(
    output: str, complaint: str, tmp_path: Path, small: Any
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    path = write_warm_start(tmp_path / "warm.toml", f'data = "{data}"', f'[model]\npath = "{small.model}"\n')
    with pytest.raises(UserError, match=complaint):
        warm_start(load_recipe(WarmStart, path, [f"output={tmp_path / output}"]), WATCHED)
    assert not (tmp_path / "runs").exists()


def test_off_a_terminal_steps_and_loss_are_plain_lines_and_every_step_has_metrics(tmp_path: Path, small) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    path = write_warm_start(tmp_path / "warm.toml", f'data = "{data}"', f'[model]\npath = "{small.model}"\n')
    out = StringIO()
    warm_start(load_recipe(WarmStart, path, ["sft.steps=45"]), SftProgress(Console(file=out), 45))
    rows = read_metrics(tmp_path / "runs" / "warm")
    assert [row["step"] for row in rows] == list(range(1, 46))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/45", *(f"{step}/45" for step in range(2, 45, 2)), "45/45"]
    assert lines[-1].startswith(f"step 45/45  loss {rows[-1]['sft/loss']:.4f}")
