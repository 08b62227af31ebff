"""Warnings about rewards: responses without a reward, and groups in which all rewards are equal.

The functions return the text of a warning, which the caller prints. The first warning about a kind of failure explains
it; later warnings only give its count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from baton.types import FailureCause, FinishReason, Group, RewardResult, ScoredTrajectory

MAX_EXPLAINED = 10
"""Maximum number of kinds of failure that are explained; further kinds are only counted."""
EQUAL_STEPS = 3
"""Number of consecutive steps with equal rewards before the first warning; doubled after each warning."""
FEW_CORRECT = 0.1
"""If the share of correct responses is below this number, `first_impression` suggests easier problems."""

_NO_ANSWER = "{:.0f} % state no answer in the format of [answer]; read some responses, or reward the format"


class RewardWarnings:
    """Counts rewards and failures as they arrive, and formulates warnings for the user."""

    def __init__(self) -> None:
        self._total = 0
        self._failed: Counter[str] = Counter()
        self._new: list[str] = []
        self._explained: set[tuple[FailureCause | None, str]] = set()
        self._equal_steps = 0
        self._next_warning = EQUAL_STEPS

    def count(self, result: RewardResult) -> None:
        """Count a reward or failure, even if no batch will contain the trajectory."""
        self._total += 1
        if result.failure is None:
            return
        self._failed[str(result.cause)] += 1
        kind = result.cause, re.split(r" returned |: ", result.failure, maxsplit=1)[0]
        if kind not in self._explained and len(self._explained) < MAX_EXPLAINED:
            self._explained.add(kind)
            self._new.append(result.failure)

    def take(self, when: str) -> list[str]:
        """Return the lines of a warning about the failures since the last call of this method; empty without failures.
        Reset the counts."""
        total, failed, new = self._total, self._failed, self._new
        self._total, self._failed, self._new = 0, Counter(), []
        if not failed:
            return []
        return [
            f"warning: {when}: {failed.total()} of {total} responses could not be scored ({by_cause(failed)}); they "
            "count neither as right nor as wrong, and are not trained on",
            *(f"  {failure}" for failure in new),
        ]

    def stepped(self, step: int, groups: Sequence[Group]) -> list[str]:
        """Return a warning if the rewards within each group have been equal for `EQUAL_STEPS` consecutive steps, and
        again whenever the number of these steps has doubled. Otherwise return an empty list."""
        self._equal_steps = self._equal_steps + 1 if have_equal_rewards(groups) else 0
        if not self._equal_steps:
            self._next_warning = EQUAL_STEPS
        if self._equal_steps < self._next_warning:
            return []
        self._next_warning *= 2
        return [f"warning: step {step}: {nothing_to_learn(self._equal_steps, groups)}"]


def by_cause(failed: Mapping[Any, float]) -> str:
    """Return counts by cause as text, such as `raised 20, timeout 5`, the most frequent cause first."""
    return ", ".join(f"{cause} {count:g}" for cause, count in sorted(failed.items(), key=lambda item: -item[1]))


def have_equal_rewards(groups: Sequence[Group]) -> bool:
    """Return whether all scored members of each group have the same reward. If groups have only one member, the rewards
    of different groups are compared instead."""
    rewards = [[m.judgement.reward for m in g.members if m.judgement.is_judged] for g in groups]
    if all(len(g.members) == 1 for g in groups):
        rewards = [[reward for row in rewards for reward in row]]
    compared = [row for row in rewards if len(row) > 1]
    return bool(compared) and all(min(row) == max(row) for row in compared)


def nothing_to_learn(steps: int, groups: Sequence[Group]) -> str:
    """Return the warning that rewards within each group have been equal for `steps` steps, with the likely reason,
    derived from the last step's `groups`."""
    members = _scored(groups)
    return (
        f"for {steps} steps all responses to a prompt have had the same reward ({_values(members)}), so they give no "
        f"gradient: {_reason(members)}"
    )


