"""How messages get from the hub to a worker and back: in order, after a while, if at all.

The messages are those of `swarm/messages.py`, but for those that carry tokens: here they have counts of them.

A connection is TCP's: messages come in order, and one that is lost takes the connection with it. Faults may break that
on purpose: a message is delayed beyond others (reordered), comes twice, or is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.simulator.clock import VirtualClock
from baton.types import PolicyVersion

Segments = list[tuple[int, int]]
"""(version, tokens), in order."""


@dataclass(slots=True, eq=False)
class SimulatedReport:
    """A worker has grown a lease."""

    lease: int
    offset: int
    segments: Segments
    end: str = ""
    """`finished` or `put_down`, or nothing."""

    @property
    def length(self) -> int:
        return self.offset + sum(n for _, n in self.segments)


@dataclass(slots=True, eq=False)
class SimulatedHello:
    """A worker is connected, for the first time or again."""

    serves: PolicyVersion | None
    leases: list[int]
    """That it holds, or of whose end nobody has told it that it is known."""


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What becomes of a message."""

    delay_s: float = 0.0
    is_lost: bool = False
    is_doubled: bool = False
    is_late: bool = False
    """It comes after others that were sent later."""


@dataclass(slots=True, eq=False)
class SimulatedConnection:
    """One direction of one worker's connection."""

    clock: VirtualClock
    link_s: float
    take: Callable[[Any], None]
    """Who hears the messages."""
    lose: Callable[[], None]
    """Cuts the connection."""
    fate: Callable[[], MessageFault] | None = None
    connection: int = 0
    """Messages of an earlier one never arrive."""
    last_s: float = field(default=0.0)

    def send(self, message: Any) -> None:
        now_s = self.clock.now_s
        if self.fate is None:
            self.clock.at(now_s + self.link_s, self._arrive, self.connection, message)
            return
        fate = self.fate()
        if fate.is_lost:
            self.clock.at(now_s, self.lose)
            return
        at_s = now_s + self.link_s + fate.delay_s
        if not fate.is_late:
            at_s = self.last_s = max(at_s, self.last_s)
        self.clock.at(at_s, self._arrive, self.connection, message)
        if fate.is_doubled:
            self.clock.at(at_s + self.link_s, self._arrive, self.connection, message)

    def cut(self) -> None:
        """Nothing that is under way arrives."""
        self.connection += 1

    def _arrive(self, connection: int, message: Any) -> None:
        if connection == self.connection:
            self.take(message)
