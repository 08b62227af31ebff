"""Groups elements into buckets by their magnitude in the base version, because small weights change more often than
large weights.

An optimiser moves every weight by about the learning rate, and representable numbers are closer together near zero. In
bfloat16 at small learning rates, 1 % of the weights account for a third of all changes. The positions of changed
elements are therefore encoded separately for each bucket.

Publisher and receiver both have the base version, so only the limits of the buckets are sent. The magnitude of an
element is a number from 0 to 255: the element is shifted left by one bit, which removes its sign, and the highest byte
of the result is taken. For bfloat16 and float32, this byte is the exponent. The first bucket contains the elements
whose magnitude is below the first limit. The second bucket contains the elements whose magnitude is between the two
limits. Changed elements in no bucket are encoded by their positions among all elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
"""[n] unsigned integers of 1, 2, 4 or 8 bytes."""

MAX_BANDS: Final = 2
_SAMPLED: Final = 2**15
"""Number of elements that are sampled to estimate the sizes of buckets."""
_BAND_BITS: Final = 160.0
"""Approximate number of bits of each bucket, not counting its positions."""


def magnitude_buckets(base: Words, limits: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of the elements of each bucket. Bucket i contains the elements of magnitude at least
    `limits[i − 1]` and below `limits[i]`."""
    if not limits:
        return
    bits = base.itemsize * 8
    shifted = base << base.dtype.type(1)
    low = 0
    for limit in limits:
        inside = shifted < base.dtype.type(limit << (bits - 8))
        if low:
            inside &= shifted >= base.dtype.type(low << (bits - 8))
        yield np.flatnonzero(inside)
        low = limit


def bucket_limits(base: Words, changed: NDArray[np.uint8]) -> list[int]:
    """Return the limits of at most two buckets, chosen so that the positions of changed elements take the fewest bits.
    `changed`: the `magnitudes` of the changed elements.

    If k of n elements changed, their positions cost n·H2(k / n) bits, where H2 is the binary entropy. For each bucket,
    n is estimated from a sample.
    """
    step = max(1, base.size // _SAMPLED)
    sampled = np.bincount(magnitudes(base[::step]), minlength=256) * step
    hits = np.bincount(changed, minlength=256)
    n = np.concatenate([[0], np.cumsum(np.maximum(sampled, hits))]).astype(np.float64)
    k = np.concatenate([[0], np.cumsum(hits)]).astype(np.float64)
    used = np.flatnonzero(hits)
    if not used.size:
        return []
    edges = np.arange(used[0], min(255, used[-1]) + 1)
    first = _bits(n[edges], k[edges])
    last = _bits(np.full(edges.size, n[-1]), k[-1] - k[edges])  # cost of the changed elements outside all buckets
    between = _bits(n[None, edges] - n[edges, None], k[None, edges] - k[edges, None])
    between[np.tril_indices(edges.size)] = np.inf
    none = float(_bits(n[-1:], k[-1:])[0])
    one, two = first + last + _BAND_BITS, first[:, None] + between + last[None] + 2 * _BAND_BITS
    best_one, best_two = int(np.argmin(one)), np.unravel_index(int(np.argmin(two)), two.shape)
    if min(none, one[best_one]) <= two[best_two]:
        return [] if none <= one[best_one] else [int(edges[best_one])]
    return [int(edges[place]) for place in best_two]


def magnitudes(words: Words) -> NDArray[np.uint8]:
    """Return the magnitude of each word: its highest byte after a left shift by one bit, which removes the sign."""
    shifted = (words << words.dtype.type(1)) >> words.dtype.type(words.itemsize * 8 - 8)
    found: NDArray[np.uint8] = shifted.astype(np.uint8)
    return found


def _bits(n: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return n·H2(k / n), and 0 for empty ranges."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = n * np.log2(n) - k * np.log2(k) - (n - k) * np.log2(n - k)
    # x·log2(x) converges to 0 for x → 0, but numpy returns NaN at 0.
    full = (k <= 0) | (k >= n)
    return np.where(full, 0.0, np.nan_to_num(bits))
