"""Decides how the trainer sends versions directly to replicas. Receives events and returns commands.

    Joined ─▶ connect ─▶ idle ── Offered ─▶ announce ─▶ stream ─▶ commit ─▶ idle, serves the version
                ▲                               │          │         │
                └────── after a delay ◀── CloseGroup ◀── Failed, or a deadline has passed

A replica is one engine, on one or more devices. Each replica has its own communicator and a deadline for each phase, so
a dead, stopped or slow replica does not delay other replicas. After a failure, a communicator is never used again:
`generation` numbers the communicators, and events of an older communicator have no effect.

A replica overwrites its weights in place, so it generates nothing from the phase `announce` to the end of the phase
`commit`. After a failure, a replica generates nothing until it has received a complete version.

If a replica serves a version when the next version is announced, it may receive only the difference from the served
version (`RunPhase.base`). All other replicas receive the whole version.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Final, Literal, assert_never

import msgspec

from baton.clock import TimedEvent, retry_wait_s
from baton.types import PolicyVersion

Phase = Literal["connect", "announce", "stream", "commit"]
"""`connect`: build the communicator. `announce`: the replica pauses and prepares. `stream`: send the tensors, which the
replica loads and checks. `commit`: the replica finishes the load and serves the version."""
_NEXT: Final[dict[Phase, Phase]] = {"announce": "stream", "stream": "commit"}
"""Phase → the phase that follows without a pause."""

# ---- events ----------------------------------------------------------------------------------------------------------


class Joined(TimedEvent, frozen=True):
    """A replica has started, or has started again. It has no communicator."""

    replica: str


class Left(TimedEvent, frozen=True):
    """A replica has ended or was closed."""

    replica: str


class Offered(TimedEvent, frozen=True):
    """The trainer has a version that all replicas must load."""

    version: PolicyVersion


class Withdrawn(TimedEvent, frozen=True):
    """The trainer no longer offers a version. Idle replicas and new replicas wait for the next offered version."""


class PhaseDone(TimedEvent, frozen=True):
    """A phase of a replica has succeeded."""

    replica: str
    generation: int
    phase: Phase


class Progressed(TimedEvent, frozen=True):
    """A replica has received a part of the stream, which extends the deadline of `stream`."""

    replica: str
    generation: int


class Failed(TimedEvent, frozen=True):
    """A phase of a replica has failed."""

    replica: str
    generation: int
    cause: str


class DeadlinePassed(TimedEvent, frozen=True):
    """The time of a `WaitUntil` has passed."""


Event = Joined | Left | Offered | Withdrawn | PhaseDone | Progressed | Failed | DeadlinePassed

# ---- commands --------------------------------------------------------------------------------------------------------


class RunPhase(msgspec.Struct, frozen=True, gc=False):
    """Run a phase, and report `PhaseDone` or `Failed`."""

    replica: str
    generation: int
    phase: Phase
    version: PolicyVersion | None = None
    """The version to send; None in `connect`."""
    base: PolicyVersion | None = None
    """The complete version that the replica held when the phase `announce` began; None if there was none."""


class CloseGroup(msgspec.Struct, frozen=True, gc=False):
    """Abort a communicator with all its pending operations. It is never used again."""

    replica: str
    generation: int


class WaitUntil(msgspec.Struct, frozen=True, gc=False):
    """Report `DeadlinePassed` at the time `at_s`."""

    at_s: float


Command = RunPhase | CloseGroup | WaitUntil


class DirectRules(msgspec.Struct, frozen=True):
    """Deadlines and delays of direct transfers, in seconds."""

    connect_s: float = 60.0
    announce_s: float = 60.0
    stall_s: float = 60.0
    """Maximum time without progress in `stream`."""
    commit_s: float = 120.0
    first_wait_s: float = 0.5
    """Delay before a new attempt after the first failure. The delay doubles with each further failure."""
    longest_wait_s: float = 30.0

    def of_phase(self, phase: Phase) -> float:
        """Return the time limit of a phase in seconds (for `stream`, the maximum time without progress)."""
        limits = {"connect": self.connect_s, "announce": self.announce_s, "stream": self.stall_s}
        return limits.get(phase, self.commit_s)


@dataclass(slots=True)
class ReplicaState:
    """The state of a replica, as known from its events."""

    generation: int
    """Number of the replica's current communicator, or of the next communicator to build."""
    phase: Phase | None = None
    """The running phase; None if the replica is idle or waits for a new attempt."""
    has: PolicyVersion | None = None
    """The version that the replica serves; None while its weights are incomplete."""
    sending: PolicyVersion | None = None
    base: PolicyVersion | None = None
    """The version that the replica served when the transfer of `sending` began; None if its weights were incomplete."""
    deadline_s: float | None = None
    """Time at which the running phase counts as failed. After a failure, the time at which the next attempt starts."""
    failures: int = 0
    """Number of consecutive failures."""
    last_cause: str = ""


