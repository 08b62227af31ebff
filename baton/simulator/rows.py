"""Types of a simulated engine: a lease, its reports, and the use of the engine's time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A trajectory to generate."""

    lease: int
    group_id: int
    sample_index: int
    prompt: int
    tokens: int
    """Tokens after the prompt."""
    length: int
    """Number of tokens at which it ends."""
    version: int
    is_exact: bool
    newest: int = -1
    """Version of its last token; -1 before the first."""


@dataclass(slots=True, eq=False)
class SimulatedLease(GenerationRequest):
    """One lease in an engine, with the tokens at its last count."""

    grown: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) not reported yet."""
    end_step: int = -1
    """The engine's step after which it is complete; -1 while it waits."""
    born: int = 0
    """Order of admission."""
    lane: int = 0
    since_s: float = 0.0
    """Time of its admission."""
    traced: dict[int, int] = field(default_factory=dict)
    """Version → tokens since then, for the trace."""


class LongestContext:
    """The longest context among running rows. All grow by one token per step, so their order is constant."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, SimulatedLease]] = []

    def add(self, row: SimulatedLease, context: int, step: int) -> None:
        heapq.heappush(self._heap, (step - context, row.born, row))

    def context(self, step: int) -> int:
        """Return the longest context; at least one row must run."""
        heap = self._heap
        while heap[0][2].end_step < 0 or heap[0][2].born != heap[0][1]:
            heapq.heappop(heap)
        return step - heap[0][0]


@dataclass(slots=True, eq=False)
class LeaseProgress:
    """An engine's report about one lease."""

    row: SimulatedLease
    segments: list[tuple[int, int]]
    """(version, tokens) since the last report."""
    end: str
    """Empty, `finished`, `put_down` or `refused`."""


@dataclass(slots=True)
class EngineTime:
    """Where an engine's time went, in seconds, and the tokens it computed."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    row_s: float = 0.0
    """Slot time in which a trajectory was decoded."""
    decoded: int = 0
    prefilled: int = 0
    reprefilled: int = 0
    """Prefilled tokens that were generated before (not prompt tokens)."""
    preemptions: int = 0

    def plus(self, other: EngineTime) -> EngineTime:
        return EngineTime(*(getattr(self, name) + getattr(other, name) for name in EngineTime.__slots__))
