"""The sweep: every trajectory finishes once, whatever a worker repeats; a worker that fails is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from baton.errors import DeadlineExceeded, EngineFault, UserError
from baton.rollout.engine import EngineSettings, EngineStats
from baton.rollout.engines.fake import END_ID, FakeEngine, fake_token
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import WorkerClient
from baton.types import (
    FinishReason,
    FromHub,
    FromWorker,
    Lease,
    PolicyVersion,
    Report,
    Retry,
    SamplingParams,
    Segment,
    Trajectory,
)

VERSION = 4
REQUESTS = [EvalGroup(group_id, (9, group_id), 4) for group_id in (10, 11, 12)]


def length(group_id: int, sample_index: int) -> int:
    """3 to 26 tokens: some trajectories span several reports of 5 tokens."""
    return 3 + (group_id * 7 + sample_index * 5) % 24


def fake_port() -> LocalTransport:
    settings = EngineSettings(slots=8, max_context_tokens=64, report_every_tokens=5)
    return LocalTransport(FakeEngine(settings, PolicyVersion("a", VERSION), length))


def grown(port: Any, max_new_tokens: int = 20, **settings: Any) -> list[Trajectory]:
    sweep = EvalRollout(WorkerClient(port, **settings))
    return list(sweep.rollout(REQUESTS, SamplingParams(max_new_tokens), noise_seed=1, version=VERSION))


class Disturbed(LocalTransport):
    """A port on which messages come twice, and come again after their lease has ended."""

    def __init__(self) -> None:
        super().__init__(fake_port().engine)
        self._seen: list[FromWorker] = []

    def receive(self, timeout_s: float) -> list[FromWorker]:
        new = super().receive(timeout_s)
        late = self._seen[-8:]
        self._seen += new
        return [*late, *(message for each in new for message in (each, each))]


class Clock:
    """The time that a sweep sees."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Silent:
    """A worker that takes leases and never reports."""

    name = "worker seven"
    slots = 4

    def __init__(self, answer: Any = lambda lease: [], each_wait: Callable[[], None] = lambda: None) -> None:
        self._answer, self._each_wait = answer, each_wait
        self._waiting: list[FromWorker] = []

    def send(self, message: FromHub) -> None:
        assert isinstance(message, Lease)
        self._waiting += self._answer(message)

    def receive(self, timeout_s: float) -> list[FromWorker]:
        self._each_wait()
        waiting, self._waiting = self._waiting, []
        return waiting

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        raise AssertionError

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        pass


def test_every_trajectory_finishes_once_with_the_tokens_that_its_engine_wrote() -> None:
    found = {t.name: t for t in grown(fake_port())}
    assert sorted(found) == sorted(f"{g}/{i}" for g in (10, 11, 12) for i in range(4))
    for trajectory in found.values():
        wanted = length(trajectory.group_id, trajectory.sample_index)
        assert trajectory.num_tokens == min(wanted, 20)
        assert trajectory.finish_reason is (FinishReason.STOP if wanted <= 20 else FinishReason.LENGTH)
        assert trajectory.prompt_ids == (9, trajectory.group_id)
        assert len(trajectory.segments) == 1, "one version, one segment, however often was reported"
        assert set(trajectory.policy_versions) == {VERSION}
        place = (trajectory.group_id, trajectory.sample_index)
        expected = [fake_token(*place, n, VERSION, length=wanted) for n in range(trajectory.num_tokens)]
        assert trajectory.token_ids == expected
        assert (trajectory.token_ids[-1] == END_ID) == (wanted <= 20)


def test_messages_that_come_twice_or_late_change_nothing() -> None:
    def by_name(t: Trajectory) -> str:
        return t.name

    assert sorted(grown(Disturbed()), key=by_name) == sorted(grown(fake_port()), key=by_name)


def test_a_sweep_leases_again_and_again_without_reusing_a_lease_id() -> None:
    ids: list[int] = []

    class Listening(LocalTransport):
        def send(self, message: FromHub) -> None:
            assert isinstance(message, Lease)
            ids.append(message.lease_id)
            super().send(message)

    sweep = EvalRollout(WorkerClient(Listening(fake_port().engine)))
    for _ in range(2):
        assert len(list(sweep.rollout(REQUESTS, SamplingParams(20), noise_seed=1, version=VERSION))) == 12
    assert len(set(ids)) == len(ids) == 24


