"""Runs one simulation for `baton simulate`: writes the event log, returns the trace spans, and raises errors for users.

If an invariant does not hold, `broken_law` searches for a small case that violates the same invariant, with few faults
and few train steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.errors import BatonError, UserError
from baton.files import write_whole
from baton.records.trace import Span
from baton.simulator.clock import NoProgress
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import Setting
from baton.simulator.invariants import InvariantViolation
from baton.simulator.result import Result, summarise
from baton.simulator.run import EventLog, RunOptions, simulate

MOST_TRIES = 400
"""Maximum number of simulations in the search for a smaller case."""
SHOWN_LINES = 60
"""Number of lines of the event log that an error message contains."""


class InvariantBroken(BatonError):
    """Error for the user after an InvariantViolation, with the seed and the last lines of the event log."""


class Spans:
    """A `Tracer` that keeps all spans in memory."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        self.spans.append(Span(name, actor, lane, begin_s, end_s, facts))


def run_request(
    setting: Setting, options: RunOptions, log_path: Path | None, *, is_traced: bool
) -> tuple[Result, Sequence[Span]]:
    """Run the simulation. Return the result and, if `is_traced`, the trace spans. The event log is written to
    `log_path` even if the run fails.

    Raises UserError if the run makes no progress. Raises InvariantBroken if an invariant does not hold; the message
    describes the smallest case that was found.
    """
    log = EventLog() if log_path is not None else None
    tracer = Spans() if is_traced else None
    try:
        record = simulate(setting, replace(options, log=log, tracer=tracer))
    except NoProgress as error:
        raise UserError(f"the run makes no progress: {error}; seed {options.seed}") from error
    except AssertionError as error:
        found = broken_law(setting, options)
        raise InvariantBroken(found.sentence() if found is not None else str(error)) from error
    finally:
        if log_path is not None and log is not None:
            write_whole(log_path, b"\n".join(log.lines) + b"\n")
    return summarise(setting, record), tracer.spans if tracer is not None else ()


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
