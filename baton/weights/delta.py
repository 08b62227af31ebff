"""A piece of a version's bytes, coded against the same piece of its base; exact to the bit, whatever the bits mean.

    same    nothing: all elements are those of the base
    sparse  which elements changed (`magnitude_buckets.py`, `rice.py`), and by how much
    dense   by how much each element changed
    full    the elements themselves

"How much" is the difference of two bit patterns as integers, modulo 2^bits: a weight that moved to the next number of
its dtype has ±1, and NaN, infinities and -0.0 are integers like any other. Decoding is a function of the base and of
the coded bytes alone; who calls it has verified the base by its digest, and verifies the result.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.errors import WeightsFault
from baton.weights.bitstream import BitReader, BitWriter, Bytes
from baton.weights.magnitude_buckets import MAX_BANDS, bucket_limits, magnitude_buckets
from baton.weights.manifest import Coding
from baton.weights.rice import read_mask, write_mask

Words = NDArray[Any]
"""[n] unsigned integers of 1, 2, 4 or 8 bytes."""

_SPARSE_BELOW: Final = {1: 2.0, 2: 2.0, 4: 0.6, 8: 0.6}
"""By bytes of a word: density from which on "sparse" is not worth a try. Of wide words, whose differences are large
where most of them change, "dense" is as short and quicker."""
_DENSE_ABOVE: Final = 0.25
"""Density up to which a dense difference, or the whole, is not worth one."""


class Coded(NamedTuple):
    """A coded piece."""

    coding: Coding
    data: bytes
    num_changed: int
    """Elements that are not those of the base; all, without one."""


def encode(new: Bytes, base: Bytes | None, word: int) -> Coded:
    """Return the shortest coding of a piece of words of `word` bytes. Without a base it is "full"."""
    now = new.view(f"u{word}")
    if base is None:
        return Coded("full", _full(now), now.size)
    before = base.view(f"u{word}")
    changed = now != before
    count = int(np.count_nonzero(changed))
    if not count:
        return Coded("same", b"", 0)
    found = []
    if count < _SPARSE_BELOW[word] * now.size:
        found.append(Coded("sparse", _sparse(now, before, changed), count))
    if count > _DENSE_ABOVE * now.size:
        found.append(Coded("dense", _dense(now, before), count))
        found.append(Coded("full", _full(now), count))
    return min(found, key=lambda coded: len(coded.data))


def decode(coding: Coding, coded: bytes, piece: Bytes, word: int) -> None:
    """Turn a piece that holds the base into the new one. Raises WeightsFault for bytes that `encode` cannot have made.

    piece: [bytes] changed in place; what it holds after a fault is neither.
    """
    words = piece.view(f"u{word}")
    reader = BitReader(coded)
    match coding:
        case "same":
            pass
        case "sparse":
            positions = _read_changed(reader, words)
            words[positions] += _read_steps(reader, positions.size, word)
        case "dense":
            words += _unfold(_read_planes(reader, words.size, word))
        case "full":
            words[:] = _rotated(_read_planes(reader, words.size, word), 1)
    reader.end()


def _sparse(now: Words, before: Words, changed: NDArray[np.bool_]) -> bytes:
    writer = BitWriter()
    positions = _write_changed(writer, before, changed)
    _write_steps(writer, now[positions] - before[positions])
    return writer.block()


def _write_changed(writer: BitWriter, before: Words, changed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Append which elements changed, band by band; return their positions in that order."""
    limits = bucket_limits(before, np.flatnonzero(changed))
    writer.number(len(limits))
    for limit in limits:
        writer.number(limit)
    found, rest = [], changed
    for band in magnitude_buckets(before, limits):
        has_changed = changed[band]
        write_mask(writer, has_changed)
        found.append(band[has_changed])
        rest = rest if found[:-1] else changed.copy()
        rest[band] = False
    write_mask(writer, rest)
    return np.concatenate([*found, np.flatnonzero(rest)])


