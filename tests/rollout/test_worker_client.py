"""While environments work, the wait for a worker ends with the first message of either."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.frames import FrameSocket, frame_socket_of, frame_sockets
from baton.rollout.engine import EngineStats
from baton.rollout.worker_client import SHORT_WAIT_S, WorkerClient
from baton.types import FromPort, WorkLost

pytestmark = pytest.mark.timeout(60)
LONG_S = 3600.0


class Worker:
    """A transport whose messages arrive on a socket, or on none."""

    name, slots = "the worker", 8

    def __init__(self, *, has_socket: bool = True) -> None:
        self.own, self.other = pair()
        self.sockets = (self.own,) if has_socket else ()
        self.waits: list[float] = []

    def stats(self) -> EngineStats:
        return EngineStats()

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        self.waits.append(timeout_s)
        return [] if self.own.receive() is None else [WorkLost("lost", 1)]


def pair() -> tuple[FrameSocket, FrameSocket]:
    ours, theirs = frame_sockets(100)
    return ours, frame_socket_of(theirs.detach(), 100)


def test_an_answer_of_an_environment_ends_the_wait_for_the_worker() -> None:
    worker, (answers, environment) = Worker(), pair()
    environment.send(b"answer")
    assert WorkerClient(worker).receive(LONG_S, 1, (), [answers]) == []  # type: ignore[arg-type]
    assert worker.waits == [0.0, 0.0], "it looks, waits for both, and looks again"
    assert answers.receive() == b"answer", "nobody else has read it"


def test_a_message_of_the_worker_ends_the_wait_or_needs_none() -> None:
    worker, (answers, _environment) = Worker(), pair()
    worker.other.send(b"report")
    assert len(WorkerClient(worker).receive(LONG_S, 1, (), [answers])) == 1  # type: ignore[arg-type]
    assert worker.waits == [0.0]


@pytest.mark.parametrize(("has_socket", "has_answers"), [(False, True), (True, False)])
def test_without_sockets_of_both_neither_waits_for_long(has_socket: bool, has_answers: bool) -> None:
    worker, (answers, _environment) = Worker(has_socket=has_socket), pair()
    client = WorkerClient(worker)  # type: ignore[arg-type]
    assert client.receive(LONG_S, 1, (), [answers] if has_answers else []) == []
    assert client.receive(7.0, 1, ()) == []
    assert worker.waits == [SHORT_WAIT_S, 7.0], "without environments the worker alone decides"
