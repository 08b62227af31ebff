"""Encodes a part (a byte range of a version's flat buffer) as the difference to the same part of the base version.
Decoding is bit-exact for every dtype. There are four codings of a part:

* "same" has no content: all elements equal those of the base.
* "sparse" contains the positions of the changed elements (`magnitude_buckets.py`, `rice.py`) and their differences.
* "dense" contains the differences of all elements.
* "full" contains the elements themselves.

The difference of two elements is the difference of their bit patterns as integers, modulo 2^bits. A weight that changed
to the next representable number has the difference ±1. NaN, infinities and -0.0 need no special case. The result of
decoding depends only on the base and the encoded bytes. The caller verifies the digests of the base and of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.errors import WeightsFault
from baton.weights.bitstream import BitReader, BitWriter, Bytes, Pieces, size_of
from baton.weights.magnitude_buckets import MAX_BANDS, Words, bucket_limits, magnitude_buckets, magnitudes
from baton.weights.manifest import Coding
from baton.weights.rice import Ints, read_mask, write_mask, write_positions

_SPARSE_BELOW: Final = {1: 2.0, 2: 2.0, 4: 0.6, 8: 0.6}
"""Number of bytes of a word → maximum fraction of changed elements for which `encode` tries "sparse". With the value
2.0, `encode` always tries "sparse".

If many elements of 4 or 8 bytes changed, their differences are large. "dense" is then as short as "sparse", and faster.
"""
_DENSE_ABOVE: Final = 0.25
"""Up to this fraction of changed elements, `encode` does not try "dense" and "full", because "sparse" is shorter."""
_BLOCK: Final = 2**18
"""Maximum number of words that are processed at a time. With smaller blocks, the threads acquire the GIL more often."""


class Coded(NamedTuple):
    """An encoded part."""

    coding: Coding
    data: Pieces
    num_changed: int
    """Number of elements that differ from the base. Without a base, this is the number of all elements."""


class Changes(NamedTuple):
    """The changed elements of a part of coding "same" or "sparse"."""

    positions: NDArray[np.int32]
    """[n] positions in the part, in ascending order."""
    steps: Words
    """[n] differences of these elements to the base."""


def encode(new: Bytes, base: Bytes | None, word: int) -> Coded:
    """Encode a part, whose words have `word` bytes, with the shortest coding. Without a base, the coding is "full"."""
    now = new.view(f"u{word}")
    if base is None:
        return Coded("full", _full(now), now.size)
    before = base.view(f"u{word}")
    changed = now != before
    count = int(np.count_nonzero(changed))
    if not count:
        return Coded("same", [], 0)
    found = []
    if count < _SPARSE_BELOW[word] * now.size:
        found.append(Coded("sparse", _sparse(now, before, changed), count))
    if count > _DENSE_ABOVE * now.size:
        found.append(Coded("dense", _dense(now, before), count))
        found.append(Coded("full", _full(now), count))
    return min(found, key=lambda coded: size_of(coded.data))


def decode_blocks(coding: Coding, coded: bytes | memoryview, base: Bytes, word: int) -> Iterator[tuple[int, Bytes]]:
    """Decode a part of coding "dense" or "full". Yield consecutive blocks: the first byte in the part, and the decoded
    bytes, which are valid until the next block. Raises WeightsFault for bytes that `encode` cannot have produced."""
    words = base.view(f"u{word}")
    reader = BitReader(coded)
    for block, read in _read_planes(reader, words):
        found = words[block] + _unfold(read) if coding == "dense" else _rotated(read, 1)
        yield block.start * word, found.view(np.uint8)
    reader.end()


def decode_changes(coding: Coding, coded: bytes | memoryview, base: Bytes, word: int) -> Changes:
    """Decode the changed elements of a part of coding "same" or "sparse", without applying them. Raises WeightsFault
    for bytes that `encode` cannot have produced."""
    reader, words = BitReader(coded), base.view(f"u{word}")
    positions, steps = np.empty(0, np.int64), np.empty(0, words.dtype)
    if coding == "sparse":
        positions = _read_changed(reader, words)
        steps = _read_steps(reader, positions.size, word)
    reader.end()
    if (positions[1:] < positions[:-1]).any():  # there are several magnitude buckets
        order = np.argsort(positions, kind="stable")
        positions, steps = positions[order], steps[order]
    return Changes(positions.astype(np.int32), steps)


def _sparse(now: Words, before: Words, changed: NDArray[np.bool_]) -> Pieces:
    writer = BitWriter()
    positions = _write_changed(writer, before, np.flatnonzero(changed))
    _write_steps(writer, now[positions] - before[positions])
    return [b"".join(writer.block)]


def _write_changed(writer: BitWriter, before: Words, rest: Ints) -> Ints:
    """Write the positions of changed elements (`rest`) to `writer`, one magnitude bucket after another. Return the
    positions in the order in which they were written."""
    high = magnitudes(before[rest])
    limits = bucket_limits(before, high)
    writer.number(len(limits))
    for limit in limits:
        writer.number(limit)
    found: list[Ints] = []
    for band, limit in zip(magnitude_buckets(before, limits), limits, strict=True):
        is_inside = high < limit
        found.append(rest[is_inside])
        write_positions(writer, np.searchsorted(band, found[-1]), band.size)
        rest, high = rest[~is_inside], high[~is_inside]
    write_positions(writer, rest, before.size)
    return np.concatenate([*found, rest]) if found else rest


def _read_changed(reader: BitReader, before: Words) -> Ints:
    limits = [reader.number(255) for _ in range(reader.number(MAX_BANDS))]
    found = [band[read_mask(reader, band.size)] for band in magnitude_buckets(before, limits)]
    found.append(read_mask(reader, before.size))
    if sum(part.size for part in found) > before.size:
        raise WeightsFault("an encoded part is damaged: it has more changes than elements")
    return np.concatenate(found)


def _dense(now: Words, before: Words) -> Pieces:
    return _planes(now, lambda block: _fold(now[block] - before[block]))


def _full(now: Words) -> Pieces:
    # The rotation moves the sign to the lowest bit, so that the exponent of bfloat16 and float32 is a whole byte, which
    # compresses well.
    return _planes(now, lambda block: _rotated(now[block], now.itemsize * 8 - 1))


def _fold(difference: Words) -> Words:
    signed = difference.view(f"i{difference.itemsize}")
    folded: Words = ((signed << 1) ^ (signed >> (difference.itemsize * 8 - 1))).view(difference.dtype)
    return folded


def _unfold(folded: Words) -> Words:
    one = folded.dtype.type(1)
    difference: Words = (folded >> one) ^ (~(folded & one) + one)
    return difference


def _rotated(words: Words, right: int) -> Words:
    """Rotate each word to the right by `right` bits."""
    bits = words.itemsize * 8
    kind = words.dtype.type
    rotated: Words = words >> kind(right)
    rotated |= words << kind(bits - right)
    return rotated


def _planes(words: Words, value: Callable[[slice], Words]) -> Pieces:
    """Return the encoded values: a stream of the highest bytes of all words, then a stream of the next bytes, and so
    on. `value`: function that returns the values to encode for a slice of `words`."""
    planes = [np.empty(words.size, np.uint8) for _ in range(words.itemsize)]
    for block in _blocks(words.size):
        found = value(block)
        for plane in planes:
            plane[block] = found  # the assignment keeps the lowest byte
            if plane is not planes[-1]:
                found >>= found.dtype.type(8)
    writer = BitWriter()
    while planes:
        writer.stream(planes.pop())
    return writer.block


def _read_planes(reader: BitReader, words: Words) -> Iterator[tuple[slice, Words]]:
    """Read values that `_planes` wrote. Yield (slice, values) for blocks of at most `_BLOCK` values. `words` gives the
    number of values and their dtype."""
    planes = [reader.stream(words.size) for _ in range(words.itemsize)]
    for block in _blocks(words.size):
        found = planes[0][block].astype(words.dtype)
        for plane in planes[1:]:
            found <<= words.dtype.type(8)
            found |= plane[block]
        yield block, found


def _blocks(size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `_BLOCK` words, so that intermediate values stay in the processor's cache."""
    for begin in range(0, size, _BLOCK):
        yield slice(begin, min(begin + _BLOCK, size))


