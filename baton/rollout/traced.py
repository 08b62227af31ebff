"""Records the time of scoring in the trace."""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.records.trace import Tracer
from baton.rollout.parts import TrajectoryScorer
from baton.types import Prompt, ScoredTrajectory, Trajectory

CUT_S = 1.0
"""Longer periods of scoring are written in pieces, so that little is missing when the process ends."""


class TracedTrajectoryScorer(TrajectoryScorer):
    """A scorer that writes a trace span for each period in which trajectories wait for their rewards."""

    def __init__(self, judges: TrajectoryScorer, tracer: Tracer) -> None:
        self._judges, self._tracer = judges, tracer
        self.sees_groups = judges.sees_groups
        self._num_out = self._num_judged = 0
        self._since_s = 0.0

    def submit(self, trajectories: Sequence[Trajectory], prompt: Prompt, responses: Sequence[str]) -> None:
        if not self._num_out:
            self._since_s = time.monotonic()
        self._num_out += len(trajectories)
        self._judges.submit(trajectories, prompt, responses)

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        found = self._judges.collect(timeout_s)
        self._num_out -= len(found)
        self._num_judged += len(found)
        now_s = time.monotonic()
        if (found and not self._num_out) or (self._num_out and now_s - self._since_s > CUT_S):
            self._tracer.span("judge", "judges", 0, self._since_s, now_s, trajectories=self._num_judged)
            self._since_s, self._num_judged = now_s, 0
        return found
