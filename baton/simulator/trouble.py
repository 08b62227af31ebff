"""Trouble on the wires while it lasts: what becomes of messages and fetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from baton.simulator.clock import Clock
from baton.simulator.faults import FaultSettings
from baton.simulator.wire import Fate

FINE = Fate()


class Trouble:
    """All storms and partitions of a run."""

    def __init__(self, faults: Sequence[FaultSettings], clock: Clock, random: Random) -> None:
        self._storms = [fault for fault in faults if fault.kind in ("partition", "storm")]
        self._clock, self._random = clock, random

    def fates(self, worker: str) -> Callable[[], Fate]:
        """Return what says what becomes of a worker's next message."""
        return lambda: self._fate(worker)

    def is_apart(self, worker: str) -> bool:
        """Whether a worker is cut off by a partition."""
        return any(storm.kind == "partition" for storm in self._over(worker))

    def fetch_fault(self, worker: str) -> str:
        """Why a fetch that is complete now failed; empty where it did not."""
        for storm in self._over(worker):
            if storm.kind == "partition":
                return "the store cannot be reached"
            if storm.corrupt and self._random.random() < storm.corrupt:
                return "a chunk is not what its digest says"
        return ""

    def _over(self, worker: str) -> list[FaultSettings]:
        """Those that a worker meets with now."""
        now_s = self._clock.now_s
        return [s for s in self._storms if s.at_s <= now_s < s.at_s + s.for_s and s.worker in ("", worker)]

    def _fate(self, worker: str) -> Fate:
        storms = self._over(worker)
        if not storms:
            return FINE
        draw, delay_s = self._random.random, 0.0
        is_lost = is_doubled = is_late = False
        for storm in storms:
            if storm.kind == "partition":
                delay_s = max(delay_s, storm.at_s + storm.for_s - self._clock.now_s)
            if storm.delay_s:
                delay_s += draw() * storm.delay_s
            is_lost |= bool(storm.loss) and draw() < storm.loss
            is_doubled |= bool(storm.duplicate) and draw() < storm.duplicate
            if storm.reorder and draw() < storm.reorder:
                is_late, delay_s = True, delay_s + draw()
        return Fate(delay_s, is_lost, is_doubled, is_late)
