"""A watch over a worker that is waited for: no progress for too long, and the run stops with its name."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import islice

from baton.errors import DeadlineExceeded
from baton.rollout.transport import WorkerTransport
from baton.types import FromPort

LONGEST_LOOK_S = 5.0
"""From one look to the next no more than this counts: this process may have stood still itself."""


class StallWatch:
    """Counts any message, and any change of the engine's counters, as a sign of progress."""

    def __init__(self, port: WorkerTransport, timeout_s: float) -> None:
        self._port, self._timeout_s = port, timeout_s
        self.reset()

    def reset(self) -> None:
        """Begin to wait."""
        self._stats, self._is_empty = self._port.stats(), not self._port.slots
        self._waited_s, self._looked_s = 0.0, time.monotonic()

    def check(self, messages: Sequence[FromPort], num_waiting: int, names: Iterable[str]) -> None:
        """Look at what one wait has brought. Raises DeadlineExceeded naming the worker and some of who waits for it.

        names: of the waiting trajectories; looked at only where they are needed.
        """
        stats, is_empty, now_s = self._port.stats(), not self._port.slots, time.monotonic()
        self._waited_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        if messages or stats != self._stats or is_empty != self._is_empty or not num_waiting:
            self._waited_s, self._stats, self._is_empty = 0.0, stats, is_empty
            return
        absence_s = self._port.absence_s if is_empty else 0.0
        if self._waited_s > (timeout_s := max(self._timeout_s, absence_s)):
            raise DeadlineExceeded(
                f"{self._port.name} has made no progress for {timeout_s:.0f} s while {num_waiting} trajectories "
                f"wait for it ({', '.join(islice(names, 4)) or 'none begun yet'})"
            )
