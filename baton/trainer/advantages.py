"""How much better each trajectory did than expected: pure functions from groups to advantages.

To join: write a function from groups to {group id: one advantage per member} and name it in `ESTIMATORS` under the
algorithm that uses it. An estimator sees all groups of a batch, so it may also normalise over the batch.
Needs no torch, because the settings list the algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from baton.errors import UserError
from baton.types import Group, Judged

EPSILON = 1e-6
"""Added to a group's standard deviation (GRPO leaves the size open; most implementations take this)."""

Estimator = Callable[[Sequence[Group]], dict[int, tuple[float, ...]]]
"""Groups → {group id: [G] advantages, ordered by sample_index}."""


def group_relative(groups: Sequence[Group]) -> dict[int, tuple[float, ...]]:
    """GRPO: A_i = (R_i − mean R) / (std R + ε) within a group, std with G − 1 (arXiv 2402.03300, section 4.1.2).

    Mean, std and G are over the judged members; the others get zero, and no gradient (`is_trained`). A group of equal
    rewards gives exactly zero. Raises UserError for a group of one: it has no std.
    """
    return {group.group_id: _compared(group) for group in groups}


def rewards(group: Group) -> list[float]:
    """Rewards of the judged members, ordered by sample_index."""
    return [member.judgement.reward for member in group.members if member.judgement.is_judged]


def is_comparable(group: Group) -> bool:
    """Whether at least two members have a judgement; a group without teaches nothing and gets no gradient."""
    return len(rewards(group)) >= 2


def is_trained(group: Group, member: Judged) -> bool:
    """Whether a trajectory may get a gradient: it has a judgement, and another one to be compared with."""
    return member.judgement.is_judged and is_comparable(group)


def has_equal_rewards(group: Group) -> bool:
    """Whether all judged members got the same reward, so that nothing can be learnt by comparing them."""
    return len(set(rewards(group))) <= 1


def _compared(group: Group) -> tuple[float, ...]:
    num_members = len(group.members)
    if num_members < 2:
        raise UserError(
            f"group-relative advantages compare a trajectory with its group: group {group.group_id} has {num_members} "
            "member, allowed are 2 or more (group_size)"
        )
    if not is_comparable(group):
        return (0.0,) * num_members
    of_judged = iter(_standardised(rewards(group)))
    return tuple(next(of_judged) if member.judgement.is_judged else 0.0 for member in group.members)


def _standardised(values: Sequence[float]) -> tuple[float, ...]:
    num_members = len(values)
    if min(values) == max(values):
        return (0.0,) * num_members  # the rounded mean of equal numbers need not equal them
    mean = math.fsum(values) / num_members
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num_members - 1))
    return tuple((value - mean) / (std + EPSILON) for value in values)


ESTIMATORS: Mapping[str, Estimator] = {"grpo": group_relative}
"""Algorithm name → its estimator."""