class DirectSync:
    """Decides when each replica connects, what it receives, and when it has failed."""

    def __init__(self, rules: DirectRules | None = None) -> None:
        self.rules = rules or DirectRules()
        self.want: PolicyVersion | None = None
        self.replicas: dict[str, ReplicaState] = {}
        self._generations = count(1)
        self._timer_s: float | None = None

    def handle(self, event: Event) -> list[Command]:
        """Apply one event. Return the resulting commands in the order in which to execute them."""
        commands: list[Command] = []
        match event:
            case Joined(at_s=at_s, replica=name):
                commands += self._removed(name)
                self.replicas[name] = ReplicaState(next(self._generations))
                commands.append(self._run(name, "connect", at_s))
            case Left(replica=name):
                commands += self._removed(name)
            case Offered(version=version):
                if self.want is None or self.want.lineage != version.lineage or self.want.number < version.number:
                    self.want = version
            case Withdrawn():
                self.want = None
            case PhaseDone(at_s=at_s, replica=name, generation=generation, phase=phase):
                if (state := self._current(name, generation)) is not None and state.phase == phase:
                    commands += self._after(name, state, phase, at_s)
            case Progressed(at_s=at_s, replica=name, generation=generation):
                if (state := self._current(name, generation)) is not None and state.phase == "stream":
                    state.deadline_s = at_s + self.rules.stall_s
            case Failed(at_s=at_s, replica=name, generation=generation, cause=cause):
                if (state := self._current(name, generation)) is not None and state.phase is not None:
                    commands += self._failed(name, state, cause, at_s)
            case DeadlinePassed(at_s=at_s):
                self._timer_s = None
                for name, state in self.replicas.items():
                    if state.deadline_s is not None and state.deadline_s <= at_s:
                        commands += self._expired(name, state, at_s)
            case _:
                assert_never(event)
        commands += [self._run(name, "announce", event.at_s) for name, s in self.replicas.items() if self._is_due(s)]
        return commands + self._timer()

    def _current(self, name: str, generation: int) -> ReplicaState | None:
        """Return a replica's state if `generation` is its current communicator; None for an outdated event."""
        state = self.replicas.get(name)
        return state if state is not None and state.generation == generation else None

    def _is_due(self, state: ReplicaState) -> bool:
        """Return whether a replica is connected and idle, and does not serve the offered version."""
        return state.phase is None and state.deadline_s is None and self.want is not None and state.has != self.want

    def _run(self, name: str, phase: Phase, at_s: float) -> Command:
        state = self.replicas[name]
        if phase == "announce":
            state.sending, state.base, state.has = self.want, state.has, None
        state.phase, state.deadline_s = phase, at_s + self.rules.of_phase(phase)
        return RunPhase(name, state.generation, phase, state.sending, state.base)

    def _after(self, name: str, state: ReplicaState, phase: Phase, at_s: float) -> list[Command]:
        if phase in _NEXT:
            return [self._run(name, _NEXT[phase], at_s)]
        if phase == "commit":
            state.has, state.failures, state.last_cause = state.sending, 0, ""
        state.phase = state.deadline_s = state.sending = state.base = None
        return []

    def _expired(self, name: str, state: ReplicaState, at_s: float) -> list[Command]:
        if state.phase is None:
            return [self._run(name, "connect", at_s)]
        limit_s = self.rules.of_phase(state.phase)
        return self._failed(name, state, f"no answer within {limit_s:g} s in phase {state.phase}", at_s)

    def _failed(self, name: str, state: ReplicaState, cause: str, at_s: float) -> list[Command]:
        """Abort the communicator of a replica, and set the time at which the next attempt starts."""
        closed = CloseGroup(name, state.generation)
        state.generation, state.phase, state.failures = next(self._generations), None, state.failures + 1
        state.sending, state.base, state.last_cause = None, None, cause
        first_s, longest_s = self.rules.first_wait_s, self.rules.longest_wait_s
        state.deadline_s = at_s + retry_wait_s(state.failures, first_s=first_s, longest_s=longest_s)
        return [closed]

    def _removed(self, name: str) -> list[Command]:
        state = self.replicas.pop(name, None)
        return [] if state is None else [CloseGroup(name, state.generation)]

    def _timer(self) -> list[Command]:
        """Return a command that starts a timer for the earliest deadline. Return no command if a running timer ends at
        this deadline or earlier."""
        deadlines = [state.deadline_s for state in self.replicas.values() if state.deadline_s is not None]
        if not deadlines or (self._timer_s is not None and self._timer_s <= min(deadlines)):
            return []
        self._timer_s = min(deadlines)
        return [WaitUntil(self._timer_s)]
