"""The desk: what workers say counts once, where it belongs, whatever the network does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.records.lease_trace import LeaseTrace
from baton.swarm import lease_events as ev
from baton.swarm.lease_broker import (
    BrokerCommand,
    LeaseBroker,
    ReportViolation,
    SendToController,
    SendToWorker,
    VerifyTrajectory,
    key_of,
)
from baton.swarm.lease_credit import FIRST_LEASES, FREE_RETURNS
from baton.swarm.leases import LeaseRules, LeaseTable
from baton.swarm.messages import Ack, Dropped
from baton.swarm.worker.session import Outbox
from baton.types import (
    Abort,
    Author,
    FinishReason,
    Lease,
    Report,
    Retry,
    SamplingParams,
    Segment,
    Trajectory,
    WorkLost,
    WorkRevoked,
)

MAX = 40


def segment(start: int, end: int, version: int = 0, *, salt: int = 0) -> Segment:
    """The tokens of places start … end − 1: each tells its place."""
    return Segment(tuple(100 * salt + p for p in range(start, end)), (-1.0,) * (end - start), version)


def said(lease: int, start: int, end: int, finish: FinishReason | None = None, **more: object) -> Report:
    salt = int(more.pop("salt", 0))
    return Report(lease, start, (segment(start, end, salt=salt),) if end > start else (), finish, **more)


class Spans:
    """A tracer that nobody reads."""

    def span(self, *_: object, **facts: object) -> None:
        pass


class Driver:
    """Calls a desk, and has the commands that it returns carried out, as the hub does."""

    def __init__(self, broker: LeaseBroker, execute: Callable[[BrokerCommand], None]) -> None:
        self._broker, self._execute = broker, execute

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._broker, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> None:
            for command in found(*arguments, **named):
                self._execute(command)

        return call


class Counter:
    """A desk with everything it says."""

    def __init__(
        self, *, restarts: bool = False, holds: bool = False, backup_lease_factor: float = 0.0, is_traced: bool = False
    ) -> None:
        self.now_s = 0.0
        self.sent: list[tuple[int, object]] = []
        self.on_reports: list[object] = []
        self.hung_up: list[tuple[int, str]] = []
        self.convicted: list[tuple[int, str]] = []
        self.finished: list[tuple[Trajectory, tuple]] = []
        self.complaint: str | None = None
        rules = LeaseRules(
            restarts=restarts,
            heartbeat_timeout_s=5.0,
            backup_lease_factor=backup_lease_factor,
            backup_lease_after_s=1.0,
        )

        self.holds = holds
        trace = LeaseTrace(Spans()) if is_traced else None
        self.desk = LeaseBroker(LeaseTable(rules), self.check, self.clock, trace)
        self.broker = Driver(self.desk, self.execute)

    def check(self, *_: object, **__: object) -> str | None:
        return self.complaint

    def execute(self, command: BrokerCommand) -> None:
        match command:
            case SendToWorker(worker=worker, message=message):
                self.send(worker, message)
            case SendToController(message=told):
                self.on_reports.append(told)
            case ev.DisconnectWorker(worker=worker, cause=cause):
                self.hung_up.append((worker, cause))
            case ReportViolation(worker=worker, sentence=sentence):
                self.convicted.append((worker, sentence))
            case VerifyTrajectory(lease=lease, trajectory=trajectory, spans=spans):
                self.finished.append((trajectory, spans))
                if not self.holds:
                    self.broker.release(key_of(lease))

    def clock(self) -> float:
        return self.now_s

    def send(self, worker: int, message: object) -> None:
        self.sent.append((worker, message))

    def worker(self, number: int, *, slots: int = 4, version: int = 0, kind: str | None = "") -> None:
        self.broker.join(ev.WorkerJoined(self.now_s, number, slots, kind=kind))
        self.broker.heartbeat(number, version, 0)

    def want(
        self,
        task: int,
        *,
        group: int | None = None,
        segments: Sequence[Segment] = (),
        is_exact: bool = True,
        seed: int = 1,
    ) -> None:
        trajectory = Trajectory(task if group is None else group, 0, (5, 6), tuple(segments))
        self.broker.want(Lease(task, trajectory, SamplingParams(MAX), seed, 0, is_exact))

    def leases(self, worker: int) -> list[Lease]:
        return [message for to, message in self.sent if to == worker and isinstance(message, Lease)]

    def to(self, worker: int) -> list[object]:
        """What it was told beside leases."""
        return [message for to, message in self.sent if to == worker and not isinstance(message, Lease)]

    def grown(self, task: int) -> Trajectory:
        """As the runner has it; it takes a report only where the last one ended."""
        trajectory = Trajectory(task, 0, (5, 6))
        for message in self.on_reports:
            if isinstance(message, Report) and message.lease_id == task:
                assert message.token_offset == trajectory.num_tokens
                trajectory = trajectory.extended(message.segments, message.finish_reason)
        return trajectory


def test_a_trajectory_grows_ends_and_everything_is_acknowledged():
    counter = Counter()
    counter.worker(0)
    counter.want(7)
    (lease,) = counter.leases(0)
    assert lease.trajectory.prompt_ids == (5, 6)
    number = lease.lease_id
    counter.broker.report(0, said(number, 0, 5))
    counter.broker.report(0, said(number, 5, 9, FinishReason.STOP))
    assert counter.to(0) == [Ack(number, 5), Ack(number, 9, has_ended=True)]
    assert counter.grown(7).token_ids == list(range(9))
    assert counter.grown(7).finish_reason is FinishReason.STOP
    assert counter.finished[0][1] == ((0, 0, 9),)
    assert not counter.broker.table.tasks


def test_a_worker_that_reported_tokens_is_an_author_after_it_has_left():
    counter = Counter()
    counter.worker(0)
    counter.worker(1)
    counter.want(7)
    ((author, lease),) = counter.sent
    counter.broker.report(author, said(lease.lease_id, 0, 0))
    assert not counter.desk.is_author(author), "a report without tokens"
    counter.broker.report(author, said(lease.lease_id, 0, 5))
    for worker in (0, 1):
        counter.broker.leave(worker, "left")
    assert counter.desk.is_author(author)
    assert not counter.desk.is_author(1 - author)


def test_a_worker_that_has_left_is_forgotten_when_all_its_tokens_were_trained_on():
    counter = Counter()
    for worker in (0, 1):
        counter.worker(worker)
    for task in (7, 8, 9):
        counter.want(task, group=task)
    leases = {lease.trajectory.group_id: (worker, lease.lease_id) for worker, lease in counter.sent}
    (first, done), (second, _), (third, begun) = leases[7], leases[8], leases[9]
    assert first == third != second
    counter.broker.report(first, said(done, 0, 9, FinishReason.STOP))
    counter.broker.report(first, said(begun, 0, 5))
    counter.broker.leave(first, "left")
    counter.desk.trained([(1, 7, 0)])
    assert counter.desk.authors((1, 7, 0)) == ()
    assert counter.desk.is_author(first), "another worker continues its unfinished trajectory"
    continued = next(lease for worker, lease in counter.sent[3:] if worker == second)
    counter.broker.report(second, said(continued.lease_id, 5, 9, FinishReason.STOP))
    counter.desk.trained([])
    assert counter.desk.is_author(first), "not trained on yet"
    counter.desk.trained([(1, 9, 0)])
    assert not counter.desk.is_author(first)
    assert counter.desk.is_author(second), "it is connected"


def test_late_repeated_reordered_and_foreign_reports_change_nothing_and_are_answered():
    counter = Counter()
    counter.worker(0)
    counter.worker(1)
    counter.want(7)
    worker = counter.sent[0][0]
    (lease,) = counter.leases(worker)
    number, other = lease.lease_id, 1 - worker
    counter.broker.report(worker, said(number, 0, 5))
    heard = list(counter.on_reports)
    for who, report, answer in (
        (worker, said(number, 0, 5), Ack(number, 5)),  # twice
        (worker, said(number, 8, 12), Ack(number, 5)),  # before what lies between
        (worker, said(number, 2, 9), Ack(number, 5)),  # half known
        (other, said(number, 5, 9), Dropped(number)),  # of somebody else's lease
        (worker, said(999, 0, 4), Dropped(999)),  # of no lease
        (2**40, said(number, 5, 9), Dropped(number)),  # of nobody
    ):
        del counter.sent[:]
        counter.broker.report(who, report)
        assert counter.sent == [(who, answer)]
    assert counter.on_reports == heard
    counter.broker.report(worker, said(number, 5, 9, FinishReason.STOP))
    del counter.sent[:]
    counter.broker.report(worker, said(number, 5, 9, FinishReason.STOP))
    assert counter.sent == [(worker, Dropped(number))], "late: its lease has ended"
    assert counter.grown(7).token_ids == list(range(9))
    counter.broker.refuse(other, Retry(number, 3))
    counter.broker.refuse(worker, Retry(number, 3))


@settings(max_examples=150)
@given(st.data())
def test_what_is_said_again_after_any_cut_arrives_once(data):
    """A worker with an outbox, and a network that loses the end of what was said, in both directions."""
    counter, box = Counter(), Outbox()
    counter.worker(0)
    counter.want(7)
    (lease,) = counter.leases(0)
    number = lease.lease_id
    box.open(number)
    ends = sorted(data.draw(st.sets(st.integers(1, MAX - 1), min_size=1, max_size=8)))
    reports = [said(number, a, b) for a, b in zip([0, *ends], ends, strict=False)]
    reports.append(said(number, ends[-1], MAX, FinishReason.LENGTH))
    told = 0

    def deliver(messages: list[Report], answers: int) -> None:
        nonlocal told
        for message in messages:
            counter.broker.report(0, message)
        for answer in counter.to(0)[told : told + answers]:
            match answer:
                case Ack(lease_id=lease_id, length=length, has_ended=has_ended):
                    box.confirm(lease_id, length, has_ended=has_ended)
                case Dropped(lease_id=lease_id):
                    box.close(lease_id)
        told = len(counter.to(0))

    for report in reports:
        box.add(report)
        deliver([report][: data.draw(st.integers(0, 1))], data.draw(st.integers(0, 1)))
        if data.draw(st.booleans()):
            counter.broker.held(0, box.leases)
            again = box.again()
            deliver(again[: data.draw(st.integers(0, len(again)))], data.draw(st.integers(0, 9)))
    counter.broker.held(0, box.leases)
    deliver(box.again(), 99)
    assert counter.grown(7).token_ids == list(range(MAX))
    assert counter.grown(7).finish_reason is FinishReason.LENGTH
    assert box.leases == ()
    assert not [message for message in counter.on_reports if isinstance(message, WorkLost)]


def test_after_a_cut_both_sides_agree_on_what_is_held():
    counter = Counter()
    counter.worker(0)
    for task in (1, 2, 3):
        counter.want(task)
    first, second, third = (lease.lease_id for lease in counter.leases(0))
    counter.broker.report(0, said(first, 0, 5))
    counter.broker.abort(3)
    del counter.sent[:]
    counter.broker.held(0, [first, third, 77])
    assert (0, Dropped(77)) in counter.sent, "it holds what it should not"
    assert (0, Abort(third)) in counter.sent, "it may not have heard of the recall"
    counter.broker.heartbeat(0, 0, 1)
    (anew,) = counter.leases(0)
    assert anew.trajectory.group_id == 2, "what it should hold and does not is leased anew"
    assert anew.lease_id not in {first, second, third}, "an id is said once"
    counter.broker.report(0, said(first, 5, 6, FinishReason.STOP))
    assert counter.grown(1).num_tokens == 6, "the rest goes on as if nothing had been"


def test_a_dead_workers_trajectory_goes_on_from_its_last_report_elsewhere():
    counter = Counter()
    counter.worker(0)
    counter.want(7)
    counter.broker.report(0, said(counter.leases(0)[0].lease_id, 0, 5))
    counter.worker(1)
    counter.broker.leave(0, "gone")
    (lease,) = counter.leases(1)
    assert lease.trajectory.token_ids == list(range(5))
    counter.broker.report(1, said(lease.lease_id, 5, 8, FinishReason.STOP))
    assert counter.grown(7).token_ids == list(range(8))
    assert counter.finished[0][1] == ((0, 0, 5), (1, 5, 8)), "each author is named for what it wrote"


def test_in_sync_it_begins_at_the_prompt_and_is_compared_with_what_was_known():
    counter = Counter(restarts=True)
    counter.worker(0)
    counter.want(7)
    counter.broker.report(0, said(counter.leases(0)[0].lease_id, 0, 5))
    counter.worker(1)
    counter.broker.leave(0, "gone")
    (lease,) = counter.leases(1)
    assert lease.trajectory.num_tokens == 0
    counter.broker.report(1, said(lease.lease_id, 0, 3))
    assert counter.grown(7).num_tokens == 5, "nothing new yet"
    counter.broker.report(1, said(lease.lease_id, 3, 8, FinishReason.STOP))
    assert counter.grown(7).token_ids == list(range(8))
    assert WorkLost("regenerated", 3) in counter.on_reports
    assert sum(m.num_tokens for m in counter.on_reports if isinstance(m, WorkLost)) == 5


def test_in_sync_a_contradiction_counts_for_nobody_and_the_trajectory_is_made_anew():
    counter = Counter(restarts=True)
    counter.worker(0)
    counter.want(7)
    counter.broker.report(0, said(counter.leases(0)[0].lease_id, 0, 5))
    counter.worker(1)
    counter.broker.leave(0, "gone")
    (lease,) = counter.leases(1)
    counter.broker.report(1, said(lease.lease_id, 0, 8, FinishReason.STOP, salt=3))
    assert counter.on_reports[-1] == WorkRevoked(1, 7, 0, "contradicted")
    assert counter.to(1) == [Dropped(lease.lease_id)]
    assert not counter.broker.table.tasks, "the runner wants it anew"
    counter.want(8)
    counter.broker.report(1, said(counter.leases(1)[-1].lease_id, 0, 8, FinishReason.STOP, salt=3))
    assert counter.grown(8).num_tokens == 8


def relieved(kinds: tuple[str | None, str | None]) -> tuple[Counter, int, int]:
    """In sync: worker 0 has made 5 tokens and is slow; worker 1, quick and free, holds the backup lease."""
    counter = Counter(restarts=True, backup_lease_factor=1.0)
    for number, kind in enumerate(kinds):
        counter.worker(number, slots=1, kind=kind)
    counter.want(7)
    counter.want(1)
    slow = counter.leases(0)[0].lease_id
    counter.now_s = 4.0
    counter.broker.report(0, said(slow, 0, 5))
    counter.broker.report(1, said(counter.leases(1)[0].lease_id, 0, 40, FinishReason.LENGTH))
    counter.broker.handle(ev.LeaseTick(counter.now_s))
    (_, backup) = counter.leases(1)
    assert backup.trajectory.group_id == 7
    assert backup.trajectory.num_tokens == 0
    return counter, slow, backup.lease_id


UNLIKE = [(None, None), ("cpu", "gpu"), ("cpu", None), (None, "cpu")]
"""Engines with noise of their own, and different classes: they make different tokens, and are honest."""


@pytest.mark.parametrize("kinds", UNLIKE)
def test_a_backup_of_another_class_that_finishes_first_is_kept_and_nobody_is_blamed(kinds):
    counter, slow, backup = relieved(kinds)
    counter.broker.report(1, said(backup, 0, 3, salt=3))
    counter.broker.report(0, said(slow, 5, 6))
    assert counter.grown(7).token_ids == list(range(6)), "the first goes on meanwhile"
    counter.broker.report(1, said(backup, 3, 8, FinishReason.STOP, salt=3))
    assert counter.on_reports[-1] == WorkRevoked(1, 7, 0, "overtaken")
    assert counter.to(0)[-1] == Dropped(slow)
    granted = len(counter.sent)
    counter.want(8, group=7)
    assert not [m for _, m in counter.sent[granted:] if isinstance(m, Lease)], "it is there already"
    assert counter.grown(8).num_tokens == 8
    assert counter.grown(8).token_ids == [*range(300, 308)]
    assert counter.finished[-1][0].token_ids == [*range(300, 308)]
    assert counter.finished[-1][1] == ((1, 0, 8),), "its author is named, and may be checked"
    assert counter.convicted == counter.hung_up == []
    assert not counter.broker.table.tasks


@pytest.mark.parametrize("kinds", UNLIKE)
def test_a_backup_of_another_class_that_is_overtaken_is_dropped_and_counted(kinds):
    counter, slow, backup = relieved(kinds)
    counter.broker.report(1, said(backup, 0, 3, salt=3))
    counter.broker.report(0, said(slow, 5, 9, FinishReason.STOP))
    assert counter.grown(7).token_ids == list(range(9))
    assert counter.to(1)[-1] == Dropped(backup)
    assert WorkLost("overtaken", 3) in counter.on_reports
    assert not [m for m in counter.on_reports if isinstance(m, WorkRevoked)]


def test_a_backup_of_the_same_class_that_makes_other_tokens_is_a_contradiction():
    counter, _, backup = relieved(("cpu", "cpu"))
    counter.broker.report(1, said(backup, 0, 3, salt=3))
    assert counter.on_reports[-1] == WorkRevoked(1, 7, 0, "contradicted")


def test_what_an_earlier_process_knew_of_a_foreign_engine_is_replaced_when_it_is_made_again():
    """The tokens of a journal, which an engine with noise of its own cannot make twice."""
    counter = Counter(restarts=True)
    counter.worker(0, kind=None)
    counter.want(7, segments=[segment(0, 4)])
    counter.broker.report(0, said(counter.leases(0)[0].lease_id, 0, 6, FinishReason.STOP, salt=2))
    assert counter.on_reports == [WorkRevoked(1, 7, 0, "overtaken")]
    counter.want(8, group=7)
    assert counter.grown(8).token_ids == [*range(200, 206)]


def test_what_a_quarantined_worker_finished_first_is_not_kept():
    counter, _, backup = relieved(("cpu", "gpu"))
    counter.broker.report(1, said(backup, 0, 8, FinishReason.STOP, salt=3))
    counter.broker.leave(1, "quarantine")
    counter.broker.revoke(frozenset({1}), "quarantine")
    counter.want(8, group=7)
    (lease, *_) = [lease for lease in counter.leases(0) if lease.lease_id > backup]
    assert lease.trajectory.num_tokens == 0


def test_a_report_that_no_honest_worker_sends_is_not_appended():
    counter = Counter()
    counter.worker(0)
    counter.want(7)
    number = counter.leases(0)[0].lease_id
    counter.complaint = "the tokens are not of this world"
    counter.broker.report(0, said(number, 0, 5))
    assert counter.convicted == [(0, "the tokens are not of this world")]
    assert counter.on_reports == []
    counter.complaint = None
    counter.broker.report(0, said(number, 3, 5))
    assert counter.convicted == [(0, "the tokens are not of this world")], "out of order is no crime"


@pytest.mark.parametrize("holds", [False, True])
def test_revoke_takes_back_exactly_what_a_worker_wrote(holds):
    """Finished by it, begun by it, growing at it; nothing of the others'."""
    counter = Counter(holds=holds)
    counter.worker(0, slots=8)
    for task in (1, 2, 3):
        counter.want(task)
    one, two, three = (lease.lease_id for lease in counter.leases(0))
    counter.broker.report(0, said(one, 0, 5, FinishReason.STOP))  # finished by 0
    counter.broker.report(0, said(two, 0, 5))  # begun by 0, finished by 1
    counter.broker.report(0, said(three, 0, 4))  # begun by 0, growing at 1
    counter.worker(1, slots=8)
    counter.broker.leave(0, "gone")
    again = {lease.trajectory.group_id: lease.lease_id for lease in counter.leases(1)}
    counter.broker.report(1, said(again[2], 5, 9, FinishReason.STOP))
    counter.want(4)
    counter.want(5)
    mine = {lease.trajectory.group_id: lease.lease_id for lease in counter.leases(1)}
    counter.broker.report(1, said(mine[4], 0, 9, FinishReason.STOP))
    counter.broker.report(1, said(mine[5], 0, 3))
    finals = [m.lease_id for m in counter.on_reports if isinstance(m, Report) and m.finish_reason is not None]
    assert finals == ([] if holds else [1, 2, 4])
    del counter.on_reports[:], counter.sent[:]
    counter.broker.revoke(frozenset({0}), "quarantine")
    assert counter.on_reports == [WorkRevoked(1, task, 0, "quarantine") for task in (3, 1, 2)]
    assert counter.to(1) == [Dropped(mine[3])]
    for key in [(1, 1, 0), (1, 2, 0), (1, 4, 0)]:
        counter.broker.release(key)
        counter.broker.release(key)
    released = [m for m in counter.on_reports if isinstance(m, Report)]
    assert [m.lease_id for m in released] == ([4] if holds else []), "what was revoked is never released"
    heard = list(counter.on_reports)
    counter.broker.revoke(frozenset({0}), "quarantine")
    assert counter.on_reports == heard, "once"
    counter.broker.report(1, said(mine[5], 3, 6, FinishReason.STOP))
    counter.broker.release((1, 5, 0))
    assert counter.on_reports[-1] == Report(5, 3, (segment(3, 6),), FinishReason.STOP), "and what is honest goes on"


