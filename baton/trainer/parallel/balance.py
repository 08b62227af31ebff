"""Load balance: assigns each row of a minibatch to one rank, so that all ranks need about the same time.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BatchShare:
    """A rank's share of every minibatch."""

    rank: int = 0
    size: int = 1
    """Number of ranks that train different rows."""
    even_tokens: float = float("inf")
    """Row length in tokens at which attention costs as much as the linear layers (`trainer/model_setup.py`)."""

    speeds: tuple[float, ...] = ()
    """Relative speed of each rank (`trainer.speeds`); if empty, all ranks are equally fast."""

    @property
    def speed(self) -> float:
        """Speed of this rank, relative to the mean over ranks."""
        return self.speeds[self.rank] * self.size / sum(self.speeds) if self.speeds else 1.0

    def limits(self, max_tokens: int) -> list[int]:
        """Return each rank's maximum number of tokens of a microbatch, which is `max_tokens` for the fastest ranks.

        Ranks gather parameters in each pass, so they run the same pass at the same time. The maxima are proportional to
        the speeds, so the passes of all ranks take about the same time.
        """
        return [max(1, int(max_tokens * speed / max(self.speeds))) for speed in self.speeds] or [max_tokens] * self.size

    def cost(self, num_tokens: int) -> float:
        """Return the cost of a row, as a multiple of the cost of one token in a very short row."""
        return num_tokens * (1.0 + num_tokens / self.even_tokens)


ALONE = BatchShare()


def balanced(costs: Sequence[float], count: int, speeds: Sequence[float] = ()) -> list[list[int]]:
    """Distribute the indices 0 … len(costs) − 1 over `count` parts that take about the same time; each part is sorted.
    `speeds`: relative speed of the rank of each part; by default, all are equal.

    Costs are assigned in descending order. Each cost is assigned to the part that then has the shortest total time
    (Graham 1969; Gonzalez, Ibarra and Sahni 1977). If several parts take equally little time, the first one gets the
    cost. At equal speeds, no part exceeds the mean by more than (1 − 1/count) times the largest cost. The result
    depends only on the arguments, so every rank computes the same parts.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    rates = np.array(speeds or [1.0] * count)
    loads = np.zeros(count)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        part = int(((loads + costs[place]) / rates).argmin())
        parts[part].append(place)
        loads[part] += costs[place]
    return [sorted(part) for part in parts]
