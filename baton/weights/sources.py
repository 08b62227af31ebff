"""Sources of manifests and chunks for a fetcher. Sources are untrusted, so the fetcher verifies all data."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

from baton.errors import StorageFault
from baton.types import PolicyVersion
from baton.weights.manifest import MAX_CHUNK_BYTES
from baton.weights.storage import ByteReader, LocalStorage


class WeightsSource(Protocol):
    """A source of versions: a `Store` that this machine can read, the hub or a relay. Methods raise OSError or a
    BatonError on failure. Every call has a deadline and limits the number of bytes that it accepts."""

    name: str
    """Name of the source in error messages."""
    distance: int
    """Sources are queried in ascending order of this number, and in random order if their numbers are equal."""

    def manifest(self, version: PolicyVersion) -> bytes:
        """Return the bytes of a version's manifest."""

    def chunk(self, digest: str, size: int) -> bytes:
        """Return the `size` bytes of the chunk with this digest."""


class ChunkCache:
    """A cache of chunks on this machine's disk. Above `max_bytes`, the oldest chunks are removed. Several threads may
    use it."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._place, self._max_bytes = LocalStorage(directory), max_bytes
        self._lock = threading.RLock()
        self._sizes: dict[str, int] = {}
        """File name → size in bytes, oldest first."""

        def age(name: str) -> int:
            try:
                return (directory / name).stat().st_mtime_ns
            except OSError:  # another process has removed the file
                return 0

        for name in sorted(self._place.names("chunks"), key=age):
            if name.endswith(".unfinished"):
                self._place.remove(name)
            else:
                self._sizes[name] = self._place.size(name) or 0
        self._shrink(0)

    def get(self, digest: str) -> bytes | None:
        """Return a chunk without verifying it, or None if it is not cached."""
        try:
            return self._place.read(f"chunks/{digest}", MAX_CHUNK_BYTES)
        except OSError:
            return None

    def body(self, digest: str) -> ByteReader:
        """Return a reader of a chunk, whose bytes are not verified. Raises OSError if the chunk is not cached."""
        return ByteReader.kept(self._place, f"chunks/{digest}")

    def put(self, digest: str, data: bytes) -> None:
        """Store a chunk, after removing the oldest chunks if necessary. Raises StorageFault when the disk is full."""
        if len(data) > self._max_bytes:
            return
        with self._lock:
            self._shrink(len(data))
            self._place.write(f"chunks/{digest}", data)
            self._sizes[f"chunks/{digest}"] = len(data)

    def put_or_halve(self, digest: str, data: bytes) -> str:
        """Store a chunk and return an empty text. If it cannot be stored, keep at most half of the present bytes from
        now on, and return a message for the user."""
        with self._lock:
            try:
                self.put(digest, data)
                return ""
            except (StorageFault, OSError) as error:
                self._max_bytes = sum(self._sizes.values()) // 2
                try:
                    self._shrink(0)
                except OSError:  # nothing can be removed either, as on a read-only disk
                    self._max_bytes = 0
                kept = f"from now on, the cache keeps at most {self._max_bytes / 2**30:.2f} GiB"
                return f"a chunk cannot be stored ({error.__cause__ or error}); {kept}"

    def _shrink(self, wanted: int) -> None:
        """Remove the oldest chunks until `wanted` more bytes fit."""
        while self._sizes and sum(self._sizes.values()) + wanted > self._max_bytes:
            oldest = next(iter(self._sizes))
            self._place.remove(oldest)
            del self._sizes[oldest]
