"""Measures how many trajectories the workers finish per second, and how long a version takes to reach all workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

MEMORY = 2048
"""Number of the most recent finished trajectories from which the rate is computed."""


@dataclass(slots=True)
class ThroughputTracker:
    """Measurements of one hub. The hub's thread writes them, and the controller's thread reads them."""

    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """Seconds between consecutive finished trajectories. Time in which no lease was held is not counted."""
    last_s: float = 0.0
    announced: dict[int, float] = field(default_factory=dict)
    """Version → time at which the trainer published it. A version stays here until all workers serve it."""
    broadcast_s: float = 0.0
    """Seconds from publication until all workers served the version, for the last such version."""

    def finish(self, now_s: float, busy_since_s: float) -> None:
        """Record a finished trajectory. busy_since_s: start of the current period in which leases are held."""
        self.gaps_s.append(max(0.0, now_s - max(self.last_s, busy_since_s)))
        self.last_s = now_s

    def per_s(self) -> float:
        """Return the trajectories per second over the last `MEMORY` trajectories; 0 for fewer than two."""
        gaps = list(self.gaps_s)
        return len(gaps) / max(1e-6, sum(gaps)) if len(gaps) > 1 else 0.0

    def serve(self, now_s: float, served: Iterable[int | None]) -> None:
        """Update `broadcast_s`. served: version number of each connected worker; None if it serves no version."""
        slowest = min((-1 if number is None else number for number in served), default=-1)
        for number in [n for n in self.announced if n <= slowest]:
            self.broadcast_s = now_s - self.announced.pop(number)
