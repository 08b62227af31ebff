"""Decode attention on a CPU in classes of rows with similar lengths. Each class scans positions only up to the length
of its own longest row.

Rows of similar length are kept in adjacent slots. The keys and values of a class are then a view of the slots, without
a copy. `LengthClasses` chooses at most three classes, and the order of rows that these classes need. The choices are
reproducible, because they depend on numbers of positions and not on measured times. Scans of all allowed lengths
compute identical bits (`network.py`), so the result of a row does not depend on the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from baton.cost.generate import CLASS_VALUES

Ints = np.ndarray[Any, np.dtype[np.int64]]
_COPY_COST = 2
"""Cost of copying one position to another slot. The unit of all costs in this file is the time to scan one position."""
HORIZON_STEPS = 16
"""Number of decode steps between two choices of the classes. Rows move only if the moves cost less than the shorter
scans save in this number of steps."""


class SlotRange(NamedTuple):
    """Adjacent slots whose rows scan the same number of positions."""

    begin: int
    end: int
    """Index of the first slot after the range."""
    kv_length: int


class LengthClasses:
    """The classes of a decode step."""

    def __init__(self, kv_lengths: Sequence[int], values_per_position: int) -> None:
        """Start with one class. `kv_lengths`: allowed numbers of positions that a class may scan, ascending.
        `values_per_position`: kv_heads × head_dim."""
        self._kv_lengths = np.array(kv_lengths, dtype=np.int64)
        self._pairs = np.triu_indices(len(kv_lengths))
        """All pairs (i, j) with i ≤ j. Each pair defines three classes: the first scans `kv_lengths[i]` positions, the
        second scans `kv_lengths[j]` positions, and the third scans the length of the longest row. If i = j, the first
        two are one class."""
        self._class_cost = CLASS_VALUES // values_per_position
        """Cost of each additional class in a decode step. The unit is the time to scan one position."""
        self.ends: tuple[int, ...] = ()
        """For each class except the last: index of the first slot after the class. Ascending."""

    def ranges(self, length_W: Ints) -> list[SlotRange]:
        """Return the slots and the number of scanned positions of each class. The result is empty if classes save
        nothing. `length_W`: number of positions that the row of each slot attends to."""
        ends = [*(end for end in self.ends if end < len(length_W)), len(length_W)]
        longest = np.maximum.reduceat(length_W, [0, *ends[:-1]])
        lengths = self._kv_lengths[np.searchsorted(self._kv_lengths, longest)].tolist()
        ranges = [SlotRange(*found) for found in zip((0, *ends), ends, lengths, strict=False)]
        return ranges if self._cost(ranges) < len(length_W) * max(lengths) else []

    def order(self, length_W: Ints) -> Ints | None:
        """Choose the classes again. Return the new order of the rows, or None if no row moves. With the returned
        `order`, slot i receives the row of slot `order[i]`. A row moves only if its slot is in the wrong class."""
        index_W = np.searchsorted(self._kv_lengths, length_W)
        chosen, end_C, best = self._best_classes(index_W)
        class_W = np.searchsorted(chosen, index_W)
        moved = np.flatnonzero(class_W != np.searchsorted(end_C, np.arange(len(length_W)), side="right"))
        now = self._cost(self.ranges(length_W)) or len(length_W) * int(self._kv_lengths[index_W.max()])
        copied = length_W[moved].sum() * _COPY_COST + (self._class_cost if len(moved) else 0)
        if (now - best) * HORIZON_STEPS <= copied:
            return None
        self.ends = tuple(end_C[:-1].tolist())
        order = np.arange(len(length_W))
        order[moved] = moved[np.argsort(class_W[moved], kind="stable")]
        return order if len(moved) else None

    def _best_classes(self, index_W: Ints) -> tuple[Ints, Ints, int]:
        """Sort the rows by length and divide them into the cheapest classes. Return three values. The first value has
        an index in `_kv_lengths` for each class: the length that the class scans. The second value has the number of
        rows up to the end of each class. The third value is the cost of a decode step."""
        last, lengths = index_W.max(), self._kv_lengths
        end_N = np.bincount(index_W, minlength=len(lengths)).cumsum()
        first, second = self._pairs
        cost = end_N[first] * lengths[first] + (end_N[second] - end_N[first]) * lengths[second]
        cost += (end_N[-1] - end_N[second]) * lengths[last]
        cost += self._class_cost * ((first < second) * 1 + (second < last))
        best = cost.argmin()
        chosen = np.unique([min(first[best], last), min(second[best], last), last])
        return chosen, end_N[chosen], int(cost[best])

    def _cost(self, ranges: Sequence[SlotRange]) -> int:
        return sum((r.end - r.begin) * r.kv_length for r in ranges) + self._class_cost * max(0, len(ranges) - 1)
