"""Where files lie: a directory of this machine, or anything that fsspec knows. A file is whole or absent.

A file system behind a network may hang for ever, and fsspec knows no deadline: see `RemoteStorage`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import fsspec

from baton.clock import call_within
from baton.errors import DeadlineExceeded, StorageFault, WeightsFault
from baton.files import flush_to_disk

T = TypeVar("T")

CALL_S: Final = 60.0
"""What a file system behind a network has for one call, beside what its bytes take."""
SLOWEST_BYTES_PER_S: Final = 100_000.0
MAX_CALLS: Final = 32
"""At a time; those that hang count until they return."""


@dataclass(frozen=True, slots=True)
class ByteReader:
    """Bytes that are read as they are needed."""

    size: int
    read: Callable[[int, int], bytes]
    """(offset, at most so many bytes) → the bytes there; may block, and raise OSError."""

    @classmethod
    def of(cls, data: bytes) -> ByteReader:
        """Those in memory already."""
        return cls(len(data), lambda offset, size: data[offset : offset + size])

    @classmethod
    def kept(cls, place: Storage, name: str) -> ByteReader:
        """Those of a file. Raises OSError when there is none."""
        size = place.size(name)
        if size is None:
            raise FileNotFoundError(f"there is no {name}")
        return cls(size, lambda offset, size: place.read(name, size - 1, offset))


class Storage(Protocol):
    """Files by name, with "/" between folders. What cannot be read raises OSError."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is whole or absent whenever the process dies. Raises StorageFault when it cannot be."""

    def read(self, name: str, limit: int, offset: int = 0) -> bytes:
        """Return a file's bytes from `offset` on, at most `limit` + 1. Raises OSError when there is none."""

    def size(self, name: str) -> int | None:
        """Return a file's size, or None when there is none."""

    def names(self, folder: str) -> list[str]:
        """Return the names of all files below a folder, unfinished ones included."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def settle(self) -> None:
        """Return once everything written so far outlives a power cut."""


class LocalStorage:
    """A directory. Files are written beside their name, flushed, then renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unsettled: set[Path] = set()
        """Folders with new names in them."""

    def write(self, name: str, data: bytes) -> None:
        path = self._root / name
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            for folder in reversed(path.relative_to(self._root).parents):
                if not (self._root / folder).is_dir():
                    (self._root / folder).mkdir(parents=True, exist_ok=True)
                    self._unsettled.add((self._root / folder).parent)
            unfinished.write_bytes(data)
            flush_to_disk(unfinished)
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise StorageFault(f"{path} cannot be written ({error.strerror or error}); nothing refers to it") from error
        self._unsettled.add(path.parent)

    def read(self, name: str, limit: int, offset: int = 0) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(offset)
            return file.read(limit + 1)

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        top = self._root / folder
        return [(Path(at) / file).relative_to(self._root).as_posix() for at, _, files in os.walk(top) for file in files]

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def settle(self) -> None:
        while self._unsettled:
            folder = self._unsettled.pop()
            if folder.is_dir():
                flush_to_disk(folder)


class RemoteStorage:
    """A bucket or another machine's disk. Object stores show a file once it is whole; elsewhere its digest decides.

    Every method raises WeightsFault naming the place when it does not answer in `call_s`.
    """

    def __init__(self, url: str, call_s: float = CALL_S) -> None:
        self._url, self._call_s = url, call_s
        self._free = threading.Semaphore(MAX_CALLS)
        self._files: Any
        self._files, root = self._within("opening it", lambda: fsspec.core.url_to_fs(url, use_listings_cache=False))
        self._root = root.rstrip("/")

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def write() -> None:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

        try:
            self._within(f"writing {name}", write, len(data))
        except OSError as error:
            raise StorageFault(f"{path} cannot be written ({error}); nothing refers to it") from error

    def read(self, name: str, limit: int, offset: int = 0) -> bytes:
        def read() -> bytes:
            return bytes(self._files.cat_file(self._path(name), start=offset, end=offset + limit + 1))

        return self._within(f"reading {name}", read, limit)

    def size(self, name: str) -> int | None:
        try:
            return int(self._within(f"looking for {name}", lambda: self._files.size(self._path(name))))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        try:
            found = self._within(f"listing {folder}", lambda: list(self._files.find(self._path(folder))))
        except FileNotFoundError:
            return []
        return [str(path)[len(self._root) + 1 :] for path in found]

    def remove(self, name: str) -> None:
        def remove() -> None:
            if self._files.exists(self._path(name)):
                self._files.rm_file(self._path(name))

        self._within(f"removing {name}", remove)

    def settle(self) -> None:
        """A write returns once the other side has it."""

    def _within(self, what: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        """Make a call in a thread that is left behind when it hangs; only so many are."""
        timeout_s = self._call_s + num_bytes / SLOWEST_BYTES_PER_S
        if not self._free.acquire(timeout=timeout_s):
            raise WeightsFault(f"{self._url}: {what} is not tried, since {MAX_CALLS} earlier calls have not returned")

        def counted() -> T:
            try:
                return call()
            finally:
                self._free.release()

        try:
            return call_within(timeout_s, f"{self._url}: {what}:", counted)
        except DeadlineExceeded as error:
            raise WeightsFault(f"{self._url} did not answer in {timeout_s:.0f} s while {what}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def open_storage(where: str | Path) -> Storage:
    """Return the place that a directory or a URL names."""
    text = str(where)
    if "://" in text and not text.startswith("file://"):
        return RemoteStorage(text)
    return LocalStorage(Path(text.removeprefix("file://")).absolute())
