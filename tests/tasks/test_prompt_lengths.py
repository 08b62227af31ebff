"""Prompts that leave no room for a response are found at the start, left out or refused, and never end a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.errors import TaskExhausted, UserError
from baton.tasks.prompt_lengths import SAMPLE, measure
from baton.tasks.stream import AnswerSettings, PromptStream, TaskMixture, TaskSettings
from baton.types import Prompt

LONG = (3, 17, 40, 41)
"""Rows with 500 words; the others have two to five."""


def words(prompt: Prompt) -> int:
    """One token for a word."""
    return sum(len(m.content.split()) for m in prompt.messages)


def rows(path: Path, count: int = 200) -> str:
    texts = [" ".join(["x"] * 500) + f" {i}" if i in LONG else f"What is {i} ?" for i in range(count)]
    path.write_text("".join(json.dumps({"prompt": text, "answer": i}) + "\n" for i, text in enumerate(texts)))
    return str(path)


def mixture(*settings: TaskSettings) -> TaskMixture:
    return TaskMixture(settings, AnswerSettings(instruct=False))


def test_long_rows_are_counted_at_the_start_and_left_out_of_training_and_evaluation(tmp_path: Path) -> None:
    path = rows(tmp_path / "q.jsonl")
    tasks = mixture(TaskSettings(name="mine", path=path))
    measured: list[int] = []
    (found,) = measure(tasks, words, 100, seed=0, on_measured=measured.append)
    assert (found.rows, found.longest_tokens, found.max_tokens, found.too_long) == (200, 501, 99, 4)
    assert sum(measured) == 200
    assert str(found).startswith(f"mine: 200 rows; {found.held_out} distinct problems are held out or in a test set; ")
    assert str(found).endswith(
        "the longest prompt has 501 tokens, 99 are allowed; 4 prompts are too long and are skipped"
    )
    stream = PromptStream(tasks, seed=1)
    prompts = stream.take(3 * (200 - found.held_out))  # type: ignore[operator]  # three epochs and a little
    assert max(words(p) for p in prompts) <= 5
    assert stream.take_counts()["prompts/too_long"] >= 6
    assert stream.take_counts() == {}
    held_out = tasks.held_out(256, or_fewer=True)
    assert max(words(p) for p in held_out) <= 5

    unlimited = PromptStream(mixture(TaskSettings(name="mine", path=path)), seed=1).take(100)
    assert [p.prompt_id for p in unlimited if words(p) < 100] == [
        p.prompt_id for p in PromptStream(tasks, seed=1).take(100)
    ][: sum(words(p) < 100 for p in unlimited)], "the order of the others stays"


def test_a_task_whose_problems_are_all_trained_on_has_none_held_out(tmp_path: Path) -> None:
    tasks = mixture(TaskSettings(name="mine", path=rows(tmp_path / "q.jsonl"), held_out="none"))
    (found,) = measure(tasks, words, 600, seed=0)
    assert str(found).startswith(
        "mine: 200 rows; no distinct problems are held out or in a test set; the longest prompt has 501 "
    )


def test_a_task_that_refuses_long_prompts_does_not_start(tmp_path: Path) -> None:
    tasks = mixture(TaskSettings(name="mine", path=rows(tmp_path / "q.jsonl"), too_long="refuse"))
    with pytest.raises(UserError, match=r"task 'mine': 4 prompts are longer than 99 tokens, the longest has 501, and"):
        measure(tasks, words, 100, seed=0)
    measure(tasks, words, 502, seed=0)


def test_a_generated_prompt_that_is_too_long_is_skipped_when_it_is_drawn() -> None:
    tasks = mixture(TaskSettings(name="chain_sum", params={"min_terms": 2, "max_terms": 30}))
    (found,) = measure(tasks, words, 40, seed=0)
    assert found.rows is None
    assert 0 < found.too_long < SAMPLE
    stream = PromptStream(tasks, seed=0)
    assert max(words(p) for p in stream.take(300)) < 40
    assert stream.take_counts()["prompts/too_long"] > 0


def test_a_task_without_any_short_prompt_says_so(tmp_path: Path) -> None:
    tasks = mixture(TaskSettings(name="mine", path=rows(tmp_path / "q.jsonl")))
    measure(tasks, words, 3, seed=0)
    with pytest.raises(TaskExhausted, match=r"its prompts are too long: raise engine\.max_context_tokens"):
        PromptStream(tasks, seed=0).take(1)


def test_only_what_may_be_too_long_of_a_large_file_is_measured(tmp_path: Path) -> None:
    measured: list[int] = []
    tasks = mixture(TaskSettings(name="mine", path=rows(tmp_path / "q.jsonl", 3000)))
    (found,) = measure(tasks, words, 100, seed=0, on_measured=measured.append)
    assert found.too_long == 4
    assert sum(measured) < 300


def test_fewer_held_out_problems_than_asked_for_are_all_used(tmp_path: Path) -> None:
    tasks = mixture(TaskSettings(name="mine", path=rows(tmp_path / "q.jsonl", 700)))
    held_out = tasks.held_out(256, or_fewer=True)
    assert 40 < len(held_out) < 110
    assert len({p.prompt_id for p in held_out}) == len(held_out)
    with pytest.raises(TaskExhausted, match="but 256 were requested"):
        tasks.held_out(256)
