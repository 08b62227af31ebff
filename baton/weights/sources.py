"""Where a fetcher gets bytes from: manifests by version, chunks by digest. Nothing that a source says is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from baton.errors import StorageFault
from baton.types import PolicyVersion
from baton.weights.manifest import MAX_CHUNK_BYTES
from baton.weights.storage import ByteReader, LocalStorage
from baton.weights.store import Store


class WeightsSource(Protocol):
    """A shared directory, a bucket, the hub, a relay. A method that cannot answer raises OSError or a BatonError; it
    has a deadline of its own, and does not take in much more than what was asked for."""

    name: str
    """For messages: who is at fault."""
    distance: int
    """Near ones are asked first; those of one distance in any order."""

    def manifest(self, version: PolicyVersion) -> bytes:
        """Return the bytes of a version's manifest."""

    def chunk(self, digest: str, size: int) -> bytes:
        """Return the chunk of a digest."""


class StoreSource:
    """A store that this machine can read by itself."""

    def __init__(self, store: Store) -> None:
        self.name, self.distance = store.name, 0
        self._store = store

    def manifest(self, version: PolicyVersion) -> bytes:
        return self._store.read_manifest(version)

    def chunk(self, digest: str, size: int) -> bytes:
        return self._store.get_chunk(digest, size)


class ChunkCache:
    """Chunks on this machine's disk, at most so many bytes: an interrupted fetch goes on where it was."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._place, self._max_bytes = LocalStorage(directory), max_bytes
        self._sizes: dict[str, int] = {}
        """Name → bytes of what is there, the oldest first."""
        for name in self._place.names("chunks"):
            if name.endswith(".unfinished"):
                self._place.remove(name)
            else:
                self._sizes[name] = self._place.size(name) or 0
        self._shrink(0)

    def get(self, digest: str) -> bytes | None:
        """Return a chunk, not verified, or None where it is not there."""
        try:
            return self._place.read(f"chunks/{digest}", MAX_CHUNK_BYTES)
        except OSError:
            return None

    def body(self, digest: str) -> ByteReader:
        """Return a chunk, not verified, to be read piece by piece. Raises OSError where it is not there."""
        return ByteReader.kept(self._place, f"chunks/{digest}")

    def put(self, digest: str, data: bytes) -> None:
        """Keep a chunk; the oldest ones make room for it. Raises StorageFault when the disk is full."""
        if len(data) > self._max_bytes:
            return
        self._shrink(len(data))
        try:
            self._place.write(f"chunks/{digest}", data)
        except StorageFault as error:
            raise StorageFault(f"{error}; the version held before is still served") from error
        self._sizes[f"chunks/{digest}"] = len(data)

    def _shrink(self, wanted: int) -> None:
        """Remove the oldest chunks until so many bytes more have room."""
        while self._sizes and sum(self._sizes.values()) + wanted > self._max_bytes:
            oldest = next(iter(self._sizes))
            self._place.remove(oldest)
            del self._sizes[oldest]