def test_a_lease_asks_for_exactly_the_trainers_version() -> None:
    with pytest.raises(EngineFault, match=r"serves version 4 and refused trajectory 10/0"):
        list(EvalRollout(WorkerClient(fake_port())).rollout(REQUESTS, SamplingParams(20), noise_seed=1, version=5))


def test_a_refusal_names_worker_version_and_trajectory() -> None:
    with pytest.raises(EngineFault, match=r"worker seven serves version 3 and refused trajectory 10/0"):
        grown(Silent(lambda lease: [Retry(lease.lease_id, 3)]))


def test_a_trajectory_whose_replica_has_failed_is_leased_again() -> None:
    refused = set[str]()

    def reports(lease: Lease) -> list[FromWorker]:
        if lease.trajectory.name not in refused:
            refused.add(lease.trajectory.name)
            return [Retry(lease.lease_id, VERSION)]
        return [Report(lease.lease_id, 0, (Segment((7,), (-1.0,), VERSION),), FinishReason.LENGTH)]

    assert {one.name for one in grown(Silent(reports))} == refused
    assert len(refused) == 12


def test_a_worker_that_refuses_everything_is_named() -> None:
    """A refusal is a message, so the worker's deadline for progress does not end the evaluation."""
    with pytest.raises(EngineFault, match=r"worker seven has refused \d+ leases in a row, .* it serves version 4;"):
        grown(Silent(lambda lease: [Retry(lease.lease_id, VERSION)]))


def test_an_abort_that_nobody_asked_for_is_a_fault() -> None:
    with pytest.raises(EngineFault, match=r"worker seven aborted trajectory 10/0"):
        grown(Silent(lambda lease: [Report(lease.lease_id, 0, (), is_aborted=True)]))


def test_a_worker_that_never_reports_is_named_with_those_who_wait() -> None:
    clock = Clock()
    worker = Silent(each_wait=lambda: clock.advance(4.0))
    with pytest.raises(DeadlineExceeded) as caught:
        grown(worker, stall_timeout_s=10.0, clock=clock)
    assert clock.now_s == 12.0, "at the first look after 10 s"
    assert "worker seven has made no progress" in str(caught.value)
    assert "12 trajectories wait" in str(caught.value)
    assert "10/0" in str(caught.value)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_report_with_a_gap_or_an_overlap_is_not_appended(offset: int) -> None:
    def reports(lease: Lease) -> list[FromWorker]:
        first, second, again = (Segment((token,), (-1.0,), VERSION) for token in (7, 8, 6))
        return [
            Report(lease.lease_id, 0, (first,)),
            Report(lease.lease_id, 1, (second,)),
            Report(lease.lease_id, offset, (again,), FinishReason.STOP),
            Report(lease.lease_id, 2, (Segment((9,), (-1.0,), VERSION),), FinishReason.STOP),
        ]

    assert [trajectory.token_ids for trajectory in grown(Silent(reports))] == [[7, 8, 9]] * 12


def test_no_requests_need_no_worker() -> None:
    sweep = EvalRollout(WorkerClient(Silent()))
    assert list(sweep.rollout([], SamplingParams(5), noise_seed=0, version=0)) == []


def test_a_prompt_without_room_for_a_response_is_refused_before_anything_is_sent() -> None:
    worker = Silent()
    sweep = EvalRollout(WorkerClient(worker, max_context_tokens=8))
    long = [*REQUESTS, EvalGroup(13, tuple(range(8)), 4)]
    with pytest.raises(UserError, match=r"group 13 has 8 tokens.*engine\.max_context_tokens is 8"):
        next(iter(sweep.rollout(long, SamplingParams(4), noise_seed=1, version=VERSION)))
    assert worker.receive(0) == []


def test_a_slow_worker_that_makes_tokens_without_a_due_report_is_not_stalled() -> None:
    clock = Clock()

    class Slow(LocalTransport):
        def receive(self, timeout_s: float) -> list[FromWorker]:
            clock.advance(4.0)
            return super().receive(timeout_s)

    settings = EngineSettings(slots=16, max_context_tokens=64, report_every_tokens=1000)
    port = Slow(FakeEngine(settings, PolicyVersion("a", VERSION), lambda group_id, sample_index: 26))
    # 26 steps of 4 s pass before anything is reported
    assert len(grown(port, 30, stall_timeout_s=10.0, clock=clock)) == 12
    assert clock.now_s >= 26 * 4.0