def first_impression(groups: Sequence[Group]) -> list[str]:
    """Return a line with statistics of an untrained policy's responses, and a warning for each problem that prevents
    learning. Without any scored response, the list is empty."""
    scored = _scored(groups)
    if not scored:
        return []
    found = []
    if have_equal_rewards(groups):
        to = "a prompt" if any(len(g.members) > 1 for g in groups) else "all prompts"
        same = f"all responses to {to} have the same reward ({_values(scored)}), so they give no gradient"
        found.append(f"warning: {same}: {_reason(scored)}")
    elif _share_without_answer(scored) == 1.0:
        found.append(f"warning: the rewards differ, but {_NO_ANSWER.format(100)}")
    wrong = [m for m in scored if not m.judgement.is_correct and m.episode is None]
    silent = [m.judgement.reward for m in wrong if m.judgement.answer is None]
    tried = [m.judgement.reward for m in wrong if m.judgement.answer is not None]
    if silent and tried and 2 * len(wrong) > len(scored) and mean(silent) > mean(tried):
        found.append(
            f"warning: wrong responses get more reward without an answer ({mean(silent):.3g} on average) than with one "
            f"({mean(tried):.3g}), so the model may learn not to answer; make the reward without an answer the lowest"
        )
    cut = _share_cut(scored)
    if cut > 0.5 and not _is_cut_before_answer(scored):
        found.append(f"warning: {100 * cut:.0f} % of the responses are cut at rollout.max_new_tokens; raise this limit")
    answered = f"{100 * (1 - _share_without_answer(scored)):.0f} % state an answer, "
    if all(m.episode is not None for m in scored):
        answered = ""
    correct = sum(m.judgement.is_correct for m in scored) / len(scored)
    is_ready = not found and len({m.judgement.reward for m in scored}) > 1
    ready = "; rewards differ, so training can begin"
    if not correct:
        ready += ", but no response is correct: only differences between wrong responses are learned at first"
    elif correct < FEW_CORRECT:
        ready += ", but few responses are correct, so learning may be slow: add easier problems"
    verdict = (
        f"before training: of {len(scored)} responses {answered}{100 * correct:.0f} % are correct, {100 * cut:.0f} % "
        f"are cut{ready if is_ready else ''}"
    )
    return [verdict, *found]


def _scored(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    return [m for g in groups for m in g.members if m.judgement.is_judged]


def _values(scored: Sequence[ScoredTrajectory]) -> str:
    rewards = {m.judgement.reward for m in scored}
    return f"{rewards.pop():g} everywhere" if len(rewards) == 1 else "it differs only between groups"


def _share_without_answer(scored: Sequence[ScoredTrajectory]) -> float:
    """Return the share of responses without an answer. A multi-turn episode counts as a response with an answer."""
    return sum(m.judgement.answer is None and m.episode is None for m in scored) / len(scored)


def _share_cut(members: Sequence[ScoredTrajectory]) -> float:
    return sum(m.trajectory.finish_reason is FinishReason.LENGTH for m in members) / len(members)


def _is_cut_before_answer(scored: Sequence[ScoredTrajectory]) -> bool:
    return _share_without_answer(scored) > 0.5 and _share_cut(scored) > 0.5


def _reason(scored: Sequence[ScoredTrajectory]) -> str:
    if _is_cut_before_answer(scored):
        share = 100 * _share_cut(scored)
        return f"{share:.0f} % are cut at rollout.max_new_tokens before they state an answer; raise this limit"
    if (no_answer := _share_without_answer(scored)) > 0.5:
        return _NO_ANSWER.format(100 * no_answer)
    if all(m.judgement.is_correct for m in scored):
        return "all are correct; choose harder tasks"
    if not any(m.judgement.is_correct for m in scored):
        return "none is correct; choose easier tasks, or check in some responses that answers are extracted correctly"
    return "check what the reward functions return for some responses"
