"""The engine's side of a worker: versions change under its leases, and nothing is lost, doubled or out of order."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_bench import MAX_NEW_TOKENS, SETTINGS, assert_whole, length

from baton.rollout.engines.fake import FakeEngine
from baton.swarm.worker.engine_driver import EngineDriver, EngineThread
from baton.types import FromWorker, Lease, PolicyVersion, Report, Retry, SamplingParams, Trajectory

pytestmark = pytest.mark.timing


def lease(number: int, version: int = 0, *, is_exact: bool = False) -> Lease:
    return Lease(number, Trajectory(number, 0, (7, 8)), SamplingParams(MAX_NEW_TOKENS), 1, version, is_exact)


class AbortsLate(FakeEngine):
    """As the engine for SGLang: an abort ends only while weights are loaded."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._late: list[int] = []
        self._outbox: list[FromWorker] = []

    def abort(self, lease_id: int) -> None:
        self._late.append(lease_id)

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        for lease_id in self._late:
            super().abort(lease_id)
        self._late = []
        self._outbox += super().step()
        super().load_weights(tensors, version)

    def step(self) -> list[FromWorker]:
        found, self._outbox = self._outbox, []
        return found + super().step()


def driver(mode: str, engine: type[FakeEngine] = FakeEngine) -> EngineDriver:
    return EngineDriver(engine(SETTINGS, PolicyVersion("a", 0), length), mode)


class Hub:
    """Takes reports only where the last one ended, as the desk does."""

    def __init__(self) -> None:
        self.grown: dict[int, Trajectory] = {}
        self.ended: dict[int, FromWorker] = {}

    def lease(self, given_lease: Lease) -> Lease:
        self.grown[given_lease.lease_id] = given_lease.trajectory
        return given_lease

    def hear(self, messages: list[FromWorker]) -> None:
        for message in messages:
            assert message.lease_id not in self.ended, "nothing after the last word"
            if isinstance(message, Report):
                trajectory = self.grown[message.lease_id]
                assert message.token_offset == trajectory.num_tokens, "nothing lost, nothing doubled"
                self.grown[message.lease_id] = trajectory.extended(message.segments, message.finish_reason)
            if isinstance(message, Retry) or message.is_aborted or message.finish_reason is not None:
                self.ended[message.lease_id] = message


@settings(max_examples=150)
@given(st.sampled_from([("resume", FakeEngine), ("keep", FakeEngine), ("resume", AbortsLate)]), st.integers(0, 10**6))
def test_switches_aborts_and_drops_at_any_moment(mode_and_engine, seed):
    """To the hub a lease that is carried over a switch has only grown; what is aborted is put down, switch or not."""
    rng, hub, mine = random.Random(seed), Hub(), driver(*mode_and_engine)
    version, numbers = 0, itertools.count()
    aborted: set[int] = set()
    dropped: set[int] = set()
    for _ in range(rng.randrange(5, 60)):
        match rng.choice(["lease", "lease", "step", "step", "step", "flush", "switch", "abort", "drop"]):
            case "lease":
                mine.lease(hub.lease(lease(next(numbers), version - rng.randrange(2))))
            case "step":
                hub.hear(mine.step())
            case "flush":
                hub.hear(mine.flush())
            case "switch":
                version += 1
                hub.hear(mine.switch({}, PolicyVersion("a", version)))
            case "abort":
                alive = [number for number in hub.grown if number not in hub.ended]
                if alive:
                    aborted.add(rng.choice(alive))
                    mine.abort(max(aborted))
            case "drop":
                alive = [number for number in hub.grown if number not in hub.ended]
                if alive:
                    dropped.add(rng.choice(alive))
                    for number in dropped:
                        mine.drop(number)
                        hub.ended.setdefault(number, Retry(number, 0))
    for number in aborted:
        mine.abort(number)
    hub.hear(mine.switch({}, PolicyVersion("a", version + 1)))
    hub.hear(mine.step())
    for number in aborted:
        assert number in hub.ended, "an abort is not forgotten at a switch"
    for _ in range(2000):
        if not mine.is_busy:
            break
        hub.hear(mine.step())
    assert hub.ended.keys() == hub.grown.keys()
    for number, trajectory in hub.grown.items():
        versions = trajectory.policy_versions
        assert versions == sorted(versions), "versions ascend"
        if number not in aborted | dropped:
            assert_whole(trajectory)


def test_resume_prefills_again_and_keep_goes_on_in_flight():
    for mode, prefilled in (("resume", 2), ("keep", 1)):
        mine, hub = driver(mode), Hub()
        long = next(number for number in range(100) if length(number, 0) > MAX_NEW_TOKENS)
        mine.lease(hub.lease(lease(long)))
        for _ in range(7):
            hub.hear(mine.step())
        hub.hear(mine.switch({}, PolicyVersion("a", 1)))
        while mine.is_busy:
            hub.hear(mine.step())
        versions = hub.grown[long].policy_versions
        assert versions == [0] * 7 + [1] * (MAX_NEW_TOKENS - 7)
        assert_whole(hub.grown[long])
        assert mine.stats.decoded_tokens == MAX_NEW_TOKENS, "no token is made twice"
        assert (mine.stats.prefilled_tokens > 2) == (prefilled == 2)


