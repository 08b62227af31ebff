"""Trace spans of a simulated run. They have the names of a live run's spans (`records/trace.py`), except that prefill
has spans of its own."""

from __future__ import annotations

from typing import Any

from baton.records.trace import Span, Tracer
from baton.simulator.rows import SimulatedLease


class Spans:
    """A `Tracer` that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        self.spans.append(Span(name, actor, lane, begin_s, end_s, facts))


def trace_row(tracer: Tracer, actor: str, row: SimulatedLease, end_s: float, ended: str) -> None:
    """Trace a lease that leaves its slot. `ended` is `finish`, `abort` or `lost`."""
    versions, row.traced = row.traced, {}
    if end_s <= row.since_s:
        return
    facts: dict[str, Any] = {"group": row.group_id, "sample": row.sample_index, "tokens": sum(versions.values())}
    if versions:
        facts["version"] = max(versions)
    if len(versions) > 1:
        facts["versions"] = {str(version): count for version, count in versions.items()}
    tracer.span("generate", actor, row.lane, row.since_s, end_s, **facts, ended=ended)
