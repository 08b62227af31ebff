"""The reward scorer in virtual time. It scores at most `concurrency` trajectories at the same time; further
trajectories wait in a queue."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from baton.records.trace import Tracer
from baton.simulator.clock import VirtualClock
from baton.simulator.inputs import ScoringSpec
from baton.simulator.seeds import choices


class SimulatedScorer:
    """A reward scorer that calls a function when a trajectory has been scored."""

    def __init__(self, spec: ScoringSpec, clock: VirtualClock, seed: int, tracer: Tracer | None = None) -> None:
        self._spec, self._clock, self._tracer = spec, clock, tracer
        self._random = choices(seed, "judges")
        self._sigma = math.sqrt(math.log1p(spec.cv**2))
        self._free_s: list[float] = []
        """Heap of the times when each of the concurrent scorers becomes free. Scorers that have not been used yet are
        not in the heap."""
        self._since_s = self._until_s = 0.0
        """Begin and end of the current busy period."""
        self._num = 0

    def submit(self, then: Callable[[], None]) -> None:
        spec, now_s = self._spec, self._clock.now_s
        if not spec.latency_s:
            then()
            return
        seconds = spec.latency_s
        if self._sigma:
            # a normal score with mean -sigma² / 2 gives a lognormal factor with mean 1
            seconds *= math.exp(self._random.gauss(-(self._sigma**2) / 2, self._sigma))
        begin_s = now_s
        if len(self._free_s) >= spec.concurrency:
            begin_s = max(now_s, heapq.heappop(self._free_s))
        heapq.heappush(self._free_s, begin_s + seconds)
        if now_s > self._until_s:
            self.close()
            self._since_s = now_s
        self._until_s, self._num = max(self._until_s, begin_s + seconds), self._num + 1
        self._clock.at(begin_s + seconds, then)

    def close(self) -> None:
        """Write the span of the current busy period, from its first submission to its last reward, to the trace."""
        if self._tracer is not None and self._num:
            self._tracer.span("judge", "judges", 0, self._since_s, self._until_s, trajectories=self._num)
        self._num = 0
