"""Which rank trains which rows: every row once, and about equal work for all. Pure; needs no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Which part of every minibatch is a rank's."""

    rank: int = 0
    size: int = 1
    """Ranks that rows are dealt to."""
    even_tokens: float = float("inf")
    """Tokens of a row at which attention costs as much as the linear layers do (`trainer/fitting.py`)."""

    def cost(self, num_tokens: int) -> float:
        """Return what a row costs, in tokens of a short one."""
        return num_tokens * (1.0 + num_tokens / self.even_tokens)


ALONE = BatchShare()


def balanced(costs: Sequence[float], count: int) -> list[list[int]]:
    """Deal places 0 … len(costs) − 1 to `count` parts of about equal cost; each part in ascending order.

    The dearest first, each to the part with the least so far, of equal ones the first (Graham 1969): no part costs more
    than the mean and (1 − 1/count) of one row. The same costs give the same parts on every rank.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, part) for part in range(count)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, part = loads[0]
        parts[part].append(place)
        heapq.heapreplace(loads, (load + costs[place], part))
    return [sorted(part) for part in parts]
