"""What goes through a simulated engine: a lease, its reports, and where the time went."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A trajectory that is to be grown."""

    lease: int
    group_id: int
    sample_index: int
    prompt: int
    tokens: int
    """After the prompt."""
    length: int
    """Tokens at which it ends."""
    version: int
    is_exact: bool
    newest: int = -1
    """Version of its last token; -1 before the first."""


@dataclass(slots=True, eq=False)
class SimulatedLease(GenerationRequest):
    """One lease in an engine, with the tokens that were counted last."""

    grown: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) that have not been reported."""
    end_step: int = -1
    """The engine's step after which it is complete; -1 while it waits."""
    born: int = 0
    """Order of admission."""
    lane: int = 0
    since_s: float = 0.0
    """When it was admitted."""
    traced: dict[int, int] = field(default_factory=dict)
    """Version → tokens since then, for the trace."""


class LongestContext:
    """The longest context of those that run: all grow by a token a step, so their order stays."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, SimulatedLease]] = []

    def add(self, row: SimulatedLease, context: int, step: int) -> None:
        heapq.heappush(self._heap, (step - context, row.born, row))

    def context(self, step: int) -> int:
        """Of the longest; some row runs."""
        heap = self._heap
        while heap[0][2].end_step < 0 or heap[0][2].born != heap[0][1]:
            heapq.heappop(heap)
        return step - heap[0][0]


@dataclass(slots=True, eq=False)
class LeaseProgress:
    """What an engine says of one lease."""

    row: SimulatedLease
    segments: list[tuple[int, int]]
    """(version, tokens) since the last report."""
    end: str
    """``, `finished`, `put_down` or `refused`."""


@dataclass(slots=True)
class EngineTime:
    """Where an engine's time went, seconds, and what it made."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    row_s: float = 0.0
    """Slot time in which a trajectory was decoded."""
    decoded: int = 0
    prefilled: int = 0
    reprefilled: int = 0
    """Tokens after prompts among them."""
    preemptions: int = 0

    def plus(self, other: EngineTime) -> EngineTime:
        return EngineTime(*(getattr(self, name) + getattr(other, name) for name in EngineTime.__slots__))
