"""Records of a run as arrays: metrics by step, and lengths with verdicts of sampled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.records.metrics import read_metrics
from baton.records.run_directory import RecordedEvaluation, RunDirectory
from baton.types import ScoredTrajectory

MAX_SAMPLED_STEPS = 40
"""Maximum number of steps whose trajectories are read; a longer run is sampled evenly, with first and last step."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric at the steps that have it."""

    steps: Floats
    """[steps]"""
    values: Floats
    """[steps]"""

    def smoothed(self, window: int) -> Floats:
        """[steps] centred mean over `window` (odd) values, fewer at the ends."""
        sums = np.cumsum(np.concatenate(([0.0], self.values)))
        places = np.arange(len(self.values))
        low = np.maximum(0, places - window // 2)
        high = np.minimum(len(places), places + window // 2 + 1)
        means: Floats = (sums[high] - sums[low]) / (high - low)
        return means


@dataclass(frozen=True)
class History:
    """Metrics and evaluations of a run."""

    rows: dict[int, dict[str, float]]
    """Values by step and name; several rows of one step are merged."""
    evaluations: Sequence[RecordedEvaluation]

    @classmethod
    def read(cls, run: RunDirectory) -> History:
        """Read metrics and evaluations; values that are not finite are left out."""
        rows: dict[int, dict[str, float]] = {}
        for row in read_metrics(run.path):
            found = rows.setdefault(row["step"], {})
            found.update({name: float(value) for name, value in row.items() if name != "step" and _is_finite(value)})
        return cls(rows, run.evaluations())

    @cached_property
    def names(self) -> list[str]:
        """Names of all metrics, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    @property
    def last_step(self) -> int:
        """The last step with a row; 0 without rows."""
        return max(self.rows, default=0)

    def curve(self, name: str) -> Curve:
        """Return one metric; the curve is empty if no step has it."""
        points = [(step, row[name]) for step, row in sorted(self.rows.items()) if name in row]
        return Curve(np.array([p[0] for p in points], float), np.array([p[1] for p in points], float))


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Length and verdict of every trajectory of one step."""

    step: int
    lengths: Floats
    """[trajectories] tokens"""
    verdicts: NDArray[np.str_]
    """[trajectories] `correct`, `wrong` or `not judged`"""


VERDICTS = ("correct", "wrong", "not judged")


def read_lengths(run: RunDirectory) -> list[StepLengths]:
    """Read lengths and verdicts of at most MAX_SAMPLED_STEPS steps."""
    found = []
    for step in evenly(run.recorded_steps(), MAX_SAMPLED_STEPS):
        members = [member for group in run.groups(step) for member in group.members]
        lengths = np.array([m.trajectory.num_tokens for m in members], float)
        found.append(StepLengths(step, lengths, np.array([verdict(m) for m in members])))
    return found


def verdict(member: ScoredTrajectory) -> str:
    """One of VERDICTS."""
    if not member.judgement.is_judged:
        return "not judged"
    return "correct" if member.judgement.is_correct else "wrong"


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and bool(np.isfinite(value))
