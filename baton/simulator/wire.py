"""What the hub and a worker say to each other, and how it gets there: in order, after a while, if at all.

A connection is TCP's: messages come in order, and one that is lost takes the connection with it. Faults may break that
on purpose: a message is delayed beyond others (reordered), comes twice, or is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.simulator.clock import Clock
from baton.types import PolicyVersion

Segments = list[tuple[int, int]]
"""(version, tokens), in order."""


@dataclass(slots=True, eq=False)
class Report:
    """A worker has grown a lease."""

    lease: int
    offset: int
    segments: Segments
    end: str = ""
    """`finished` or `put_down`, or nothing."""

    @property
    def length(self) -> int:
        """Tokens after it."""
        return self.offset + sum(n for _, n in self.segments)


@dataclass(slots=True, eq=False)
class Retry:
    """It does not serve what a lease asks for."""

    lease: int
    has_version: int


@dataclass(slots=True, eq=False)
class Beat:
    """A sign of life."""

    serves: PolicyVersion | None
    decoded: int


@dataclass(slots=True, eq=False)
class Hello:
    """A worker is connected, for the first time or again."""

    serves: PolicyVersion | None
    leases: list[int]
    """That it holds, or of whose end nobody has told it that it is known."""


@dataclass(slots=True, eq=False)
class Leaving:
    """It goes."""


@dataclass(slots=True, eq=False)
class Granted:
    """A lease for a worker."""

    lease: int
    group_id: int
    sample_index: int
    prompt: int
    base: int
    length: int
    version: int
    is_exact: bool


@dataclass(slots=True, eq=False)
class Recalled:
    """Put a lease down, and say what there is."""

    lease: int


@dataclass(slots=True, eq=False)
class Dropped:
    """Forget a lease."""

    lease: int


@dataclass(slots=True, eq=False)
class Ack:
    """So much of a lease is known."""

    lease: int
    length: int
    has_ended: bool


@dataclass(slots=True, eq=False)
class Want:
    """Serve a version."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a message."""

    delay_s: float = 0.0
    is_lost: bool = False
    is_doubled: bool = False
    is_late: bool = False
    """It comes after others that were sent later."""


@dataclass(slots=True, eq=False)
class Line:
    """One direction of one worker's connection."""

    clock: Clock
    link_s: float
    take: Callable[[Any], None]
    """Who hears the messages."""
    lose: Callable[[], None]
    """Cuts the connection."""
    fate: Callable[[], Fate] | None = None
    connection: int = 0
    """Messages of an earlier one never arrive."""
    last_s: float = field(default=0.0)

    def send(self, message: Any) -> None:
        """Put a message on the way."""
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
