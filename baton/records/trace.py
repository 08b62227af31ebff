"""The trace of a run lists periods of work (spans) of each actor, with times and policy versions.

An actor works in one or more lanes. The spans of a lane do not overlap. A live run and a simulation use the same names:

    actor                     names of spans
    trainer                   wait_for_batch, train, publish, eval, checkpoint
    judges                    judge: at least one reward is pending
    engine process 0, node#3  generate: one lease in one slot; fetch, in the lane for weights: transfer of a version
    hub, examiner             publish, check

`chrome_trace` exports a trace for Perfetto and Chrome. `views/pages/slots.py` draws it for `baton report --html`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import msgspec

from baton.clock import Clock
from baton.files import append, writing

ASIDE = -1
"""Lane for an actor's work that occupies no slot, such as weight transfer."""
BEGIN, GAP = "begin", "gap"
"""Names of marks, which are spans without duration. `BEGIN`: a process starts. `GAP`: spans are missing."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A period of work. A span without duration is a mark."""

    name: str
    actor: str
    lane: int
    begin_s: float
    """Start of the span in Unix time; in a simulation, in seconds since the simulation's start."""
    end_s: float
    facts: dict[str, Any] = {}
    """Further values by name. Spans with the name `generate` have the keys `group`, `sample`, `tokens`, `version`
    (policy version of the last token) and `ended` (`finish`, `abort`, `refused`, `dropped` or `lost`). If the tokens
    have several policy versions, the span also has `versions` (policy version → number of tokens). Spans of the trainer
    have the key `step`."""


class Tracer(Protocol):
    """Receives spans."""

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        """Record a span."""


def gapless_periods(spans: Iterable[Span]) -> list[list[Span]]:
    """Divide the spans of a trace at its marks `BEGIN` and `GAP` into periods in which no span is missing. Marks and
    empty periods are omitted."""
    periods = groupby(spans, lambda span: span.name in (BEGIN, GAP))
    return [list(period) for is_mark, period in periods if not is_mark]


def actors_of(spans: Iterable[Span]) -> tuple[list[str], list[str]]:
    """Return the names of all actors except workers, with the trainer first, and the names of the workers. Both lists
    are sorted by name, and numbers in names are compared as numbers."""
    found: dict[str, bool] = {}
    for span in spans:
        found[span.actor] = found.get(span.actor, False) or span.name == "generate"
    names = sorted(found, key=lambda name: (name != "trainer", _by_number(name)))
    return [name for name in names if not found[name]], [name for name in names if found[name]]


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part or 0), "") if i % 2 else (0, part) for i, part in enumerate(re.split(r"(\d+)", name))]


_PART = "part"
MAX_PENDING = 200_000
"""Maximum number of spans in memory. A mark `GAP` replaces further spans until the next `flush`."""
LIMIT_BYTES = 32_000_000
"""Maximum size of a run's trace. If a trace becomes larger, spans in its middle are deleted."""


