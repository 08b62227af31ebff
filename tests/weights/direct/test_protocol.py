"""Direct transfers: whatever happens to one replica, it serves only whole versions, and the others do not wait."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import PolicyVersion
from baton.weights.direct.protocol import (
    CloseGroup,
    DeadlinePassed,
    DirectRules,
    DirectSync,
    Failed,
    Joined,
    Left,
    Offered,
    PhaseDone,
    Progressed,
    RunPhase,
    WaitUntil,
    Withdrawn,
)

RULES = DirectRules(connect_s=5, announce_s=6, stall_s=7, commit_s=8, first_wait_s=0.5, longest_wait_s=4)
PHASES = ("connect", "announce", "stream", "commit")
STEP_S = 0.1
"""Time that a healthy replica needs for a phase."""


def v(number: int) -> PolicyVersion:
    return PolicyVersion("run", number, f"digest-{number}")


@dataclass
class Replica:
    """A replica of the world: it serves what it has committed, or nothing."""

    group: int | None = None
    serves: PolicyVersion | None = None
    running: RunPhase | None = None
    begun_s: float = 0.0
    is_stopped: bool = False
    is_dead: bool = False
    fails: bool = False
    loading: PolicyVersion | None = None
    served: list[int] = field(default_factory=list)


class World:
    """Runs the machine's commands in virtual time."""

    def __init__(self) -> None:
        self.machine, self.now_s = DirectSync(RULES), 0.0
        self.replicas: dict[str, Replica] = {}
        self.until_s: float | None = None
        self.closed: set[int] = set()
        self.late: list[RunPhase] = []
        self.bases: list[tuple[str, PolicyVersion | None, PolicyVersion]] = []
        """(replica, base, version) of each announced transfer."""

    def tell(self, event) -> None:
        for command in self.machine.handle(event):
            match command:
                case RunPhase(replica=name, generation=generation, phase=phase, version=version, base=base):
                    replica = self.replicas[name]
                    if phase == "announce":
                        assert base in (None, replica.serves), "a difference is only for who holds its base"
                        self.bases.append((name, base, version))
                    assert generation not in self.closed, "a communicator that has failed is never used again"
                    assert replica.running is None, "one phase of a replica at a time"
                    assert (version is None) == (phase == "connect")
                    replica.running, replica.begun_s = command, self.now_s
                case CloseGroup(replica=name, generation=generation):
                    self.closed.add(generation)
                    replica = self.replicas[name]
                    if replica.running is not None:
                        self.late.append(replica.running)
                    replica.running = None
                    if replica.loading is not None:
                        replica.serves = None
                case WaitUntil(at_s=at_s):
                    assert at_s > self.now_s
                    self.until_s = at_s if self.until_s is None else min(at_s, self.until_s)
        self.check()

    def check(self) -> None:
        for name, state in self.machine.replicas.items():
            replica = self.replicas[name]
            if state.has is not None and not replica.is_dead:
                assert replica.serves == state.has, "the sender knows what a replica serves"
            assert state.phase is None or state.deadline_s is not None, "every phase has a deadline"

    def join(self, name: str) -> None:
        replica = self.replicas.setdefault(name, Replica())
        replica.is_dead = replica.is_stopped = replica.fails = False
        replica.serves = replica.loading = None
        self.tell(Joined(self.now_s, name))

    def leave(self, name: str) -> None:
        self.tell(Left(self.now_s, name))

    def kill(self, name: str) -> None:
        """SIGKILL: whatever runs fails at once, and the replica has no weights."""
        replica = self.replicas[name]
        replica.is_dead, replica.serves = True, None
        if replica.running is not None:
            self.tell(Failed(self.now_s, name, replica.running.generation, "connection closed"))

    def advance(self) -> None:
        """Run everything that is due, then let the time pass to the next event."""
        self.now_s += STEP_S
        for name, replica in self.replicas.items():
            command = replica.running
            if command is None or replica.is_stopped:
                continue
            if replica.is_dead or replica.fails:
                self.tell(Failed(self.now_s, name, command.generation, "broken"))
                continue
            replica.running = None
            self.do(replica, command)
            if command.phase == "stream":
                self.tell(Progressed(self.now_s, name, command.generation))
            self.tell(PhaseDone(self.now_s, name, command.generation, command.phase))
        if self.until_s is not None and self.until_s <= self.now_s:
            self.until_s = None
            self.tell(DeadlinePassed(self.now_s))

    def do(self, replica: Replica, command: RunPhase) -> None:
        match command.phase:
            case "connect":
                replica.group = command.generation
            case "announce":
                assert replica.group == command.generation
                replica.serves, replica.loading = None, command.version
            case "stream":
                assert replica.loading == command.version
            case "commit":
                replica.serves, replica.loading = command.version, None
                replica.served.append(command.version.number)

    def until(self, condition, limit_s: float) -> float:
        begin_s = self.now_s
        while not condition():
            assert self.now_s - begin_s < limit_s, f"not within {limit_s} s"
            self.advance()
        return self.now_s - begin_s


def serving(world: World, name: str, number: int):
    return lambda: world.replicas[name].serves == v(number)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("what", ["kill", "stop"])
def test_the_others_are_served_within_four_phases_whatever_one_does(phase: str, what: str) -> None:
    world = World()
    for name in "abc":
        world.join(name)
    if phase != "connect":
        world.advance()
        world.tell(Offered(world.now_s, v(1)))
    for _ in range(max(0, PHASES.index(phase) - 1)):
        world.advance()
    assert world.replicas["b"].running.phase == phase
    if what == "kill":
        world.kill("b")
    else:
        world.replicas["b"].is_stopped = True
    if phase == "connect":
        world.tell(Offered(world.now_s, v(1)))
    taken_s = world.until(lambda: serving(world, "a", 1)() and serving(world, "c", 1)(), 60)
    assert taken_s <= 4.5 * STEP_S
    assert world.replicas["b"].serves is None
    world.replicas["b"].is_stopped = False
    if what == "kill":
        world.join("b")
    world.until(serving(world, "b", 1), 2 * (RULES.commit_s + RULES.longest_wait_s))


