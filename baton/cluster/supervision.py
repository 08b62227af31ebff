"""Decides about processes and machines over time: which process restarts, which is given up, when to replan.

Events in, commands out; no clock, no I/O. `at_s` is the time of an event on the caller's clock.

    ProcessStarted ─▶ up ──ProcessEnded──▶ wait, doubled each time ──SupervisionTick──▶ StartProcess ─▶ …
                              │ more than max_failures in a row
                              └─▶ StopProcess; the others continue; if none is left, Fail
    MachineLost ─▶ its processes are removed ─┬─ it ran a rank ─▶ TrainerLost
    MachineJoined ────────────────────────────┴─ settle_s without changes ─▶ Replan ─▶ Planned ─▶ StopProcess,
                                                                             StartProcess, SetWorkerWeight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from baton.clock import retry_wait_s
from baton.cluster.placement import Placement, ProcessSpec, change

# ---- events ----------------------------------------------------------------------------------------------------------


class ProcessStarted(msgspec.Struct, frozen=True, tag="Began"):
    """A process is running."""

    at_s: float
    name: str


class ProcessEnded(msgspec.Struct, frozen=True, tag="Ended"):
    """A process, or the actor that runs it, has ended or could not be started."""

    at_s: float
    name: str
    cause: str


class MachineLost(msgspec.Struct, frozen=True, tag="MachineLost"):
    """A machine has left the cluster."""

    at_s: float
    machine: str


class MachineJoined(msgspec.Struct, frozen=True, tag="MachineJoined"):
    """A machine that can be planned with has joined."""

    at_s: float
    machine: str


class Planned(msgspec.Struct, frozen=True, tag="Planned"):
    """The answer to Replan: the workers of the new plan, or None to keep the current ones."""

    at_s: float
    workers: tuple[ProcessSpec, ...] | None
    words: str


class SupervisionTick(msgspec.Struct, frozen=True, tag="Tick"):
    """Time has passed."""

    at_s: float


Event = ProcessStarted | ProcessEnded | MachineLost | MachineJoined | Planned | SupervisionTick

# ---- commands --------------------------------------------------------------------------------------------------------


class StartProcess(msgspec.Struct, frozen=True, tag="Begin"):
    """Start a process."""

    post: ProcessSpec


class StopProcess(msgspec.Struct, frozen=True, tag="End"):
    """Have a process report what it has, and end it; if its machine is gone, only remove it."""

    name: str
    cause: str
    is_there: bool = True


class SetWorkerWeight(msgspec.Struct, frozen=True, tag="Weigh"):
    """The weight of a worker has changed."""

    post: ProcessSpec


class Replan(msgspec.Struct, frozen=True, tag="Replan"):
    """Ask the planner for a plan for the current machines."""

    lost: tuple[str, ...]
    joined: tuple[str, ...]


class TrainerLost(msgspec.Struct, frozen=True, tag="TrainerLost"):
    """A machine that runs a trainer rank is gone: the trainer must restart from its last checkpoint."""

    machine: str


class Fail(msgspec.Struct, frozen=True, tag="Fail"):
    """The run cannot continue."""

    cause: str


class LogMessage(msgspec.Struct, frozen=True, tag="Say"):
    """A line for the user."""

    text: str


Command = StartProcess | StopProcess | SetWorkerWeight | Replan | TrainerLost | Fail | LogMessage


@dataclass(frozen=True, slots=True)
class SupervisionRules:
    """Limits and times of the supervision."""

    max_failures: int = 5
    """Consecutive failures after which a process is restarted; one more and it is given up."""
    first_wait_s: float = 0.5
    """Delay before the first restart; doubled at each further failure."""
    longest_wait_s: float = 30.0
    long_life_s: float = 60.0
    """A process that ran for this long starts again with no failures counted."""
    settle_s: float = 2.0
    """Replan once no machine has joined or left for this long: machines often change together."""


@dataclass(slots=True)
class _Watched:
    post: ProcessSpec
    failures: int = 0
    since_s: float | None = None
    """Time since which the process runs; None while it does not."""
    begin_s: float | None = None
    """Time of the next restart; None if none is scheduled."""


@dataclass(slots=True)
class _MachineChanges:
    """Machines that joined or left since the last plan."""

    lost: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    last_s: float | None = None
    """Time of the last change; None without one."""


class Supervision:
    """The supervision of a placed run."""

    def __init__(self, placement: Placement, rules: SupervisionRules | None = None) -> None:
        self.rules = rules or SupervisionRules()
        self._training = placement.training_machines
        self._posts = {post.name: _Watched(post) for post in placement.workers}
        self._unrest = _MachineChanges()
        self._is_planning = False

    def start(self) -> list[Command]:
        """Return the commands that start all workers."""
        return [StartProcess(watched.post) for watched in self._posts.values()]

    def handle(self, event: Event) -> list[Command]:
        """Handle one event; return the resulting commands in order. Events of removed processes are ignored."""
        return list(self._apply_event(event))

    def _apply_event(self, event: Event) -> Iterator[Command]:
        match event:
            case ProcessStarted(at_s=at_s, name=name):
                if watched := self._posts.get(name):
                    watched.since_s, watched.begin_s = at_s, None
            case ProcessEnded():
                yield from self._on_process_ended(event)
            case MachineLost():
                yield from self._lost(event)
            case MachineJoined(at_s=at_s, machine=machine):
                yield LogMessage(f"machine {machine} is there")
                self._unrest.lost.discard(machine)
                self._unrest.joined.add(machine)
                self._unrest.last_s = at_s
            case Planned():
                yield from self._planned(event)
            case SupervisionTick():
                yield from self._on_tick(event)
            case _:
                assert_never(event)

    @property
    def workers(self) -> tuple[ProcessSpec, ...]:
        """The current workers, including those that wait for a restart."""
        return tuple(watched.post for watched in self._posts.values())

    # ---- posts -------------------------------------------------------------------------------------------------------

    def _on_process_ended(self, event: ProcessEnded) -> Iterator[Command]:
        watched = self._posts.get(event.name)
        if watched is None or watched.begin_s is not None:
            return
        since_s, watched.since_s = watched.since_s, None
        is_old = since_s is not None and event.at_s - since_s >= self.rules.long_life_s
        watched.failures = 1 if is_old else watched.failures + 1
        if watched.failures > self.rules.max_failures:
            yield from self._give_up(watched, event.cause)
            return
        first_s, longest_s = self.rules.first_wait_s, self.rules.longest_wait_s
        wait_s = retry_wait_s(watched.failures, first_s=first_s, longest_s=longest_s)
        watched.begin_s = event.at_s + wait_s
        yield LogMessage(f"{event.name} on {watched.post.machine} {event.cause}; beginning it again in {wait_s:g} s")

    def _give_up(self, watched: _Watched, cause: str) -> Iterator[Command]:
        name = watched.post.name
        del self._posts[name]
        words = f"{name} on {watched.post.machine} ended {watched.failures} times in a row: {cause}"
        yield StopProcess(name, "is given up")
        if self._posts or self._unrest.last_s is not None or self._is_planning:
            yield LogMessage(f"{words}; it is given up, the others go on")
        else:
            yield Fail(f"no worker is left; {words}")

    # ---- machines ----------------------------------------------------------------------------------------------------

    def _lost(self, event: MachineLost) -> Iterator[Command]:
        gone = [watched.post.name for watched in self._posts.values() if watched.post.machine == event.machine]
        for name in gone:
            del self._posts[name]
            yield StopProcess(name, f"its machine {event.machine} is gone", is_there=False)
        words = f" with {', '.join(gone)}" if gone else ""
        yield LogMessage(f"machine {event.machine} is gone{words}")
        if event.machine in self._training:
            yield TrainerLost(event.machine)
        self._unrest.joined.discard(event.machine)
        self._unrest.lost.add(event.machine)
        self._unrest.last_s = event.at_s

    def _planned(self, event: Planned) -> Iterator[Command]:
        self._is_planning = False
        yield LogMessage(event.words)
        lost = self._unrest.lost  # machines lost while the planner ran
        if event.workers is not None:
            yield from self._apply([post for post in event.workers if post.machine not in lost])
        if not self._posts and self._unrest.last_s is None:
            yield Fail("no worker is left, and no machine to put one on")

    def _apply(self, wanted: Sequence[ProcessSpec]) -> Iterator[Command]:
        made = change(self.workers, wanted)
        for post in made.ended:
            del self._posts[post.name]
            yield StopProcess(post.name, "is not in the new plan")
        for post in made.kept:
            watched = self._posts[post.name]
            is_reweighed, watched.post = watched.post.weight != post.weight, post
            if is_reweighed:
                yield SetWorkerWeight(post)
        for post in made.begun:
            self._posts[post.name] = _Watched(post)
            yield StartProcess(post)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _on_tick(self, event: SupervisionTick) -> Iterator[Command]:
        for watched in self._posts.values():
            if watched.begin_s is not None and event.at_s >= watched.begin_s:
                watched.begin_s = None
                yield StartProcess(watched.post)
        last_s = self._unrest.last_s
        if last_s is not None and not self._is_planning and event.at_s - last_s >= self.rules.settle_s:
            unrest, self._unrest = self._unrest, _MachineChanges()
            self._is_planning = True
            yield Replan(tuple(sorted(unrest.lost)), tuple(sorted(unrest.joined)))