def _read_changed(reader: BitReader, before: Words) -> NDArray[np.int64]:
    limits = [reader.number(255) for _ in range(reader.number(MAX_BANDS))]
    found = [band[read_mask(reader, band.size)] for band in magnitude_buckets(before, limits)]
    return np.concatenate([*found, read_mask(reader, before.size)])


def _dense(now: Words, before: Words) -> bytes:
    writer = BitWriter()
    _write_planes(writer, _fold(now - before))
    return writer.block()


def _full(now: Words) -> bytes:
    """The sign goes to the lowest bit: the exponent then lies in bytes of its own, which squeeze well."""
    writer = BitWriter()
    _write_planes(writer, _rotated(now, now.itemsize * 8 - 1))
    return writer.block()


def _fold(difference: Words) -> Words:
    signed = difference.view(f"i{difference.itemsize}")
    folded: Words = ((signed << 1) ^ (signed >> (difference.itemsize * 8 - 1))).view(difference.dtype)
    return folded


def _unfold(folded: Words) -> Words:
    one = folded.dtype.type(1)
    difference: Words = (folded >> one) ^ (~(folded & one) + one)
    return difference


def _rotated(words: Words, right: int) -> Words:
    """Rotate the bits of each word to the right."""
    bits = words.itemsize * 8
    kind = words.dtype.type
    rotated: Words = (words >> kind(right)) | (words << kind(bits - right))
    return rotated


def _write_planes(writer: BitWriter, words: Words) -> None:
    """One stream for each byte of the words, the highest first."""
    planes = words.view(np.uint8).reshape(words.size, words.itemsize)
    for byte in reversed(range(words.itemsize)):
        writer.stream(planes[:, byte])


def _read_planes(reader: BitReader, count: int, word: int) -> Words:
    planes = np.empty((count, word), np.uint8)
    for byte in reversed(range(word)):
        planes[:, byte] = reader.stream(count)
    return planes.reshape(-1).view(f"u{word}")


def _write_steps(writer: BitWriter, steps: Words) -> None:
    """Append differences other than 0, most of them small: signs, then magnitudes after Elias' gamma code (1975).

    A magnitude of n bits says n - 1 times that there is one more, and gives the bits below its highest. Who has one
    more among those that had one before is a mask like any other, so that saying it costs what its share is worth.
    """
    one = steps.dtype.type(1)
    is_negative = (steps >> steps.dtype.type(steps.itemsize * 8 - 1)) == one
    writer.bits(is_negative.view(np.uint8))
    rest = np.where(is_negative, ~steps + one, steps)
    low: list[Any] = []
    for bit in range(steps.itemsize * 8):
        if not rest.size:
            break
        has_more = rest >> steps.dtype.type(bit) > one
        write_mask(writer, has_more)
        rest = rest[has_more]
        low.append((rest >> steps.dtype.type(bit)).astype(np.uint8) & 1)
    writer.bits(np.concatenate(low) if low else np.empty(0, np.uint8))


def _read_steps(reader: BitReader, count: int, word: int) -> Words:
    is_negative = reader.bits(count) == 1
    levels: list[NDArray[np.int64]] = []
    rest = np.arange(count)
    while rest.size and len(levels) < word * 8:
        rest = rest[read_mask(reader, rest.size)]
        levels.append(rest)
    if rest.size:
        raise WeightsFault("a coded part is damaged: a difference has more bits than its word")
    bits, at = reader.bits(sum(level.size for level in levels)), 0
    steps: Words = np.ones(count, f"u{word}")
    kind = steps.dtype.type
    for bit, level in enumerate(levels):
        steps[level] += kind(1 << bit)  # the highest bit moves up
        steps[level] |= bits[at : at + level.size].astype(steps.dtype) << kind(bit)
        at += level.size
    return np.where(is_negative, ~steps + kind(1), steps)
