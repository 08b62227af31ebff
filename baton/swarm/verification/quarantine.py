"""Stores the quarantine records of a run in a JSON lines file in the run's directory, so that they survive a restart.

    hub ──QuarantineRecord──▶ quarantine.jsonl ◀──LiftRecord── baton token unquarantine
          └────────── follow, at every tick ──────┘

The file is append-only. A `LiftRecord` ends all earlier quarantines of the workers that it names. If the disk is full,
a new record is in force nevertheless, and every tick tries to write it. A record that is not written before the run
ends is lost.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from baton.errors import StorageFault, UserError
from baton.swarm.audit_log import AuditLog
from baton.swarm.auth import AccessGrant
from baton.swarm.verification.policy import QuarantineRecord

logger = logging.getLogger(__name__)

MAX_QUARANTINED = 3
"""If this number of workers with the same access token are quarantined, the token itself is quarantined. Without this
limit, a quarantined worker could discard its key and join again as a new worker any number of times."""


class LiftRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user has ended the quarantine of workers."""

    lifted: tuple[str, ...]
    """Ids of the workers, in the form of `QuarantineRecord.worker`."""
    at: float
    """Time in Unix seconds, UTC."""


class Quarantine:
    """The quarantine records that are in force."""

    def __init__(self, path: Path | None) -> None:
        """Read the file if it exists. Without a path, records stay in memory. Raises UserError for a damaged file."""
        self._path = path
        self._size = 0
        self.records: list[QuarantineRecord] = []
        self._unwritten: list[QuarantineRecord] = []
        """Records in force that are not in the file yet."""
        self.follow()

    def follow(self) -> tuple[str, ...]:
        """Write waiting records, read the file if it has changed, and return the workers whose quarantine has ended."""
        self._write_waiting()
        path = self._path
        size = path.stat().st_size if path is not None and path.exists() else 0
        if path is None or size == self._size:
            return ()
        before, self._size = {one.worker for one in self.records}, size
        self.records = [*_read(path), *self._unwritten]
        return tuple(sorted(before - {one.worker for one in self.records}))

    def add(self, record: QuarantineRecord) -> None:
        """Add a record and write it to the file. If the file cannot be written, `follow` tries again."""
        self.records.append(record)
        self._unwritten.append(record)
        if (error := self._write_waiting()) is not None:
            logger.warning("the quarantine of %s is in force but not on disk (%s): free space", record.shown, error)

    def close(self) -> None:
        """Write the records that are not in the file yet. Raises StorageFault if this fails."""
        if (error := self._write_waiting()) is not None:
            names = ", ".join(one.shown for one in self._unwritten)
            raise StorageFault(
                f"the quarantine of {names} is lost, because {self._path} cannot be written ({error}): free space; "
                "before --resume, revoke the worker's token (baton token revoke), or the run trusts the worker again"
            )

    def _write_waiting(self) -> OSError | None:
        """Write the records that are not in the file yet. Return the error if this fails."""
        try:
            while self._unwritten:
                # if another process also wrote, `_size` is less than the file's size, and `follow` reads the file again
                self._size += self._append(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            return error
        return None

    def lift(self, name: str, at: float) -> tuple[str, ...]:
        """End quarantines, and return the ids of the workers. `name`: the id or the label of one worker, or the name of
        an access token to select all its workers. `at`: Unix seconds. Raises UserError if no quarantined worker has
        this name."""
        self.follow()
        found = tuple(dict.fromkeys(one.worker for one in self.records if name in _names(one)))
        if not found:
            known = ", ".join(dict.fromkeys(one.shown for one in self.records)) or "none"
            raise UserError(f"{self._path} has no worker {name!r} in quarantine; workers in quarantine: {known}")
        self._append(LiftRecord(found, at))
        self.follow()
        return found

    def reason(self, grant: AccessGrant, worker: str = "") -> str | None:
        """Return the reason why a worker or its access token is quarantined, or None if neither is quarantined."""
        for one in self.records:
            if one.worker == worker:
                return f"in quarantine: {one.verdict.reason}"
        of_token = {one.worker: one for one in self.records if one.token == grant.digest}
        if len(of_token) < MAX_QUARANTINED:
            return None
        last = [*of_token.values()][-1].verdict.reason
        return f"in quarantine: {len(of_token)} workers of this token are quarantined; the last: {last}"

    def _append(self, line: QuarantineRecord | LiftRecord) -> int:
        if self._path is None:
            return 0
        data = msgspec.json.encode(line) + b"\n"
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(handle).st_size
            # a power failure has truncated the last line; begin a new line
            if size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data
            # the last call may have written the line, and failed to flush it
            left = b"" if os.pread(handle, len(data), max(0, size - len(data))) == data else data
            while left:  # a nearly full disk first accepts a part of the data, and raises at the next write
                left = left[os.write(handle, left) :]
            os.fsync(handle)
            return len(data)
        finally:
            os.close(handle)


def _names(one: QuarantineRecord) -> tuple[str, ...]:
    return one.worker, one.label, one.label.rpartition("#")[0]


def unquarantine(run: Path, name: str) -> tuple[str, ...]:
    """End the quarantine of workers of a run, record this in the audit log, and return the ids of the workers. `name`:
    as in `Quarantine.lift`. Raises UserError if the run has no quarantined workers with this name."""
    if not run.is_dir():
        raise UserError(f"the directory {run} does not exist: give the directory of a run, such as runs/NAME")
    kept = run / "quarantine.jsonl"
    if not kept.exists():
        raise UserError(f"no worker of {run} is in quarantine: {kept} does not exist")
    lifted = Quarantine(kept).lift(name, time.time())
    AuditLog(run / "audit.jsonl").record("unquarantined", 0, ", ".join(lifted), "", "baton token unquarantine", name)
    return lifted


def _read(path: Path) -> list[QuarantineRecord]:
    found: list[QuarantineRecord] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = _decoded(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if line.strip().endswith(b"}"):
                problem = f"{path}, line {number}, is not a quarantine record: {error}; remove the line"
                raise UserError(problem) from error
            logger.warning("%s, line %d, is incomplete because writing was interrupted; it is ignored", path, number)
            continue
        if isinstance(record, LiftRecord):
            found = [one for one in found if one.worker not in record.lifted]
        else:
            found.append(record)
    return found


def _decoded(line: bytes) -> QuarantineRecord | LiftRecord:
    try:
        return msgspec.json.decode(line, type=LiftRecord)
    except msgspec.ValidationError:
        return msgspec.json.decode(line, type=QuarantineRecord)
