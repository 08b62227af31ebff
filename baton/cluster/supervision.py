"""Decides, from events of processes and machines, when to restart a worker process, when to stop restarting it, and
when to make a new plan.

`Supervision` receives events and returns commands, without a clock and without I/O. The field `at_s` of an event is
the event's time on the caller's clock.

    ProcessStarted ─▶ up ──ProcessEnded──▶ wait, doubled each time ──SupervisionTick──▶ StartProcess ─▶ …
                              │ more than max_failures in a row
                              └─▶ StopProcess; the others continue; if none is left, Fail
    MachineLost ─▶ its processes are removed ─┬─ it ran a rank ─▶ TrainerLost
    MachineJoined ────────────────────────────┴─ settle_s without changes ─▶ Replan ─▶ Planned ─▶ StopProcess,
                                                                             StartProcess, SetWorkerWeight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from baton.clock import RestartRule, TimedEvent
from baton.cluster.placement import Placement, ProcessSpec, change

# ---- events ----------------------------------------------------------------------------------------------------------


class ProcessStarted(TimedEvent, frozen=True, tag="Began"):
    """A process is running."""

    name: str


class ProcessEnded(TimedEvent, frozen=True, tag="Ended"):
    """A process or its Ray actor has ended, or could not be started."""

    name: str
    cause: str


class MachineLost(TimedEvent, frozen=True, tag="MachineLost"):
    """A machine has left the cluster."""

    machine: str


class MachineJoined(TimedEvent, frozen=True, tag="MachineJoined"):
    """A machine with a known GPU type has joined."""

    machine: str


class Planned(TimedEvent, frozen=True, tag="Planned"):
    """Result of Replan: the workers of the new plan, or None to keep the current workers."""

    workers: tuple[ProcessSpec, ...] | None
    words: str


class SupervisionTick(TimedEvent, frozen=True, tag="Tick"):
    """Periodic event that gives the current time."""


Event = ProcessStarted | ProcessEnded | MachineLost | MachineJoined | Planned | SupervisionTick

# ---- commands --------------------------------------------------------------------------------------------------------


class StartProcess(msgspec.Struct, frozen=True, tag="Begin"):
    """Start a process."""

    spec: ProcessSpec = msgspec.field(name="post")


class StopProcess(msgspec.Struct, frozen=True, tag="End"):
    """Stop a process after it has reported its tokens. If the process's machine is lost, only remove the process."""

    name: str
    cause: str
    is_reachable: bool = msgspec.field(default=True, name="is_there")
    """False if the machine of the process is lost."""


class SetWorkerWeight(msgspec.Struct, frozen=True, tag="Weigh"):
    """Set the relative speed of a running worker to the value that a new plan expects (`ProcessSpec.weight`)."""

    spec: ProcessSpec = msgspec.field(name="post")


class Replan(msgspec.Struct, frozen=True, tag="Replan"):
    """Compute a new plan for the current machines."""

    lost: tuple[str, ...]
    joined: tuple[str, ...]


class TrainerLost(msgspec.Struct, frozen=True, tag="TrainerLost"):
    """Restart the trainer from its last checkpoint, because a machine that ran a trainer rank has left the cluster."""

    machine: str


class Fail(msgspec.Struct, frozen=True, tag="Fail"):
    """End the run with an error."""

    cause: str


class LogMessage(msgspec.Struct, frozen=True, tag="Say"):
    """Print a line for the user."""

    text: str


Command = StartProcess | StopProcess | SetWorkerWeight | Replan | TrainerLost | Fail | LogMessage


@dataclass(frozen=True, slots=True)
class SupervisionRules(RestartRule):
    """The limits and delays of `Supervision`."""

    settle_s: float = 2.0
    """A new plan is made when no machine has joined or left for this number of seconds, because machines often join or
    leave together."""


@dataclass(slots=True)
class _Watched:
    spec: ProcessSpec
    failures: int = 0
    since_s: float | None = None
    """Time when the process started; None while it does not run."""
    begin_s: float | None = None
    """Time when the process is restarted; None if no restart is scheduled."""


