"""What becomes of posts and machines over time: who is begun again, who is given up, when to plan anew.

Events in, commands out; no clock, no I/O. `at_s` is the time of an event on the clock of whoever drives this.

    ProcessStarted ─▶ up ──ProcessEnded──▶ waits, each time longer ──SupervisionTick──▶ StartProcess ─▶ …
                              │ max_failures in a row
                              └─▶ StopProcess; the others go on; when none is left, Fail
    MachineLost ─▶ its posts are over at once ─┬─ it trained ─▶ TrainerLost
    MachineJoined ─────────────────────────────┴─ quiet for settle_s ─▶ Replan ─▶ Planned ─▶ StopProcess, StartProcess,
    SetWorkerWeight
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
    """A post's process is at work."""

    at_s: float
    name: str


class ProcessEnded(msgspec.Struct, frozen=True, tag="Ended"):
    """A post's process, or the actor that holds it, has ended, or could not be begun."""

    at_s: float
    name: str
    cause: str


class MachineLost(msgspec.Struct, frozen=True, tag="MachineLost"):
    """A machine is gone from the cluster."""

    at_s: float
    machine: str


class MachineJoined(msgspec.Struct, frozen=True, tag="MachineJoined"):
    """A machine that can be planned with is there now."""

    at_s: float
    machine: str


class Planned(msgspec.Struct, frozen=True, tag="Planned"):
    """The answer to Replan: the workers that there are to be, or why things stay as they are."""

    at_s: float
    workers: tuple[ProcessSpec, ...] | None
    words: str


class SupervisionTick(msgspec.Struct, frozen=True, tag="Tick"):
    """Time has passed."""

    at_s: float


Event = ProcessStarted | ProcessEnded | MachineLost | MachineJoined | Planned | SupervisionTick

# ---- commands --------------------------------------------------------------------------------------------------------


class StartProcess(msgspec.Struct, frozen=True, tag="Begin"):
    """Start a post's process."""

    post: ProcessSpec


class StopProcess(msgspec.Struct, frozen=True, tag="End"):
    """Have a post's process put down what it has, and end; or only forget it where its machine is gone."""

    name: str
    cause: str
    is_there: bool = True


class SetWorkerWeight(msgspec.Struct, frozen=True, tag="Weigh"):
    """A worker's share is another now."""

    post: ProcessSpec


class Replan(msgspec.Struct, frozen=True, tag="Replan"):
    """Ask the planner about the machines there are now."""

    lost: tuple[str, ...]
    joined: tuple[str, ...]


class TrainerLost(msgspec.Struct, frozen=True, tag="TrainerLost"):
    """A machine that trains is gone: the trainer goes back to its last checkpoint."""

    machine: str


class Fail(msgspec.Struct, frozen=True, tag="Fail"):
    """The run cannot go on."""

    cause: str


class LogMessage(msgspec.Struct, frozen=True, tag="Say"):
    """A line for people."""

    text: str


Command = StartProcess | StopProcess | SetWorkerWeight | Replan | TrainerLost | Fail | LogMessage


@dataclass(frozen=True, slots=True)
class SupervisionRules:
    """Times in seconds."""

    max_failures: int = 5
    """In a row; after one more a post is given up."""
    first_wait_s: float = 0.5
    """Before a post is begun again; twice as long each further time."""
    longest_wait_s: float = 30.0
    long_life_s: float = 60.0
    """A post that was up for so long has no failures behind it."""
    settle_s: float = 2.0
    """Machines often come and go together: a plan is asked for when none has for so long."""


@dataclass(slots=True)
class _Watched:
    post: ProcessSpec
    failures: int = 0
    since_s: float | None = None
    """Up since; None while it is not."""
    begin_s: float | None = None
    """To be begun again at."""


@dataclass(slots=True)
class _MachineChanges:
    """Machines that have come and gone since the last plan."""

    lost: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    last_s: float | None = None
    """None while there is nothing to plan for."""


class Supervision:
    """The decisions about a placed run."""

    def __init__(self, placement: Placement, rules: SupervisionRules | None = None) -> None:
        self.rules = rules or SupervisionRules()
        self._training = placement.training_machines
        self._posts = {post.name: _Watched(post) for post in placement.workers}
        self._unrest = _MachineChanges()
        self._is_planning = False

    def start(self) -> list[Command]:
        """Return what to begin with."""
        return [StartProcess(watched.post) for watched in self._posts.values()]

    def handle(self, event: Event) -> list[Command]:
        """Take one event; return what is to be done, in order. Events of posts that are over are ignored."""
        return list(self._apply_event(event))

    def _apply_event(self, event: Event) -> Iterator[Command]:
        match event:
            case ProcessStarted(at_s=at_s, name=name):
                if watched := self._posts.get(name):
                    watched.since_s, watched.begin_s = at_s, None
            case ProcessEnded():
                yield from self._ended(event)
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
                yield from self._tick(event)
            case _:
                assert_never(event)

    @property
    def workers(self) -> tuple[ProcessSpec, ...]:
        """The posts there are to be."""
        return tuple(watched.post for watched in self._posts.values())

    # ---- posts -------------------------------------------------------------------------------------------------------

    def _ended(self, event: ProcessEnded) -> Iterator[Command]:
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
        lost = self._unrest.lost  # while the planner was thinking
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

    def _tick(self, event: SupervisionTick) -> Iterator[Command]:
        for watched in self._posts.values():
            if watched.begin_s is not None and event.at_s >= watched.begin_s:
                watched.begin_s = None
                yield StartProcess(watched.post)
        last_s = self._unrest.last_s
        if last_s is not None and not self._is_planning and event.at_s - last_s >= self.rules.settle_s:
            unrest, self._unrest = self._unrest, _MachineChanges()
            self._is_planning = True
            yield Replan(tuple(sorted(unrest.lost)), tuple(sorted(unrest.joined)))
