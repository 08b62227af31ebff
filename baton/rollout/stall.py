"""Detects a worker that makes no progress for too long; the run then stops with an error that names it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import islice

from baton.errors import DeadlineExceeded
from baton.rollout.transport import WorkerTransport
from baton.types import FromPort

LONGEST_LOOK_S = 5.0
"""At most this much time counts between two checks: this process itself may have been suspended."""


class StallWatch:
    """Measures the time since the last progress: a message, a change of the engine's counters, or of having slots."""

    def __init__(self, port: WorkerTransport, timeout_s: float) -> None:
        self._port, self._timeout_s = port, timeout_s
        self.reset()

    def reset(self) -> None:
        """Start a new wait: the elapsed time is zero."""
        self._stats, self._is_empty = self._port.stats(), not self._port.slots
        self._waited_s, self._looked_s = 0.0, time.monotonic()

    def check(self, messages: Sequence[FromPort], num_waiting: int, names: Iterable[str]) -> None:
        """Record the messages of one wait. Raises DeadlineExceeded naming the worker and some waiting trajectories.

        names: of the waiting trajectories; consumed only for the error.
        """
        stats, is_empty, now_s = self._port.stats(), not self._port.slots, time.monotonic()
        self._waited_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        if messages or stats != self._stats or is_empty != self._is_empty or not num_waiting:
            self._waited_s, self._stats, self._is_empty = 0.0, stats, is_empty
            return
        no_worker_timeout_s = self._port.no_worker_timeout_s if is_empty else 0.0
        if self._waited_s > (timeout_s := max(self._timeout_s, no_worker_timeout_s)):
            raise DeadlineExceeded(
                f"{self._port.name} has made no progress for {timeout_s:.0f} s while {num_waiting} trajectories "
                f"wait for it ({', '.join(islice(names, 4)) or 'none begun yet'})"
            )