def test_a_stopped_replica_is_given_up_at_its_deadline_and_gets_a_new_communicator() -> None:
    world = World()
    world.join("a")
    world.advance()
    world.tell(Offered(world.now_s, v(1)))
    world.advance()
    assert world.replicas["a"].running.phase == "stream"
    first = world.replicas["a"].group
    world.replicas["a"].is_stopped = True
    world.until(lambda: first in world.closed, RULES.stall_s + 2 * STEP_S)
    assert "no answer within 7 s in phase stream" in world.machine.replicas["a"].last_cause
    world.replicas["a"].is_stopped = False
    world.until(serving(world, "a", 1), 20)
    assert world.replicas["a"].group > first


def test_progress_extends_the_deadline_of_a_long_stream() -> None:
    machine = DirectSync(RULES)
    machine.handle(Joined(0.0, "a"))
    machine.handle(PhaseDone(0.0, "a", 1, "connect"))
    machine.handle(Offered(0.0, v(1)))
    machine.handle(PhaseDone(0.0, "a", 1, "announce"))
    for second in range(1, 60):
        machine.handle(Progressed(float(second), "a", 1))
        assert not [c for c in machine.handle(DeadlinePassed(float(second))) if isinstance(c, CloseGroup)]
    commands = machine.handle(DeadlinePassed(59 + RULES.stall_s))
    assert CloseGroup("a", 1) in commands


def test_a_late_event_of_an_old_communicator_has_no_effect() -> None:
    machine = DirectSync(RULES)
    machine.handle(Joined(0.0, "a"))
    machine.handle(Failed(1.0, "a", 1, "refused"))
    before = machine.replicas["a"]
    assert (before.phase, before.failures) == (None, 1)
    assert machine.handle(PhaseDone(1.1, "a", 1, "connect")) == []
    assert machine.handle(Failed(1.1, "a", 1, "again")) == []
    assert machine.replicas["a"].failures == 1


def test_a_version_offered_during_a_transfer_follows_it_and_an_older_one_never() -> None:
    world = World()
    world.join("a")
    world.advance()
    world.tell(Offered(world.now_s, v(1)))
    world.advance()
    for number in (3, 2):
        world.tell(Offered(world.now_s, v(number)))
    world.until(serving(world, "a", 3), 5)
    assert world.replicas["a"].served == [1, 3]


def test_a_withdrawn_version_is_not_sent_to_who_joins_later_and_the_next_one_is() -> None:
    world = World()
    world.join("a")
    world.advance()
    world.tell(Offered(world.now_s, v(1)))
    world.until(serving(world, "a", 1), 5)
    world.tell(Withdrawn(world.now_s))
    world.join("b")
    for _ in range(20):
        world.advance()
    assert (world.replicas["a"].serves, world.replicas["b"].serves) == (v(1), None)
    world.tell(Offered(world.now_s, v(2)))
    world.until(lambda: serving(world, "a", 2)() and serving(world, "b", 2)(), 5)


def test_the_base_is_what_a_replica_holds_and_nothing_after_a_failure() -> None:
    """`a` follows every version; `b` fails once in the middle of version 2 and joins again before version 4."""
    world = World()
    for name in "ab":
        world.join(name)
    for number in (1, 2, 3):
        world.tell(Offered(world.now_s, v(number)))
        world.replicas["b"].fails = number == 2
        world.until(serving(world, "a", number), 5)
        world.replicas["b"].fails = False
        world.until(serving(world, "b", number), 30)
    world.join("b")
    world.tell(Offered(world.now_s, v(4)))
    world.until(lambda: serving(world, "a", 4)() and serving(world, "b", 4)(), 5)
    assert [(base, version) for name, base, version in world.bases if name == "a"] == [
        (None, v(1)),
        (v(1), v(2)),
        (v(2), v(3)),
        (v(3), v(4)),
    ]
    assert [(base, version) for name, base, version in world.bases if name == "b"] == [
        (None, v(1)),
        (v(1), v(2)),
        (None, v(2)),
        (v(2), v(3)),
        (None, v(4)),
    ]


WHAT = st.sampled_from(["join", "leave", "kill", "stop", "go on", "fail", "offer", "late", "pass"])
ACTIONS = st.lists(st.tuples(WHAT, st.sampled_from("abc")), max_size=80)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_after_any_story_every_live_replica_ends_at_the_last_version(story) -> None:
    world, number = World(), 0
    for what, name in story:
        replica = world.replicas.get(name)
        match what:
            case "join":
                world.join(name)
            case "leave":
                world.leave(name)
            case "offer":
                number += 1
                world.tell(Offered(world.now_s, v(number)))
            case "late" if world.late:
                late = world.late.pop()
                world.tell(PhaseDone(world.now_s, late.replica, late.generation, late.phase))
            case "kill" if replica is not None:
                world.kill(name)
            case "stop" | "go on" if replica is not None:
                replica.is_stopped = what == "stop"
            case "fail" if replica is not None:
                replica.fails = not replica.fails
            case _:
                world.advance()
    for name in list(world.machine.replicas):
        replica = world.replicas[name]
        replica.is_stopped = replica.fails = False
        if replica.is_dead:
            world.join(name)
    if number:
        live = list(world.machine.replicas)
        world.until(lambda: all(serving(world, name, number)() for name in live), 60)
        assert all(replica.served == sorted(replica.served) for replica in world.replicas.values())
