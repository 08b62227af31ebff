"""A replica that needs longer to load than a train step takes is named once. Engines and transfers here are fakes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from baton.rollout import replicas
from baton.rollout.engine import EngineStats
from baton.rollout.replicas import ReplicaTransport
from baton.types import FromWorker, PolicyVersion

LIMIT_S = 60.0


class HeldEngine:
    """Ends a load when the test says so, or at once."""

    slots, stats = 8, EngineStats()

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.begun: SimpleQueue[int] = SimpleQueue()
        self.may_end: SimpleQueue[None] = SimpleQueue()

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        self.begun.put(version.number)
        if self.is_slow:
            self.may_end.get(timeout=LIMIT_S)

    def step(self) -> list[FromWorker]:
        return []

    def close(self) -> None:
        self.may_end.put(None)


class Run:
    """Two replicas, of which the second loads slowly."""

    def __init__(self) -> None:
        self.engines = [HeldEngine(is_slow=False), HeldEngine(is_slow=True)]
        offers: Any = SimpleNamespace(
            metrics=dict, offer=lambda tensors, version: tensors, withdraw=lambda: None, close=lambda: None
        )
        build: Any = lambda index: self.engines[index]  # noqa: E731
        self.port = ReplicaTransport(2, build, offers, PolicyVersion("run", 0))

    def offer(self, number: int) -> None:
        """Begin a version, and return when the first replica serves it."""
        self.port.load_weights({}, PolicyVersion("run", number))

    def end_load(self, of: int) -> None:
        """End the slow replica's load of a version. The event is processed after it has begun the next one."""
        assert self.engines[1].begun.get(timeout=LIMIT_S) == of
        self.engines[1].may_end.put(None)
        begun = self.engines[1].begun.get(timeout=LIMIT_S)
        self.engines[1].begun.put(begun)
        self.port.receive(0.0)

    def end_last_load(self) -> None:
        """End the load of the newest version, and return when the slow replica serves it."""
        self.engines[1].begun.get(timeout=LIMIT_S)
        self.engines[1].may_end.put(None)
        while not self.port.replicas[1].is_serving:
            self.port.receive(0.05)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(replicas, "GRACE_S", 0.0)
    made = Run()
    yield made
    made.port.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_a_replica_whose_loads_are_all_late_is_named_once_with_what_to_do(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.offer(1)
    run.offer(2)
    run.end_load(1)
    assert warnings_of(caplog) == [], "one late load may have a passing cause"
    run.offer(3)
    run.end_load(2)
    (found,) = warnings_of(caplog)
    assert found.startswith("replica 1 serves no version: its last load took 0 s, but versions follow each other in 0")
    assert "or remove it (engine.vllm.replicas" in found
    assert not run.port.replicas[1].is_serving
    run.offer(4)
    run.end_load(3)
    assert len(warnings_of(caplog)) == 1
    run.end_last_load()
    assert run.port.slots == 16, "its load of version 4 was not interrupted"


def test_a_replica_that_is_late_now_and_then_is_not_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 3, 5):
        run.offer(number)
        run.offer(number + 1)
        run.end_load(number)
        run.end_last_load()
    assert warnings_of(caplog) == []
