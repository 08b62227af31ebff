"""Connections between hub and worker: ordered, with latency, possibly with faults.

The messages are those of `swarm/messages.py`, except that messages with tokens have token counts here.

A connection behaves like TCP: messages arrive in order, and a lost message breaks the connection. Faults can violate
this: a message may be delayed behind later ones (reordered), arrive twice, or be lost.
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
    """Tokens that a worker has generated for a lease."""

    lease: int
    offset: int
    segments: Segments
    end: str = ""
    """`finished` or `put_down`, or empty while the lease runs."""

    @property
    def length(self) -> int:
        return self.offset + sum(n for _, n in self.segments)


@dataclass(slots=True, eq=False)
class SimulatedHello:
    """Sent when a worker connects or reconnects."""

    serves: PolicyVersion | None
    leases: list[int]
    """Leases that it holds, or whose end has not been acknowledged."""


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What happens to a message."""

    delay_s: float = 0.0
    is_lost: bool = False
    is_doubled: bool = False
    is_late: bool = False
    """It arrives after messages that were sent later."""


@dataclass(slots=True, eq=False)
class SimulatedConnection:
    """One direction of a worker's connection."""

    clock: VirtualClock
    link_s: float
    take: Callable[[Any], None]
    """Receives the messages."""
    lose: Callable[[], None]
    """Cuts the connection."""
    fate: Callable[[], MessageFault] | None = None
    connection: int = 0
    """Number of the current connection; messages of an earlier one never arrive."""
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
        """Drop all messages in transit."""
        self.connection += 1

    def _arrive(self, connection: int, message: Any) -> None:
        if connection == self.connection:
            self.take(message)
