"""Rice code (Rice 1979) for boolean masks. The code of a mask is nearly as short as the mask's entropy.

If a fraction d of the elements is true, at random positions, the gaps between true elements are geometrically
distributed. The code stores the low k bits of a gap unchanged and the higher bits in unary, with 2^k ≈ 0.69 / d. A Rice
code needs no table, so a mask with few true elements takes few bytes. Each block of gaps has its own k, because tensors
and rows change at different rates. A gap costs at most 0.13 bits more than its entropy. `BitWriter` also applies zstd,
which helps only if the positions are not random.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from baton.errors import WeightsFault
from baton.weights.bitstream import BitReader, BitWriter

Ints = NDArray[np.int64]

_BLOCK: Final = 128
"""Number of gaps that share one k."""
_MAX_K: Final = 31
_FEW: Final = 64
"""A mask with at most this number of elements is stored as one bit per element."""


def write_mask(writer: BitWriter, mask: NDArray[np.bool_]) -> None:
    """Append a mask."""
    write_positions(writer, np.flatnonzero(mask), mask.size)


def write_positions(writer: BitWriter, positions: Ints, n: int) -> None:
    """Append a mask of n elements: the positions of the true elements or, if there are fewer false elements, the
    positions of the false elements. `positions`: positions of the true elements, in ascending order."""
    is_rest = positions.size * 2 > n
    if n <= _FEW or is_rest:
        mask = np.zeros(n, np.bool_)
        mask[positions] = True
        if n <= _FEW:
            writer.bits(mask.view(np.uint8))
            return
        positions = np.flatnonzero(~mask)
    writer.number(positions.size * 2 + is_rest)
    if positions.size:
        gaps = positions.copy()
        gaps[1:] -= positions[:-1] + 1
        _write_gaps(writer, gaps)


def read_mask(reader: BitReader, n: int) -> Ints:
    """Read a mask of n elements; return the positions of the true elements. Raises WeightsFault for invalid data."""
    if n <= _FEW:
        return np.flatnonzero(reader.bits(n).view(np.bool_))
    count, is_rest = divmod(reader.number(n + 1), 2)  # `write_positions` writes at most half of the positions
    positions = _read_gaps(reader, count, n) if count else np.empty(0, np.int64)
    if not is_rest:
        return positions
    mask = np.ones(n, np.bool_)
    mask[positions] = False
    return np.flatnonzero(mask)


def _write_gaps(writer: BitWriter, gaps: Ints) -> None:
    starts = np.arange(0, gaps.size, _BLOCK)
    ks = _best_ks(gaps, starts)
    k = np.repeat(ks.astype(np.int8), _BLOCK)[: gaps.size]
    ends = gaps >> k
    ends[1:] += 1
    np.cumsum(ends, out=ends)
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    low: list[Any] = [np.empty(0, np.uint8)]
    for bit in range(int(ks.max())):
        having = gaps if ks.min() > bit else gaps[k > bit]
        low.append((having >> bit).astype(np.uint8) & 1)
    writer.stream(ks.astype(np.uint8))
    writer.number(unary.size)
    writer.bits(unary)
    writer.bits(np.concatenate(low))


def _best_ks(gaps: Ints, starts: Ints) -> Ints:
    """Return for each block the k with which its gaps take the fewest bits. Three values are tried: an estimate from
    the block's mean gap, and the two numbers next to the estimate."""
    sizes = np.diff(starts, append=gaps.size)
    mean = np.add.reduceat(gaps, starts) / sizes
    guess = np.clip(np.floor(np.log2(np.maximum(mean * 0.69, 1.0))).astype(np.int64), 0, _MAX_K - 1)
    candidates = [np.maximum(guess - 1, 0), guess, guess + 1]
    bits = []
    for k in candidates:
        high = np.repeat(k, sizes)
        np.right_shift(gaps, high, out=high)
        bits.append(k * sizes + np.add.reduceat(high, starts))
    best: Any = np.choose(np.argmin(bits, axis=0), candidates)
    return best  # type: ignore[no-any-return]


def _read_gaps(reader: BitReader, count: int, n: int) -> Ints:
    """Read `count` gaps, and return the resulting positions. Raises WeightsFault unless all positions are below `n`."""
    ks = reader.stream(-(-count // _BLOCK)).astype(np.int64)
    _require(ks.max() <= _MAX_K)
    # A gap takes (gap >> k) + 1 unary bits, which is at most gap + 1. The sum of gap + 1 over all gaps is at most n, so
    # a valid code has at most n unary bits.
    ones = np.flatnonzero(reader.bits(reader.number(n)).view(np.bool_))
    _require(ones.size == count)
    rows = np.zeros((ks.size, _BLOCK), np.int64)
    """One row for each block of gaps. The last row is padded."""
    gaps, num_padded = rows.reshape(-1)[:count], ks.size * _BLOCK - count
    gaps[0] = ones[0]
    np.subtract(ones[1:], ones[:-1], out=gaps[1:])
    gaps[1:] -= 1
    rows <<= ks[:, None]
    num_low = int(ks.sum()) * _BLOCK - int(ks[-1]) * num_padded
    _require(num_low <= n)  # `_best_ks` chooses a k above 0 only if k is at most the mean gap of the block
    bits, least, at = reader.bits(num_low), int(ks.min()), int(ks.min()) * count
    low = np.zeros(rows.shape, np.uint8 if ks.max() <= 8 else np.uint32)
    weights = (1 << np.arange(least)).astype(low.dtype)
    low.reshape(-1)[:count] = np.einsum("i,ij->j", weights, bits[:at].reshape(least, count))  # bits that all gaps have
    for bit in range(least, int(ks.max())):
        chosen = np.flatnonzero(ks > bit)
        shifted = np.zeros((chosen.size, _BLOCK), low.dtype)
        size = shifted.size - (num_padded if ks[-1] > bit else 0)
        np.left_shift(bits[at : at + size], bit, out=shifted.reshape(-1)[:size], dtype=low.dtype)
        low[chosen] |= shifted
        at += size
    rows |= low
    _require(gaps.max() < n)  # checked before the gaps are summed, so that the sum cannot overflow
    gaps += 1
    positions = np.cumsum(gaps, out=gaps)
    positions -= 1
    _require(positions[-1] < n)
    return positions


def _require(condition: object) -> None:
    if not condition:
        raise WeightsFault("an encoded part is damaged: its positions do not fit its number of elements")
