"""The training stream: reproducible, continued exactly, mixed by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError
from task_cases import FOUR, mixture

from baton.errors import UserError
from baton.rewards.answer import INSTRUCTIONS
from baton.tasks.stream import AnswerSettings, PromptStream, TaskMixture, TaskSettings

TWO = ("chain_sum", "basic_arithmetic")


def test_a_stream_goes_on_from_its_position_as_if_it_had_never_stopped() -> None:
    whole = PromptStream(mixture(*TWO), seed=5)
    expected = [whole.take(n) for n in (7, 13, 20)]
    positions = []
    stopped: dict[str, int] | None = None
    for n, prompts in zip((7, 13, 20), expected, strict=True):
        again = PromptStream(mixture(*TWO), seed=5, start=stopped)
        assert again.take(n) == prompts
        stopped = dict(again.position)
        positions.append(sum(stopped.values()))
    assert stopped == whole.position
    assert positions[0] >= 7
    assert positions[-1] > 40, "held-out draws are counted, too"


def test_it_does_not_matter_in_how_many_takes_prompts_are_taken() -> None:
    at_once = PromptStream(mixture(*TWO), seed=2).take(30)
    stream = PromptStream(mixture(*TWO), seed=2)
    assert [p for _ in range(30) for p in stream.take(1)] == at_once


def test_streams_of_two_seeds_differ() -> None:
    first, second = (PromptStream(mixture("countdown"), seed).take(40) for seed in (0, 1))
    assert len({p.prompt_id for p in first} & {p.prompt_id for p in second}) < 10


def test_tasks_appear_in_proportion_to_their_weights() -> None:
    """3 : 1 over 2 000 draws: 1 500 expected, standard deviation sqrt(2 000 · 0.75 · 0.25) = 19.4."""
    settings = [
        TaskSettings(name=name, params=FOUR[name], form="compact", weight=weight)
        for name, weight in (("chain_sum", 3.0), ("basic_arithmetic", 1.0))
    ]
    prompts = PromptStream(TaskMixture(settings, AnswerSettings()), 0).take(2000)
    assert abs(Counter(p.task for p in prompts)["chain_sum"] - 1500) < 5 * 19.4


def test_prompts_ask_for_the_answer_format_unless_told_not_to() -> None:
    task = TaskSettings(name="chain_sum", form="compact")
    asked = TaskMixture([task], AnswerSettings(format="boxed")).held_out(1)[0]
    assert [m.role for m in asked.messages] == ["system", "user"]
    assert asked.messages[0].content == INSTRUCTIONS["boxed"]
    silent = TaskMixture([task], AnswerSettings(format="boxed", instruct=False)).held_out(1)[0]
    assert [m.role for m in silent.messages] == ["user"]
    assert silent.messages[-1] == asked.messages[-1]


def test_an_empty_mixture_and_a_name_used_twice_are_refused() -> None:
    with pytest.raises(UserError, match=r"no \[\[task\]\]"):
        TaskMixture([], AnswerSettings())
    with pytest.raises(UserError, match="the name 'chain_sum' is used twice"):
        TaskMixture([TaskSettings(name="chain_sum")] * 2, AnswerSettings())


def test_one_reasoning_gym_task_may_appear_under_two_names() -> None:
    short = TaskSettings(name="short", gym="chain_sum", form="compact", params={"max_terms": 2})
    long = TaskSettings(name="long", gym="chain_sum", form="compact", params={"min_terms": 5, "max_terms": 6})
    prompts = TaskMixture([short, long], AnswerSettings()).held_out(8)
    assert Counter(p.task for p in prompts) == {"short": 4, "long": 4}


@pytest.mark.parametrize("extra", [{"gym": "chain_sum"}, {"params": {"a": 1}}, {"form": "compact"}])
def test_a_file_of_problems_takes_no_settings_of_a_generator(extra: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="path is a file of problems"):
        TaskSettings(name="mine", path="problems.jsonl", **extra)  # type: ignore[arg-type]
