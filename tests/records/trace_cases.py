"""Spans that a test collects, and what must hold of any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from baton.records.trace import Span


class Collected:
    """A tracer that keeps spans in a list."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        self.spans.append(Span(name, actor, lane, begin_s, end_s, facts))


class Ticks:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def assert_tiled(spans: Sequence[Span]) -> None:
    """No span ends before it begins, and none overlaps another of its lane."""
    lanes: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        assert span.begin_s <= span.end_s, span
        lanes[span.actor, span.lane].append(span)
    for mine in lanes.values():
        mine.sort(key=lambda s: (s.begin_s, s.end_s))
        for before, after in pairwise(mine):
            assert before.end_s <= after.begin_s, f"{before} and {after} overlap"
