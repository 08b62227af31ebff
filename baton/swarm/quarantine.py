"""Who is in quarantine, in a file of JSON lines in the run's directory: a restart forgets none.

    hub ──Conviction──▶ quarantine.jsonl ◀──Lifted── baton token unquarantine
          └────────── follow, at every tick ──────┘

The file only grows. A line `Lifted` ends the convictions of its workers that stand before it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from baton.errors import UserError
from baton.swarm.inspector import Conviction

logger = logging.getLogger(__name__)


class Lifted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A person has ended the quarantine of workers."""

    lifted: tuple[str, ...]
    """As `Conviction.worker` names them."""
    at: float
    """Unix seconds, UTC."""


class Quarantine:
    """The convictions that are in force."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one. Raises UserError where it is damaged."""
        self._path = path
        self._size = 0
        self.convictions: list[Conviction] = []
        self.follow()

    def follow(self) -> tuple[str, ...]:
        """Take in what another process has written; return the workers that are in quarantine no more."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._size:
            return ()
        before, self._size = {one.worker for one in self.convictions}, size
        self.convictions = _read(self._path)
        return tuple(sorted(before - {one.worker for one in self.convictions}))

    def add(self, conviction: Conviction) -> None:
        """Keep one."""
        self.convictions.append(conviction)
        self._append(conviction)

    def lift(self, name: str, at: float) -> tuple[str, ...]:
        """End the quarantine of a worker; return the workers' ids. at: Unix seconds.

        Raises UserError where nobody of this name is in quarantine.
        """
        self.follow()
        found = tuple(dict.fromkeys(one.worker for one in self.convictions if one.worker == name))
        if not found:
            known = ", ".join(dict.fromkeys(one.worker for one in self.convictions)) or "nobody"
            raise UserError(f"{name!r} is not in quarantine in {self._path}; in quarantine: {known}")
        self._append(Lifted(found, at))
        self.follow()
        return found

    def reason(self, name: str) -> str | None:
        """Why the workers of a token are in quarantine; None where they are not."""
        found = next((c for c in self.convictions if c.worker == name), None)
        return None if found is None else f"in quarantine: {found.verdict.reason}"

    def _append(self, line: Conviction | Lifted) -> None:
        data = msgspec.json.encode(line) + b"\n"
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":  # a line that a power cut has torn
                data = b"\n" + data
            os.write(handle, data)
            os.fsync(handle)
            self._size += len(data)  # short of the file's where another process wrote too: `follow` then reads it
        finally:
            os.close(handle)


def _read(path: Path) -> list[Conviction]:
    found: list[Conviction] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = _decoded(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if _is_whole(line):
                raise UserError(f"{path}, line {number}, is no record of a quarantine: {error}; remove it") from error
            logger.warning("%s, line %d, was cut off while it was written, and is passed over", path, number)
            continue
        if isinstance(record, Lifted):
            found = [one for one in found if one.worker not in record.lifted]
        else:
            found.append(record)
    return found


def _decoded(line: bytes) -> Conviction | Lifted:
    try:
        return msgspec.json.decode(line, type=Lifted)
    except msgspec.ValidationError:
        return msgspec.json.decode(line, type=Conviction)


def _is_whole(line: bytes) -> bool:
    return line.strip().endswith(b"}")
