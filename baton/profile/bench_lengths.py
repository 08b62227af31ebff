"""Scripted response lengths, which are the same for every mode: lognormal, correlated within groups, with a maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

_NORMAL = NormalDist()
_SAMPLE = 4000
_GOLDEN, _SILVER = 0.6180339887498949, 0.7548776662466927
"""Steps of low-discrepancy sequences, with which even a few groups have nearly the requested spread."""


@dataclass(frozen=True)
class ScriptedLengths:
    """Lengths of median · exp(between · z_group + within · z_trajectory), from 1 to `longest`, with mean `mean`."""

    mean: float
    """Mean length in tokens."""
    longest: int
    between: float
    """Standard deviation of the log length between groups."""
    within: float
    """Standard deviation of the log length between members of one group."""
    seed: int = 0

    def length(self, group_id: int, sample_index: int) -> int:
        return self._cut(self._median, group_id, sample_index)

    @cached_property
    def _median(self) -> float:
        low, high = 0.01, float(self.longest)
        for _ in range(50):
            middle = math.sqrt(low * high)
            total = sum(self._cut(middle, i // 8, i % 8) for i in range(_SAMPLE))
            low, high = (middle, high) if total < self.mean * _SAMPLE else (low, middle)
        return low

    def _cut(self, median: float, group_id: int, sample_index: int) -> int:
        own = self._normal(group_id * 64 + sample_index, _SILVER)
        drawn = median * math.exp(self.between * self._normal(group_id, _GOLDEN) + self.within * own)
        return min(self.longest, max(1, round(drawn)))

    def _normal(self, index: int, step: float) -> float:
        return _NORMAL.inv_cdf(min(1 - 1e-9, max(1e-9, ((index + 1 + 7919 * self.seed) * step) % 1.0)))
