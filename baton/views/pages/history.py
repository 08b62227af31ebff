"""Read the records of a run as arrays: metrics by train step, and the lengths and verdicts of responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.records.metrics import read_metrics
from baton.records.run_directory import RecordedEvaluation, RunDirectory
from baton.types import ScoredTrajectory

MAX_SAMPLED_STEPS = 40
"""Maximum number of train steps whose trajectories are read. If a run has more steps, evenly spaced steps are read."""

Floats = NDArray[np.float64]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one metric, and the train steps that have a value."""

    steps: Floats
    """Train steps, shape [steps]."""
    values: Floats
    """Values of the metric, shape [steps]."""

    def smoothed(self, window: int) -> Floats:
        """Return the centred moving mean over `window` values (an odd number), or fewer at both ends; [steps]."""
        sums = np.cumsum(np.concatenate(([0.0], self.values)))
        places = np.arange(len(self.values))
        low = np.maximum(0, places - window // 2)
        high = np.minimum(len(places), places + window // 2 + 1)
        means: Floats = (sums[high] - sums[low]) / (high - low)
        return means


@dataclass(frozen=True)
class History:
    """The metrics and evaluations of a run."""

    rows: dict[int, dict[str, float]]
    """Values by train step and metric name."""
    evaluations: Sequence[RecordedEvaluation]

    @classmethod
    def read(cls, run: RunDirectory) -> History:
        """Read the metrics and evaluations of a run. Merges the rows of a step; omits values that are not finite."""
        rows: dict[int, dict[str, float]] = {}
        for row in read_metrics(run.path):
            values = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
            rows.setdefault(row["step"], {}).update({n: float(value) for n, value in values.items() if isfinite(value)})
        return cls(rows, run.evaluations())

    @cached_property
    def names(self) -> list[str]:
        """Names of all metrics, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    @property
    def last_step(self) -> int:
        """Last train step with a row; 0 without rows."""
        return max(self.rows, default=0)

    def curve(self, name: str) -> Curve:
        """Return the curve of one metric, which is empty if no train step has the metric."""
        points = [(step, row[name]) for step, row in sorted(self.rows.items()) if name in row]
        return Curve(np.array([p[0] for p in points], float), np.array([p[1] for p in points], float))


@dataclass(frozen=True, slots=True)
class StepLengths:
    """The length and verdict of every trajectory of one train step."""

    step: int
    lengths: Floats
    """Response lengths in tokens, shape [trajectories]."""
    verdicts: NDArray[np.str_]
    """Elements of `VERDICTS`, shape [trajectories]."""


VERDICTS = ("correct", "wrong", "not scored")


def read_lengths(run: RunDirectory) -> list[StepLengths]:
    """Read the lengths and verdicts of at most MAX_SAMPLED_STEPS train steps."""
    found = []
    for step in evenly(run.recorded_steps(), MAX_SAMPLED_STEPS):
        members = [member for group in run.groups(step) for member in group.members]
        lengths = np.array([m.num_policy_tokens for m in members], float)
        found.append(StepLengths(step, lengths, np.array([verdict(m) for m in members])))
    return found


def verdict(member: ScoredTrajectory) -> str:
    """Return the verdict of a trajectory, an element of VERDICTS."""
    if not member.judgement.is_judged:
        return "not scored"
    return "correct" if member.judgement.is_correct else "wrong"


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` evenly spaced items, including the first and (if `count` is above 1) the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]