def test_what_is_held_back_is_told_at_its_release():
    """A run that is killed before the release resumes a trajectory without its end token, which is generated again."""
    counter = Counter(holds=True)
    counter.worker(0)
    counter.want(7)
    number = counter.leases(0)[0].lease_id
    counter.broker.report(0, said(number, 0, 5))
    counter.broker.report(0, said(number, 5, 9, FinishReason.STOP))
    assert counter.grown(7).finish_reason is None
    assert counter.grown(7).num_tokens == 5, "neither its end nor the tokens that were reported with it are known"
    counter.broker.release((1, 7, 0))
    counter.broker.release((1, 7, 0))
    assert counter.grown(7).finish_reason is FinishReason.STOP
    assert counter.grown(7).token_ids == list(range(9))


# ---- turns of an episode ---------------------------------------------------------------------------------------------


def seen(start: int, end: int) -> Segment:
    """An observation at these places."""
    return Segment(tuple(900 + p for p in range(start, end)), (0.0,) * (end - start), 0, Author.ENVIRONMENT)


def play_turn(counter: Counter, worker: int, task: int, begin: int, end: int, *before: Segment) -> None:
    """A turn of episode 7 that one worker generates."""
    counter.want(task, group=7, segments=before)
    counter.broker.report(worker, said(counter.leases(worker)[-1].lease_id, begin, end, FinishReason.STOP))


