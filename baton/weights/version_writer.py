"""Writes a version into a flat buffer: decodes the parts of an encoding, and computes the digests of the tensors.

The threads of `in_any_order` do two kinds of work, in the order of the flat buffer:

    part ──▶ changed elements ─┐
    part ──▶ changed elements ─┴▶ tensors: copy the base, apply the changes, hash; a block at a time

A block stays in the processor's cache from the copy to the hash. A part that has many changes or belongs to a large
tensor is written as soon as it is decoded, and its tensors are hashed later. This bounds the memory for changed
elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from blake3 import blake3

from baton import clock
from baton.clock import in_any_order, run_into
from baton.errors import WeightsFault
from baton.weights.bitstream import Bytes, Pieces, size_of
from baton.weights.delta import Changes, decode_blocks, decode_changes
from baton.weights.manifest import BufferPart, Encoding, TensorEntry
from baton.weights.version_files import FlatFile

BLOCK_BYTES: Final = 2**21
"""Bytes that a thread copies, changes and hashes at a time. With smaller blocks, threads acquire the GIL more often."""
GROUP_BYTES: Final = 2**22
"""Consecutive tensors are processed together until they have at least this number of bytes."""
LARGE_BYTES: Final = 2**26
"""The changed elements of a group of tensors are kept only if the group has at most this number of bytes."""
_KEPT_SHARE: Final = 32
"""The changed elements of a part are kept until its tensors are hashed only if at most 1 / `_KEPT_SHARE` of the part's
elements have changed."""
_PART_S: Final = 600.0
"""Maximum time in seconds that a thread waits for a part, which another thread has begun to decode."""


class DamagedPart(Exception):
    """The encoded bytes of a part are invalid."""


@dataclass(frozen=True, slots=True)
class _DecodedPart:
    begin: int
    end: int
    coded: BufferPart
    is_kept: bool
    """Whether the changed elements may be kept until the part's tensors are hashed."""
    changes: Future[Changes | None] = field(default_factory=Future)
    """The changes to apply; None after the part has been written."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    begin: int
    entries: tuple[TensorEntry, ...]
    parts: tuple[_DecodedPart, ...]
    """The parts that overlap the tensors."""


@dataclass(frozen=True, slots=True)
class _Item:
    """Tensors to write, and then a part to decode. With both in one item, all items take about the same time."""

    num_bytes: int
    tensors: tuple[_Tensors, ...]
    part: _DecodedPart | None = None
    data: Pieces = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class VersionWriter:
    """Applies one encoding to `before` and writes the result to `file`."""

    file: FlatFile
    before: Bytes
    """The flat buffer of the base version. If it is `file.bytes`, the new version overwrites its base."""
    is_mapped: bool
    """Write to the mapping of `file` instead of the file, which saves a copy (`FlatFile.allows_mapped_writes`)."""
    is_hashed: bool
    """Whether digests are computed."""

    def write(self, way: Encoding, entries: tuple[TensorEntry, ...], take: Callable[[int], Pieces]) -> dict[str, str]:
        """Write the version. Return the digest of each tensor by name, computed from the written bytes (`file.bytes`).
        `take` returns the next bytes of the encoding. Raises DamagedPart, StorageFault, and the errors of `take`."""
        found: dict[str, str] = {}
        for digests in in_any_order(self._process, _items(way, entries, take), lambda item: item.num_bytes):
            found.update(digests)
        return found

    def _process(self, item: _Item) -> dict[str, str]:
        try:
            found = {name: digest for tensors in item.tensors for name, digest in self._digests(tensors)}
        except BaseException as error:
            if item.part is not None:
                item.part.changes.set_exception(error)  # ends the threads that wait for the part
            raise
        if item.part is not None:
            run_into(item.part.changes, partial(self._decoded, item.part, item.data))
            item.part.changes.result(0)  # raises the error of the part
        return found

    def _decoded(self, part: _DecodedPart, pieces: Pieces) -> Changes | None:
        coding, word, old = part.coded.coding, part.coded.word, self.before[part.begin : part.end]
        data = pieces[0] if len(pieces) == 1 else _joined(pieces)
        try:
            if coding in ("same", "sparse"):
                changes = decode_changes(coding, data, old, word)
                if part.is_kept and changes.positions.size * word * _KEPT_SHARE <= old.size:
                    return changes
                self._apply(part, changes, part.begin, part.end, None)
                return None
            for at, block in decode_blocks(coding, data, old, word):
                if self.is_mapped:
                    self.file.bytes[part.begin + at : part.begin + at + block.size] = block
                else:
                    self.file.write(part.begin + at, block)
        except WeightsFault as error:
            raise DamagedPart(str(error)) from error
        return None

    def _digests(self, tensors: _Tensors) -> Iterator[tuple[str, str]]:
        begin = tensors.begin
        for entry in tensors.entries:
            digest, end = blake3(), begin + entry.num_bytes
            for part in tensors.parts:
                low, high = max(begin, part.begin), min(end, part.end)
                if low >= high:
                    continue
                changes = part.changes.result(_PART_S)
                if changes is not None:
                    self._apply(part, changes, low, high, digest)
                elif self.is_hashed:
                    digest.update(self.file.bytes[low:high].data)
            yield entry.name, digest.hexdigest()
            begin = end

    def _apply(self, part: _DecodedPart, changes: Changes, begin: int, end: int, digest: blake3 | None) -> None:
        """Write the bytes from `begin` to `end`, all in `part`, and add them to a tensor's digest."""
        word, bounds = part.coded.word, [*range(begin, end, BLOCK_BYTES), end]
        places = np.array([(at - part.begin) // word for at in bounds], changes.positions.dtype)
        edges = np.searchsorted(changes.positions, places).tolist()
        steps = torch.from_numpy(changes.steps.view(f"i{word}"))
        for (at, stop), (first, last) in zip(pairwise(bounds), pairwise(edges), strict=True):
            block = self.file.bytes[at:stop] if self.is_mapped else self.before[at:stop].copy()
            if self.is_mapped and self.before is not self.file.bytes:
                np.copyto(block, self.before[at:stop])
            places = np.subtract(changes.positions[first:last], (at - part.begin) // word, dtype=np.int64)
            torch.from_numpy(block.view(f"i{word}")).scatter_add_(0, torch.from_numpy(places), steps[first:last])
            if not self.is_mapped:
                self.file.write(at, block)
            if digest is not None and self.is_hashed:
                digest.update(self.file.bytes[at:stop].data)


def _items(way: Encoding, entries: tuple[TensorEntry, ...], take: Callable[[int], Pieces]) -> Iterator[_Item]:
    """Yield the parts and the tensors. Tensors come at least `CODERS` parts after the last part that overlaps them, so
    that a thread seldom waits for a part that another thread decodes."""
    rest, parts, end, num_parts = iter(way.parts), list[_DecodedPart](), 0, 0
    waiting: deque[tuple[int, int, _Tensors]] = deque()
    group, begin, stop = list[TensorEntry](), 0, 0
    for index, entry in enumerate(entries):
        group.append(entry)
        stop += entry.num_bytes
        if stop - begin < GROUP_BYTES and index < len(entries) - 1:
            continue
        parts = [part for part in parts if part.end > begin]
        while end < stop:
            ready = []
            while waiting and waiting[0][0] <= num_parts - clock.CODERS:
                ready.append(waiting.popleft())
            coded = next(rest)
            parts.append(_DecodedPart(end, end + coded.num_bytes, coded, stop - begin <= LARGE_BYTES))
            end, num_parts = end + coded.num_bytes, num_parts + 1
            size = coded.num_bytes + sum(size for _, size, _ in ready)
            yield _Item(size, tuple(tensors for _, _, tensors in ready), parts[-1], take(coded.size))
        waiting.append((num_parts, stop - begin, _Tensors(begin, tuple(group), tuple(parts))))
        group, begin = [], stop
    for _, size, tensors in waiting:
        yield _Item(size, (tensors,))


def _joined(pieces: Pieces) -> memoryview:
    """Join pieces like `bytes.join`, but without holding the GIL."""
    joined, at = np.empty(size_of(pieces), np.uint8), 0
    for piece in pieces:
        joined[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return joined.data
