"""Who was busy with what, when: the seam for pictures of a run."""

from __future__ import annotations

from typing import Any, Protocol


class Tracer(Protocol):
    """Whoever keeps spans. Names: generate, prefill, train, publish, judge, fetch, idle."""

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        """Something took a time. `lane`: the slot of an actor; facts: version, group, sample, tokens."""
        ...


class Spans:
    """A `Tracer` that keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, int, float, float, dict[str, Any]]] = []

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        """See `Tracer`."""
        self.spans.append((name, actor, lane, begin_s, end_s, facts))
