"""Load balance: assigns each row of a minibatch to one rank, with about equal work for all ranks.

Does not import torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchShare:
    """A rank's share of every minibatch."""

    rank: int = 0
    size: int = 1
    """Number of ranks that train different rows."""
    even_tokens: float = float("inf")
    """Row length in tokens at which attention costs as much as the linear layers (`trainer/model_setup.py`)."""

    def cost(self, num_tokens: int) -> float:
        """Return the cost of a row, relative to one token of a very short row."""
        return num_tokens * (1.0 + num_tokens / self.even_tokens)


ALONE = BatchShare()


def balanced(costs: Sequence[float], count: int) -> list[list[int]]:
    """Assign indices 0 … len(costs) − 1 to `count` parts of about equal cost, each part in ascending order.

    Costs are assigned in descending order, each to the part with the least cost so far; ties go to the first such part
    (Graham 1969). No part exceeds the mean by more than (1 − 1/count) times the largest cost. The result depends only
    on the costs, so every rank computes the same parts.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, part) for part in range(count)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, part = loads[0]
        parts[part].append(place)
        heapq.heapreplace(loads, (load + costs[place], part))
    return [sorted(part) for part in parts]
