"""Adapts over-provision, the number of open groups in mode `partial`, to measurements (overprovision = "auto").

More open groups fill the slots that the long tail of a batch leaves empty. They cost a prefill per resumed trajectory
and tokens that become too old to be trained. The over-provision therefore goes one step up while slots are empty, one
step down where a cost exceeds the gain, and otherwise stays.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 0.25
BUSY = 0.95
"""Occupancy above which more open groups gain nothing."""
MAX_MASKED = 0.1
"""Largest acceptable share of a batch's tokens that are too old to be trained."""
PREFILL_COST = 0.25
"""Cost of a prefilled token relative to a decoded one: between 0.15 and 0.3 for 1 to 30 M parameters on a CPU
(benchmarks/engine), less on a GPU."""


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """Measurements of one batch that determine the next over-provision."""

    occupancy: float
    """Share of slot time in which a trajectory was leased, between two deliveries."""
    masked_frac: float
    """Share of the batch's tokens that are too old to be trained."""
    reprefilled_frac: float
    """Tokens prefilled again in resumes, per generated token."""


def next_overprovision(now: float, measured: BatchMeasurement, most: float) -> float:
    """Return the over-provision of the next batch, from 1 to `most`, at most one step from `now`."""
    is_costly = measured.masked_frac > MAX_MASKED or measured.reprefilled_frac * PREFILL_COST > 1 - measured.occupancy
    if measured.masked_frac > MAX_MASKED or (is_costly and measured.occupancy >= BUSY):
        return max(1.0, now - STEP)
    if measured.occupancy < BUSY and not is_costly:
        return min(most, now + STEP)
    return now
