"""What a run says about its rewards: responses that could not be judged, and rewards that teach nothing.

Text only: who prints it is not decided here. A kind of failure is told with its cause the first time, and as a count
from then on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from baton.types import FailureCause, FinishReason, Group, RewardResult

MAX_EXPLAINED = 10
"""Kinds of failure whose cause is told; more are only counted."""
EQUAL_STEPS = 3
"""Steps in a row without a difference in rewards after which a run says so; again after twice as many, and so on."""


class RewardWarnings:
    """Counts judgements as they arrive, and words what a person should know about them."""

    def __init__(self) -> None:
        self._judged = 0
        self._failed: Counter[str] = Counter()
        self._new: list[str] = []
        self._explained: set[tuple[FailureCause | None, str]] = set()
        self._equal_steps = 0
        self._next_warning = EQUAL_STEPS

    def count(self, judgement: RewardResult) -> None:
        """Take a judgement, also of a trajectory that will be in no batch."""
        self._judged += 1
        if judgement.failure is None:
            return
        self._failed[str(judgement.cause)] += 1
        kind = judgement.cause, re.split(r" returned |: ", judgement.failure, maxsplit=1)[0]
        if kind not in self._explained and len(self._explained) < MAX_EXPLAINED:
            self._explained.add(kind)
            self._new.append(judgement.failure)

    def take(self, when: str) -> list[str]:
        """Return what failed since the last call, and begin anew; nothing where nothing failed."""
        judged, failed, new = self._judged, self._failed, self._new
        self._judged, self._failed, self._new = 0, Counter(), []
        if not failed:
            return []
        return [
            f"warning: {when}: {failed.total()} of {judged} responses could not be judged ({by_cause(failed)}); they "
            "are neither right nor wrong, and are not trained",
            *(f"  {failure}" for failure in new),
        ]

    def stepped(self, step: int, groups: Sequence[Group]) -> list[str]:
        """Return a warning where no response of the last steps was better than another of its group."""
        self._equal_steps = self._equal_steps + 1 if have_equal_rewards(groups) else 0
        if not self._equal_steps:
            self._next_warning = EQUAL_STEPS
        if self._equal_steps < self._next_warning:
            return []
        self._next_warning *= 2
        return [f"warning: step {step}: {nothing_to_learn(self._equal_steps, groups)}"]


def by_cause(failed: Mapping[Any, float]) -> str:
    """`raised 20, timeout 5`, the most frequent cause first."""
    return ", ".join(f"{cause} {count:g}" for cause, count in sorted(failed.items(), key=lambda item: -item[1]))


def have_equal_rewards(groups: Sequence[Group]) -> bool:
    """Whether no judged member of any group differs in reward from another; groups of one are compared together."""
    rewards = [[m.judgement.reward for m in g.members if m.judgement.is_judged] for g in groups]
    if all(len(g.members) == 1 for g in groups):
        rewards = [[reward for row in rewards for reward in row]]
    compared = [row for row in rewards if len(row) > 1]
    return bool(compared) and all(min(row) == max(row) for row in compared)


def nothing_to_learn(steps: int, groups: Sequence[Group]) -> str:
    """Say that rewards have not differed for so many steps, and the likely reason, from the groups of the last."""
    members = [m for g in groups for m in g.members if m.judgement.is_judged]
    rewards = {m.judgement.reward for m in members}
    value = f"{rewards.pop():g} everywhere" if len(rewards) == 1 else "differing only between groups"
    without = sum(m.judgement.answer is None for m in members) / len(members)
    cut = sum(m.trajectory.finish_reason is FinishReason.LENGTH for m in members) / len(members)
    if without > 0.5 and cut > 0.5:
        reason = f"{100 * cut:.0f} % are cut at rollout.max_new_tokens before they state an answer; raise it"
    elif without > 0.5:
        reason = (
            f"{100 * without:.0f} % state no answer in the format of [answer]; see `baton show`, or reward the format"
        )
    elif all(m.judgement.is_correct for m in members):
        reason = "all are correct; take harder tasks"
    elif not any(m.judgement.is_correct for m in members):
        reason = "none is correct; take easier tasks, or see with `baton show` whether answers are parsed as you expect"
    else:
        reason = "see with `baton show` what the reward functions make of them"
    return (
        f"for {steps} steps all responses to a prompt have had the same reward ({value}), so there is nothing to learn "
        f"from them: {reason}"
    )
