"""Simulates runs in which every invariant is checked at every event.

If an invariant does not hold, `broken_law` searches for a small case that violates the same invariant, with few faults
and few train steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.simulator.clock import NoProgress
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import Setting
from baton.simulator.result import RunRecord
from baton.simulator.run import EventLog, build
from baton.simulator.simulation import RunOptions
from baton.simulator.swarm import Swarm
from tests.simulator.invariants import InvariantChecker, InvariantViolation

MOST_TRIES = 400
"""Maximum number of simulations in the search for a smaller case."""
SHOWN_LINES = 60
"""Number of lines of the event log that `ReproducedViolation.sentence` returns by default."""


def simulate_checked(setting: Setting, options: RunOptions) -> RunRecord:
    """Simulate a run. Raises NoProgress if the run makes no progress, and InvariantViolation if an invariant does not
    hold."""
    world = build(setting, options)
    world.watches.append(InvariantChecker(world, world.port if isinstance(world.port, Swarm) else None))
    return world.run()


@dataclass(frozen=True, slots=True)
class ReproducedViolation:
    """A violation that was reproduced, in the smallest case that was found."""

    law: str
    what: str
    seed: int
    steps: int
    faults: tuple[FaultSettings, ...]
    log: tuple[str, ...]
    """Every event and command up to the violation."""

    def sentence(self, shown: int = SHOWN_LINES) -> str:
        """Return a message with the invariant, the seed, the faults and the last `shown` lines of the log."""
        faults = "\n".join(f"  {f.model_dump(exclude_defaults=True)}" for f in self.faults) or "  none"
        left_out = max(0, len(self.log) - shown)
        lines = "\n".join(f"  {line}" for line in self.log[left_out:])
        before = f"  ({left_out} earlier lines)\n" if left_out else ""
        return (
            f"invariant violated: {self.law}, {self.what}\nseed {self.seed}, {self.steps} train steps, "
            f"{len(self.log)} events and commands; faults:\n{faults}\nlog:\n{before}{lines}"
        )


def broken_law(setting: Setting, options: RunOptions) -> ReproducedViolation | None:
    """Simulate and check all invariants. Return None, or the violation in the smallest case that was found."""
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
        simulate_checked(setting, replace(options, log=log))
        return None
    except InvariantViolation as error:
        law, what = error.law, f"at {error.at_s:.3f} s: {error.what}"
    except NoProgress as error:
        law, what = "progress", str(error)
    except AssertionError as error:  # raised by the scheduler or the lease table
        law, what = "an assertion", str(error)
    lines = tuple(line.decode() for line in log.lines)
    return ReproducedViolation(law, what, options.seed, setting.num_steps, tuple(faults), lines)
