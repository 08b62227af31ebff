"""A live run's trace on disk: written during the run, bounded in size, readable after a kill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from baton.files import append, writing
from baton.records.trace.spans import GAP, Span

_PART = "part"
MAX_PENDING = 200_000
"""Maximum number of spans until the next flush; further spans are dropped, and a gap is recorded."""


class TraceWriter:
    """Writes a live run's spans to its directory. Spans may come from any thread, on the clock of `time.monotonic`.

        trace.jsonl ─full─▶ trace.last.jsonl ─full─▶ trace.before.jsonl ─full─▶ deleted
         first half           a quarter                a quarter

    A trace that exceeds the limit therefore keeps its beginning and its end.
    """

    def __init__(self, directory: Path | None = None, limit_bytes: int = 0) -> None:
        """Without a directory nothing is recorded. No file is opened before the first `flush`."""
        self._directory, self._limit = directory, limit_bytes
        self._lock = Lock()
        self._pending: list[Span] = []
        self._is_overfull = False
        self._offset_s = time.time() - time.monotonic()
        self._path = Path()
        self._size = self._room = self._part = 0

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        """Record a span; it is kept in memory until the next `flush`."""
        if self._directory is None:
            return
        at_s = self._offset_s
        made = Span(name, actor, lane, round(begin_s + at_s, 6), round(end_s + at_s, 6), facts)
        with self._lock:
            if len(self._pending) < MAX_PENDING:
                self._pending.append(made)
            elif not self._is_overfull:
                self._is_overfull = True
                self._pending.append(Span(GAP, actor, 0, made.begin_s, made.begin_s))

    def mark(self, name: str, **facts: Any) -> None:
        """Record an event that has no duration, at the current time."""
        now_s = time.monotonic()
        self.span(name, "trainer", 0, now_s, now_s, **facts)

    def flush(self) -> None:
        """Write the recorded spans to the operating system. Called by one thread. Raises OSError if the write fails."""
        with self._lock:
            spans, self._pending, self._is_overfull = self._pending, [], False
        if self._directory is None or not spans:
            return
        if not self._room:
            self._reopen(self._directory)
        lines = bytearray()
        for span in spans:
            line = msgspec.json.encode(span) + b"\n"
            if self._size + len(line) > self._room:
                self._append(lines)
                lines.clear()
                self._turn(self._directory, span.end_s)
            self._size += len(line)
            lines += line
        self._append(lines)

    def _append(self, lines: bytearray) -> None:
        append(self._path, bytes(lines))

    def _reopen(self, directory: Path) -> None:
        """Find the position where an earlier process ended, and terminate a line that it may have left incomplete."""
        first, before, last = trace_files(directory)
        self._path, self._room = (last, self._limit // 4) if last.exists() else (first, self._limit // 2)
        if last.exists():
            self._part = next((s.facts[_PART] for s in _read(last) if s.name == _PART), 1)
        elif before.exists():
            before.unlink()
        self._size = self._path.stat().st_size if self._path.exists() else 0
        if self._size and not self._path.read_bytes().endswith(b"\n"):
            self._append(bytearray(b"\n"))
            self._size += 1

    def _turn(self, directory: Path, at_s: float) -> None:
        """Start the next file: the current one is full."""
        _, before, last = trace_files(directory)
        if last.exists():
            last.replace(before)
        self._part += 1
        head = msgspec.json.encode(Span(_PART, "trace", 0, at_s, at_s, {_PART: self._part})) + b"\n"
        with writing(last):
            last.write_bytes(head)
        self._path, self._room, self._size = last, self._limit // 4, len(head)


def trace_files(directory: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a run's trace, the oldest first."""
    return directory / "trace.jsonl", directory / "trace.before.jsonl", directory / "trace.last.jsonl"


def read_trace(directory: Path) -> list[Span]:
    """Return a run's spans in the order in which they ended, with GAP where a part was deleted; empty
    without a trace."""
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
    """Yield the spans of one file, without incomplete lines."""
    decoder = msgspec.json.Decoder(Span)
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                continue
