"""What a trace is made of, and how it is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

ASIDE = -1
"""Lane of what an actor does beside its slots."""
BEGIN, GAP = "begin", "gap"
"""Names of marks, which have no length: a process has begun; spans are missing here."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One stretch of work, or a mark where it has no length."""

    name: str
    actor: str
    lane: int
    begin_s: float
    """A live run's: since 1970; a simulation's: since its beginning."""
    end_s: float
    facts: dict[str, Any] = {}
    """`generate` has group, sample, tokens, version (of the last token), versions (tokens by version, where there are
    several) and ended (finish, abort, dropped, lost); the trainer's have step."""


class Tracer(Protocol):
    """Whoever collects spans."""

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        """Something was done from then to then."""


def stretches(spans: Iterable[Span]) -> list[list[Span]]:
    """Cut at every mark: what one process did without a gap. Marks are left out, and stretches without a span."""
    found: list[list[Span]] = [[]]
    for span in spans:
        if span.name in (BEGIN, GAP):
            found.append([])
        else:
            found[-1].append(span)
    return [flat_buffer for flat_buffer in found if flat_buffer]


def actors_of(spans: Iterable[Span]) -> tuple[list[str], list[str]]:
    """Return (who else there is, workers), each in the order of names, the trainer first; numbers count as numbers."""
    found: dict[str, bool] = {}
    for span in spans:
        found[span.actor] = found.get(span.actor, False) or span.name == "generate"
    names = sorted(found, key=lambda name: (name != "trainer", _by_number(name)))
    return [name for name in names if not found[name]], [name for name in names if found[name]]


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part or 0), "") if i % 2 else (0, part) for i, part in enumerate(re.split(r"(\d+)", name))]