TURNS = segment(0, 3), seen(3, 5)


def test_in_sync_a_lost_turn_begins_again_after_the_observation():
    counter = Counter(restarts=True)
    counter.worker(0)
    counter.want(8, group=7, segments=(*TURNS, segment(5, 6)))
    counter.broker.report(0, said(counter.leases(0)[0].lease_id, 5, 8))
    counter.worker(1)
    counter.broker.leave(0, "gone")
    for lease in (counter.leases(0)[0], counter.leases(1)[0]):
        assert lease.trajectory.segments == TURNS, "an observation cannot be generated again"
    counter.broker.report(1, said(counter.leases(1)[0].lease_id, 5, 9, FinishReason.STOP))
    ids = [i for m in counter.on_reports if isinstance(m, Report) for s in m.segments for i in s.token_ids]
    assert ids == [6, 7, 8], "token 5 is of an earlier process"
    assert sum(m.num_tokens for m in counter.on_reports if isinstance(m, WorkLost)) == 1 + 3
    assert counter.finished[-1][1] == ((0, 6, 8), (1, 8, 9))


def test_a_turn_is_verified_alone_and_goes_to_the_worker_of_the_turn_before():
    counter = Counter()
    counter.worker(0)
    counter.worker(1)
    counter.worker(2)
    counter.broker.want(Lease(1, Trajectory(1, 0, (5, 6)), SamplingParams(MAX), 1, 0))  # worker 0 is the busiest
    play_turn(counter, 1, 2, 0, 3)
    play_turn(counter, 1, 3, 5, 8, *TURNS)
    assert [spans for _, spans in counter.finished] == [((1, 0, 3),), ((1, 5, 8),)]
    assert counter.finished[-1][0].segments == (*TURNS, segment(5, 8))


