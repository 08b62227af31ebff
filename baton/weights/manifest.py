"""The manifest of a policy version lists its tensors with their digests, and one or two encodings of the tensors'
bytes.

    version ──▶ tensors: name, dtype, shape, digest of the bytes              hashed into the version's digest
            └─▶ ways:    whole            parts ──▶ chunks                    each chunk with its own digest
                         from base v'     parts ──▶ chunks

All tensors of a version form one flat buffer, sorted by word size (widest first), then by name (`payload_order`). A
part is a contiguous range of the flat buffer, encoded with one coding (`delta.py`). The encoded parts are concatenated
and cut into chunks. The version's digest covers only the tensors, not their encodings, so the fetcher compares the
digest of every tensor after decoding.

A manifest comes from another machine, so `decode_manifest` refuses an inconsistent manifest. This file does not import
torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import pairwise
from typing import Final, Literal

import msgspec

from baton.errors import WeightsFault
from baton.policy.digest import Identity, identity_digest
from baton.types import PolicyVersion

FORMAT: Final = 1
WORD_BYTES: Final = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}
"""dtype → bytes of one element."""
MAX_MANIFEST_BYTES: Final = 64 * 2**20
MAX_CHUNK_BYTES: Final = 64 * 2**20
MAX_PART_BYTES: Final = 8 * 2**20
"""Maximum bytes of a decoded part, which bounds the memory that a fetch needs in addition to the weights."""
MIN_PART_BYTES: Final = 2**16
"""Minimum bytes of a decoded part that is not the last of its word size. A fetch keeps about 2 kB for each part, so the
minimum bounds this memory."""
MAX_TENSORS: Final = 200_000
MAX_CHUNKS: Final = 2_000_000
MAX_TOTAL_BYTES: Final = 8 * 2**40
MAX_NAME: Final = 512
MAX_DIMENSIONS: Final = 16

_DIGEST = re.compile(r"[0-9a-f]{64}")
_LINEAGE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")

Coding = Literal["same", "sparse", "dense", "full"]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """blake3 of the tensor's bytes (hexadecimal)."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * WORD_BYTES[self.dtype]


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of an encoding's bytes. A chunk is stored, sent and verified as one unit."""

    digest: str
    """blake3 (hexadecimal)."""
    size: int


class BufferPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of the flat buffer and its coding. The parts of an encoding are contiguous."""

    num_bytes: int
    """Size after decoding, in bytes."""
    word: int
    """Bytes of one element."""
    coding: Coding
    size: int
    """Size as encoded, in bytes."""


class Encoding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The encoded bytes of a version's flat buffer. A whole encoding contains the buffer itself. A delta contains the
    difference between the buffer and the flat buffer of another version, `base`."""

    base: PolicyVersion | None
    """The version that the delta requires; None for a whole encoding."""
    parts: tuple[BufferPart, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Number of bytes to fetch."""
        return sum(chunk.size for chunk in self.chunks)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tensors of a policy version, and how to construct them."""

    version: PolicyVersion
    tensors: tuple[TensorEntry, ...]
    """Sorted by `payload_order`."""
    ways: tuple[Encoding, ...]
    """One or two encodings: at most one without a base and at most one with a base."""
    is_adapter: bool = False
    """Whether the tensors are an adapter. Engines merge an adapter into the run's initial model."""
    format: int = FORMAT
    expects_whole: bool | msgspec.UnsetType = msgspec.UNSET
    """True in the manifest of a keyframe whose whole encoding is still being stored. Once the whole encoding is stored,
    a manifest with both encodings replaces this manifest."""

    @property
    def whole(self) -> Encoding | None:
        return next((way for way in self.ways if way.base is None), None)

    @property
    def delta(self) -> Encoding | None:
        return next((way for way in self.ways if way.base is not None), None)

    @property
    def base(self) -> PolicyVersion | None:
        return None if self.delta is None else self.delta.base

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all encodings. A chunk may appear more than once."""
        return tuple(chunk for way in self.ways for chunk in way.chunks)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors)


def payload_order(entry: TensorEntry) -> tuple[int, str]:
    """Return a tensor's sort key in the flat buffer: wide elements come first, so that every tensor is aligned."""
    return -WORD_BYTES[entry.dtype], entry.name


def tensors_digest(tensors: tuple[TensorEntry, ...]) -> str:
    """Return the digest of a version, computed from its entries. It equals `weights_digest` of the tensors."""
    return identity_digest(identities_of(tensors))


def identities_of(tensors: tuple[TensorEntry, ...]) -> list[Identity]:
    """Return name, dtype, shape and digest of each tensor: the input of the version's digest."""
    return [(entry.name, entry.dtype, entry.shape, entry.digest) for entry in tensors]


def name_of(version: PolicyVersion) -> str:
    """Return a description of a version for messages."""
    return f"version {version.number} ({version.digest[:8] or 'no digest'}, lineage {version.lineage})"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest's bytes. Raises WeightsFault for a manifest that `decode_manifest` would refuse."""
    check_manifest(manifest)
    data = msgspec.msgpack.encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsFault(
            f"the manifest of version {manifest.version.number} would have {len(data)} bytes, allowed are at most "
            f"{MAX_MANIFEST_BYTES}: raise weights.chunk_mb, because each chunk has an entry in the manifest"
        )
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Decode and check a manifest. Raises WeightsFault if the manifest is too long, unreadable or inconsistent."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsFault(f"refused a manifest: got {len(data)} bytes, allowed are at most {MAX_MANIFEST_BYTES}")
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsFault(f"refused a manifest that cannot be decoded: {error}") from error
    check_manifest(manifest)
    return manifest


def check_version(version: PolicyVersion) -> None:
    """Raise WeightsFault for an invalid digest, or a lineage or number that cannot be part of a file name."""
    _require(_LINEAGE.fullmatch(version.lineage), f"lineage {version.lineage[:80]!r}")
    _require(0 <= version.number < 2**53, f"number {version.number}")
    _require(_DIGEST.fullmatch(version.digest), f"version digest {version.digest[:80]!r}")


def check_manifest(manifest: Manifest) -> None:
    """Raise WeightsFault unless a manifest is consistent and within the limits."""
    _require(manifest.format == FORMAT, f"format {manifest.format}, not {FORMAT}")
    check_version(manifest.version)
    _check_tensors(manifest.tensors)
    digest = tensors_digest(manifest.tensors)
    _require(digest == manifest.version.digest, f"tensors of digest {digest[:8]}, not {manifest.version.digest[:8]}")
    _require(0 < len(manifest.ways) <= 2, f"{len(manifest.ways)} encodings, not 1 or 2")
    _require(len({way.base is None for way in manifest.ways}) == len(manifest.ways), "two encodings of one kind")
    for way in manifest.ways:
        if way.base is not None:
            check_version(way.base)
            is_earlier = way.base.lineage == manifest.version.lineage and way.base.number < manifest.version.number
            _require(is_earlier, f"a base that is not an earlier version of its lineage: {name_of(way.base)}")
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
    _require(sum(entry.num_bytes for entry in tensors) <= MAX_TOTAL_BYTES, f"tensors of over {MAX_TOTAL_BYTES} bytes")
    keys = [payload_order(entry) for entry in tensors]
    _require(all(a < b for a, b in pairwise(keys)), "tensors out of order, or two tensors of one name")
    _require(len({entry.name for entry in tensors}) == len(tensors), "two tensors of one name")


def _check_encoding(way: Encoding, tensors: tuple[TensorEntry, ...]) -> None:
    """Raise WeightsFault unless the parts cover the flat buffer in order, and the chunks contain exactly the parts."""
    _require(len(way.chunks) <= MAX_CHUNKS, f"{len(way.chunks)} chunks")
    for chunk in way.chunks:
        _require(_DIGEST.fullmatch(chunk.digest), f"chunk digest {chunk.digest[:80]!r}")
        _require(0 < chunk.size <= MAX_CHUNK_BYTES, f"a chunk of {chunk.size} bytes")
    _require(len(way.parts) <= MAX_CHUNKS, f"{len(way.parts)} parts")
    wanted, found = Counter[int](), Counter[int]()
    """Bytes of a word → bytes of all elements with such words."""
    for entry in tensors:
        wanted[WORD_BYTES[entry.dtype]] += entry.num_bytes
    last_word, last_bytes = 8, MIN_PART_BYTES
    for part in way.parts:
        _require(part.word in (1, 2, 4, 8) and part.word <= last_word, f"a part of words of {part.word} bytes")
        is_size = 0 < part.num_bytes <= MAX_PART_BYTES and part.num_bytes % part.word == 0
        _require(is_size, f"a part of {part.num_bytes} bytes")
        is_long = last_bytes >= MIN_PART_BYTES or part.word < last_word
        _require(is_long, f"a part of {last_bytes} bytes that is not the last of its word size")
        # If data is incompressible, its encoding is longer than the part, because the lengths of streams are added.
        # These lengths take far less than 2^16 bytes.
        _require(0 <= part.size <= MAX_PART_BYTES + 2**16, f"an encoded part of {part.size} bytes")
        _require(way.base is not None or part.coding == "full", f"a part of coding {part.coding!r} without a base")
        last_word, last_bytes = part.word, part.num_bytes
        found[part.word] += part.num_bytes
    _require(found == wanted, "parts that do not cover the tensors")
    coded = sum(part.size for part in way.parts)
    _require(coded == way.size, f"chunks of {way.size} bytes for encoded parts of {coded}")


def _require(condition: object, got: str) -> None:
    if not condition:
        raise WeightsFault(f"refused a manifest: it has {got}")
