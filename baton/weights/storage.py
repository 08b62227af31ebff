"""Storage of files: a local directory, or any file system that fsspec supports. In local directories and object stores,
readers see only complete files.

A remote file system may hang, and fsspec has no timeout, so `RemoteStorage` gives each call a deadline.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import fsspec

from baton.clock import call_within
from baton.errors import DeadlineExceeded, StorageFault, UserError, WeightsFault
from baton.files import flush_to_disk

T = TypeVar("T")

CALL_S: Final = 60.0
"""Timeout in seconds of a call to a remote file system. A transfer of n bytes may take n / `SLOWEST_BYTES_PER_S`
seconds longer."""
SLOWEST_BYTES_PER_S: Final = 100_000.0
"""Minimum transfer rate of a remote file system; a slower transfer times out."""
MAX_CALLS: Final = 32
"""Maximum number of concurrent calls. A call that has timed out counts as concurrent until it returns."""


@dataclass(frozen=True, slots=True)
class ByteReader:
    """Reads bytes at an offset, so that a large HTTP body is never completely in memory."""

    size: int
    read: Callable[[int, int], bytes]
    """Function (offset, limit) → at most `limit` bytes from the offset on. The function may block or raise OSError."""

    @classmethod
    def of(cls, data: bytes) -> ByteReader:
        return cls(len(data), lambda offset, size: data[offset : offset + size])

    @classmethod
    def kept(cls, place: Storage, name: str) -> ByteReader:
        """Return a reader of a stored file. Raises OSError if there is no such file."""
        size = place.size(name)
        if size is None:
            raise FileNotFoundError(f"no such file: {name}")
        return cls(size, lambda offset, size: place.read(name, size - 1, offset))


class Storage(Protocol):
    """Stores files by name. Names contain "/" between folders. Methods raise OSError when a file cannot be read."""

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Write a file atomically: readers see the old or the new file. Raises StorageFault if writing fails."""

    def read(self, name: str, limit: int, offset: int = 0) -> bytes:
        """Return the bytes from `offset` to the end of the file, but at most `limit` + 1 bytes. If `limit` + 1 bytes
        are returned, the file is longer than the caller accepts. Raises OSError if there is no file."""

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, or None if there is no such file."""

    def names(self, folder: str) -> list[str]:
        """Return the names of all files below a folder, including unfinished files."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def settle(self) -> None:
        """Block until all files written so far would survive a power failure. Raises StorageFault; the next call then
        tries again."""


class LocalStorage:
    """A directory. Files are written under a temporary name, flushed, then renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unsettled: set[Path] = set()
        """Folders with new entries that have not been flushed to disk."""

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        path = self._root / name
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            for folder in reversed(path.relative_to(self._root).parents):
                if not (self._root / folder).is_dir():
                    (self._root / folder).mkdir(parents=True, exist_ok=True)
                    self._unsettled.add((self._root / folder).parent)
            with unfinished.open("wb") as file:
                file.writelines(pieces)
            flush_to_disk(unfinished)
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise StorageFault(
                f"{path} cannot be written ({error.strerror or error}); no published version uses it"
            ) from error
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
            try:
                if folder.is_dir():
                    flush_to_disk(folder)
            except OSError as error:
                self._unsettled.add(folder)
                raise StorageFault(
                    f"{folder} cannot be flushed to disk ({error.strerror or error}); a power failure may remove its "
                    "last files"
                ) from error


class RemoteStorage:
    """Stores files in a bucket or on another machine's disk.

    In an object store, readers see only complete files. On other file systems, a reader may see a part of a file, which
    then does not match the file's digest. Every method raises WeightsFault, which names the URL, when a call times out
    (`call_s`). If a call fails, `read` raises OSError, `write` StorageFault, and the other methods WeightsFault.
    """

    def __init__(self, url: str, call_s: float = CALL_S) -> None:
        self._url, self._call_s = url, call_s
        self._free = threading.Semaphore(MAX_CALLS)
        self._files: Any
        self._files, root = self._within("opening it", self._opened)
        self._root = root.rstrip("/")

    def _opened(self) -> tuple[Any, str]:
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"the store {self._url} cannot be opened ({error}): correct the URL, or install the package with which "
                "fsspec opens it"
            ) from error
        return found

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        path, data = self._path(name), b"".join(pieces)

        def write() -> None:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)

        try:
            self._within(f"writing {name}", write, len(data), fault=OSError)
        except OSError as error:
            raise StorageFault(f"{path} cannot be written ({error}); no published version uses it") from error

    def read(self, name: str, limit: int, offset: int = 0) -> bytes:
        def read() -> bytes:
            return bytes(self._files.cat_file(self._path(name), start=offset, end=offset + limit + 1))

        return self._within(f"reading {name}", read, limit, fault=OSError)

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

        with suppress(FileNotFoundError):  # another process has removed it since
            self._within(f"removing {name}", remove)

    def settle(self) -> None:
        """Do nothing: each write returned only after the remote side had stored the file."""

    def _within(
        self, what: str, call: Callable[[], T], num_bytes: int = 0, *, fault: type[Exception] = WeightsFault
    ) -> T:
        """Make a call in one of at most `MAX_CALLS` threads. After a timeout, the thread runs until the call ends.
        `fault`: raised instead of the error of a call, which is often an exception of a library that fsspec uses."""
        timeout_s = self._call_s + num_bytes / SLOWEST_BYTES_PER_S
        if not self._free.acquire(timeout=timeout_s):
            raise WeightsFault(f"{self._url}: {what} was not tried: {MAX_CALLS} earlier calls have not returned")

        def counted() -> T:
            try:
                return call()
            finally:
                self._free.release()

        try:
            return call_within(timeout_s, f"{self._url}: {what}:", counted)
        except DeadlineExceeded as error:
            raise WeightsFault(f"{self._url} did not answer in {timeout_s:.0f} s while {what}") from error
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:
            raise fault(f"{self._url}: {what} failed: {type(error).__name__}: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def open_storage(where: str | Path) -> Storage:
    """Return the storage for a directory or a URL."""
    text = str(where)
    if "://" in text and not text.startswith("file://"):
        return RemoteStorage(text)
    return LocalStorage(Path(text.removeprefix("file://")).absolute())
