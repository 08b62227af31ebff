"""What a run says about its rewards: kinds of failure once with their cause, and when nothing can be learned."""

from __future__ import annotations

import pytest

from baton.rewards.warnings import MAX_EXPLAINED, RewardWarnings, first_impression, have_equal_rewards
from baton.types import FailureCause, FinishReason, Group, Prompt, RewardResult, ScoredTrajectory, Segment, Trajectory


def failed(text: str, cause: FailureCause = FailureCause.RAISED) -> RewardResult:
    return RewardResult(0.0, {}, False, None, text, cause)


def group(
    *rewards: float | None, answer: str | None = "4", reason: FinishReason = FinishReason.STOP, group_id: int = 0
) -> Group:
    """Members by reward, None where there is no judgement; reward 1 is correct."""
    members = []
    for index, reward in enumerate(rewards):
        trajectory = Trajectory(group_id, index, (1,), (Segment((5,), (-1.0,), 0),), reason)
        judgement = failed("x") if reward is None else RewardResult(reward, {}, reward == 1.0, answer)
        members.append(ScoredTrajectory(trajectory, judgement))
    return Group(group_id, Prompt("p", "t", ()), tuple(members))


def test_a_kind_of_failure_is_explained_once_and_counted_each_time() -> None:
    warnings = RewardWarnings()
    for number in range(3):
        warnings.count(failed(f"f raised KeyError: {number} (f.py, line 2)"))
    warnings.count(failed("f gave no answer within 1 s", FailureCause.TIMEOUT))
    warnings.count(RewardResult(1.0, {}, True))
    first, *causes = warnings.take("step 1")
    assert first.startswith("warning: step 1: 4 of 5 responses could not be scored (raised 3, timeout 1)")
    assert causes == ["  f raised KeyError: 0 (f.py, line 2)", "  f gave no answer within 1 s"]
    warnings.count(failed("f raised KeyError: 7 (f.py, line 2)"))
    assert len(warnings.take("step 2")) == 1
    warnings.count(RewardResult(1.0, {}, True))
    assert warnings.take("step 3") == []
    for number in range(100):
        warnings.count(failed(f"f raised Error{number}: x"))
    assert len(warnings.take("step 4")) == 1 + MAX_EXPLAINED - 2


def test_equal_rewards_are_told_after_three_steps_and_then_ever_more_rarely() -> None:
    warnings = RewardWarnings()
    equal, unequal = [group(0.0, 0.0), group(1.0, 1.0)], [group(0.0, 1.0)]
    said = [bool(warnings.stepped(step, equal)) for step in range(1, 14)]
    assert [step for step, is_said in enumerate(said, 1) if is_said] == [3, 6, 12]
    assert warnings.stepped(14, unequal) == []
    assert [bool(warnings.stepped(step, equal)) for step in (15, 16, 17)] == [False, False, True]


@pytest.mark.parametrize(
    ("groups", "is_equal"),
    [
        ([group(0.0, 0.0), group(1.0, 1.0)], True),
        ([group(0.0, 0.0), group(1.0, 0.0)], False),
        ([group(0.0, None), group(1.0, 1.0)], True),  # one judged member compares with nobody
        ([group(None, None)], False),  # not judged: told elsewhere
        ([group(0.0), group(1.0)], False),  # groups of one: compared over the batch
        ([group(0.5), group(0.5)], True),
    ],
)
def test_equal_within_each_group_or_over_groups_of_one(groups: list[Group], is_equal: bool) -> None:
    assert have_equal_rewards(groups) is is_equal


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([group(0.0, 0.0, answer=None)], "100 % state no answer in the format of [answer]"),
        ([group(0.0, 0.0, answer=None, reason=FinishReason.LENGTH)], "100 % are cut at rollout.max_new_tokens"),
        ([group(1.0, 1.0)], "(1 everywhere), so they give no gradient: all are correct"),
        ([group(0.0, 0.0)], "none is correct"),
        ([group(0.0, 0.0), group(1.0, 1.0)], "(it differs only between groups)"),
    ],
)
def test_the_likely_reason_is_named(groups: list[Group], reason: str) -> None:
    warnings = RewardWarnings()
    for step in (1, 2, 3):
        said = warnings.stepped(step, groups)
    assert reason in said[0]


def test_a_first_impression_says_what_will_not_work() -> None:
    cut = FinishReason.LENGTH
    assert first_impression([group(0.0, 1.0), group(0.0, 0.0)]) == [
        "before training: of 4 responses 100 % state an answer, 25 % are correct, 0 % are cut; rewards differ, "
        "so training can begin"
    ]
    (partial_credit,) = first_impression([group(0.0, 0.3)])
    assert partial_credit.endswith(
        "training can begin, but no response is correct: only differences between wrong responses are learned at first"
    )
    (few,) = first_impression([group(0.0, 1.0), *[group(0.0, 0.0)] * 5])
    assert "8 % are correct" in few
    assert few.endswith("few responses are correct, so learning may be slow: add easier problems")
    verdict, equal = first_impression([group(0.0, 0.0, answer=None)])
    assert verdict == "before training: of 2 responses 0 % state an answer, 0 % are correct, 0 % are cut"
    assert equal.startswith("warning: all responses to a prompt have the same reward (0 everywhere), so they give no ")
    assert "100 % state no answer in the format of [answer]" in equal
    (_, too_short) = first_impression([group(0.0, 1.0, reason=cut)])
    assert too_short == "warning: 100 % of the responses are cut at rollout.max_new_tokens; raise this limit"
    (_, both) = first_impression([group(0.0, 0.0, answer=None, reason=cut)])
    assert "100 % are cut at rollout.max_new_tokens before they state an answer" in both
    (_, unread) = first_impression([group(0.2, 0.7, answer=None)])
    assert unread.startswith("warning: the rewards differ, but 100 % state no answer")
    (_, silence) = first_impression([group(0.0, 0.1, 1.0), group(0.2, 0.2, answer=None)])
    assert silence.startswith(
        "warning: wrong responses get more reward without an answer (0.2 on average) than with one (0.05)"
    )
    assert len(first_impression([group(0.3, 0.1, 1.0), group(0.2, 0.2, answer=None)])) == 1  # 0.2 without and with one
    assert len(first_impression([group(0.0, 1.0, 1.0, 1.0), group(0.2, 1.0)])) == 1  # most are right
    assert first_impression([group(None, None)]) == []
    (_, single) = first_impression([group(0.0), group(0.0)])
    assert single.startswith("warning: all responses to all prompts have the same reward")
