"""Builds and runs a simulation of a setting. Also logs the simulation's events and commands, and keeps its trace
spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from baton.clock import TimedEvent
from baton.errors import UserError
from baton.files import write_whole
from baton.records.trace import Span, Tracer
from baton.rollout.scheduler import RolloutScheduler
from baton.simulator.clock import NoProgress
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import Setting
from baton.simulator.network import NetworkFaults
from baton.simulator.pool import SimulatedEnginePool
from baton.simulator.result import Result, RunRecord, summarise
from baton.simulator.seeds import choices
from baton.simulator.simulation import EventObserver, Simulation
from baton.simulator.swarm import FaultInjector, Swarm
from baton.swarm import lease_events as ev
from baton.swarm.leases import LeaseTable


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


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Seed, faults and observers of a simulated run."""

    seed: int = 0
    faults: Sequence[FaultSettings] = ()
    log: EventLog | None = None
    tracer: Tracer | None = None
    make_scheduler: Callable[..., RolloutScheduler] = field(default=RolloutScheduler)
    make_table: Callable[..., LeaseTable] = field(default=LeaseTable)
    on_step: Callable[[int, int], None] = lambda step, num_steps: None
    """Called after each new train step, with its number and the number of train steps of the run."""


def build(setting: Setting, options: RunOptions | None = None) -> Simulation:
    """Build a simulation that is ready to run. Raises UserError for faults that do not fit the setting."""
    options = options or RunOptions()
    world = Simulation(
        setting,
        options.seed,
        has_restarts=any(fault.kind == "restart" for fault in options.faults),
        tracer=options.tracer,
        make_scheduler=options.make_scheduler,
    )
    world.on_step = options.on_step
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
        world.port = swarm = Swarm(world, network, options.tracer, options.make_table)
        FaultInjector(swarm, options.faults, choices(options.seed, "victims"))
    if options.log is not None:
        world.watches.append(options.log)
    return world


def simulate(setting: Setting, options: RunOptions | None = None) -> RunRecord:
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
