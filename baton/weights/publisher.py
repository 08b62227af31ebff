"""The trainer's side of weight transfer: encodes each version as chunks and a manifest, and stores both.

    tensors ─▶ flat buffer ─▶ parts, encoded against the base ─▶ chunks ─▶ store ─▶ manifest ─▶ store
                                        ▲                                                        │
                                        └───────── the version becomes the next base ◀───────────┘

Each version except the first has a delta to the previously published version, unless the whole encoding is shorter than
the delta. Every `keyframe_every`-th version also has a whole encoding, for workers that join. An adapter is published
whole, because it is small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from baton.clock import in_order
from baton.errors import WeightsFault
from baton.policy.adapters import is_adapter
from baton.types import PolicyVersion
from baton.weights.bitstream import Bytes, Pieces, size_of
from baton.weights.delta import Coded, encode
from baton.weights.flat_buffer import flattened, layout_of, pieces, signed, tensors_of, unsigned
from baton.weights.manifest import BufferPart, Encoding, Manifest, TensorEntry, check_version, name_of, tensors_digest
from baton.weights.settings import WeightsSettings
from baton.weights.store import Store
from baton.weights.version_files import FlatFile, TensorsOfFile, VersionFiles


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The result of a publication."""

    manifest: Manifest
    bytes: int
    """Size of the delta in bytes; if there is no delta, size of the whole encoding. The manifest is not included."""
    density: float | None
    """Fraction of the elements that differ from the base; None without a base."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Base:
    """The last published version, and the number of versions since the last keyframe."""

    version: PolicyVersion
    entries: tuple[TensorEntry, ...]
    flat_buffer: Bytes
    since_whole: int


class Publisher:
    """Publishes the versions of a run in ascending order."""

    def __init__(self, store: Store, settings: WeightsSettings, *, files: VersionFiles | None = None) -> None:
        """`files`: stores the last two versions in files that workers on this machine map. Without `files`, versions
        are in unnamed temporary files. To encode a version, the publisher reads the previous version from its file."""
        self._store, self._settings, self._files = store, settings, files
        self._base: _Base | None = None

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: PolicyVersion,
        *,
        when_shared: Callable[[Mapping[str, torch.Tensor]], object] = lambda mapped: None,
        when_stored: Callable[[], object] = lambda: None,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> PublishedVersion:
        """Store a version and make it visible to readers. Publishing the same version again changes nothing.

        `when_shared`: called with the mapped tensors as soon as the version's file is complete. The version is encoded
        and stored for other machines after this call. `when_stored`: called once when other machines can fetch the
        version. `later`: called for a keyframe with a short delta, which other machines can fetch before the whole
        encoding is stored. The argument is a function that stores the whole encoding. The function must be called once,
        in any thread, even while further versions are published. If `later` is None, this method stores the whole
        encoding before it returns.

        If the trainer wrote `tensors` to a file, the publisher uses the digests that the trainer computed while
        writing. Raises WeightsFault if `tensors` do not have the version's digest, or if a different version with the
        same number is already published. Raises StorageFault when a file cannot be written; the version is then
        invisible, or visible without its whole encoding, and can be published again.
        """
        begin = time.perf_counter()
        entries, file = self._flattened(tensors)
        flat_buffer = file.bytes
        digest = tensors_digest(entries)
        version = msgspec.structs.replace(version, digest=version.digest or digest)
        check_version(version)
        if version.digest != digest:
            raise WeightsFault(f"cannot publish {name_of(version)}: its tensors have the digest {digest[:8]}")
        there = self._store.find(version.lineage, version.number)
        if there is not None and there.version != version:
            raise WeightsFault(f"cannot publish {name_of(version)}: {name_of(there.version)} is already published")
        if self._files is not None:
            self._files.finish(version, file)
        when_shared(tensors_of(entries, flat_buffer))
        made = self._written(version, entries, flat_buffer, adapter=is_adapter(tensors))
        manifest, density = next(made) if there is None else (there, None)
        self._store.put_manifest(manifest)
        when_stored()
        has_rest = there is None and manifest.expects_whole is True
        if has_rest and later is None:
            for manifest, _ in made:
                self._store.put_manifest(manifest)
        is_keyframe = has_rest or manifest.whole is not None
        since = 0 if is_keyframe or self._base is None else self._base.since_whole + 1
        self._base = _Base(version, entries, flat_buffer, since)
        if has_rest and later is not None:
            later(partial(self._store_rest, made))
        way = manifest.delta or manifest.ways[0]
        return PublishedVersion(manifest, way.size, density, time.perf_counter() - begin)

    def _store_rest(self, made: Iterator[tuple[Manifest, float | None]]) -> None:
        for manifest, _ in made:
            self._store.put_manifest(manifest)

    def _flattened(self, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[TensorEntry, ...], FlatFile]:
        if self._files is not None and isinstance(tensors, TensorsOfFile):
            entries = unsigned(tensors)
            if (file := self._files.adopt(tensors.path, entries)) is not None:
                return signed(entries, tensors.digests), file
        return flattened(tensors, FlatFile.unnamed if self._files is None else self._files.create)

    def _written(
        self, version: PolicyVersion, entries: tuple[TensorEntry, ...], flat_buffer: Bytes, *, adapter: bool
    ) -> Iterator[tuple[Manifest, float | None]]:
        """Write the chunks of a version; yield (manifest that the caller must store, fraction of changed elements). A
        keyframe with a short delta yields two manifests: the first contains only the delta, and the second also the
        whole encoding."""
        base, ways, density = self._base, [], None
        if (
            base is not None
            and not adapter
            and base.version.lineage == version.lineage
            and base.version.number < version.number
            and layout_of(base.entries) == layout_of(entries)
        ):
            way, density = self._way(base, entries, flat_buffer)
            ways.append(way)
        is_due = base is None or base.since_whole + 1 >= self._settings.keyframe_every
        if all(way.base is not None for way in ways) and (is_due or not ways or ways[0].size > flat_buffer.size // 2):
            is_short = all(way.size <= flat_buffer.size // 2 for way in ways)
            if ways and is_short:
                yield Manifest(version, entries, tuple(ways), expects_whole=True), density
            whole, _ = self._way(None, entries, flat_buffer)
            ways = [way for way in ways if is_short or way.size < whole.size] + [whole]
        yield Manifest(version, entries, tuple(ways), is_adapter=adapter), density

    def _way(self, base: _Base | None, entries: tuple[TensorEntry, ...], flat_buffer: Bytes) -> tuple[Encoding, float]:
        """Encode a flat buffer (as a delta if `base` is given) and write the chunks; return encoding and density."""
        parts: list[BufferPart] = []
        changed = 0

        def code(piece: tuple[int, int, int]) -> Coded:
            begin, end, word = piece
            return encode(flat_buffer[begin:end], None if base is None else base.flat_buffer[begin:end], word)

        def coded() -> Iterator[bytes | memoryview]:
            nonlocal changed
            cut = list(pieces(entries))
            found = in_order(code, cut, lambda piece: piece[1] - piece[0])
            for (begin, end, word), one in zip(cut, found, strict=True):
                parts.append(BufferPart(end - begin, word, one.coding, size_of(one.data)))
                changed += one.num_changed
                yield from one.data

        # a chunk is stored while the next parts are encoded
        data = _cut(coded(), self._settings.chunk_bytes)
        chunks = tuple(in_order(lambda pieces: self._store.put_chunk(*pieces), data, size_of, threads=1))
        elements = sum(part.num_bytes // part.word for part in parts)
        needs_base = base is not None and any(part.coding != "full" for part in parts)
        way = Encoding(base.version if base is not None and needs_base else None, tuple(parts), chunks)
        return way, changed / max(1, elements)


def _cut(coded: Iterable[bytes | memoryview], size: int) -> Iterator[Pieces]:
    """Cut encoded bytes into chunks of `size` bytes; the last chunk may be smaller."""
    waiting: Pieces = []
    room = size
    for data in coded:
        rest = memoryview(data)
        while rest:
            waiting.append(rest[:room])
            rest, room = rest[room:], room - len(waiting[-1])
            if not room:
                yield waiting
                waiting, room = [], size
    if waiting:
        yield waiting