@pytest.mark.parametrize("moment", ["acting", "leased", "aborted", "over"])
def test_an_episode_is_taken_back_once_for_any_turn_of_a_worker(moment):
    counter = Counter()
    counter.worker(0)
    play_turn(counter, 0, 1, 0, 3)
    counter.broker.leave(0, "gone")
    counter.worker(1)
    if moment != "acting":
        counter.want(2, group=7, segments=TURNS)
    if moment == "aborted":
        counter.broker.abort(2)
        counter.broker.report(1, said(counter.leases(1)[0].lease_id, 5, 6, is_aborted=True))
    if moment == "over":
        counter.broker.report(1, said(counter.leases(1)[0].lease_id, 5, 8, FinishReason.STOP))
    del counter.on_reports[:]
    for _ in range(2):
        counter.broker.revoke(frozenset({0}), "quarantine")
    assert counter.on_reports == [WorkRevoked(1, 7, 0, "quarantine")]
    assert not counter.broker.table.tasks
    if moment == "leased":
        assert counter.to(1)[-1] == Dropped(counter.leases(1)[0].lease_id)


def test_an_episode_that_began_again_is_not_taken_back_for_a_worker_of_its_first_attempt():
    counter = Counter()
    counter.worker(0)
    play_turn(counter, 0, 1, 0, 3)
    counter.broker.leave(0, "gone")
    counter.worker(1)
    play_turn(counter, 1, 2, 0, 3)
    del counter.on_reports[:]
    counter.broker.revoke(frozenset({0}), "quarantine")
    assert counter.on_reports == []