class TraceWriter:
    """Writes the spans of a live run to the run's directory. Any thread may add spans. Callers give times as values of
    `time.monotonic`.

    Spans are first written to trace.jsonl. When this file has half of the allowed size, the writer continues with
    trace.last.jsonl. When trace.last.jsonl has a quarter of the allowed size, the writer renames it to
    trace.before.jsonl, which replaces the earlier file of this name, and starts a new trace.last.jsonl.
    """

    def __init__(self, directory: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        """Without a directory, the writer drops all spans. The first `flush` opens the file."""
        self._directory, self._limit = directory, limit_bytes
        self._lock = Lock()
        self._pending: list[Span] = []
        self._offset_s = time.time() - time.monotonic()
        self._path = Path()
        self._size = self._room = self._part = 0

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        """Record a span, which stays in memory until the next `flush`."""
        if self._directory is None:
            return
        at_s = self._offset_s
        made = Span(name, actor, lane, round(begin_s + at_s, 6), round(end_s + at_s, 6), facts)
        with self._lock:
            if len(self._pending) < MAX_PENDING:
                self._pending.append(made)
            elif len(self._pending) == MAX_PENDING:
                self._pending.append(Span(GAP, actor, 0, made.begin_s, made.begin_s))

    def mark(self, name: str, **facts: Any) -> None:
        """Record a span without duration at the current time."""
        now_s = time.monotonic()
        self.span(name, "trainer", 0, now_s, now_s, **facts)

    def flush(self) -> None:
        """Write the recorded spans, without waiting for the disk. Only one thread may call this. Raises OSError."""
        with self._lock:
            spans, self._pending = self._pending, []
        if self._directory is None or not spans:
            return
        if not self._room:
            self._reopen(self._directory)
        lines = bytearray()
        for span in spans:
            line = msgspec.json.encode(span) + b"\n"
            if self._size + len(line) > self._room:
                append(self._path, bytes(lines))
                lines.clear()
                self._start_next_file(self._directory, span.end_s)
            self._size += len(line)
            lines += line
        append(self._path, bytes(lines))

    def _reopen(self, directory: Path) -> None:
        """Continue the last file of an earlier process. If its last line is incomplete, add a line break."""
        first, before, last = trace_files(directory)
        self._path, self._room = (last, self._limit // 4) if last.exists() else (first, self._limit // 2)
        if last.exists():
            self._part = next((s.facts[_PART] for s in _read(last) if s.name == _PART), 1)
        elif before.exists():
            before.unlink()
        self._size = self._path.stat().st_size if self._path.exists() else 0
        if self._size and not self._path.read_bytes().endswith(b"\n"):
            append(self._path, b"\n")
            self._size += 1

    def _start_next_file(self, directory: Path, at_s: float) -> None:
        _, before, last = trace_files(directory)
        if last.exists():
            last.replace(before)
        self._part += 1
        head = msgspec.json.encode(Span(_PART, "trace", 0, at_s, at_s, {_PART: self._part})) + b"\n"
        with writing(last):
            last.write_bytes(head)
        self._path, self._room, self._size = last, self._limit // 4, len(head)


def trace_files(directory: Path) -> tuple[Path, Path, Path]:
    """Return the paths of the three files of a run's trace, the oldest first."""
    return directory / "trace.jsonl", directory / "trace.before.jsonl", directory / "trace.last.jsonl"


def read_trace(directory: Path) -> list[Span]:
    """Return a run's spans in recorded order, with a mark `GAP` in place of deleted spans; empty without a trace."""
    spans: list[Span] = []
    part = 0
    for path in trace_files(directory):
        for span in _read(path):
            if span.name != _PART:
                spans.append(span)
                continue
            if span.facts[_PART] > part + 1:
                spans.append(Span(GAP, "trace", 0, span.begin_s, span.begin_s))
            part = span.facts[_PART]
    return spans


def _read(path: Path) -> Iterator[Span]:
    """Yield the spans of a file. Incomplete and damaged lines are skipped."""
    decoder = msgspec.json.Decoder(Span)
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue


@dataclass(slots=True)
class StageTimer:
    """Measures the time of each stage of a train step, and writes each stage to the trace as a span."""

    trace: Tracer = field(default_factory=TraceWriter)
    seconds: dict[str, float] = field(default_factory=dict)
    now_s: Clock = time.monotonic

    @contextmanager
    def stage(self, name: str, step: int, span: str = "") -> Iterator[None]:
        """Add the duration of the context to the stage `name`. `span`: name of the span; the default is `name`."""
        begin_s = self.now_s()
        try:
            yield
        finally:
            end_s = self.now_s()
            self.seconds[name] = self.seconds.get(name, 0.0) + end_s - begin_s
            self.trace.span(span or name, "trainer", 0, begin_s, end_s, step=step)

    def take(self) -> dict[str, float]:
        """Return stage name → seconds since the last call, and reset all stages to zero."""
        taken, self.seconds = self.seconds, {}
        return taken


def chrome_trace(spans: Sequence[Span]) -> bytes:
    """Return a trace as JSON in Chrome's Trace Event Format, for ui.perfetto.dev, chrome://tracing and speedscope.

    Actors become processes, lanes become threads, spans become complete events, and marks become instant events. Times
    are whole microseconds since the first span. Start and end are rounded separately, so adjacent spans stay adjacent.

    Source: Chromium, "Trace Event Format".
    """
    others, workers = actors_of(spans)
    pids = {actor: pid for pid, actor in enumerate([*others, *workers], start=1)}
    zero_s = min((span.begin_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for actor, pid in pids.items():
        events.append(_name("process_name", pid, 0, name=actor))
        events.append(_name("process_sort_index", pid, 0, sort_index=pid))
    for actor, lane in sorted({(span.actor, span.lane) for span in spans}, key=lambda at: (pids[at[0]], at[1])):
        events.append(_name("thread_name", pids[actor], _tid(lane), name=_lane_name(actor in workers, lane)))
        events.append(_name("thread_sort_index", pids[actor], _tid(lane), sort_index=_tid(lane)))
    for span in sorted(spans, key=lambda span: span.begin_s):
        begin, end = (round((at_s - zero_s) * 1e6) for at_s in (span.begin_s, span.end_s))
        place = {"name": span.name, "ts": begin, "pid": pids[span.actor], "tid": _tid(span.lane), "args": span.facts}
        if span.end_s > span.begin_s:
            events.append({**place, "ph": "X", "cat": "baton", "dur": end - begin})
        else:
            events.append({**place, "ph": "i", "s": "p"})
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _tid(lane: int) -> int:
    return lane - ASIDE


def _lane_name(is_worker: bool, lane: int) -> str:
    if lane == ASIDE:
        return "weights"
    return f"slot {lane}" if is_worker else "main" if not lane else f"lane {lane}"
