"""Small weights change more often than large ones: where the coder of positions looks at them apart.

An optimiser moves every weight by about the learning rate, and the next number of a dtype is the nearer the smaller a
weight is; in bfloat16 at small learning rates, one weight in a hundred has a third of all changes. Both sides hold the
base, so a band is a range of the base's magnitudes, and its limit is all that needs to be said: the highest byte of an
element without its sign, which for bfloat16 and float32 is the exponent. What is below the first limit is one band,
from there to the second the next; the rest is looked for among all elements, which costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]

MAX_BANDS: Final = 2
"""Besides the rest."""
_SAMPLED: Final = 2**15
"""Elements that the sizes of magnitude_buckets are guessed from."""
_BAND_BITS: Final = 160.0
"""What a band costs whatever is in it, about."""


def magnitude_buckets(base: Words, limits: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Return the positions of each band's elements: those of a magnitude from the last limit to its own."""
    if not limits:
        return
    bits = base.itemsize * 8
    magnitudes = base << base.dtype.type(1)
    low = 0
    for limit in limits:
        inside = magnitudes < base.dtype.type(limit << (bits - 8))
        if low:
            inside &= magnitudes >= base.dtype.type(low << (bits - 8))
        yield np.flatnonzero(inside)
        low = limit


def bucket_limits(base: Words, changed: NDArray[np.int64]) -> list[int]:
    """Return the limits, at most two, that leave the fewest bits to say which elements changed.

    changed: positions. Counts n and k of a range of magnitudes cost n·H2(k / n) bits; n is guessed from a sample.
    """
    step = max(1, base.size // _SAMPLED)
    sampled = np.bincount(_highest_byte(base[::step]), minlength=256) * step
    hits = np.bincount(_highest_byte(base[changed]), minlength=256)
    n = np.concatenate([[0], np.cumsum(np.maximum(sampled, hits))]).astype(np.float64)
    k = np.concatenate([[0], np.cumsum(hits)]).astype(np.float64)
    used = np.flatnonzero(hits)
    if not used.size:
        return []
    edges = np.arange(used[0], min(255, used[-1]) + 1)
    first = _bits(n[edges], k[edges])
    last = _bits(np.full(edges.size, n[-1]), k[-1] - k[edges])  # among all elements
    between = _bits(n[None, edges] - n[edges, None], k[None, edges] - k[edges, None])
    between[np.tril_indices(edges.size)] = np.inf
    none = float(_bits(n[-1:], k[-1:])[0])
    one, two = first + last + _BAND_BITS, first[:, None] + between + last[None] + 2 * _BAND_BITS
    best_one, best_two = int(np.argmin(one)), np.unravel_index(int(np.argmin(two)), two.shape)
    if min(none, one[best_one]) <= two[best_two]:
        return [] if none <= one[best_one] else [int(edges[best_one])]
    return [int(edges[place]) for place in best_two]


def _highest_byte(words: Words) -> NDArray[np.int64]:
    found: NDArray[np.int64] = ((words << words.dtype.type(1)) >> words.dtype.type(words.itemsize * 8 - 8)).astype(int)
    return found


def _bits(n: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    """n·H2(k / n), and 0 for empty ranges."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = n * np.log2(n) - k * np.log2(k) - (n - k) * np.log2(n - k)
    # x·log2(x) is 0 at 0, where numpy has no number
    full = (k <= 0) | (k >= n)
    result: NDArray[np.float64] = np.where(full, 0.0, np.nan_to_num(bits))
    return result
