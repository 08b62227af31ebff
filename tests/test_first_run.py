"""The mistakes of a first run, and what is printed about each before hours are spent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import baton
from baton.errors import UserError
from baton.trainer.local_trainer import LocalTrainer
from tests.api_cases import CONFIG, QUESTIONS
from tests.small_reward import evenness

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shown(small: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[list[baton.Sample], list[str]]]:
    """Previews with the model of the tests, and returns the samples and the printed lines after the responses."""

    def call(data: Any, reward: Any, **config: Any) -> tuple[list[baton.Sample], list[str]]:
        form = config.pop("answer_format", "last_line")
        samples = baton.preview(small.model, data, reward, n=2, answer_format=form, config=CONFIG | config)
        lines = capsys.readouterr().out.splitlines()
        return samples, [line for line in lines if line.startswith(("before", "warning", "generation", "memory"))]

    return call


def test_a_preview_returns_four_responses_to_each_prompt_and_the_needs(shown: Callable[..., Any]) -> None:
    samples, lines = shown(QUESTIONS, evenness)
    assert [(s.group_id, s.sample_index) for s in samples] == [(g, i) for g in (0, 1) for i in range(4)]
    assert all(s.parts == {"evenness": s.reward} for s in samples)
    assert re.match(r"before training: of 8 responses \d+ % state an answer, ", lines[0])
    assert lines[-2].startswith("generation of a step: ")
    assert lines[-1].startswith("memory: the trainer ")
    assert not Path("runs").exists()


def test_a_long_step_is_predicted_without_an_exponent(shown: Callable[..., Any]) -> None:
    _, lines = shown(QUESTIONS, evenness, **{"rollout.batch_groups": 40_000})
    assert re.match(r"generation of a step: [\d.]+ to [\d.]+ s for \d+ responses", lines[-2])


def test_no_answer_in_the_format(shown: Callable[..., Any]) -> None:
    samples, lines = shown(QUESTIONS, "correct", answer_format="boxed")
    assert {s.parsed for s in samples} == {None}
    assert lines[0].startswith("before training: of 8 responses 0 % state an answer, 0 % are correct, ")
    assert lines[1].startswith("warning: all responses to a prompt have the same reward (0 everywhere)")
    assert "state no answer in the format of [answer]" in lines[1] or "before they state an answer" in lines[1]


def test_equal_rewards(shown: Callable[..., Any]) -> None:
    _, lines = shown(QUESTIONS, lambda response: 0.5)
    assert lines[1].startswith("warning: all responses to a prompt have the same reward (0.5 everywhere)")


def test_a_reward_that_raises(shown: Callable[..., Any]) -> None:
    def reward(level: int) -> float:
        return {"easy": 1.0}[level]  # type: ignore[index]

    _, lines = shown(QUESTIONS, reward)
    assert lines[0].startswith("warning: 8 of 8 responses could not be scored; the first: reward function ")
    assert "raised KeyError: " in lines[0]
    assert "(test_first_run.py, line " in lines[0]


def test_prompts_that_are_too_long(shown: Callable[..., Any]) -> None:
    rows = [row | {"prompt": row["prompt"] + "+0" * (40 if i % 4 == 0 else 0)} for i, row in enumerate(QUESTIONS)]
    _, lines = shown(rows, evenness)
    assert any(line.startswith("warning: task data: 40 rows") and "10 prompts are too long" in line for line in lines)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"text": "1+1", "answer": "2"}], r"line 1 has no 'prompt'; it has \['answer', 'text'\]"),
        ([{"prompt": "1+1", "result": "2"}], r"line 1 has no 'answer'; it has \['prompt', 'result'\]"),
    ],
)
def test_a_wrong_column_and_a_missing_answer(shown: Callable[..., Any], rows: list[Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        shown(rows, "correct")


def test_a_device_without_memory(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: object, batch: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LocalTrainer, "step", step)
    with pytest.raises(UserError) as raised:
        baton.train(small.model, QUESTIONS, evenness, steps=1, name="r", config=CONFIG)
    text = str(raised.value)
    assert text.startswith("the device is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; lower ")
    assert "engine.slots = 8" in text
    assert "trainer.max_tokens_per_microbatch = " in text
    assert baton.Run("runs/r").status == "failed"


SCRIPT = """
import baton

def reward(response):
    return len(response) % 5 / 5

run = baton.train({model!r}, {rows!r}, [reward, "rewards.py:brevity"], steps=2, name="r", config={config!r})
print(run.status, sorted(next(run.samples(2)).parts))
"""


@pytest.mark.slow
@pytest.mark.timing
def test_a_script_needs_no_main_guard(small: Any, tmp_path: Path) -> None:
    """Although an engine process and a process for a reward function start."""
    (tmp_path / "rewards.py").write_text("def brevity(response):\n    return -len(response)\n")
    config = CONFIG | {"engine.processes": 1, "run.threads": 1}
    (tmp_path / "s.py").write_text(SCRIPT.format(model=str(small.model), rows=QUESTIONS, config=config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "s.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished ['brevity', 'reward']"