def _write_steps(writer: BitWriter, steps: Words) -> None:
    """Append the nonzero differences `steps`: their signs, then their magnitudes in Elias gamma code (1975).

    The gamma code of an n-bit magnitude has n flags, which state the number of bits, and then the n - 1 bits below the
    highest bit. The first flags of all magnitudes are written as one mask, then the second flags as another mask, and
    so on. If nearly all or nearly no flags of a mask are set, `write_mask` takes less than one bit per flag.
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
    """Read `count` differences. To bound the memory, the function keeps the number of bits of each difference in one
    byte. A list of indices for each bit would take 8 bytes per entry, and in damaged data every difference may have all
    bits of a word."""
    is_negative = reader.bits(count) == 1
    num_low = np.zeros(count, np.uint8)
    rest: NDArray[Any] = np.arange(count, dtype=np.int32)
    num_levels = 0
    while rest.size and num_levels < word * 8:
        rest = rest[read_mask(reader, rest.size)]
        num_low[rest] += 1
        num_levels += 1
    if rest.size:
        raise WeightsFault("an encoded part is damaged: a difference has more bits than its word")
    packed, at = reader.packed(int(num_low.sum(dtype=np.int64))), 0
    steps: Words = np.ones(count, f"u{word}")
    kind = steps.dtype.type
    for bit in range(num_levels - 1):
        level = np.flatnonzero(num_low > bit)
        steps[level] += kind(1 << bit)  # these magnitudes have one more bit
        bits = np.unpackbits(packed[at // 8 : -(-(at + level.size) // 8)])[at % 8 :][: level.size]
        steps[level] |= bits.astype(steps.dtype) << kind(bit)
        at += level.size
    return np.where(is_negative, ~steps + kind(1), steps)
