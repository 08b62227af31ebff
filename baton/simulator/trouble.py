"""Trouble on the wires while it lasts: what becomes of messages and fetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from baton.simulator.clock import Clock
from baton.simulator.wire import Fate

FINE = Fate()


@dataclass(frozen=True, slots=True)
class Storm:
    """Trouble between two moments, for one worker or for all. Shares are of messages, or of fetches."""

    begin_s: float
    end_s: float
    worker: str = ""
    """Empty: all."""
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.0
    """Longest extra delay of a message."""
    corrupt: float = 0.0
    """Of fetches that bring something else than was published."""
    is_partition: bool = False
    """Nothing comes through; what is said waits, as on TCP, as long as the connection is held."""

    def hits(self, worker: str, now_s: float) -> bool:
        """Whether it is over a worker now."""
        return self.begin_s <= now_s < self.end_s and self.worker in ("", worker)


class Trouble:
    """All storms of a run."""

    def __init__(self, storms: list[Storm], clock: Clock, random: Random) -> None:
        self.storms, self._clock, self._random = storms, clock, random

    def fates(self, worker: str) -> Callable[[], Fate]:
        """Return what says what becomes of a worker's next message."""
        return lambda: self._fate(worker)

    def is_apart(self, worker: str) -> bool:
        """Whether a worker is cut off by a partition."""
        return any(storm.is_partition for storm in self._over(worker))

    def fetch_fault(self, worker: str) -> str:
        """Why a fetch that is complete now failed; empty where it did not."""
        for storm in self._over(worker):
            if storm.is_partition:
                return "the store cannot be reached"
            if storm.corrupt and self._random.random() < storm.corrupt:
                return "a chunk is not what its digest says"
        return ""

    def _over(self, worker: str) -> list[Storm]:
        return [storm for storm in self.storms if storm.hits(worker, self._clock.now_s)]

    def _fate(self, worker: str) -> Fate:
        storms = self._over(worker)
        if not storms:
            return FINE
        draw, delay_s = self._random.random, 0.0
        is_lost = is_doubled = is_late = False
        for storm in storms:
            if storm.is_partition:
                delay_s = max(delay_s, storm.end_s - self._clock.now_s)
            if storm.delay_s:
                delay_s += draw() * storm.delay_s
            is_lost |= bool(storm.loss) and draw() < storm.loss
            is_doubled |= bool(storm.duplicate) and draw() < storm.duplicate
            if storm.reorder and draw() < storm.reorder:
                is_late, delay_s = True, delay_s + draw()
        return Fate(delay_s, is_lost, is_doubled, is_late)
