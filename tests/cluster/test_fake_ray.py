"""Ranks and workers on a fake of Ray whose answers the test decides: races and losses that real Ray rarely shows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray_rows import row

from baton.cluster.inventory import machines
from baton.cluster.placement import Placement, ProcessSpec
from baton.cluster.ray import ranks
from baton.cluster.ray.ranks import RayRanks
from baton.cluster.ray.supervisor import RayWorkerSupervisor
from baton.errors import RankLost
from baton.trainer.parallel.messages import Listen

ROWS = [row("here"), row("there", gpu_type_H100=1)]
BY_NAME = {machine.name: machine for machine in machines(ROWS)}
GPU = ("there:0",)


class Lost(Exception):
    """In place of `ray.exceptions.RayError`."""


class TaskError(Lost):
    """In place of `ray.exceptions.RayTaskError`."""


class Never:
    """The answer of a call that does not return."""


class FakeCluster:
    """In place of `RayCluster`. Each actor answers a call by the function of this name."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=TaskError)
    own_address = here = "here"

    def __init__(self, answers: Mapping[str, Callable[..., Any]], on_start: Callable[[], None] = lambda: None) -> None:
        self._answers, self._on_start = answers, on_start
        self.ray = self

    def rows(self) -> list[Any]:
        return ROWS

    def alive(self) -> frozenset[str]:
        return frozenset(each["NodeID"] for each in ROWS)

    def reserve(self, bundles: object, name: str) -> Any:
        return SimpleNamespace(ready=lambda: [None])

    def release(self, group: object) -> None: ...

    def kill(self, actor: object) -> None: ...

    def options(self, *about: object) -> dict[str, Any]:
        self._on_start()
        return {}

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **named: SimpleNamespace(remote=self._actor))

    def _actor(self, *arguments: object) -> Any:
        calls = {name: SimpleNamespace(remote=self._future(answer)) for name, answer in self._answers.items()}
        return SimpleNamespace(**calls)

    def _future(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: SimpleFuture(answer(*arguments))

    def wait(self, futures: Sequence[Any], **limits: object) -> tuple[list[Any], list[Any]]:
        ready = [each for each in futures if not (isinstance(each, SimpleFuture) and each.result is Never)]
        if not ready:
            time.sleep(0.01)
        return ready, [each for each in futures if each not in ready]

    def get(self, future: Any, timeout: float) -> Any:
        if isinstance(future.result, Exception):
            raise future.result
        return future.result


class SimpleFuture:
    """A call of an actor that has returned, unless the result is `Never`."""

    def __init__(self, result: Any) -> None:
        self.result = result


def test_of_a_version_whose_rank_is_lost_no_part_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = iter([np.zeros(4, np.uint8), Lost("the node died")])
    answers = {"pid": lambda: 1, "visible": dict, "take": lambda path, begin: next(pieces), "close": lambda: None}
    spec = ProcessSpec("rank-0", "rank", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1)
    monkeypatch.setattr(ranks, "PIECE_BYTES", 4)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = RayRanks(FakeCluster(answers), [spec], BY_NAME)  # type: ignore[arg-type]
    with pytest.raises(RankLost, match="rank 0 on there was lost: the node died"):
        started.bring("/version")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["put", "wait"])
def test_a_call_of_ray_itself_that_fails_ends_the_ranks(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises errors of several types when it has lost its head."""

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no head")

    cluster = FakeCluster({"pid": lambda: 1, "visible": dict, "handle": lambda data: b"", "close": lambda: None})
    spec, killed = ProcessSpec("rank-0", "rank", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1), list[object]()
    started = RayRanks(cluster, [spec], BY_NAME)  # type: ignore[arg-type]
    monkeypatch.setattr(FakeCluster, "put", lambda self, data: data, raising=False)
    monkeypatch.setattr(FakeCluster, call, fail, raising=False)
    monkeypatch.setattr(FakeCluster, "kill", lambda self, actor: killed.append(actor))
    with pytest.raises(RankLost, match="the connection to the Ray cluster was lost: no head"):
        started.ask(Listen(), 60.0)
    assert len(killed) == 1


def test_a_worker_that_starts_while_the_trainer_takes_the_gpu_is_asked_to_free_it() -> None:
    """The controller's thread calls `sleep` while the supervisor's thread is starting the first worker."""
    asked: list[str] = []
    sleepers: list[Thread] = []

    def on_start() -> None:
        sleeper = Thread(target=supervisor.sleep)
        sleeper.start()
        sleepers.append(sleeper)
        sleeper.join(0.5)  # without a common lock, `sleep` would end here and find no worker

    answers = {
        "watch": lambda: Never,
        "pid": lambda: Never,
        "leave": lambda: None,
        "use_device": lambda turn, limit_s: asked.append(turn) or 0,
    }
    rank = ProcessSpec("rank-0", "rank", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1)
    worker = ProcessSpec("worker-0", "worker", "there", "H100", GPU, {}, 1, slots=8, ranks=(0,))
    names = {machine.id: machine.name for machine in BY_NAME.values()}
    recipe = SimpleNamespace(
        rollout=SimpleNamespace(stall_timeout_s=60.0),
        model=SimpleNamespace(device="cuda"),
        engine=SimpleNamespace(kind="embedded"),
    )
    planner = SimpleNamespace(base_types=(), servers={}, recipe=recipe)
    access = SimpleNamespace(url="http://127.0.0.1:1", certificate="", token=lambda name: "t", gone=lambda *_: None)
    supervisor = RayWorkerSupervisor(
        FakeCluster(answers, on_start),  # type: ignore[arg-type]
        Placement((rank,), (worker,), names),
        planner,  # type: ignore[arg-type]
        lambda line: None,
    )
    supervisor.ranks = None, ({"CUDA_VISIBLE_DEVICES": "0"},)
    supervisor.begin(access)
    try:
        until_s = time.monotonic() + 60
        while not sleepers and time.monotonic() < until_s:
            time.sleep(0.01)
        sleepers[0].join(60)
        assert not sleepers[0].is_alive()
        assert asked == ["sleep"]
        supervisor.check_health()
    finally:
        supervisor.close()
