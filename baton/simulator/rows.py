"""Types of a simulated engine: leases, progress reports, and the use of the engine's time."""

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
    """Number of response tokens that exist already."""
    length: int
    """Number of response tokens of the complete trajectory."""
    version: int
    is_exact: bool
    newest: int = -1
    """Version of the last token; -1 before the first token."""


@dataclass(slots=True, eq=False)
class SimulatedLease(GenerationRequest):
    """A lease in an engine. `tokens` has the value of the last count."""

    grown: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens) of segments that are not reported yet."""
    end_step: int = -1
    """Engine step after which the trajectory is complete; -1 while the lease waits for a slot."""
    born: int = 0
    """Sequence number of the admission to a slot."""
    lane: int = 0
    since_s: float = 0.0
    """Time of the admission."""
    traced: dict[int, int] = field(default_factory=dict)
    """Number of tokens by version since the admission, for the trace."""


class LongestContext:
    """The longest context among the running leases. Every context grows by one token per step, so their order never
    changes."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, SimulatedLease]] = []

    def add(self, row: SimulatedLease, context: int, step: int) -> None:
        heapq.heappush(self._heap, (step - context, row.born, row))

    def context(self, step: int) -> int:
        """Return the longest context. At least one lease must be running."""
        heap = self._heap
        while heap[0][2].end_step < 0 or heap[0][2].born != heap[0][1]:
            heapq.heappop(heap)
        return step - heap[0][0]


@dataclass(slots=True, eq=False)
class LeaseProgress:
    """An engine's report about one lease."""

    row: SimulatedLease
    segments: list[tuple[int, int]]
    """(version, number of tokens) of the segments since the last report."""
    end: str
    """Empty, `finished`, `put_down` or `refused`."""


@dataclass(slots=True)
class EngineTime:
    """Seconds that an engine spent on each activity, and the number of tokens that it computed."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    row_s: float = 0.0
    """Seconds of decoding, summed over the slots in use."""
    decoded: int = 0
    prefilled: int = 0
    reprefilled: int = 0
    """Response tokens that were prefilled again."""
    preemptions: int = 0

    def plus(self, other: EngineTime) -> EngineTime:
        return EngineTime(*(getattr(self, name) + getattr(other, name) for name in EngineTime.__slots__))
