"""What a worker decides, by its messages alone: the network, the engine and the fetches are the test's."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import DeadlineExceeded, UserError
from baton.swarm import version_sync as vs
from baton.swarm.messages import (
    PROTOCOL,
    SILENT_HEARTBEATS,
    Ack,
    Admitted,
    Dropped,
    Heartbeat,
    Hello,
    Rejected,
    Want,
    Welcome,
)
from baton.swarm.verification.verify import WorkerClass
from baton.swarm.worker.session import CONNECT_DEADLINE_S, ConnectionLost, Prepare, WorkerSession
from baton.types import Abort, FinishReason, Lease, PolicyVersion, Report, Retry, SamplingParams, Segment, Trajectory

CLASS = WorkerClass("cpu", "float32", "embedded")
LEASE = Lease(7, Trajectory(0, 0, [1, 2]), SamplingParams(8), 1, 0)
PART = Report(7, 0, (Segment([5, 6], [-1.0, -1.0], 0),))
REST = Report(7, 2, (Segment([7], [-1.0], 0),), FinishReason.LENGTH)
FIRST = PolicyVersion("lineage", 0, "digest")


def welcome(incarnation: str = "a", **changed: Any) -> Welcome:
    values = {"protocol": PROTOCOL, "run": "run", "incarnation": incarnation, "model_digest": "m", "is_adapter": False}
    values |= {"base": None, "attention": "", "engine": {}, "on_new_version": "resume", "relay_secret": ""}
    return Welcome(**{**values, "heartbeat_s": 2.0, "report_every_s": 1.0, **changed})


def connected(session: WorkerSession, incarnation: str = "a") -> list[Any]:
    """Connect, and return what the worker sends when its engine is ready."""
    session.receive(welcome(incarnation), 0.0)
    return list(session.ready(CLASS, 4))


def test_reports_are_sent_again_after_a_reconnection_until_they_are_confirmed() -> None:
    session = WorkerSession()
    assert connected(session) == [Hello("", CLASS, "m", 4, None)]
    session.receive(Admitted("key"), 0.0)
    assert list(session.receive(LEASE, 0.0)) == [LEASE]
    assert list(session.reported([PART])) == [PART]
    session.lost(0.0)
    assert list(session.reported([REST])) == [], "it is kept, not sent"
    assert connected(session) == [Hello("key", CLASS, "m", 4, None, (7,)), PART, REST]
    session.receive(Ack(7, 2), 0.0)
    session.lost(0.0)
    assert connected(session)[1:] == [REST]
    assert session.num_unconfirmed == 1
    session.receive(Ack(7, 3, has_ended=True), 0.0)
    session.lost(0.0)
    assert connected(session) == [Hello("key", CLASS, "m", 4, None)]


def test_a_lease_that_was_dropped_or_refused_is_not_reported_again() -> None:
    session = WorkerSession()
    connected(session)
    session.receive(LEASE, 0.0)
    session.reported([PART])
    assert list(session.receive(Dropped(7), 0.0)) == [Dropped(7)]
    session.receive(Lease(8, LEASE.trajectory, LEASE.sampling, 1, 3), 0.0)
    assert list(session.reported([Retry(8, 0)])) == [Retry(8, 0)]
    session.lost(0.0)
    assert connected(session) == [Hello("", CLASS, "m", 4, None)]


def test_a_restarted_hub_makes_the_worker_discard_all_leases() -> None:
    session = WorkerSession()
    connected(session)
    session.receive(LEASE, 0.0)
    session.reported([PART])
    session.lost(0.0)
    beat, prepare = session.receive(welcome("b"), 0.0)
    assert isinstance(beat, Heartbeat)
    assert prepare == Prepare(welcome("b"), is_new_hub=True)
    assert list(session.reported([REST])) == [], "the engine is still being told"
    session.lost(0.0)
    assert list(session.receive(welcome("b"), 0.0)) == [beat, prepare], "a cut in between changes nothing"
    assert session.ready(CLASS, 4) == [Hello("", CLASS, "m", 4, None)]


def test_a_wanted_version_is_fetched_activated_and_said() -> None:
    session = WorkerSession()
    connected(session)
    assert list(session.receive(Want(FIRST, relays=("relay",)), 1.0)) == [vs.Fetch(FIRST)]
    assert session.want == Want(FIRST, relays=("relay",))
    assert session.heartbeat().fetching == 0
    assert list(session.handle(vs.FetchFailed(2.0, FIRST, "cut"))) == [vs.SetTimer(2.5)]
    assert session.heartbeat().fault == "cut"
    assert list(session.handle(vs.TimerFired(2.5))) == [vs.Fetch(FIRST)]
    assert list(session.handle(vs.Fetched(3.0, FIRST))) == [vs.Activate(FIRST)]
    assert list(session.handle(vs.Activated(4.0, FIRST))) == [Heartbeat(FIRST)]
    session.lost(5.0)
    later = PolicyVersion("lineage", 1, "digest")
    connected(session)
    session.receive(Want(later), 6.0)
    session.lost(7.0)
    session.handle(vs.Fetched(8.0, later))
    assert list(session.handle(vs.Activated(8.0, later))) == [], "there is no connection"
    assert connected(session) == [Hello("", CLASS, "m", 4, later)]


@pytest.mark.parametrize("first", [Abort(1), Ack(1, 2), Want(FIRST)])
def test_a_connection_begins_with_one_welcome(first: Any) -> None:
    session = WorkerSession()
    with pytest.raises(ConnectionLost, match=f"the hub sent {type(first).__name__} instead"):
        session.receive(first, 0.0)
    connected(session)
    with pytest.raises(ConnectionLost, match="the hub sent Welcome instead"):
        session.receive(welcome(), 0.0)


def test_a_refusal_ends_the_connection_or_the_worker() -> None:
    session = WorkerSession()
    with pytest.raises(ConnectionLost, match="try again"):
        session.receive(Rejected("try again", is_final=False), 0.0)
    connected(session)
    with pytest.raises(UserError, match="the hub refuses this worker: in quarantine"):
        session.receive(Rejected("in quarantine", is_final=True), 0.0)


def test_a_worker_without_a_key_of_the_hubs_engine_names_it_and_ends() -> None:
    with pytest.raises(UserError, match=r"engine.vllm.key_of_2030 of the hub: .*: install the same version of Baton"):
        WorkerSession().receive(welcome(engine={"vllm": {"key_of_2030": 1}}), 0.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_digest": "other"},
        {"engine": {"slots": 8}},
        {"is_adapter": True, "base": FIRST},
        {"attention": "eager"},
        {"on_new_version": "keep"},
    ],
)
def test_a_worker_ends_if_the_next_hub_needs_another_engine(changed: dict[str, Any]) -> None:
    """A worker survives an interrupted run. With the engine of this run, its tokens for the next run would be wrong,
    and the hub would quarantine the worker."""
    session = WorkerSession()
    connected(session)
    session.lost(0.0)
    with pytest.raises(UserError, match="another model or engine"):
        session.receive(welcome("b", **changed), 0.0)


def test_waits_between_attempts_double_until_a_hub_serves_the_worker() -> None:
    session = WorkerSession(jitter=lambda: 0.5)
    assert [session.lost(0.0) for _ in range(9)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    session.receive(welcome(), 0.0)
    assert session.lost(0.0) == 15.0, "Welcome is no service"
    connected(session)
    assert session.lost(0.0) == 0.25


def test_a_worker_gives_up_when_no_hub_has_served_it_for_too_long() -> None:
    session = WorkerSession(url="http://hub", reconnect_timeout_s=100.0)
    session.served_s = 1000.0
    session.lost(1099.0)
    connected(session)
    session.lost(2000.0)
    session.lost(2099.0)
    with pytest.raises(DeadlineExceeded, match="no hub has answered at http://hub for 100 s; the worker ends"):
        session.lost(2100.0)


def test_a_hub_with_another_protocol_is_refused_before_anything_is_misunderstood() -> None:
    with pytest.raises(UserError, match=f"the hub uses protocol 9 and this worker {PROTOCOL}: install the same"):
        WorkerSession().receive(welcome(protocol=9), 0.0)


def test_the_limit_of_silence_follows_the_heartbeat_that_the_hub_asks_for() -> None:
    session = WorkerSession()
    assert session.silence_s == CONNECT_DEADLINE_S
    connected(session)
    assert session.silence_s == 2.0 * SILENT_HEARTBEATS
    session.lost(0.0)
    assert session.silence_s == CONNECT_DEADLINE_S, "the next Welcome has not arrived"
