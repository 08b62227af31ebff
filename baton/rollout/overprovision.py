"""Adapts over-provision in mode `partial` to measurements (overprovision = "auto").

Over-provision is the number of open groups divided by the number of groups in a batch. More open groups fill the slots
that become empty while the longest trajectories of a batch finish. They cost one prefill per resumed trajectory, and
some tokens become too old to be trained. Over-provision therefore increases by one step while slots are empty, and
decreases by one step when the costs exceed the gain.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 0.25
BUSY = 0.95
"""Occupancy above which more open groups do not increase throughput."""
MAX_MASKED = 0.1
"""Maximum acceptable share of a batch's tokens that are too old to be trained."""
PREFILL_COST = 0.25
"""Cost of a prefilled token relative to a decoded one: between 0.15 and 0.3 for 1 to 30 M parameters on a CPU
(benchmarks/engine), less on a GPU."""


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """Measurements of one batch that determine the next over-provision."""

    occupancy: float
    """Share of slot time in which a trajectory was leased, between the deliveries of two batches."""
    masked_frac: float
    """Share of the batch's tokens that are too old to be trained."""
    reprefilled_frac: float
    """Number of tokens prefilled again by resumes, divided by the number of generated tokens."""


def next_overprovision(now: float, measured: BatchMeasurement, most: float) -> float:
    """Return the over-provision of the next batch: between 1 and `most`, and at most one step from `now`."""
    is_costly = measured.masked_frac > MAX_MASKED or measured.reprefilled_frac * PREFILL_COST > 1 - measured.occupancy
    if measured.masked_frac > MAX_MASKED or (is_costly and measured.occupancy >= BUSY):
        return max(1.0, now - STEP)
    if measured.occupancy < BUSY and not is_costly:
        return min(most, now + STEP)
    return now
