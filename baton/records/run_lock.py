"""Ensures that only one process at a time writes to a run's directory.

    lock          locked (flock) while the process runs; the operating system releases the lock when the process ends
    holder.json   the process that holds the directory: epoch, process id, host, start time, command

A second process on the same machine is refused. A process on another machine is also refused if the network file system
supports locks. If the file system does not support locks, a process on another machine can take over the directory by
writing the next epoch to holder.json. The first process calls `check` before each durable write, and stops if the
directory has been taken over.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO

import msgspec

from baton.errors import RunTakenOver, UserError
from baton.files import make_directory, write_whole

RETRY_S = 0.05
RETRIES = 20
"""Number of retries of `take`. Retries are needed because two kinds of processes may hold the lock for a moment
although no run uses the directory: a process that calls `status`, and a child of a killed run between fork and exec."""
LOCK_FILES = frozenset({"lock", "holder.json"})


class LockHolder(msgspec.Struct, frozen=True):
    """The process that holds a run's directory."""

    epoch: int
    """Number of processes that have held the directory so far, including this one."""
    pid: int
    host: str
    since: str
    command: tuple[str, ...]
    is_over: bool = False
    """True if the process has released the directory."""
    outcome: str = ""
    """How the last run in the directory ended: `finished`, `stopped` or `failed`; empty if no run has ended in it."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}: {' '.join(self.command)}"


class RunLock:
    """The lock of a run's directory, held by this process."""

    def __init__(self, directory: Path, file: IO[bytes], holder: LockHolder, made: Sequence[Path]) -> None:
        """`made`: directories that `take` created, deepest first; `release` removes them if no run was started."""
        self._directory, self._file, self._holder, self._made = directory, file, holder, made

    @classmethod
    def take(cls, directory: Path, log: Callable[[str], None] = lambda text: None) -> RunLock:
        """Lock a directory. A directory that does not exist is created first. Raises UserError, which names the other
        process, if another process holds the directory."""
        made = make_directory(directory)
        file = _lock(directory)
        before = _read(directory)
        if before is not None and not before.is_over and before.host != socket.gethostname():
            log(
                f"warning: {directory} was held by {before}, which did not release it; "
                "if that process is still running, it stops at its next write"
            )
        since = datetime.now(UTC).isoformat(timespec="seconds")
        epoch = 1 if before is None else before.epoch + 1
        outcome = "" if before is None else before.outcome
        holder = LockHolder(epoch, os.getpid(), socket.gethostname(), since, tuple(sys.argv), outcome=outcome)
        _write(directory, holder)
        return cls(directory, file, holder, made)

    def check(self) -> None:
        """Raise RunTakenOver if another process has taken over the directory. Called before each durable write."""
        found = _read(self._directory)
        if found != self._holder:
            raise RunTakenOver(
                f"{self._directory} is held by {found or 'an unknown process, because holder.json cannot be read'}; "
                "this process stops and writes no more to it"
            )

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @staticmethod
    def status(directory: Path) -> str:
        """Return `running` if a process holds the directory. Otherwise return how the last run in the directory ended:
        `finished`, `stopped` or `failed`. A process that ended without releasing the directory counts as `failed`.
        Return an empty string if the outcome was not recorded."""
        with suppress(FileNotFoundError), (directory / "lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "running"
        found = _read(directory)
        return "failed" if found is None or not found.is_over else found.outcome

    def release(self, outcome: str | None = None) -> None:
        """Release the lock. If `take` created the directory and no run was started in it, remove the directory. May be
        called twice. `outcome`: how the run ended; None if no run was started."""
        if self._file.closed:
            return
        with suppress(OSError), self._file:
            if _read(self._directory) != self._holder:
                return
            if (self._directory / "run.json").exists():
                ended = self._holder.outcome if outcome is None else outcome
                _write(self._directory, msgspec.structs.replace(self._holder, is_over=True, outcome=ended))
                return
            for name in LOCK_FILES:
                (self._directory / name).unlink()
            for directory in self._made:
                directory.rmdir()


def _lock(directory: Path) -> IO[bytes]:
    path = directory / "lock"
    for attempt in count():
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            if attempt < RETRIES:
                time.sleep(RETRY_S)
                continue
            raise UserError(
                f"{directory} is in use by {_read(directory) or 'another process'}; wait until it ends, or stop it"
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # the previous holder has deleted this file; open and lock its replacement
    raise AssertionError


def _read(directory: Path) -> LockHolder | None:
    try:
        return msgspec.json.decode((directory / "holder.json").read_bytes(), type=LockHolder)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write(directory: Path, holder: LockHolder) -> None:
    write_whole(directory / "holder.json", msgspec.json.encode(holder))
