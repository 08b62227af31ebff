"""Connections between hub and worker: ordered, with latency, possibly with faults.

The messages are those of `swarm/messages.py`, with token counts in place of tokens.

Without faults, messages arrive in order. A fault can delay a message behind later messages, deliver it twice, or lose
it together with the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.simulator.clock import VirtualClock
from baton.types import PolicyVersion

Segments = list[tuple[int, int]]
"""(version, number of tokens) of each segment, in order."""


@dataclass(slots=True, eq=False)
class SimulatedReport:
    """Tokens that a worker has generated for a lease."""

    lease: int
    offset: int
    segments: Segments
    end: str = ""
    """`finished`, `put_down` (aborted), or empty while the lease runs."""

    @property
    def length(self) -> int:
        return self.offset + sum(n for _, n in self.segments)


@dataclass(slots=True, eq=False)
class SimulatedHello:
    """The first message after a worker connects or reconnects."""

    serves: PolicyVersion | None
    leases: list[int]
    """Leases that the worker holds, and leases whose end the hub has not acknowledged."""


@dataclass(frozen=True, slots=True)
class MessageFault:
    """The effect of network faults on one message."""

    delay_s: float = 0.0
    is_lost: bool = False
    is_doubled: bool = False
    is_late: bool = False
    """Whether the message arrives after messages that were sent later."""


@dataclass(slots=True, eq=False)
class SimulatedConnection:
    """One direction of a worker's connection."""

    clock: VirtualClock
    link_s: float
    take: Callable[[Any], None]
    """Called with each message that arrives."""
    lose: Callable[[], None]
    """Called to cut the connection."""
    fate: Callable[[], MessageFault] | None = None
    connection: int = 0
    """Sequence number of the connection. Messages of an earlier connection are discarded."""
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