def test_a_later_turn_that_a_backup_of_another_class_finishes_first_is_generated_again_from_the_prompt():
    """What came after the first turn does not answer for the first turn."""
    counter = Counter(restarts=True, backup_lease_factor=1.0)
    for number, kind in enumerate(("cpu", "gpu")):
        counter.worker(number, slots=1, kind=kind)
    counter.want(7, segments=TURNS)
    counter.want(1)
    counter.now_s = 4.0
    counter.broker.report(0, said(counter.leases(0)[0].lease_id, 5, 7))
    counter.broker.report(1, said(counter.leases(1)[0].lease_id, 0, 40, FinishReason.LENGTH))
    counter.broker.handle(ev.LeaseTick(counter.now_s))
    (_, backup) = counter.leases(1)
    assert backup.trajectory.segments == TURNS
    counter.broker.report(1, said(backup.lease_id, 5, 9, FinishReason.STOP, salt=3))
    assert counter.on_reports[-1] == WorkRevoked(1, 7, 0, "overtaken")
    told = len(counter.on_reports)
    counter.want(8, group=7)
    assert counter.on_reports[told:] == []
    assert [m.trajectory.num_tokens for _, m in counter.sent[-1:] if isinstance(m, Lease)] == [0]


def test_who_refuses_one_lease_after_another_is_hung_up_on():
    counter = Counter()
    counter.worker(0)
    counter.want(7)
    refused = 0
    while not counter.hung_up:
        refused += 1
        counter.broker.refuse(0, Retry(counter.leases(0)[-1].lease_id, 9))
        counter.broker.heartbeat(0, 0, 0)  # and says again that it serves the version
        assert refused < 100
    assert refused == 65
    assert "refused 64 leases in a row" in counter.hung_up[0][1]
    counter.worker(1)
    counter.broker.report(1, said(counter.leases(1)[0].lease_id, 0, 5, FinishReason.STOP))
    assert counter.grown(7).num_tokens == 5


