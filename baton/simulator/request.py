"""Runs one simulation for `baton simulate`: writes the event log, returns the trace spans, and raises errors for
users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.errors import UserError
from baton.files import write_whole
from baton.records.trace import Span
from baton.simulator.find import InvariantBroken, broken_law
from baton.simulator.log import EventLog
from baton.simulator.result import Result, summarise
from baton.simulator.run import RunOptions, simulate
from baton.simulator.setting import Setting
from baton.simulator.tracing import Spans
from baton.simulator.world import NoProgress


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """A setting to simulate, and what to record of the run."""

    setting: Setting
    options: RunOptions = field(default_factory=RunOptions)
    log: Path | None = None
    """Path of the event log. The log is also written if the run fails."""
    is_traced: bool = False


def run_request(request: SimulationRequest) -> tuple[Result, Sequence[Span]]:
    """Simulate. Return the result and, if `is_traced`, the trace spans.

    Raises UserError if the run makes no progress. Raises InvariantBroken if an invariant does not hold; its message has
    the shortest event log found that reproduces the violation.
    """
    setting, options = request.setting, request.options
    log = EventLog() if request.log is not None else None
    tracer = Spans() if request.is_traced else None
    try:
        record = simulate(setting, replace(options, log=log, tracer=tracer))
    except NoProgress as error:
        raise UserError(f"the run makes no progress: {error}; seed {options.seed}") from error
    except AssertionError as error:
        found = broken_law(setting, options)
        raise InvariantBroken(found.sentence() if found is not None else str(error)) from error
    finally:
        if request.log is not None and log is not None:
            write_whole(request.log, b"\n".join(log.lines) + b"\n")
    return summarise(setting, record), tracer.spans if tracer is not None else ()
