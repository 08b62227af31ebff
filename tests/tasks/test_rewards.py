"""From a response to a judgement: parts, weights, and accuracy beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError
from task_cases import mixture

from baton.errors import UserError
from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import JudgeSettings, RewardSettings
from baton.tasks.stream import AnswerSettings, TaskMixture, TaskSettings
from baton.types import FailureCause, Prompt

COUNTDOWN = mixture("countdown")
PROMPT = COUNTDOWN.held_out(1)[0]


OPENED: list[RewardScorer] = []


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def judge(*rewards: RewardSettings) -> RewardScorer:
    OPENED.append(RewardScorer(COUNTDOWN.tasks, rewards, {}, JudgeSettings(workers=1)))
    return OPENED[-1]


def answered(text: str | None) -> str:
    return f"<think>…</think><answer>{text}</answer>"


def test_the_reward_is_the_weighted_sum_of_unweighted_parts() -> None:
    """The right expression in the right form: 1 · 1 + 0.5 · 1 − 0.25 · 1 = 1.25."""
    parts = (
        RewardSettings(kind="correct"),
        RewardSettings(kind="format", weight=0.5),
        RewardSettings(kind="exact", weight=-0.25),
    )
    full = judge(*parts).score(PROMPT, answered(PROMPT.answer))
    assert full.parts == {"correct": 1.0, "format": 1.0, "exact": 1.0}
    assert full.reward == 1.25
    assert (full.is_correct, full.answer) == (True, PROMPT.answer)
    empty = judge(*parts).score(PROMPT, "no idea")
    assert empty.parts == {"correct": 0.0, "format": 0.0, "exact": 0.0}
    assert (empty.reward, empty.is_correct, empty.answer) == (0.0, False, None)


def test_another_right_expression_is_correct_but_not_exact() -> None:
    found = judge(RewardSettings(kind="correct"), RewardSettings(kind="exact"))
    judgement = found.score(PROMPT, answered(f"({PROMPT.answer})"))
    assert judgement.parts == {"correct": 1.0, "exact": 0.0}


def test_without_a_reference_no_answer_is_exact() -> None:
    found = judge(RewardSettings(kind="exact")).score(msgspec.structs.replace(PROMPT, answer=None), answered(""))
    assert found.cause is FailureCause.MALFORMED
    assert found.failure == "exact has no reference answer to compare with"


def test_partial_credit_is_a_reward_only_by_kind_score_and_never_accuracy() -> None:
    """countdown gives 0.05 for a plain number that is not the target made of the numbers: shaping, not accuracy."""
    both = judge(RewardSettings(kind="score"), RewardSettings(kind="correct"))
    judgement = both.score(PROMPT, answered("1+1"))
    assert judgement.parts == {"score": 0.05, "correct": 0.0}
    assert judgement.is_correct is False
    assert judge(RewardSettings(kind="correct")).score(PROMPT, answered("1+1")).reward == 0.0


@pytest.mark.parametrize("response", ["", "<answer></answer>", "<answer>nonsense</answer>", "<answer> </answer>"])
def test_nonsense_is_never_correct(response: str) -> None:
    judgement = judge(RewardSettings(kind="correct")).score(PROMPT, response)
    assert (judgement.reward, judgement.is_correct) == (0.0, False)


def test_hedging_with_several_answers_is_judged_by_the_last_and_loses_the_format() -> None:
    parts = judge(RewardSettings(kind="correct"), RewardSettings(kind="format"))
    right, wrong = answered(PROMPT.answer), answered("1")
    assert parts.score(PROMPT, wrong + right).parts == {"correct": 1.0, "format": 0.0}
    assert parts.score(PROMPT, right + wrong).parts == {"correct": 0.0, "format": 0.0}


def test_copying_the_prompts_own_tags_earns_nothing() -> None:
    instructed = "give only the final answer inside <answer> and </answer>."
    judgement = judge(RewardSettings(kind="correct"), RewardSettings(kind="format")).score(PROMPT, instructed)
    assert judgement.parts == {"correct": 0.0, "format": 0.0}


def test_a_verifier_that_breaks_on_an_answer_leaves_it_unjudged_with_the_cause() -> None:
    tasks = TaskMixture([TaskSettings(name="prime_factorization")], AnswerSettings())
    with RewardScorer(tasks.tasks, [RewardSettings(kind="correct")], {}) as found:
        judgement = found.score(tasks.held_out(1)[0], answered("two times three"))
    assert (judgement.is_judged, judgement.cause, judgement.parts) == (False, FailureCause.RAISED, {})
    assert judgement.failure is not None
    assert judgement.failure.startswith("the scorer of task 'prime_factorization' raised ValueError: ")


def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_own_function_gets_its_arguments_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def brevity(parsed, response, *, answer, episode, gym_index):\n    assert answer and episode is None\n"
    source += "    return -len(response) if parsed is None else 2\n"
    write_module(tmp_path, monkeypatch, "own_reward_one", source)
    own = RewardSettings(kind="function", function="own_reward_one:brevity", weight=0.5)
    found = judge(RewardSettings(kind="correct"), own)
    assert found.score(PROMPT, "abcd").parts == {"correct": 0.0, "brevity": -4.0}
    assert found.score(PROMPT, "abcd").reward == -2.0
    assert found.score(PROMPT, answered(PROMPT.answer)).reward == 2.0


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_module:f", "cannot be imported: No module named 'no_such_module'"),
        ("math:no_such", "cannot be imported"),
        ("math:pi", "is a float, not a function"),
        ("math.sqrt", "allowed is 'module:name'"),
    ],
)
def test_an_own_function_that_is_not_there_is_refused_before_the_start(path: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        judge(RewardSettings(kind="function", function=path))


def test_parts_that_would_hide_each_other_and_no_parts_are_refused() -> None:
    with pytest.raises(UserError, match="two parts have the same name"):
        judge(RewardSettings(kind="correct"), RewardSettings(kind="correct", weight=2))
    with pytest.raises(UserError, match=r"no \[\[reward\]\]"):
        judge()
    for kind, function in (("function", None), ("correct", "math:sqrt")):
        with pytest.raises(ValidationError, match="belongs to kind"):
            RewardSettings(kind=kind, function=function)  # type: ignore[arg-type]


def test_a_prompt_is_judged_the_same_after_a_trip_through_json() -> None:
    import msgspec

    again = msgspec.json.decode(msgspec.json.encode(PROMPT), type=Prompt)
    fresh = RewardScorer(mixture("countdown").tasks, [RewardSettings(kind="correct")], {})
    assert fresh.score(again, answered(PROMPT.answer)).is_correct
