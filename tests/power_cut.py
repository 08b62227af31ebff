"""A disk that remembers every write, rename and flush, and what a power cut after any of them leaves of it.

A directory is scanned before each file operation of this process (audit events), at each flush, and within each write
of SQLite (a VFS of apsw): what changed since the last scan is one entry of the log. A cut keeps what was flushed: a
file's bytes by a flush of the file, a name by a flush of its directory. Of the rest it keeps all, nothing, or what dice
say: each write whole, torn or lost, and names in the order in which they were made.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

KEEPS = ("nothing", "everything", "dice")
_SCANNED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}
_active: list[Recorder] = []


class Recorder:
    """The log of what happens below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple[Any, ...]] = []
        self._ids: dict[int, int] = {root.stat().st_ino: 0}
        self._next = 1
        self._names: dict[int, dict[str, int]] = {0: {}}
        """Directory → name → node."""
        self._bytes: dict[int, bytes] = {}
        self._is_scanning = False
        self._lock = threading.RLock()

    def scan(self) -> None:
        """Log what changed since the last scan."""
        with self._lock:
            if self._is_scanning:  # a scan opens files itself
                return
            self._is_scanning = True
            try:
                while not self._scan():
                    pass
            finally:
                self._is_scanning = False

    def flushed(self, path: str | None = None, inode: int | None = None) -> None:
        """Log that a file or directory was written out."""
        with self._lock:
            self.scan()
            inode = Path(path).stat().st_ino if path is not None else inode
            if inode in self._ids:
                self.log.append(("flush", self._ids[inode]))

    def _scan(self) -> bool:
        """Return whether no other thread has removed a file meanwhile."""
        try:
            names, created, ids, files = self._walk()
            known = set(self._ids.values())
        except FileNotFoundError:
            return False
        for own, after in names.items():
            before = self._names.get(own, {})
            moved = {node for name, node in before.items() if after.get(name) != node}
            for name, node in after.items():
                if before.get(name) != node and node in known - moved:
                    self.log.append(("link", own, name, node))
        for own, before in self._names.items():
            after = names.get(own, {})
            lost = {name: node for name, node in before.items() if after.get(name) != node}
            moved = {node: name for name, node in after.items() if before.get(name) != node}
            for name, node in lost.items():
                if node in moved:
                    self.log.append(("move", own, name, moved[node]))
                elif name not in after or after[name] not in before.values():
                    self.log.append(("remove", own, name))
        self.log += created
        for node, content in files.items():
            self._write(node, self._bytes.get(node, b""), content)
        self._ids, self._names, self._bytes = ids, names, files
        return True

    def _walk(self) -> tuple[dict[int, dict[str, int]], list[tuple[Any, ...]], dict[int, int], dict[int, bytes]]:
        names: dict[int, dict[str, int]] = {}
        ids: dict[int, int] = {self.root.stat().st_ino: 0}
        files: dict[int, bytes] = {}
        created: list[tuple[Any, ...]] = []
        waiting = [(self.root, 0)]
        while waiting:
            directory, own = waiting.pop()
            names[own] = {}
            for entry in os.scandir(directory):
                inode = entry.inode()
                known, is_second = self._ids.get(inode), inode in ids
                node = ids[inode] if is_second else self._next if known is None else known
                ids[inode] = names[own][entry.name] = node
                if known is None:
                    self._next += not is_second
                    kind = ("link", own, entry.name, node) if is_second else None
                    created.append(kind or ("create", own, entry.name, node, entry.is_dir()))
                if entry.is_dir():
                    waiting.append((Path(entry.path), node))
                else:
                    files[node] = Path(entry.path).read_bytes()
        return names, created, ids, files

    def _write(self, node: int, before: bytes, after: bytes) -> None:
        if before == after:
            return
        if len(after) < len(before):
            self.log.append(("truncate", node, len(after)))
            before = before[: len(after)]
        first = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        last = next((i for i in range(len(before), first, -1) if before[i - 1] != after[i - 1]), first)
        end = len(after) if len(after) > len(before) else last
        if end > first:
            self.log.append(("write", node, first, after[first:end]))


