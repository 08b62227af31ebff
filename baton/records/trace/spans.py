"""The elements of a trace, and how a trace is divided."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

ASIDE = -1
"""Lane of an actor's work outside its slots, such as weight transfer."""
BEGIN, GAP = "begin", "gap"
"""Names of marks, which have no duration: a process started; spans are missing here."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A period of work, or a mark if it has no duration."""

    name: str
    actor: str
    lane: int
    begin_s: float
    """Live run: Unix time; simulation: time since its start."""
    end_s: float
    facts: dict[str, Any] = {}
    """`generate` has group, sample, tokens, version (of the last token), versions (tokens by version, if several) and
    ended (finish, abort, refused, dropped, lost); the trainer's spans have step."""


class Tracer(Protocol):
    """Receives spans."""

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        """Record a span."""


def stretches(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide a trace at its marks into periods without a gap. Marks and empty periods are left out."""
    found: list[list[Span]] = [[]]
    for span in spans:
        if span.name in (BEGIN, GAP):
            found.append([])
        else:
            found[-1].append(span)
    return [period for period in found if period]


def actors_of(spans: Iterable[Span]) -> tuple[list[str], list[str]]:
    """Return (other actors, workers), each sorted by name with numbers compared as numbers, the trainer first."""
    found: dict[str, bool] = {}
    for span in spans:
        found[span.actor] = found.get(span.actor, False) or span.name == "generate"
    names = sorted(found, key=lambda name: (name != "trainer", _by_number(name)))
    return [name for name in names if not found[name]], [name for name in names if found[name]]


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part or 0), "") if i % 2 else (0, part) for i, part in enumerate(re.split(r"(\d+)", name))]