def end_unasked(counter: Counter, worker: int, lease: int, how: str) -> None:
    """What an untrusted worker does with a lease instead of finishing it."""
    match how:
        case "abort":
            counter.broker.report(worker, said(lease, 0, 0, is_aborted=True))
        case "tokens":
            counter.broker.report(worker, said(lease, 0, MAX, is_aborted=True))
        case "refuse":
            counter.broker.heartbeat(worker, None, 0)
            counter.broker.refuse(worker, Retry(lease, -1))
        case "omit":
            counter.broker.heartbeat(worker, None, 0)
            counter.broker.held(worker, [])


@pytest.mark.parametrize("comes_again", [False, True])
@pytest.mark.parametrize("how", ["abort", "tokens", "refuse", "omit"])
def test_who_returns_each_lease_gets_soon_one_in_40_s_and_the_hub_says_so(how, comes_again):
    """Without a bound, it gets a lease at each of its 6,000 messages, and the trajectory is never made."""
    counter, liar = Counter(restarts=True), 0
    counter.broker.join(ev.WorkerJoined(counter.now_s, 0, 4096, owner="liar"))
    counter.want(7)
    given = 0
    for moment in range(6000):
        counter.now_s = 0.02 * moment
        if comes_again and moment % 100 == 99:
            counter.broker.leave(liar, "left")
            liar += 1
            counter.broker.join(ev.WorkerJoined(counter.now_s, liar, 4096, owner="liar"))
        counter.broker.heartbeat(liar, 0, moment)
        fresh = counter.leases(liar)
        if fresh and fresh[-1].lease_id in counter.desk.table.leases:
            given += 1
            end_unasked(counter, liar, fresh[-1].lease_id, how)
        counter.broker.handle(ev.LeaseTick(counter.now_s))
    assert given <= FREE_RETURNS + 2 + 120 / 40, "32 are free, three go down to none, and one in 40 s"
    assert "more leases" in counter.desk.limit_of(liar)
    counter.worker(liar + 1)
    counter.broker.handle(ev.LeaseTick(counter.now_s))
    (lease,) = counter.leases(liar + 1)
    counter.broker.report(liar + 1, said(lease.lease_id, 0, MAX, FinishReason.STOP))
    assert counter.grown(7).num_tokens == MAX, "an honest worker makes it"


