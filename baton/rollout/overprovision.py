"""Chooses over-provision in mode `partial` from measurements of the run (`overprovision = "auto"`).

Over-provision is the number of open groups divided by the number of groups in a batch. More open groups fill the slots
that become empty while the longest trajectories of a batch finish. The cost is a prefill per resumed trajectory, wider
decode steps, and tokens that become too old to be trained. Gain and cost depend on the response lengths and on the
engine, so occupancy alone does not determine the best value. A level is one of the values of over-provision in
`LEVELS`. `OverprovisionSearch` measures the rate of useful tokens at the present level and at its two neighbours, and
moves to the best level.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEVELS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
SETTLING = 2
"""After a change of the level, this number of batches is not measured, because the groups of these batches were opened
at the previous level."""
MEASURED = 2
"""Number of batches of one measurement."""
CLOSE = 0.02
"""The next higher level is chosen only if it increases the rate of useful tokens by at least this share, because more
open groups make tokens older."""
BUSY = 0.95
"""Occupancy above which more open groups do not increase throughput."""
CHANGED = 0.3
"""If the rate at the present level has changed by more than this share since its last measurement, the measurements of
all other levels are discarded."""
MEMORY = 64
"""Number of batches after which the measurement of a level is repeated."""


@dataclass(slots=True)
class SlotUse:
    """Use of the slots since the start of the process."""

    useful_tokens: int = 0
    """Number of generated tokens, without tokens that were masked, dropped or lost."""
    busy_slot_s: float = 0.0
    slot_s: float = 0.0
    """Number of slots, busy or free, integrated over the time in which at least one trajectory was leased."""


@dataclass(slots=True)
class OverprovisionSearch:
    """Searches the best level of over-provision during one run."""

    level: float
    most: float
    """Upper bound of the level."""
    _batches: int = 0
    _wait: int = SETTLING + 1
    """Number of calls to `next` until the measurement of the current level begins; during the measurement, number of
    calls until the measurement ends."""
    _before: SlotUse | None = None
    """`SlotUse` at the start of the measurement; None until the first measurement of a new level starts."""
    _rates: dict[float, tuple[float, int]] = field(default_factory=dict)
    """Last measurement of each level: useful tokens per slot-second, and the value of `_batches` at the end of the
    measurement."""
    _measured: dict[float, int] = field(default_factory=dict)
    """Level → number of batches at the end of its last measurement. Unlike `_rates`, this dict is never cleared."""

    def next(self, now: SlotUse) -> float:
        """Return the level of the next batch: the present level or one of its neighbours. Call once per batch."""
        self._batches += 1
        self._wait -= 1
        if self._wait > 0:
            return self.level
        self._wait, before, self._before = MEASURED, self._before, now
        if before is None:
            return self.level
        slot_s = max(1e-9, now.slot_s - before.slot_s)
        rate = (now.useful_tokens - before.useful_tokens) / slot_s
        known, _ = self._rates.get(self.level, (rate, 0))
        if abs(rate - known) > CHANGED * known:
            self._rates.clear()
        self._measured[self.level] = self._batches
        self._rates[self.level] = rate, self._batches
        chosen = self._choose(is_full=(now.busy_slot_s - before.busy_slot_s) / slot_s >= BUSY)
        if chosen != self.level:
            self.level, self._wait, self._before = chosen, SETTLING, None
        return self.level

    def _choose(self, *, is_full: bool) -> float:
        """Return the next level: the best measured neighbour if it is better than the present level (see `CLOSE`), else
        a level without a recent measurement, else the present level."""
        levels = [level for level in LEVELS if level <= self.most]
        at = levels.index(self.level)
        near = [self.level, *levels[at + 1 : at + 2 - is_full], *levels[max(0, at - 1) : at]]
        known = [level for level in near if level in self._rates]
        best = max(known, key=lambda level: self._rates[level][0] * (1 - CLOSE) ** levels.index(level))
        if best != self.level:
            return best
        oldest = self._batches - MEMORY
        to_measure = [level for level in near if level not in self._rates or self._rates[level][1] < oldest]
        # prefer the level measured longest ago, so that changing rates do not favour one direction
        return min(to_measure, key=lambda level: self._measured.get(level, 0), default=self.level)
