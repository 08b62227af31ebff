"""Finds a small case that violates an invariant: few faults, few train steps, and the event log up to the violation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.errors import BatonError
from baton.simulator.faults import FaultSettings
from baton.simulator.invariants import InvariantViolation
from baton.simulator.log import EventLog
from baton.simulator.run import RunOptions, simulate
from baton.simulator.setting import Setting
from baton.simulator.world import NoProgress


class InvariantBroken(BatonError):
    """Raised if an invariant does not hold. The message has the seed and the event log up to the violation."""


MOST_TRIES = 400
SHOWN_LINES = 60


@dataclass(frozen=True, slots=True)
class ReproducedViolation:
    """A violation that was reproduced, in the smallest case found."""

    law: str
    what: str
    seed: int
    steps: int
    faults: tuple[FaultSettings, ...]
    log: tuple[str, ...]
    """Every event and command up to the violation."""

    def sentence(self, shown: int = SHOWN_LINES) -> str:
        """Return a text with the invariant, the seed, the faults and the last lines of the log."""
        faults = "\n".join(f"  {f.model_dump(exclude_defaults=True)}" for f in self.faults) or "  none"
        left_out = max(0, len(self.log) - shown)
        lines = "\n".join(f"  {line}" for line in self.log[left_out:])
        before = f"  ({left_out} earlier lines)\n" if left_out else ""
        return (
            f"invariant violated: {self.law}, {self.what}\nseed {self.seed}, {self.steps} train steps, "
            f"{len(self.log)} events and commands; faults:\n{faults}\nlog:\n{before}{lines}"
        )


def broken_law(setting: Setting, options: RunOptions) -> ReproducedViolation | None:
    """Simulate with all invariants checked. Return None if they hold, otherwise the violation in the smallest case
    found."""
    first = _try(setting, options)
    if first is None:
        return None
    tries = 0
    best = first
    if first.faults or options.faults:
        size = max(1, len(best.faults) // 2)
        while size and tries < MOST_TRIES:
            smaller = None
            for start in range(0, len(best.faults), size):
                fewer = best.faults[:start] + best.faults[start + size :]
                tries += 1
                smaller = _try(replace(setting, num_steps=best.steps), replace(options, faults=fewer))
                if smaller is not None and smaller.law == first.law:
                    break
                smaller = None
            if smaller is not None:
                best, size = smaller, min(size, max(1, len(smaller.faults)))
            else:
                size //= 2
    for steps in range(1, best.steps):
        shorter = _try(replace(setting, num_steps=steps), replace(options, faults=best.faults))
        if shorter is not None and shorter.law == first.law and len(shorter.log) <= len(best.log):
            return shorter
    return best


def _try(setting: Setting, options: RunOptions) -> ReproducedViolation | None:
    log = EventLog()
    faults: Sequence[FaultSettings] = options.faults
    try:
        simulate(setting, replace(options, laws=True, log=log))
        return None
    except InvariantViolation as error:
        law, what = error.law, f"at {error.at_s:.3f} s: {error.what}"
    except NoProgress as error:
        law, what = "progress", str(error)
    except AssertionError as error:  # raised by the scheduler or the lease table
        law, what = "an assertion", str(error)
    lines = tuple(line.decode() for line in log.lines)
    return ReproducedViolation(law, what, options.seed, setting.num_steps, tuple(faults), lines)
