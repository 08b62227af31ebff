"""How many groups to keep open: the one setting of partial rollouts, chosen from what was measured.

More open groups fill the slots that a batch's long tail leaves empty. They cost a prefill for everything put down, and
tokens that grow too old to be trained. So: one step up while slots stand empty, one step down where either cost is more
than the gain, and otherwise as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 0.25
BUSY = 0.95
"""Slots are full enough at this occupancy: nothing is to be won."""
MAX_MASKED = 0.1
"""Share of a batch's tokens that may be too old to be trained."""
PREFILL_COST = 0.25
"""A prefilled token costs about this much of a decoded one: between 0.15 and 0.3 for 1 to 30 M parameters on a CPU
(benchmarks/engine), less on a GPU."""


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """One batch, as far as over-provision is concerned."""

    occupancy: float
    """Share of slot time in which a trajectory ran, from the wish for a batch to its delivery."""
    masked_frac: float
    """Share of its tokens that are too old to be trained."""
    reprefilled_frac: float
    """Tokens prefilled again after they were put down, per generated token."""


def next_overprovision(now: float, measured: BatchMeasurement, most: float) -> float:
    """Return the over-provision of the next batch, from 1 to `most`, at most one step from `now`."""
    is_costly = measured.masked_frac > MAX_MASKED or measured.reprefilled_frac * PREFILL_COST > 1 - measured.occupancy
    if measured.masked_frac > MAX_MASKED or (is_costly and measured.occupancy >= BUSY):
        return max(1.0, now - STEP)
    if measured.occupancy < BUSY and not is_costly:
        return min(most, now + STEP)
    return now
