"""The reward scorer in virtual time, which scores at most `concurrency` trajectories at the same time. Further
trajectories wait in a queue."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from baton.records.trace import Tracer
from baton.simulator.clock import VirtualClock
from baton.simulator.inputs import ScoringSpec
from baton.simulator.scripted_trajectories import Script
from baton.simulator.seeds import choices
from baton.types import Prompt, RewardResult, ScoredTrajectory, Trajectory

_RESULTS = {reward: RewardResult(reward, {}, reward > 0) for reward in (0.0, 1.0)}


class SimulatedScorer:
    """A `TrajectoryScorer` that takes time and gives the scripted rewards."""

    sees_groups = scores_episodes = False

    def __init__(
        self, spec: ScoringSpec, script: Script, clock: VirtualClock, seed: int, tracer: Tracer | None = None
    ) -> None:
        self._spec, self._script, self._clock, self._tracer = spec, script, clock, tracer
        self._random = choices(seed, "judges")
        self._sigma = math.sqrt(math.log1p(spec.cv**2))
        self._free_s: list[float] = []
        """Heap with one time per scorer that has been used: the time at which the scorer becomes free."""
        self._done: list[ScoredTrajectory] = []
        """Trajectories that `collect` will return."""
        self._since_s = self._until_s = 0.0
        """Begin and end of the current busy period."""
        self._num = 0

    def submit(self, finished: Sequence[Trajectory | ScoredTrajectory], prompt: Prompt) -> None:
        for one in finished:
            assert isinstance(one, Trajectory), "a simulated run has no multi-turn episodes"
            scored = ScoredTrajectory(one, _RESULTS[self._script.reward(one.group_id, one.sample_index)])
            if self._spec.latency_s:
                self._clock.at(self._score_s(), self._done.append, scored)
            else:
                self._done.append(scored)

    def collect(self, timeout_s: float = 0.0) -> list[ScoredTrajectory]:
        self._clock.poll(timeout_s, lambda: bool(self._done))
        found = self._done.copy()
        self._done.clear()  # the scheduled actions append to this list
        return found

    def restart(self) -> None:
        """Drop all trajectories, because the controller has stopped."""
        self._done = []

    def _score_s(self) -> float:
        """Return the time at which the scoring of a trajectory ends if the trajectory is submitted now."""
        spec, now_s, seconds = self._spec, self._clock.now_s, self._spec.latency_s
        if self._sigma:
            # if x is normal with mean -sigma² / 2, the lognormal factor exp(x) has mean 1
            seconds *= math.exp(self._random.gauss(-(self._sigma**2) / 2, self._sigma))
        begin_s = now_s
        if len(self._free_s) >= spec.concurrency:
            begin_s = max(now_s, heapq.heappop(self._free_s))
        heapq.heappush(self._free_s, begin_s + seconds)
        if now_s > self._until_s:
            self.close()
            self._since_s = now_s
        self._until_s, self._num = max(self._until_s, begin_s + seconds), self._num + 1
        return begin_s + seconds

    def close(self) -> None:
        """Write to the trace the span of the current busy period: from its first submission to its last reward."""
        if self._tracer is not None and self._num:
            self._tracer.span("judge", "judges", 0, self._since_s, self._until_s, trajectories=self._num)
        self._num = 0
