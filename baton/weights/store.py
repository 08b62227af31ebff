"""The store of published versions: chunks and manifests. A version's chunks are written before its manifest.

    chunks/3f09…                       a chunk, under its own digest; written once, never changed
    versions/<lineage>/000000012       a manifest; a version exists as soon as this file does

One process writes to a store, and any number of processes may read it. If no manifest names a chunk, either the chunk
belongs to a version that is being written, or a dead process has left it. `collect` removes the chunks that dead
processes have left. `collect` never removes files that are neither chunks nor manifests.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Final

from blake3 import blake3

from baton.errors import WeightsFault
from baton.types import PolicyVersion
from baton.weights.bitstream import size_of
from baton.weights.manifest import (
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Chunk,
    Manifest,
    decode_manifest,
    encode_manifest,
    name_of,
)
from baton.weights.storage import ByteReader, Storage, open_storage

_CHUNK: Final = re.compile(r"chunks/([0-9a-f]{64})(\.unfinished)?")
_VERSION: Final = re.compile(r"versions/([A-Za-z0-9_-]{1,64})/([0-9]{9,16})(\.unfinished)?")


class Store:
    """A content-addressed store in a directory, or at any URL that fsspec opens. Safe to use from several threads. A
    store is also the `WeightsSource` of a machine that can read the directory or the URL."""

    distance = 0
    """`WeightsSource.distance`: no source has a smaller number, so a store is queried first."""

    def __init__(self, where: str | Path) -> None:
        self.name = str(where)
        self._place: Storage = open_storage(where)
        self._lock = threading.RLock()
        self._unmarked: set[str] = set()
        """Digests of the chunks stored after the last manifest. `collect` keeps these chunks although no manifest
        contains them."""
        self._lineage: str | None = None
        """Lineage of the version that was published last."""
        self._manifests: dict[tuple[str, int], Manifest] = {}
        """Cache of the manifests that `collect` has read. A manifest with `expects_whole` is not cached, because
        another manifest will replace it."""

    def put_chunk(self, *pieces: bytes | memoryview) -> Chunk:
        """Write a chunk, given in pieces, unless the store has it. Raises StorageFault if writing fails."""
        digest = blake3()
        for piece in pieces:
            digest.update(piece)
        chunk = Chunk(digest.hexdigest(), size_of(pieces))
        with self._lock:
            self._unmarked.add(chunk.digest)
            if self._place.size(_chunk_name(chunk.digest)) != chunk.size:
                self._place.write(_chunk_name(chunk.digest), *pieces)
        return chunk

    def chunk(self, digest: str, size: int = MAX_CHUNK_BYTES) -> bytes:
        """Return at most `size` + 1 unverified bytes of a chunk. Raises OSError if there is no such chunk."""
        return self._place.read(_chunk_name(digest), min(size, MAX_CHUNK_BYTES))

    def chunk_body(self, digest: str) -> ByteReader:
        """Return a reader of a chunk, whose bytes are not verified. Raises OSError if there is no such chunk."""
        return ByteReader.kept(self._place, _chunk_name(digest))

    def put_manifest(self, manifest: Manifest) -> None:
        """Store a version's manifest, which makes the version visible. All chunks of the version must have been stored
        before. Storing the same manifest again changes nothing. A manifest without `expects_whole` replaces a manifest
        with `expects_whole`. Raises WeightsFault when a different version with the same number is already published,
        and StorageFault when writing fails."""
        version = manifest.version
        data = encode_manifest(manifest)
        with self._lock:
            there = self.find(version.lineage, version.number)
            if there is not None and there.version != version:
                raise WeightsFault(f"cannot publish {name_of(version)}: {name_of(there.version)} is already published")
            if there is None or (there.expects_whole is True and manifest.expects_whole is not True):
                self._place.settle()  # the chunks must survive a power failure before the manifest names them
                self._place.write(_version_name(version), data)
                self._place.settle()
            self._unmarked.clear()
            self._lineage = version.lineage

    def find(self, lineage: str, number: int) -> Manifest | None:
        """Return the manifest of a version, or None if the version is not published. A damaged manifest counts as
        absent. Raises WeightsFault when the store does not answer, because then it is unknown whether the version
        exists."""
        try:
            data = self.manifest(PolicyVersion(lineage, number))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightsFault(f"version {number} of lineage {lineage} cannot be read: {error}") from error
        try:
            manifest = decode_manifest(data)
        except WeightsFault:
            return None
        return manifest if (manifest.version.lineage, manifest.version.number) == (lineage, number) else None

    def manifest(self, version: PolicyVersion) -> bytes:
        """Return the unverified bytes of a version's manifest. Raises OSError if the version is not published."""
        return self._place.read(_version_name(version), MAX_MANIFEST_BYTES)

    def manifest_body(self, lineage: str, number: int) -> ByteReader:
        """Return a reader of a version's unverified manifest. This call reads the whole manifest, because a longer
        manifest may replace the file while the reader is in use. Raises OSError if the version is not published."""
        return ByteReader.of(self.manifest(PolicyVersion(lineage, number)))

    def versions(self) -> list[PolicyVersion]:
        """Return all published versions, sorted by lineage and number, without their digests."""
        return sorted(
            (PolicyVersion(found[1], int(found[2])) for found in self._matches("versions", _VERSION) if not found[3]),
            key=lambda version: (version.lineage, version.number),
        )

    def collect(self, live: Iterable[PolicyVersion], *, keep: int = 1) -> int:
        """Remove the files that no machine needs any more; return the number of removed files.

        `live`: versions that a worker has or requests. `collect` keeps the `live` versions. It also keeps the latest
        `keep` versions of the lineage in which this process published last. If this process has published no version,
        it keeps the latest `keep` versions of every lineage. If a kept version has only a delta, earlier versions back
        to a keyframe are kept too. A manifest is removed before its chunks, so a visible version always has its data.
        """
        with self._lock:
            kept = self._needed(list(live), keep)
            chunks = {chunk.digest for manifest in kept.values() for chunk in manifest.chunks} | self._unmarked
            versions = self._matches("versions", _VERSION)
            doomed = [f.string for f in versions if f[3] or (f[1], int(f[2])) not in kept]
            doomed += [f.string for f in self._matches("chunks", _CHUNK) if f[2] or f[1] not in chunks]
            for name in doomed:
                self._place.remove(name)
            self._manifests = {at: manifest for at, manifest in kept.items() if manifest.expects_whole is not True}
            return len(doomed)

    def _needed(self, live: list[PolicyVersion], keep: int) -> dict[tuple[str, int], Manifest]:
        """Return the manifests of all versions to keep, by lineage and number."""
        same_lineage = groupby(self.versions(), lambda version: version.lineage)
        by_lineage = {lineage: [version.number for version in same] for lineage, same in same_lineage}
        roots = {(version.lineage, version.number) for version in live}
        for lineage, numbers in by_lineage.items():
            if self._lineage in (None, lineage):
                roots |= {(lineage, number) for number in numbers[-keep:]}
        kept: dict[tuple[str, int], Manifest] = {}
        for root in roots:
            at: tuple[str, int] | None = root
            while at is not None and at not in kept and at[1] in by_lineage.get(at[0], ()):
                manifest = self._manifests.get(at) or self.find(*at)
                if manifest is None:
                    break
                kept[at] = manifest
                base = manifest.base if manifest.whole is None else None
                at = None if base is None else (base.lineage, base.number)
        return kept

    def _matches(self, folder: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [found for name in self._place.names(folder) if (found := pattern.fullmatch(name)) is not None]


def _chunk_name(digest: str) -> str:
    name = f"chunks/{digest}"
    if not _CHUNK.fullmatch(name):
        raise WeightsFault(f"{digest[:80]!r} is not a digest: expected 64 hexadecimal digits")
    return name


def _version_name(version: PolicyVersion) -> str:
    name = f"versions/{version.lineage}/{version.number:09d}"
    if not _VERSION.fullmatch(name):
        raise WeightsFault(f"{name_of(version)} cannot be part of a file name")
    return name