class Remains:
    """What a power cut leaves of a log's first entries."""

    def __init__(self, log: list[tuple[Any, ...]], keeps: str, seed: int) -> None:
        self._keeps, self._dice = keeps, random.Random(seed)
        self._kinds: dict[int, bool] = {0: True}
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._pending_names: dict[int, list[tuple[Any, ...]]] = {0: []}
        self._bytes: dict[int, bytearray] = {}
        self._pending_bytes: dict[int, list[tuple[Any, ...]]] = {}
        for entry in log:
            self._take(entry)
        for node in list(self._pending_names):
            pending = self._pending_names[node]
            self._settle_names(node, pending[: self._kept(len(pending))])
        for node, pending in self._pending_bytes.items():
            for entry in self._kept_writes(pending):
                self._apply(node, entry)

    def write(self, root: Path) -> None:
        """Make a directory of it."""
        waiting = [(root, 0)]
        while waiting:
            directory, own = waiting.pop()
            directory.mkdir()
            for name, node in self._names[own].items():
                if self._kinds[node]:
                    waiting.append((directory / name, node))
                else:
                    (directory / name).write_bytes(self._bytes[node])

    @property
    def key(self) -> Any:
        """Equal for equal remains."""

        def tree(own: int) -> Any:
            return tuple(
                (name, tree(node) if self._kinds[node] else bytes(self._bytes[node]))
                for name, node in sorted(self._names[own].items())
            )

        return tree(0)

    def _take(self, entry: tuple[Any, ...]) -> None:
        match entry:
            case ("create", own, _, node, is_directory):
                self._kinds[node] = is_directory
                if is_directory:
                    self._names[node], self._pending_names[node] = {}, []
                else:
                    self._bytes[node], self._pending_bytes[node] = bytearray(), []
                self._pending_names[own].append(entry)
            case ("move" | "remove" | "link", own, *_):
                self._pending_names[own].append(entry)
            case ("write" | "truncate", node, *_):
                self._pending_bytes[node].append(entry)
            case ("flush", node) if self._kinds[node]:
                self._settle_names(node, self._pending_names[node])
                self._pending_names[node] = []
            case ("flush", node):
                for write in self._pending_bytes[node]:
                    self._apply(node, write)
                self._pending_bytes[node] = []

    def _settle_names(self, own: int, entries: list[tuple[Any, ...]]) -> None:
        names = self._names[own]
        for entry in entries:
            match entry:
                case ("create", _, name, node, _):
                    names[name] = node
                case ("link", _, name, node):
                    names[name] = node
                case ("remove", _, name):
                    names.pop(name, None)
                case ("move", _, name, to):
                    names[to] = names.pop(name)

    def _apply(self, node: int, entry: tuple[Any, ...]) -> None:
        content = self._bytes[node]
        if entry[0] == "truncate":
            del content[entry[2] :]
            return
        _, _, offset, data = entry
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data

    def _kept(self, count: int) -> int:
        return {"nothing": 0, "everything": count}.get(self._keeps, self._dice.randint(0, count))

    def _kept_writes(self, pending: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        for entry in pending:
            fate = {"nothing": 0.0, "everything": 1.0}.get(self._keeps, self._dice.random())
            if fate > 0.5:
                yield entry
            elif fate > 0.3 and entry[0] == "write":
                yield (*entry[:3], entry[3][: len(entry[3]) // 2])


class _File(apsw.VFSFile):
    def __init__(self, vfs: str, name: Any, flags: list[int]) -> None:
        super().__init__(vfs, name, flags)
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._is_new = bool(flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL))

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        _active[-1].scan()

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        _active[-1].scan()

    def xSync(self, flags: int) -> None:
        _active[-1].flushed(self._path)
        if self._is_new:  # as SQLite's own VFS does at the first flush of a log or journal
            self._is_new = False
            _active[-1].flushed(str(Path(self._path).parent))


class _Vfs(apsw.VFS):
    def __init__(self) -> None:
        super().__init__("power-cut", "")

    def xOpen(self, name: Any, flags: list[int]) -> _File:
        opened = _File("", name, flags)
        _active[-1].scan()
        return opened

    def xDelete(self, name: str, syncdir: bool) -> None:
        super().xDelete(name, syncdir)
        _active[-1].scan()
        if syncdir:
            _active[-1].flushed(str(Path(name).parent))


class _Rows(list[Any]):
    def fetchone(self) -> Any:
        return self[0] if self else None

    def fetchall(self) -> list[Any]:
        return self


class _Connection:
    def __init__(self, path: Path, **_: Any) -> None:
        self._db = apsw.Connection(str(path), vfs="power-cut")

    def execute(self, statement: str, values: Any = ()) -> _Rows:
        return _Rows(self._db.execute(statement, values))

    def close(self) -> None:
        self._db.close()


_VFS = _Vfs()


def active() -> Recorder:
    """The recorder of the `recorded` block that this process is in."""
    return _active[-1]


def _audit(event: str, _: Any) -> None:
    if _active and event in _SCANNED:
        _active[-1].scan()


_is_hooked: list[bool] = []


@contextmanager
def recorded(root: Path) -> Iterator[Recorder]:
    """Log what happens below a directory that exists and is empty."""
    if not _is_hooked:
        _is_hooked.append(True)
        sys.addaudithook(_audit)  # for as long as the process lives
    recorder = Recorder(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: recorder.flushed(inode=os.fstat(handle).st_ino))
        fake = SimpleNamespace(
            connect=_Connection, DatabaseError=apsw.Error, OperationalError=type("Never", (Exception,), {})
        )
        patch.setattr("baton.records.journal.sqlite3", fake)
        _active.append(recorder)
        try:
            yield recorder
        finally:
            recorder.scan()
            _active.pop()
