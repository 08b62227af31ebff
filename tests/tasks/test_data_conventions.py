"""One real train step from a file in each convention of the field, with the reward functions that belong to it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from safetensors.torch import load_file

from baton.console import Console
from baton.errors import UserError
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.recipe.recipe import Recipe
from baton.records.evaluation import Evaluation
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.run.assemble import build_loop
from baton.run.summary import summarise
from baton.trainer.checkpoint import list_checkpoints
from baton.types import FailureCause
from baton.views.pages.report import render
from baton.views.terminal.progress import TerminalObserver
from baton.views.terminal.report import print_report

pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]

FUNCTIONS = """
import asyncio, time
from pathlib import Path

def trl(prompts, completions, completion_ids, solution, difficulty, **columns):
    sizes = {len(column) for column in (prompts, completions, completion_ids, solution, difficulty, columns["tags"])}
    assert sizes in ({4}, {1}), sizes  # a group of the train step, or one of the evaluation
    assert prompts[0][0] == {"role": "system", "content": "Be brief."}, prompts
    assert prompts[0][1]["role"] == "user" and prompts[0][1]["content"].startswith("What is"), prompts
    assert completions[0][0]["role"] == "assistant" and type(completions[0][0]["content"]) is str, completions
    assert solution[0] in ("3", "4", "5") and set(difficulty) == {2.5} and columns["tags"][-1] == ["a", "b"], columns
    return [len(ids) + len(turns[0]["content"]) % 7 for ids, turns in zip(completion_ids, completions)]