@pytest.mark.parametrize(("mode", "exact"), [("resume", [(0, True), (1, True)]), ("keep", [(0, False)])])
def test_with_resume_the_engine_is_given_leases_of_exactly_its_version(mode, exact, monkeypatch):
    """An engine may continue other leases with keys and values of an older version, which verification cannot do."""
    mine, hub, given = driver(mode), Hub(), []
    submit = FakeEngine.submit

    def noted(engine: FakeEngine, one: Lease) -> None:
        given.append((one.version, one.is_exact))
        submit(engine, one)

    monkeypatch.setattr(FakeEngine, "submit", noted)
    mine.lease(hub.lease(lease(next(number for number in range(100) if length(number, 0) > MAX_NEW_TOKENS))))
    hub.hear(mine.step())
    hub.hear(mine.switch({}, PolicyVersion("a", 1)))
    assert given == exact
    assert mine.is_busy


def test_a_lease_of_exactly_a_version_is_put_down_by_another_and_refused_under_it():
    mine, hub = driver("drain"), Hub()
    long = next(number for number in range(100) if length(number, 0) > MAX_NEW_TOKENS)
    mine.lease(hub.lease(lease(long, is_exact=True)))
    hub.hear(mine.step())
    hub.hear(mine.switch({}, PolicyVersion("a", 1)))
    hub.hear(mine.step())
    last = hub.ended[long]
    assert isinstance(last, Report)
    assert last.is_aborted
    assert set(hub.grown[long].policy_versions) == {0}
    other = Lease(500, Trajectory(500, 0, (7,)), SamplingParams(8), 1, 0, True)
    mine.lease(hub.lease(other))
    hub.hear(mine.step())
    assert hub.ended[500] == Retry(500, 1)
    assert not mine.is_busy


def test_a_lease_said_twice_is_grown_once():
    mine, hub = driver("resume"), Hub()
    one = hub.lease(lease(3))
    mine.lease(one)
    mine.lease(one)
    while mine.is_busy:
        hub.hear(mine.step())
    assert_whole(hub.grown[3])


def test_what_was_dropped_leaves_its_place_and_its_number_free():
    """A hub that was started again counts its leases from 0."""
    mine = driver("resume")
    for _ in range(3):
        hub = Hub()
        for number in range(12):
            mine.lease(hub.lease(lease(number)))
        hub.hear(mine.step())
        mine.drop_all()
        assert not mine.is_busy
    hub = Hub()
    for number in range(12):
        mine.lease(hub.lease(lease(number)))
    while mine.is_busy:
        hub.hear(mine.step())
    for trajectory in hub.grown.values():
        assert_whole(trajectory)


class Failing(FakeEngine):
    """Dies at its third token."""

    def step(self) -> list[FromWorker]:
        if self.stats.decode_steps == 3:
            raise MemoryError("no more")
        return super().step()


def test_whatever_ends_the_engine_reaches_on_fault():
    faults: list[Exception] = []
    failed = Event()

    def on_fault(error: Exception) -> None:
        faults.append(error)
        failed.set()

    mine = EngineDriver(Failing(SETTINGS, PolicyVersion("a", 0), lambda group, sample: 99), "resume")
    thread = EngineThread(lambda: mine, lambda reports, stats: None, on_fault, report_every_s=0.01)
    thread.do(lambda driver: driver.lease(lease(0)))
    assert failed.wait(30.0)
    assert [type(error) for error in faults] == [MemoryError]
    thread.close()
    thread.close()


def test_the_engine_thread_reports_while_it_grows_and_obeys_between_tokens():
    heard: list[FromWorker] = []
    mine = EngineDriver(FakeEngine(SETTINGS, PolicyVersion("a", 0), lambda group, sample: 999), "keep")
    thread = EngineThread(lambda: mine, lambda reports, stats: heard.extend(reports), pytest.fail, report_every_s=0.0)
    thread.do(lambda driver: driver.lease(lease(0)))
    done = Event()
    end_s = time.monotonic() + 30
    while not heard and time.monotonic() < end_s:
        time.sleep(0.001)
    assert isinstance(heard[0], Report)
    assert len(heard[0].segments[0].token_ids) < SETTINGS.report_every_tokens, "the clock is a reason to report, too"
    thread.do(lambda driver: (driver.drop_all(), done.set()))
    assert done.wait(30.0)
    thread.close()
    assert not mine.is_busy
