"""The warm start's demonstrations: right unless they are meant to be wrong, in the shares that the recipe says."""

from __future__ import annotations

import math
import random
import re
from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from task_cases import mixture

from baton.environments.calculator import Calculator
from baton.environments.sokoban import Sokoban
from baton.errors import UserError
from baton.rewards.answer import extract_answer
from baton.tasks.demonstrations import DemonstrationSettings, demonstrate, demonstrations
from baton.tasks.stream import AnswerSettings, TaskMixture, TaskSettings

HONEST = DemonstrationSettings(direct_share=0, slip_share=0)


def expressions() -> st.SearchStrategy[str]:
    """Expressions of the kind that basic_arithmetic writes, never dividing by something that may be zero."""
    number = st.integers(0, 99).map(str)
    signed = number | st.integers(-99, -1).map(str)

    def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return (
            st.builds(lambda a, op, b: f"{a}{op}{b}", inner, st.sampled_from("+-*"), inner)
            | st.builds(lambda a, b: f"{a}/{b}", inner, st.integers(1, 9))
            | inner.map(lambda e: f"({e})")
            | inner.map(lambda e: f"-({e})")
        )

    return st.recursive(signed, joined, max_leaves=5)


def value_of(expression: str) -> int:
    return int(eval(expression.replace("/", "//")))


@example(expression="4-(1+3)", restate=1.0, seed=0)
@example(expression="9-(4-(2-1))*2", restate=1.0, seed=0)
@example(expression="8/(2*2)-(3-5)/2", restate=1.0, seed=0)
@given(expression=expressions(), restate=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 9))
def test_a_demonstration_without_slip_ends_in_the_right_answer_and_every_line_of_it_is_true(
    expression: str, restate: float, seed: int
) -> None:
    settings = DemonstrationSettings(direct_share=0, slip_share=0, restate_share=restate)
    response = demonstrate(expression, settings, random.Random(seed))
    assert extract_answer(response, "tags") == str(value_of(expression))
    work = re.fullmatch(r"<think>(.*)</think><answer>-?\d+</answer>", response, re.DOTALL)
    assert work is not None
    for line in filter(None, work[1].split("\n")):
        whole, _, step = line.rpartition(": ")
        left, _, right = step.partition("=")
        assert value_of(left) == int(right), line
        if whole:
            assert value_of(whole) == value_of(expression), f"{line} no longer equals {expression}"


@given(expression=expressions(), restate=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
def test_a_slip_falsifies_one_line_and_an_answer_is_never_wrong_without_one(
    expression: str, restate: float, seed: int
) -> None:
    settings = DemonstrationSettings(direct_share=0, slip_share=1, restate_share=restate)
    response = demonstrate(expression, settings, random.Random(seed))
    lines = [line.rpartition(": ")[2] for line in response[len("<think>") : response.index("</think>")].split("\n")]
    wrong = []
    for line in filter(None, lines):
        left, _, right = line.partition("=")
        try:
            wrong.append(value_of(left) != int(right))
        except ZeroDivisionError:  # what the slip before has made of a divisor
            wrong.append(False)
    assert sum(wrong) <= 1
    if restate == 0:  # a restated minus needs no line of its own, so that a slip meant for it does not happen
        assert sum(wrong) == bool(wrong)
    is_right = extract_answer(response, "tags") == str(value_of(expression))
    if not any(wrong):
        assert is_right
    elif wrong[-1]:
        assert not is_right


def test_worked_by_hand() -> None:
    plain = DemonstrationSettings(direct_share=0, slip_share=0, restate_share=0)
    restated = DemonstrationSettings(direct_share=0, slip_share=0, restate_share=1)
    dice = random.Random(0)
    assert demonstrate("4-1+3", plain, dice) == "<think>4-1=3\n3+3=6</think><answer>6</answer>"
    assert demonstrate("4-1+3", restated, dice) == "<think>4-1+3: 4-1=3\n3+3: 3+3=6</think><answer>6</answer>"
    assert demonstrate("2*(3--4)", plain, dice) == "<think>3--4=7\n2*7=14</think><answer>14</answer>"
    assert demonstrate("-(3/2+4)", plain, dice) == "<think>3/2=1\n1+4=5\n-(5)=-5</think><answer>-5</answer>"
    assert demonstrate("7", plain, dice) == "<think></think><answer>7</answer>"


def within(count: int, total: int, share: float) -> bool:
    """Whether a count lies within five standard deviations of a binomial's mean."""
    return abs(count - total * share) <= 5 * math.sqrt(total * share * (1 - share))


def test_shares_are_those_of_the_settings() -> None:
    settings = DemonstrationSettings(direct_share=0.6, direct_wrong_share=0.9, slip_share=0.08, restate_share=0.3)
    dice, total = random.Random(0), 4000
    responses = [demonstrate("4-1+3", settings, dice) for _ in range(total)]
    direct = [r for r in responses if "<think>" not in r]
    stepwise = [r for r in responses if "<think>" in r]
    assert within(len(direct), total, 0.6)
    assert within(sum(extract_answer(r, "tags") != "6" for r in direct), len(direct), 0.9)
    assert within(sum(extract_answer(r, "tags") != "6" for r in stepwise), len(stepwise), 0.08)
    assert within(sum(": " in r for r in stepwise), len(stepwise), 0.3)


def test_the_same_seed_shows_the_same_and_another_seed_something_else() -> None:
    def shown(seed: int) -> list[str]:
        stream = demonstrations(mixture("chain_sum"), DemonstrationSettings(), seed)
        return [response for _, (response,) in islice(stream, 50)]

    assert shown(1) == shown(1) != shown(2)


@pytest.mark.parametrize("name", ["countdown", "knights_knaves"])
def test_other_tasks_than_arithmetic_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="allowed are prompts of chain_sum and basic_arithmetic in the compact form"):
        next(demonstrations(mixture(name), HONEST, 0))