@pytest.mark.parametrize("how", ["abort", "refuse", "omit", "leave"])
def test_an_honest_worker_may_return_all_its_leases_at_once(how):
    """Because of a new version, of a broken connection, or of SIGTERM (its last reports arrive before `Leaving`)."""
    counter = Counter()
    counter.broker.join(ev.WorkerJoined(counter.now_s, 0, 64, owner="friend"))
    counter.broker.heartbeat(0, 0, 0)
    for task in range(300):
        counter.want(task)
    for lease in list(counter.leases(0)) + [None] * 100:
        lease = lease or next(one for one in counter.leases(0) if one.lease_id in counter.desk.table.leases)
        counter.broker.report(0, said(lease.lease_id, 0, 20, FinishReason.STOP))
    held = [lease.lease_id for lease in counter.leases(0) if lease.lease_id in counter.desk.table.leases]
    assert len(held) == 80, "its 64 slots, and 16 that wait"
    if how == "leave":
        for lease in held:
            counter.broker.report(0, said(lease, 0, 1))
        counter.broker.leave(0, "left")
    for lease in held:
        end_unasked(counter, 0, lease, how)
    counter.broker.join(ev.WorkerJoined(counter.now_s, 1, 64, owner="friend"))
    counter.broker.heartbeat(1, 0, 0)
    assert counter.desk.limit_of(0) == counter.desk.limit_of(1) == ""
    assert counter.desk.num_leases(1) >= FIRST_LEASES