async def trl_async(prompts, completions, label, source, **columns):
    await asyncio.sleep(0.001)
    assert prompts[0].startswith("What is") and type(completions[0]) is str, (prompts, completions)
    assert type(label[0]) is int and set(source) == {"disk"}, (label, source)
    return [len(completion) % 7 for completion in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "lighteval/MATH", data_source
    assert ground_truth in ("3", "4", "5"), ground_truth
    assert extra_info["split"] == "train" and type(extra_info["index"]) is int, extra_info
    return {"score": len(solution_str) % 7, "acc": False}

def plain(prompt, response, parsed, answer, topic, absent=None):
    assert prompt.startswith("What is") and answer in ("3", "4", "5"), prompt
    assert parsed is None or parsed in response
    assert topic == "sums" and absent is None, topic
    return len(response) % 7

def raises(prompt, response, answer):
    raise RuntimeError("no licence")

def raises_for_some(prompt, response, answer):
    if int(prompt.split()[2]) % 3 == 0:
        raise KeyError("no such test case")
    return len(response) % 7

def constant(prompt, response, answer):
    return 0.0

def breaks_later(prompt, response, answer):
    if (Path(__file__).parent / "broken").exists():
        raise RuntimeError("the disk of the sandbox is full")
    return len(response) % 7

def hangs_once(prompt, response, answer):
    mark = Path(__file__).parent / "hung"
    if not mark.exists():
        mark.touch()
        while True:
            pass
    return len(response) % 7
"""
QUESTIONS = [f"What is {i} and {i % 3 + 3}?" for i in range(60)]
ANSWERS = [str(i % 3 + 3) for i in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 on disk."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = scratch_tokenizer(["What is 1 and 2? Be brief. <answer>3</answer>"], 300)
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


@pytest.fixture
def tree(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe of one train step without its task and reward; the functions lie beside it."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return {
        "run": {"name": "r", "directory": str(tmp_path / "runs"), "steps": 1, "threads": 1},
        "model": {"path": str(model), "device": "cpu"},
        "answer": {"instruct": False},
        "rollout": {"batch_groups": 4, "group_size": 4, "max_new_tokens": 12},
        "engine": {"slots": 16, "max_context_tokens": 128},
        "trainer": {"lr": 1e-3},
        "eval": {"num_prompts": 2},
        "judge": {"deadline_s": 5.0},
    }


def own(tmp_path: Path, name: str) -> dict[str, Any]:
    return {"kind": "function", "function": f"{tmp_path / 'functions.py'}:{name}"}


def train(tree: dict[str, Any]) -> RunDirectory:
    recipe = Recipe.model_validate(tree)
    with TerminalObserver(Console(quiet=True), 1) as observer:
        loop = build_loop(recipe, observer, resume=False, overwrite=False)
        loop.train()
        loop.close()
    return loop.run


class AfterTheFirstEvaluation(TerminalObserver):
    """Has something done between the evaluation of the first version and the first train step."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__(Console(quiet=True), 1)
        self.then = then

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        super().evaluated(step, results)
        if step == 0:
            self.then()


def assert_learnt(run: RunDirectory, model: Path) -> dict[str, Any]:
    """Every trajectory was judged, rewards differ, and the weights moved."""
    row = next(row for row in read_metrics(run.path) if "reward/mean" in row)
    assert row["judge/failed"] == 0
    assert row["reward/std"] > 0
    assert row["policy/grad_norm"] > 0
    checkpoint = list_checkpoints(run.checkpoints)[-1]
    before, after = load_file(model / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)
    return row


def write_trl(tmp_path: Path) -> dict[str, Any]:
    rows = [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": q}],
            "solution": a,
            "difficulty": 2.5,
            "tags": ["a", "b"],
        }
        for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    (tmp_path / "trl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(tmp_path / "trl.jsonl")}


def write_verl(tmp_path: Path) -> dict[str, Any]:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": "lighteval/MATH",
            "prompt": [{"role": "user", "content": q}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": a},
            "extra_info": {"split": "train", "index": i},
        }
        for i, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    return {"path": str(tmp_path / "train.parquet")}


def write_plain(tmp_path: Path) -> dict[str, Any]:
    rows = [{"prompt": q, "answer": int(a), "topic": "sums"} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(tmp_path / "plain.jsonl")}


def write_disk(tmp_path: Path) -> dict[str, Any]:
    from datasets import Dataset, DatasetDict

    columns = {"prompt": QUESTIONS, "label": [int(a) for a in ANSWERS], "source": ["disk"] * 60}
    other = Dataset.from_dict({"prompt": ["not this one"], "label": [0], "source": ["test"]})
    DatasetDict({"train": Dataset.from_dict(columns), "test": other}).save_to_disk(tmp_path / "disk")
    return {"path": str(tmp_path / "disk")}


@pytest.mark.parametrize(
    ("write", "function", "first"),
    [
        (write_trl, "trl", "Be brief."),
        (write_verl, "compute_score", "What is"),
        (write_plain, "plain", "What is"),
        (write_disk, "trl_async", "What is"),
    ],
)
def test_one_train_step_from_a_file_in_each_convention(
    tree: dict[str, Any],
    model: Path,
    tmp_path: Path,
    write: Callable[[Path], dict[str, Any]],
    function: str,
    first: str,
) -> None:
    tree |= {"task": [{"name": "mine", **write(tmp_path)}], "reward": [own(tmp_path, function), {"kind": "correct"}]}
    run = train(tree)
    row = assert_learnt(run, model)
    assert row[f"reward/{function}/mean"] > 0
    groups = run.groups(1)
    assert all(group.prompt.answer in ("3", "4", "5") for group in groups)
    assert all(group.prompt.messages[0].content.startswith(first) for group in groups)
    assert all(set(m.judgement.parts) == {function, "correct"} for group in groups for m in group.members)


@pytest.mark.slow
def test_the_command_finds_functions_beside_the_recipe_and_data_without_references(
    tree: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """From another directory than the package's, by module name, and with no reference answer at all."""
    rows = [{"prompt": q, "topic": "sums"} for q in QUESTIONS]
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "shorter.py").write_text("def shorter(prompt, response, parsed):\n    return -len(response)\n")
    tree |= {
        "task": [{"name": "mine", "path": "bare.jsonl", "scorer": "none"}],
        "reward": [{"kind": "function", "function": "shorter:shorter"}],
    }
    (tmp_path / "r.toml").write_text(tomli_w.dumps(tree))
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", "from baton.cli.main import main; main()", "train", "r.toml"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_learnt(RunDirectory.open(tmp_path / "runs" / "r"), model)


def test_one_hanging_judgement_is_counted_kept_and_not_trained(
    tree: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    tree |= {"task": [{"name": "mine", **write_plain(tmp_path)}], "reward": [own(tmp_path, "hangs_once")]}
    tree["judge"] = {"deadline_s": 1.0}
    recipe = Recipe.model_validate(tree)
    (tmp_path / "hung").touch()
    with AfterTheFirstEvaluation((tmp_path / "hung").unlink) as observer:  # the first judgement of the step hangs
        loop = build_loop(recipe, observer, resume=False, overwrite=False)
        loop.train()
        loop.close()
    row = next(row for row in read_metrics(loop.run.path) if "reward/mean" in row)
    assert (row["judge/failed"], row["judge/timeout"], row["judge/groups_lost"]) == (1, 1, 0)
    members = [m for group in loop.run.groups(1) for m in group.members]
    failed = [m for m in members if not m.judgement.is_judged]
    assert [m.judgement.cause for m in failed] == [FailureCause.TIMEOUT]
    assert row["tokens/trained"] == sum(m.trajectory.num_tokens for m in members if m.judgement.is_judged)
    assert row["tokens/generated"] - row["tokens/trained"] == failed[0].trajectory.num_tokens > 0


def observed(tree: dict[str, Any]) -> tuple[RunDirectory, str]:
    """A run, and what it printed."""
    console = Console(file=io.StringIO(), width=400)
    with TerminalObserver(console, tree["run"]["steps"]) as observer:
        loop = build_loop(Recipe.model_validate(tree), observer, resume=False, overwrite=False)
        loop.train()
        loop.close()
    return loop.run, console.file.getvalue()  # type: ignore[attr-defined]


def printed_report(run: RunDirectory) -> str:
    console = Console(file=io.StringIO(), width=400)
    print_report(console, summarise(run))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_function_that_raises_for_some_is_told_with_its_cause_once_then_counted_and_is_in_the_report(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    tree |= {"task": [{"name": "mine", **write_plain(tmp_path)}], "reward": [own(tmp_path, "raises_for_some")]}
    tree["run"]["steps"], tree["judge"], tree["eval"] = 3, {"deadline_s": 60.0}, {"num_prompts": 4}
    run, said = observed(tree)
    assert said.count("raises_for_some' raised KeyError: 'no such test case' (functions.py, line ") == 1
    rows = [row for row in read_metrics(run.path) if row.get("judge/failed")]
    assert rows
    for row in rows:
        assert f"warning: step {row['step']}: {row['judge/failed']:.0f} of 16 responses could not be scored" in said
    report = printed_report(run)
    assert f"{sum(row['judge/failed'] for row in rows):.0f} of 48 responses could not be scored (raised " in report
    assert "KeyError: 'no such test case' (functions.py, line " in report
    assert "responses could not be scored (raised " in render(run)


def test_a_run_without_any_difference_in_rewards_says_that_nothing_can_be_learned(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    tree |= {"task": [{"name": "mine", **write_plain(tmp_path)}], "reward": [own(tmp_path, "constant")]}
    tree["run"]["steps"], tree["judge"] = 4, {"deadline_s": 60.0}
    run, said = observed(tree)
    assert said.count("for 3 steps all responses to a prompt have had the same reward (0 everywhere)") == 1
    assert "for 4 steps all responses to a prompt have had the same reward (0 everywhere)" in printed_report(run)


def test_a_prompt_that_is_too_long_is_left_out_counted_and_never_ends_a_run(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    """Nine of 60 rows have more tokens than the context; before, the first that was drawn ended the run."""
    rows = [
        {"prompt": q + " and 1" * (200 if i % 7 == 0 else 0), "answer": a}
        for i, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree |= {"task": [{"name": "mine", "path": str(tmp_path / "long.jsonl")}], "reward": [{"kind": "format"}]}
    tree["run"]["steps"], tree["eval"] = 13, {"num_prompts": 256, "every": 0}  # a step takes four prompts
    run, said = observed(tree)
    assert "; 9 prompts are too long and are skipped" in said
    assert "held-out prompts: the tasks have fewer than eval.num_prompts = 256" in said
    counted = [row.get("prompts/too_long", 0) for row in read_metrics(run.path)]
    assert sum(counted) >= 6
    assert RunDirectory.open(run.path).recorded_steps()[-1] == 13
    tree["task"][0]["too_long"], tree["run"]["name"] = "refuse", "refused"
    with pytest.raises(UserError, match=r"task 'mine': 9 prompts are longer than 127 tokens, the longest has "):
        observed(tree)


def test_a_function_that_always_raises_stops_the_run_in_one_sentence(tree: dict[str, Any], tmp_path: Path) -> None:
    tree |= {"task": [{"name": "mine", **write_plain(tmp_path)}], "reward": [own(tmp_path, "raises")]}
    with pytest.raises(UserError) as caught:
        train(tree)
    assert "none of the 16 trajectories of train step 1 could be scored: " in str(caught.value)
    assert "functions.py:raises' raised RuntimeError: no licence (functions.py, line " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_breaks_in_mid_run_stops_it_after_the_step_whose_trajectories_are_kept(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    tree |= {"task": [{"name": "mine", **write_plain(tmp_path)}], "reward": [own(tmp_path, "breaks_later")]}
    with AfterTheFirstEvaluation((tmp_path / "broken").touch) as observer:
        loop = build_loop(Recipe.model_validate(tree), observer, resume=False, overwrite=False)
        with pytest.raises(UserError, match=r"none of the 16 trajectories of train step 1 .* the sandbox is full"):
            loop.train()
        loop.close()
    causes = {m.judgement.cause for group in loop.run.groups(1) for m in group.members}
    assert causes == {FailureCause.RAISED}
