"""How much better each trajectory did than expected: pure functions from groups to advantages.

To join: write a function from groups to {group id: one advantage per member} and name it in `ESTIMATORS` under the
algorithm that uses it. An estimator sees all groups of a batch, so it may also normalise over the batch.
Needs no torch, because the settings list the algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from baton.errors import UserError
from baton.types import Group

EPSILON = 1e-6
"""Added to a group's standard deviation (GRPO leaves the size open; most implementations take this)."""

Estimator = Callable[[Sequence[Group]], dict[int, tuple[float, ...]]]
"""Groups → {group id: [G] advantages, ordered by sample_index}."""


def group_relative(groups: Sequence[Group]) -> dict[int, tuple[float, ...]]:
    """GRPO: A_i = (R_i − mean R) / (std R + ε) within a group, std with G − 1 (arXiv 2402.03300, section 4.1.2).

    A group of equal rewards gives exactly zero. Raises UserError for a group of one: it has no std.
    """
    return {group.group_id: _standardised(rewards(group), group.group_id) for group in groups}


def rewards(group: Group) -> list[float]:
    """[G] rewards, ordered by sample_index."""
    return [member.judgement.reward for member in group.members]


def has_equal_rewards(group: Group) -> bool:
    """Whether all members got the same reward, so that nothing can be learnt by comparing them."""
    values = rewards(group)
    return min(values) == max(values)


def _standardised(values: Sequence[float], group_id: int) -> tuple[float, ...]:
    num_members = len(values)
    if num_members < 2:
        raise UserError(
            f"group-relative advantages compare a trajectory with its group: group {group_id} has {num_members} "
            "member, allowed are 2 or more (group_size)"
        )
    if min(values) == max(values):
        return (0.0,) * num_members  # the rounded mean of equal numbers need not equal them
    mean = math.fsum(values) / num_members
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num_members - 1))
    return tuple((value - mean) / (std + EPSILON) for value in values)


ESTIMATORS: Mapping[str, Estimator] = {"grpo": group_relative}
"""Algorithm name → its estimator."""
