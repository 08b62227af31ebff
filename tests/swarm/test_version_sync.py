"""Have and want: whatever is announced, and whatever fails, a worker serves verified versions and ends at the last."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.swarm.version_sync import (
    Activate,
    Activated,
    Fetch,
    Fetched,
    FetchFailed,
    SetTimer,
    SleepChanged,
    TimerFired,
    VersionSync,
    VersionWanted,
)
from baton.types import PolicyVersion

A, B = "first", "second"


def v(number: int, lineage: str = A) -> PolicyVersion:
    return PolicyVersion(lineage, number, f"{lineage}-{number}")


class World:
    """Does what the machine says, as slowly and as badly as it is told to."""

    def __init__(self) -> None:
        self.machine = VersionSync()
        self.now_s = 0.0
        self.fetching: list[PolicyVersion] = []
        self.activating: list[PolicyVersion] = []
        self.verified: set[PolicyVersion] = set()
        self.served: list[PolicyVersion] = []
        self.wakes: list[float] = []

    def tell(self, event) -> None:
        for command in self.machine.handle(event):
            match command:
                case Fetch(version=version):
                    self.fetching.append(version)
                    assert len(self.fetching) == 1, "one fetch at a time"
                    assert not self.activating
                case Activate(version=version):
                    assert version in self.verified, "nothing but what was fetched and verified"
                    self.activating.append(version)
                case SetTimer(at_s=at_s):
                    assert 0 < at_s - self.now_s <= 30.0
                    self.wakes.append(at_s)
        assert self.machine.have == (self.served[-1] if self.served else None)

    def fetched(self) -> None:
        if self.fetching:
            version = self.fetching.pop()
            self.verified.add(version)
            self.tell(Fetched(self.now_s, version))

    def failed(self) -> None:
        if self.fetching:
            self.tell(FetchFailed(self.now_s, self.fetching.pop(), "malformed"))

    def activated(self) -> None:
        if self.activating:
            self.served.append(self.activating.pop())
            self.tell(Activated(self.now_s, self.served[-1]))

    def settle(self) -> None:
        """No more faults: everything asked for happens."""
        for _ in range(20):
            if self.wakes:
                self.now_s = max(self.now_s, self.wakes.pop())
                self.tell(TimerFired(self.now_s))
            self.fetched()
            self.activated()


steps = st.one_of(
    st.tuples(st.just("want"), st.integers(0, 12)),
    st.tuples(st.just("stale"), st.integers(0, 12)),
    st.tuples(st.sampled_from(["fetched", "failed", "activated", "wake", "wait"]), st.just(0)),
)


@settings(max_examples=400)
@given(before=st.lists(steps, max_size=40), after=st.lists(steps, max_size=40))
def test_any_interleaving_ends_at_the_wanted_version_and_never_goes_back(before, after):
    """`before` a new lineage is announced and `after`; announcements repeat and come out of order."""
    world = World()
    wanted = None
    for lineage, story in ((A, before), (B, after)):
        newest = -1
        for what, number in story:
            match what:
                case "want":
                    newest = max(newest, number)
                    world.tell(VersionWanted(world.now_s, v(number, lineage)))
                case "stale":  # of attempts that nobody makes
                    world.tell(FetchFailed(world.now_s, v(number + 50, lineage), "late"))
                    world.tell(Activated(world.now_s, v(number + 50, lineage)))
                    world.tell(Fetched(world.now_s, v(number + 50, lineage)))
                case "fetched":
                    world.fetched()
                case "failed":
                    world.failed()
                case "activated":
                    world.activated()
                case "wake":
                    world.tell(TimerFired(world.now_s))
                case "wait":
                    world.now_s += 0.7
        if newest >= 0:
            wanted = v(newest, lineage)
    world.settle()
    assert world.machine.have == wanted == world.machine.want
    for lineage in (A, B):
        numbers = [version.number for version in world.served if version.lineage == lineage]
        assert numbers == sorted(set(numbers)), "never back within a lineage, and none twice"
    lineages = [version.lineage for version in world.served]
    assert lineages == sorted(lineages), "never back to a lineage that was left"


def test_a_hundred_malformed_announcements_and_then_a_valid_one():
    world = World()
    world.tell(VersionWanted(0.0, v(0)))
    world.settle()
    for number in range(1, 101):
        world.tell(VersionWanted(world.now_s, v(number)))
        assert world.fetching == [v(number)]
        world.failed()
        assert world.machine.have == v(0), "the old one goes on serving"
        assert world.machine.last_cause == "malformed"
    world.tell(VersionWanted(world.now_s, v(101)))
    assert world.fetching == [v(101)], "and no failure is for ever"
    world.fetched()
    world.activated()
    assert world.machine.have == v(101)
    assert world.machine.last_cause == ""


def test_waits_double_up_to_their_bound_and_begin_anew_with_another_version():
    machine = VersionSync(first_wait_s=0.5, longest_wait_s=3.0)
    now_s, waits = 0.0, []
    assert machine.handle(VersionWanted(now_s, v(1))) == [Fetch(v(1))]
    for _ in range(6):
        (wake,) = machine.handle(FetchFailed(now_s, v(1), "gone"))
        assert isinstance(wake, SetTimer)
        waits.append(wake.at_s - now_s)
        assert machine.handle(TimerFired((now_s + wake.at_s) / 2)) == [], "too early"
        assert machine.handle(VersionWanted(now_s, v(1))) == [], "said again, it is no reason to hurry"
        now_s = wake.at_s
        assert machine.handle(TimerFired(now_s)) == [Fetch(v(1))]
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert machine.handle(VersionWanted(now_s, v(2))) == [], "one is on its way"
    assert machine.handle(FetchFailed(now_s, v(1), "gone")) == [Fetch(v(2))], "at once: it is another one"


def test_a_version_that_fails_for_days_is_fetched_again_at_the_longest_wait():
    """2 ** 1024 is no float: a wait computed from it ended the worker after 8 hours and a half."""
    machine = VersionSync(first_wait_s=0.5, longest_wait_s=30.0)
    now_s = 0.0
    assert machine.handle(VersionWanted(now_s, v(1))) == [Fetch(v(1))]
    for _ in range(1100):
        (wake,) = machine.handle(FetchFailed(now_s, v(1), "gone"))
        assert isinstance(wake, SetTimer)
        assert wake.at_s - now_s <= 30.0
        now_s = wake.at_s
        assert machine.handle(TimerFired(now_s)) == [Fetch(v(1))]


def test_what_is_on_its_way_is_let_finish_and_serves_until_the_newest_is_there():
    """Else a version a second would keep a worker from ever having one."""
    machine = VersionSync()
    machine.handle(VersionWanted(0.0, v(1)))
    machine.handle(VersionWanted(1.0, v(2)))
    machine.handle(VersionWanted(2.0, v(3)))
    assert machine.handle(Fetched(3.0, v(1))) == [Activate(v(1))]
    assert machine.handle(Activated(4.0, v(1))) == [Fetch(v(3))]
    assert machine.have == v(1)
    machine.handle(VersionWanted(5.0, v(0, B)))
    assert machine.handle(Fetched(6.0, v(3))) == [Fetch(v(0, B))], "of a lineage that is dead it is of no use"


def test_an_engine_that_sleeps_activates_nothing_and_then_serves_only_a_version_that_is_loaded_again() -> None:
    machine = VersionSync()
    assert machine.handle(VersionWanted(0.0, v(1))) == [Fetch(v(1))]
    assert machine.handle(Fetched(1.0, v(1))) == [Activate(v(1))]
    assert machine.handle(SleepChanged(2.0, True)) == []
    machine.handle(Activated(3.0, v(1)))
    assert machine.have is None, "the sleep has freed the weights that were activated before"
    assert machine.handle(VersionWanted(4.0, v(2))) == [], "nothing is fetched during the sleep"
    assert machine.handle(SleepChanged(5.0, False)) == [Fetch(v(2))]
    assert machine.handle(SleepChanged(6.0, True)) == []
    assert machine.handle(Fetched(7.0, v(2))) == [], "fetched, but the engine sleeps"
    assert machine.handle(SleepChanged(8.0, False)) == []
    assert machine.have is None, "awake, and without weights"
    assert machine.handle(VersionWanted(9.0, v(2))) == [Fetch(v(2))], "whole, also if it was loaded before"
    assert machine.handle(Fetched(10.0, v(2))) == [Activate(v(2))]