@pytest.mark.parametrize("text", ["", "2 +", "two", "2**3", "2.5+1", "f(2)", "State the final answer: 4 + 3 ="])
def test_what_is_no_compact_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="got"):
        demonstrate(text, HONEST, random.Random(0))


def test_the_original_wording_is_refused() -> None:
    settings = [TaskSettings(name="chain_sum")]
    with pytest.raises(UserError, match="compact form"):
        next(demonstrations(TaskMixture(settings, AnswerSettings()), HONEST, 0))


def test_random_play_of_an_environment() -> None:
    params = {"form": "compact", "max_turns": 3, "actions_per_turn": 2}
    settings = [TaskSettings(name="rooms", environment="sokoban", params=params)]

    def shown(seed: int) -> list[tuple[str, ...]]:
        return [texts for _, texts in islice(demonstrations(TaskMixture(settings, AnswerSettings()), HONEST, seed), 60)]

    episodes = shown(1)
    assert episodes == shown(1) != shown(2)
    turns = [turn for texts in episodes for turn in texts[::2]]
    assert all(1 <= len(turn) <= 2 and set(turn) <= set("UDLR") for turn in turns)
    assert {len(texts) for texts in episodes} == {1, 3, 5}, "an episode ends when the room is solved"
    assert 20 < sum(turn.count("U") + turn.count("D") for turn in turns) * 100 / sum(map(len, turns)) < 80
    for prompt, texts in islice(demonstrations(TaskMixture(settings, AnswerSettings()), HONEST, 1), 20):
        environment = Sokoban(**params)  # type: ignore[arg-type]
        assert environment.reset(seed=prompt.metadata["seed"]) == prompt.messages[-1].content
        assert [environment.step(turn)[0] for turn in texts[:-1:2]] == list(texts[1::2])


def test_random_play_of_the_calculator_has_readable_calls_and_sometimes_the_right_answer() -> None:
    params = {"num_operations": 2, "digits": 2, "is_compact": True}
    settings = [TaskSettings(name="sums", environment="calculator", params=params)]
    mixture = TaskMixture(settings, AnswerSettings())
    num_right = 0
    for prompt, texts in islice(demonstrations(mixture, HONEST, 1), 200):
        environment = Calculator(num_operations=2, digits=2, is_compact=True)
        assert environment.reset(seed=prompt.metadata["seed"]) == prompt.messages[-1].content
        *calls, last = [environment.step(turn) for turn in texts[::2]]
        assert [(text, info["tool"]) for text, *_, info in calls] == [(text, "calculate") for text in texts[1::2]]
        assert len(calls) == 2
        assert last[2], "the answer ends the episode"
        num_right += last[4]["success"]
    assert 4 <= num_right <= 60, "one of nine pairs of operations, in one of two orders, is right for certain: 11"


def test_a_calculator_whose_calls_are_not_compact_has_no_random_actions() -> None:
    settings = [TaskSettings(name="sums", environment="calculator", params={"family": "hermes"})]
    with pytest.raises(UserError, match="random actions are compact calls; set is_compact = true"):
        next(demonstrations(TaskMixture(settings, AnswerSettings()), HONEST, 0))


def test_an_environment_without_random_actions_is_refused() -> None:
    settings = [TaskSettings(name="code", environment="code", params={"allow_unisolated": True})]
    with pytest.raises(UserError, match=r"has no random actions; allowed are 'sokoban', 'maze' and 'calculator'"):
        next(demonstrations(TaskMixture(settings, AnswerSettings()), HONEST, 0))