class Supervision:
    """State machine that supervises the workers and machines of a run."""

    def __init__(self, placement: Placement, rules: SupervisionRules | None = None) -> None:
        self.rules = rules or SupervisionRules()
        self._training = placement.training_machines
        self._specs = {spec.name: _Watched(spec) for spec in placement.workers}
        self._lost, self._joined = set[str](), set[str]()
        """Names of the machines that left, and of those that joined, after the last replan began."""
        self._changed_s: float | None = None
        """Time when a machine last left or joined; None if no machine left or joined after the last replan began."""
        self._is_planning = False

    def start(self) -> list[Command]:
        return [StartProcess(watched.spec) for watched in self._specs.values()]

    def handle(self, event: Event) -> list[Command]:
        """Return the commands that follow from an event, in order. Events of removed processes are ignored."""
        return list(self._apply_event(event))

    def _apply_event(self, event: Event) -> Iterator[Command]:
        match event:
            case ProcessStarted(at_s=at_s, name=name):
                if watched := self._specs.get(name):
                    watched.since_s, watched.begin_s = at_s, None
            case ProcessEnded():
                yield from self._on_process_ended(event)
            case MachineLost():
                yield from self._on_machine_lost(event)
            case MachineJoined(at_s=at_s, machine=machine):
                yield LogMessage(f"machine {machine} has joined")
                self._lost.discard(machine)
                self._joined.add(machine)
                self._changed_s = at_s
            case Planned():
                yield from self._planned(event)
            case SupervisionTick():
                yield from self._on_tick(event)
            case _:
                assert_never(event)

    @property
    def workers(self) -> tuple[ProcessSpec, ...]:
        """The current workers, including those that wait for a restart."""
        return tuple(watched.spec for watched in self._specs.values())

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _on_process_ended(self, event: ProcessEnded) -> Iterator[Command]:
        watched = self._specs.get(event.name)
        if watched is None or watched.begin_s is not None:
            return
        lived_s, watched.since_s = None if watched.since_s is None else event.at_s - watched.since_s, None
        watched.failures, wait_s = self.rules.after_end(watched.failures, lived_s)
        if wait_s is None:
            yield from self._give_up(watched, event.cause)
            return
        watched.begin_s = event.at_s + wait_s
        yield LogMessage(f"{event.name} on {watched.spec.machine} {event.cause}; restarting it in {wait_s:g} s")

    def _give_up(self, watched: _Watched, cause: str) -> Iterator[Command]:
        name = watched.spec.name
        del self._specs[name]
        words = f"{name} on {watched.spec.machine} ended {watched.failures} times in a row: {cause}"
        yield StopProcess(name, "is not restarted again")
        if self._specs or self._changed_s is not None or self._is_planning:
            yield LogMessage(f"{words}; it is not restarted again, the other workers continue")
        else:
            yield Fail(f"no worker is left; {words}")

    # ---- machines ----------------------------------------------------------------------------------------------------

    def _on_machine_lost(self, event: MachineLost) -> Iterator[Command]:
        gone = [watched.spec.name for watched in self._specs.values() if watched.spec.machine == event.machine]
        for name in gone:
            del self._specs[name]
            yield StopProcess(name, f"has lost its machine {event.machine}", is_reachable=False)
        words = f" with {', '.join(gone)}" if gone else ""
        yield LogMessage(f"machine {event.machine} has left the cluster{words}")
        if event.machine in self._training:
            yield TrainerLost(event.machine)
        self._joined.discard(event.machine)
        self._lost.add(event.machine)
        self._changed_s = event.at_s

    def _planned(self, event: Planned) -> Iterator[Command]:
        self._is_planning = False
        yield LogMessage(event.words)
        if event.workers is not None:  # some of their machines may have left while the planner ran
            yield from self._apply([spec for spec in event.workers if spec.machine not in self._lost])
        if not self._specs and self._changed_s is None:
            yield Fail("no worker is left, and no machine can run a worker")

    def _apply(self, wanted: Sequence[ProcessSpec]) -> Iterator[Command]:
        difference = change(self.workers, wanted)
        for spec in difference.ended:
            del self._specs[spec.name]
            yield StopProcess(spec.name, "is not in the new plan")
        for spec in difference.kept:
            watched = self._specs[spec.name]
            is_reweighed, watched.spec = watched.spec.weight != spec.weight, spec
            if is_reweighed:
                yield SetWorkerWeight(spec)
        for spec in difference.begun:
            self._specs[spec.name] = _Watched(spec)
            yield StartProcess(spec)

    # ---- timers ------------------------------------------------------------------------------------------------------

    def _on_tick(self, event: SupervisionTick) -> Iterator[Command]:
        for watched in self._specs.values():
            if watched.begin_s is not None and event.at_s >= watched.begin_s:
                watched.begin_s = None
                yield StartProcess(watched.spec)
        changed_s = self._changed_s
        if changed_s is not None and not self._is_planning and event.at_s - changed_s >= self.rules.settle_s:
            yield Replan(tuple(sorted(self._lost)), tuple(sorted(self._joined)))
            self._lost, self._joined, self._changed_s = set(), set(), None
            self._is_planning = True
