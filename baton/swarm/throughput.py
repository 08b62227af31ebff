"""How fast trajectories are finished, and how long versions take to reach the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

MEMORY = 2048
"""Finished trajectories that the pace is taken over."""


@dataclass(slots=True)
class ThroughputTracker:
    """Written by the hub's thread, read by the runner's."""

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """From one finish to the next, while something was to be done."""
    last_s: float = 0.0
    announced: dict[int, float] = field(default_factory=dict)
    """Version → when the trainer handed it over, until all workers serve it."""
    broadcast_s: float = 0.0
    """Of the last version that all workers came to serve."""

    def finish(self, now_s: float, busy_since_s: float) -> None:
        """A trajectory is finished; there has been something to do since a moment."""
        self.gaps_s.append(max(0.0, now_s - max(self.last_s, busy_since_s)))
        self.last_s = now_s

    def per_s(self) -> float:
        """Trajectories a second, over the last ones; 0 while too few are known."""
        gaps = list(self.gaps_s)
        return len(gaps) / max(1e-6, sum(gaps)) if len(gaps) > 1 else 0.0

    def serve(self, now_s: float, served: Iterable[int | None]) -> None:
        """The connected workers serve these versions now, None being none."""
        slowest = min((-1 if number is None else number for number in served), default=-1)
        for number in [n for n in self.announced if n <= slowest]:
            self.broadcast_s = now_s - self.announced.pop(number)