def test_an_abort_reports_what_there_is_and_puts_down():
    counter = Counter()
    counter.worker(0)
    counter.want(7)
    counter.broker.abort(7)
    counter.broker.abort(7)
    counter.broker.abort(99)
    number = counter.leases(0)[0].lease_id
    assert counter.to(0) == [Abort(number)]
    counter.broker.report(0, said(number, 0, 4, is_aborted=True))
    assert counter.on_reports == [Report(7, 0, (segment(0, 4),)), Report(7, 4, (), is_aborted=True)]
    assert counter.to(0)[-1] == Ack(number, 4, has_ended=True)


def test_a_straggler_is_relieved_and_only_one_branch_counts():
    counter = Counter(backup_lease_factor=2.0)
    counter.worker(0, slots=1)
    counter.worker(1, slots=1)
    counter.want(1)
    counter.want(2)
    slow, fast = counter.leases(0)[0].lease_id, counter.leases(1)[0].lease_id
    counter.now_s = 4.0
    counter.broker.report(0, said(slow, 0, 1))
    counter.broker.report(1, said(fast, 0, 30, FinishReason.STOP))
    counter.broker.handle(ev.LeaseTick(counter.now_s))
    backup = counter.leases(1)[-1]
    assert backup.trajectory.group_id == 1
    assert backup.trajectory.num_tokens == 1
    counter.broker.report(0, said(slow, 1, 3))
    counter.broker.report(1, said(backup.lease_id, 1, 8, FinishReason.STOP, salt=1))
    assert counter.grown(1).token_ids == [0, *range(101, 108)]
    assert WorkLost("overtaken", 2) in counter.on_reports
    assert Dropped(slow) in counter.to(0)
    counter.broker.report(0, said(slow, 3, 9, FinishReason.STOP))
    assert counter.grown(1).num_tokens == 8
    assert counter.finished[-1][1] == ((0, 0, 1), (1, 1, 8))


def test_events_are_a_closed_set():
    """A desk that meets a command which it does not know would drop it without a word."""
    known = {
        ev.GrantLease,
        ev.RecallLease,
        ev.DropLease,
        ev.CommitTokens,
        ev.FinishTask,
        ev.ReplaceTokens,
        ev.ReturnTask,
        ev.DiscardTokens,
        ev.DisconnectWorker,
    }
    assert set(ev.Command.__args__) == known


def test_what_one_worker_wrote_in_several_reports_is_one_span():
    """Ten tokens by worker 0 in two reports, then its end, then ten by worker 1 in two."""
    counter = Counter()
    counter.worker(0)
    counter.want(7)
    (lease,) = counter.leases(0)
    counter.broker.report(0, said(lease.lease_id, 0, 4))
    counter.broker.report(0, said(lease.lease_id, 4, 10))
    counter.worker(1)
    counter.broker.leave(0, "gone")
    (again,) = counter.leases(1)
    counter.broker.report(1, said(again.lease_id, 10, 15))
    counter.broker.report(1, said(again.lease_id, 15, 20, FinishReason.STOP))
    assert [spans for _, spans in counter.finished] == [((0, 0, 10), (1, 10, 20))]


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_worker_that_goes_while_it_is_given_leases_leaves_nothing_behind(is_traced):
    """Its connection is full at the first of three leases: the other two go to the next worker too, each once."""
    counter = Counter(is_traced=is_traced)

    def full(worker: int, message: object) -> None:
        counter.sent.append((worker, message))
        if worker == 0 and isinstance(message, Lease) and 0 in counter.broker.table.workers:
            counter.broker.leave(0, "takes nothing")

    counter.send = full  # type: ignore[method-assign]
    for task in range(3):
        counter.want(task)
    counter.worker(0)
    assert not counter.broker.table.workers
    counter.worker(1)
    assert [lease.trajectory.group_id for lease in counter.leases(1)] == [0, 1, 2]
    for lease in counter.leases(1):
        assert lease.lease_id in counter.broker.table.leases
        counter.broker.report(1, said(lease.lease_id, 0, 3, FinishReason.STOP))
    assert [counter.grown(task).num_tokens for task in range(3)] == [3, 3, 3]
    assert not counter.broker.table.tasks
    assert not counter.broker._progress
