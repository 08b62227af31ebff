"""Builds the simulation of a setting and runs it. If requested, logs events and commands, and keeps trace spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from baton.clock import TimedEvent
from baton.errors import UserError
from baton.files import write_whole
from baton.records.trace import Span
from baton.simulator.clock import NoProgress
from baton.simulator.inputs import Setting
from baton.simulator.network import NetworkFaults
from baton.simulator.pool import SimulatedEnginePool
from baton.simulator.result import Result, RunRecord, summarise
from baton.simulator.seeds import choices
from baton.simulator.simulation import NO_OPTIONS, EventObserver, RunOptions, Simulation
from baton.simulator.swarm import FaultInjector, Swarm
from baton.swarm import lease_events as ev


class EventLog(EventObserver):
    """The event log: one line of JSON per event and command, in order. Equal settings and seeds give equal logs."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def on_event(self, event: TimedEvent) -> None:
        self._add(b"> ", event)

    def on_command(self, command: msgspec.Struct) -> None:
        self._add(b"< ", command)

    def _add(self, mark: bytes, message: msgspec.Struct) -> None:
        hub = b"hub " if type(message).__module__ == ev.__name__ else b""
        self.lines.append(hub + mark + msgspec.json.encode(message))


class Spans:
    """A `Tracer` that keeps all spans in memory."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(self, name: str, actor: str, lane: int, begin_s: float, end_s: float, **facts: Any) -> None:
        self.spans.append(Span(name, actor, lane, begin_s, end_s, facts))


def build(setting: Setting, options: RunOptions = NO_OPTIONS) -> Simulation:
    """Build a simulation that is ready to run. Raises UserError for faults that do not fit the setting."""
    world = Simulation(setting, options)
    if setting.swarm is None:
        if options.faults:
            raise UserError(
                "faults apply to the workers of a swarm, and this recipe has none; set swarm.workers, such as "
                "swarm.workers=2"
            )
        world.port = SimulatedEnginePool(setting, world.clock, world.script, options.tracer)
    else:
        network = None
        if options.faults:
            network = NetworkFaults(options.faults, world.clock, choices(options.seed, "messages"))
        world.port = swarm = Swarm(world, network)
        FaultInjector(swarm, options.faults, choices(options.seed, "victims"))
    return world


def simulate(setting: Setting, options: RunOptions = NO_OPTIONS) -> RunRecord:
    """Simulate a run. Raises NoProgress if the run makes no progress."""
    return build(setting, options).run()


def run_request(
    setting: Setting,
    options: RunOptions,
    log_path: Path | None,
    *,
    is_traced: bool,
    window: tuple[int, int] | None = None,
) -> tuple[Result, Sequence[Span]]:
    """Simulate a run. Return the run's result and, if `is_traced`, the trace spans. The event log is written to
    `log_path` even if the run fails. `window`: as in `summarise`. Raises UserError if the run makes no progress."""
    log = EventLog() if log_path is not None else None
    tracer = Spans() if is_traced else None
    try:
        record = simulate(setting, replace(options, log=log, tracer=tracer))
    except NoProgress as error:
        raise UserError(f"the run makes no progress: {error}; seed {options.seed}") from error
    finally:
        if log_path is not None and log is not None:
            write_whole(log_path, b"\n".join(log.lines) + b"\n")
    return summarise(setting, record, window), tracer.spans if tracer is not None else ()
