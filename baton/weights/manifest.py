"""The manifest of a policy version: what its tensors are when all is done, and the ways to their bytes.

    version ──▶ tensors: name, dtype, shape, digest of the final bytes        their digest is the version's
            └─▶ ways:    whole            parts ──▶ chunks                    every chunk by its own digest
                         from base v'     parts ──▶ chunks

All tensors of a version lie one after another in one stretch of bytes, wide words first, then by name
(`payload_order`). A part is a piece of that stretch and how it is coded (`delta.py`); the coded parts, one after
another, are cut into the chunks of a way. The version's digest vouches for the tensors; ways are only hints about how
to get there, and whoever follows one compares the tensors' digests at the end.

A manifest comes from other machines: `decode_manifest` accepts nothing that does not fit together. Needs no torch.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Final, Literal

import msgspec

from baton.errors import WeightsFault
from baton.policy.digest import identity_digest
from baton.types import PolicyVersion

FORMAT: Final = 1
WORD_BYTES: Final = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
"""Bytes of one element by dtype."""
MAX_MANIFEST_BYTES: Final = 64 * 2**20
MAX_CHUNK_BYTES: Final = 64 * 2**20
MAX_PART_BYTES: Final = 8 * 2**20
"""Of final bytes; what is in memory at once beside the weights follows from it."""
MAX_TENSORS: Final = 200_000
MAX_CHUNKS: Final = 2_000_000
MAX_TOTAL_BYTES: Final = 8 * 2**40
MAX_NAME: Final = 512
MAX_DIMENSIONS: Final = 16

_DIGEST = re.compile(r"[0-9a-f]{64}")
_LINEAGE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")

Coding = Literal["same", "sparse", "dense", "full"]
Kind = Literal["anchor", "delta", "adapter"]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """blake3 of the final bytes."""

    @property
    def num_bytes(self) -> int:
        """Size of the final bytes."""
        return math.prod(self.shape) * WORD_BYTES[self.dtype]


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a way's coded bytes: what is stored, sent and verified as one."""

    digest: str
    size: int
    """Bytes."""


class BufferPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of the stretch of final bytes."""

    num_bytes: int
    """Of final bytes; the part begins where the one before it ended."""
    word: int
    """Bytes of one element."""
    coding: Coding
    size: int
    """Of coded bytes; they begin where those of the part before ended."""


class Encoding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to make the final bytes: from nothing, or from those of another version."""

    base: PolicyVersion | None
    parts: tuple[BufferPart, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(chunk.size for chunk in self.chunks)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a policy version is and how to get it."""

    version: PolicyVersion
    tensors: tuple[TensorEntry, ...]
    """In `payload_order`."""
    ways: tuple[Encoding, ...]
    """At most one that needs no base, and at most one that does."""
    is_adapter: bool = False
    """Whether the tensors are an adapter's, to be merged into the model that the run began with."""
    format: int = FORMAT

    @property
    def whole(self) -> Encoding | None:
        """The way that needs no base, if there is one."""
        return next((way for way in self.ways if way.base is None), None)

    @property
    def delta(self) -> Encoding | None:
        """The way from another version, if there is one."""
        return next((way for way in self.ways if way.base is not None), None)

    @property
    def kind(self) -> Kind:
        """An adapter; an anchor where the version can be had whole; else a delta."""
        if self.is_adapter:
            return "adapter"
        return "delta" if self.whole is None else "anchor"

    @property
    def base(self) -> PolicyVersion | None:
        """The version from which the delta leads here."""
        return None if self.delta is None else self.delta.base

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Of all ways; a chunk may appear more than once."""
        return tuple(chunk for way in self.ways for chunk in way.chunks)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors)


def payload_order(entry: TensorEntry) -> tuple[int, str]:
    """Return the sort key of tensors in a version's bytes: wide words first, so that all are aligned; then by name."""
    return -WORD_BYTES[entry.dtype], entry.name


def tensors_digest(tensors: tuple[TensorEntry, ...]) -> str:
    """Return the digest of the version that has these tensors: that of `weights_digest` on the tensors themselves."""
    return identity_digest((entry.name, entry.dtype, entry.shape, entry.digest) for entry in tensors)


def name_of(version: PolicyVersion) -> str:
    """Return a version in words, for messages."""
    return f"version {version.number} ({version.digest[:8] or 'no digest'}, lineage {version.lineage})"


_decoder = msgspec.msgpack.Decoder(Manifest)
_encoder = msgspec.msgpack.Encoder()


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest's bytes. Raises WeightsFault for one that `decode_manifest` would refuse."""
    check_manifest(manifest)
    return _encoder.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest in these bytes. Raises WeightsFault, saying what is wrong, unless all in it fits together."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsFault(f"a manifest of {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are allowed")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsFault(f"a manifest cannot be read: {error}") from error
    check_manifest(manifest)
    return manifest


def check_version(version: PolicyVersion) -> None:
    """Raise WeightsFault unless a version is complete and may be part of a file's name."""
    _require(_LINEAGE.fullmatch(version.lineage), f"lineage {version.lineage[:80]!r}")
    _require(0 <= version.number < 2**53, f"number {version.number}")
    _require(_DIGEST.fullmatch(version.digest), f"version digest {version.digest[:80]!r}")


def check_manifest(manifest: Manifest) -> None:
    """Raise WeightsFault, saying what is wrong, unless a manifest is within the limits and fits together."""
    _require(manifest.format == FORMAT, f"format {manifest.format}, not {FORMAT}")
    check_version(manifest.version)
    _check_tensors(manifest.tensors)
    digest = tensors_digest(manifest.tensors)
    _require(digest == manifest.version.digest, f"tensors of digest {digest[:8]}, not {manifest.version.digest[:8]}")
    _require(0 < len(manifest.ways) <= 2, f"{len(manifest.ways)} ways")
    _require(len({way.base is None for way in manifest.ways}) == len(manifest.ways), "two ways of one kind")
    for way in manifest.ways:
        if way.base is not None:
            check_version(way.base)
            is_earlier = way.base.lineage == manifest.version.lineage and way.base.number < manifest.version.number
            _require(is_earlier, f"a base that is not earlier: {name_of(way.base)}")
        _check_encoding(way, manifest.tensors)


def _check_tensors(tensors: tuple[TensorEntry, ...]) -> None:
    _require(len(tensors) <= MAX_TENSORS, f"{len(tensors)} tensors")
    for entry in tensors:
        is_name = len(entry.name) <= MAX_NAME and _NAME.fullmatch(entry.name)
        _require(is_name, f"tensor name {entry.name[:80]!r}")
        _require(entry.dtype in WORD_BYTES, f"dtype {entry.dtype[:80]!r} of {entry.name}")
        is_shape = len(entry.shape) <= MAX_DIMENSIONS and all(0 <= n <= MAX_TOTAL_BYTES for n in entry.shape)
        _require(is_shape, f"shape {entry.shape[:MAX_DIMENSIONS]} of {entry.name}")
        _require(_DIGEST.fullmatch(entry.digest), f"digest {entry.digest[:80]!r} of {entry.name}")
    _require(sum(entry.num_bytes for entry in tensors) <= MAX_TOTAL_BYTES, "too many bytes of tensors")
    keys = [payload_order(entry) for entry in tensors]
    _require(all(a < b for a, b in pairwise(keys)), "tensors out of order, or named twice")
    _require(len({entry.name for entry in tensors}) == len(tensors), "two tensors of one name")


def _check_encoding(way: Encoding, tensors: tuple[TensorEntry, ...]) -> None:
    """Parts cover all elements, wide ones first, and chunks hold just the coded parts."""
    _require(len(way.chunks) <= MAX_CHUNKS, f"{len(way.chunks)} chunks")
    for chunk in way.chunks:
        _require(_DIGEST.fullmatch(chunk.digest), f"chunk digest {chunk.digest[:80]!r}")
        _require(0 < chunk.size <= MAX_CHUNK_BYTES, f"a chunk of {chunk.size} bytes")
    _require(len(way.parts) <= MAX_CHUNKS, f"{len(way.parts)} parts")
    wanted: dict[int, int] = {}
    for entry in tensors:
        word = WORD_BYTES[entry.dtype]
        wanted[word] = wanted.get(word, 0) + entry.num_bytes
    found: dict[int, int] = {}
    last_word = 8
    for part in way.parts:
        _require(part.word in (1, 2, 4, 8) and part.word <= last_word, f"a part of words of {part.word} bytes")
        is_size = 0 < part.num_bytes <= MAX_PART_BYTES and part.num_bytes % part.word == 0
        _require(is_size, f"a part of {part.num_bytes} bytes")
        _require(0 <= part.size <= MAX_PART_BYTES + 2**16, f"a coded part of {part.size} bytes")
        _require(way.base is not None or part.coding == "full", f"a part coded {part.coding!r} without a base")
        last_word = part.word
        found[part.word] = found.get(part.word, 0) + part.num_bytes
    _require(found == {word: size for word, size in wanted.items() if size}, "parts that are not all of the tensors")
    coded = sum(part.size for part in way.parts)
    _require(coded == way.size, f"chunks of {way.size} bytes for coded parts of {coded}")


def _require(condition: object, got: str) -> None:
    if not condition:
        raise WeightsFault(f"a manifest is refused: it has {got}")
