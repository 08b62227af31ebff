"""Several replicas in one run, with real processes that receive weights over gloo: a signal to one at any stage of a
transfer delays no other. The processes hold tensors instead of a vLLM, and this shows nothing about GPUs."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "weights" / "direct"))

from replica_process import STAGES, ProcessLink

from baton.clock import RestartRule
from baton.errors import EngineFault, WeightsFault
from baton.rollout.engine import EngineStats
from baton.rollout.engines.vllm.direct import DirectLoad, DirectVersions
from baton.rollout.replicas import ReplicaTransport
from baton.types import (
    Abort,
    FinishReason,
    FromWorker,
    Lease,
    PolicyVersion,
    Report,
    Retry,
    SamplingParams,
    Segment,
    Trajectory,
    WorkLost,
)
from baton.weights.direct.settings import DirectTransfer
from tests.all_cases import chosen

pytestmark = [pytest.mark.timing, pytest.mark.slow]

SIGNALS = list(product(STAGES, (signal.SIGKILL, signal.SIGSTOP), (False, True)))
"""A stage, a signal, and whether only differences are sent. CI runs every third case, which has all values; with
`BATON_ALL_STAGES=1`, all cases run. `tests/weights/direct/test_sender.py` has each signal at each stage in CI."""
TIMEOUT_S = 4.0
"""Deadline of each phase of a transfer."""
LIMIT_S = 60.0
RESTART_S = 480.0
"""Deadline of the start of a new replica on a busy machine."""
LONG = 10**6
"""Tokens of a response that is never finished."""


def version(number: int) -> PolicyVersion:
    return PolicyVersion("run", number)


def tensors(number: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """700 tensors, which need two buckets. All elements of version `number` are `number`, but most of `same` are 1."""
    changing = {f"w{i}": torch.full((4,), float(number), dtype=dtype) for i in range(700)}
    same = torch.ones(4000, dtype=dtype)
    same[number] = 2.0
    return {**changing, "same": same}


class Client:
    """The part of `VllmClient` that transfers use."""

    def __init__(self, link: ProcessLink) -> None:
        self.link = link

    def call_workers(self, method: str, info: Any, timeout_s: float) -> list[Any]:
        return [self.link.ask(method, info, timeout_s)]

    def check(self) -> None:
        if not self.link.process.is_alive():
            raise EngineFault("the process has exited")


class ProcessEngine:
    """An engine whose tokens are the values of its process's weights, so a token shows which weights sampled it."""

    slots = 8

    def __init__(self, direct: DirectTransfer, link: ProcessLink) -> None:
        self.version, self.link, self.direct = (
            version(0),
            link,
            DirectLoad(Client(link), direct, 1, timeout_s=TIMEOUT_S),
        )
        self.leases: dict[int, tuple[Lease, int]] = {}
        self.aborted: list[int] = []
        self.num_tokens = 0
        self.is_broken = False

    @property
    def stats(self) -> EngineStats:
        return EngineStats(decoded_tokens=self.num_tokens)

    def submit(self, lease: Lease) -> None:
        self.leases[lease.lease_id] = lease, lease.trajectory.num_tokens

    def abort(self, lease_id: int) -> None:
        self.aborted.append(lease_id)

    def step(self) -> list[FromWorker]:
        assert not self.is_broken or self.aborted, "an engine without a whole version generates nothing"
        reports: list[FromWorker] = []
        for lease_id in [one for one in self.aborted if one in self.leases]:
            _, count = self.leases.pop(lease_id)
            reports.append(Report(lease_id, count, (), is_aborted=True))
        self.aborted = []
        if self.leases:
            served = self.link.ask("served", None, TIMEOUT_S)
            assert served is not None
            values = {value for name, tensor in served.items() if name != "same" for value in tensor}
            assert len(values) <= 1, "a token of parts of two versions"
            token = int(min(values, default=0))
            for lease_id, (lease, count) in list(self.leases.items()):
                segment = Segment((token,), (-1.0,), self.version.number)
                is_over = count + 1 >= lease.sampling.max_new_tokens
                reports.append(Report(lease_id, count, (segment,), FinishReason.LENGTH if is_over else None))
                self.num_tokens += 1
                self.leases[lease_id] = lease, count + 1
                if is_over:
                    del self.leases[lease_id]
            time.sleep(0.01)
        return reports

    def load_weights(self, given: dict[str, Any], wanted: PolicyVersion) -> None:
        self.is_broken = True
        self.direct.load(given, wanted)
        self.version, self.is_broken = wanted, False

    def close(self) -> None:
        self.direct.close()
        self.link.close()


class Run:
    """A transport over replicas, and the loop of a controller that sends refused leases again."""

    def __init__(self, count: int, *, is_sparse: bool = False, restart: RestartRule | None = None) -> None:
        direct = DirectTransfer("gloo", is_sparse)
        self.versions = DirectVersions(direct, TIMEOUT_S)
        self.links: list[list[ProcessLink]] = [[] for _ in range(count)]

        def build(index: int) -> Any:
            self.links[index].append(ProcessLink())
            own = DirectTransfer("gloo", is_sparse, versions=self.versions, replica=f"replica {index}")
            return ProcessEngine(own, self.links[index][-1])

        rule = restart or RestartRule(first_wait_s=0.1, longest_wait_s=0.5)
        self.port = ReplicaTransport(count, build, self.versions, version(0), restart=rule)
        self.leases: dict[int, Lease] = {}
        self.tokens: dict[int, list[tuple[int, int]]] = {}
        """Trajectory → token and version of each token."""
        self.refused: list[int] = []
        self.lost = 0
        self.number = 0

    def lease(self, group: int, max_new_tokens: int) -> None:
        self.number += 1
        segments = tuple(Segment((t,), (-1.0,), v) for t, v in self.tokens.setdefault(group, []))
        trajectory = Trajectory(group, 0, (1, 2), segments)
        made = Lease(self.number, trajectory, SamplingParams(max_new_tokens), 0, 0, is_exact=False)
        self.leases[self.number] = made
        self.port.send(made)

    def pump(self) -> None:
        for message in self.port.receive(0.1):
            match message:
                case Report(lease_id=lease_id, segments=segments, finish_reason=reason, is_aborted=is_aborted):
                    group = self.leases[lease_id].trajectory.group_id
                    assert message.token_offset == len(self.tokens[group])
                    self.tokens[group] += [(t, one.policy_version) for one in segments for t in one.token_ids]
                    if reason is not None or is_aborted:
                        del self.leases[lease_id]
                case Retry(lease_id=lease_id):
                    lease = self.leases.pop(lease_id)
                    self.refused.append(lease.trajectory.group_id)
                    self.lease(lease.trajectory.group_id, lease.sampling.max_new_tokens)
                case WorkLost(num_tokens=count):
                    self.lost += count

    def until(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < end_s, [(r.name, r.is_serving, r.cause) for r in self.port.replicas]
            self.pump()

    def load(self, number: int) -> int:
        """Load versions until both replicas serve the last one, and return its number. `load_weights` does not wait for
        a replica that has started again, so the pause before each further version is longer."""
        end_s, later = time.monotonic() + RESTART_S, number
        while True:
            self.port.load_weights(tensors(later), version(later))
            pause_s = time.monotonic() + min(0.5 * (later - number + 1), LIMIT_S)
            while self.serving != [0, 1] and time.monotonic() < pause_s:
                self.pump()
            if self.serving == [0, 1]:
                return later
            assert time.monotonic() < end_s, [(each.name, each.cause) for each in self.port.replicas]
            later += 1

    def check_tokens(self) -> None:
        """Every token was sampled from the whole weights of the version that its segment names."""
        assert all(token == number for tokens in self.tokens.values() for token, number in tokens)

    @property
    def serving(self) -> list[int]:
        return [replica.index for replica in self.port.replicas if replica.is_serving]


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(*given: Any, **named: Any) -> Run:
        made.append(Run(*given, **named))
        return made[-1]

    yield start
    for one in made:
        one.port.close()


def test_replicas_share_the_leases_and_each_loads_every_version(run: Callable[..., Run]) -> None:
    one = run(2)
    for number in (1, 2, 3):
        one.port.load_weights(tensors(number), version(number))
        assert one.serving == [0, 1]
        for group in range(12):  # more than the slots of one replica
            one.lease(100 * number + group, 3)
        one.until(lambda: not one.leases)
        one.check_tokens()
    assert {n for tokens in one.tokens.values() for _, n in tokens} == {1, 2, 3}
    assert all(links[0].methods.count("init_weight_transfer_engine") == 1 for links in one.links)
    assert one.port.stats().decoded_tokens == 3 * 12 * 3
    size = sum(tensor.nbytes for tensor in tensors(1).values())
    found, later = one.port.metrics({}), one.port.metrics({})
    assert found["perf/weights_sent_bytes"] == 2 * 3 * size
    assert [found[f"replicas/{index}/version"] for index in (0, 1)] == [3, 3]
    for index in (0, 1):
        assert found[f"replicas/{index}/tokens_per_s"] > 0
        assert 0 < found[f"replicas/{index}/running"] <= 8
    assert later == {"perf/weights_sent_bytes": 0, "replicas/0/version": 3, "replicas/1/version": 3}


def test_the_metrics_of_a_replica_show_what_it_generated_and_that_it_is_late(run: Callable[..., Run]) -> None:
    """Rates are per second in which the replica had leases, so an idle replica is not a slow one."""
    one = run(2)
    one.port.load_weights(tensors(1), version(1))
    for group in range(3):
        one.lease(group, LONG)
    one.until(lambda: all(len(tokens) > 5 for tokens in one.tokens.values()))
    found = one.port.metrics({})
    running = sum(found[f"replicas/{index}/running"] for index in (0, 1))
    assert running <= 3
    rates = [replica.counted for replica in one.port.replicas]
    assert sum(tokens for tokens, _, _ in rates) >= 15
    assert [found[f"replicas/{i}/tokens_per_s"] for i in (0, 1)] == [tokens / s for tokens, s, _ in rates]
    one.links[1][0].ask("signal_at", (STAGES[2], signal.SIGSTOP), LIMIT_S)
    one.port.load_weights(tensors(2), version(2))
    found = one.port.metrics({})
    assert [found[f"replicas/{index}/version"] for index in (0, 1)] == [2, 1]
    one.links[1][0].cont()


@pytest.mark.parametrize(("stage", "number", "is_sparse"), chosen(SIGNALS[::3], SIGNALS[1::3] + SIGNALS[2::3]))
def test_a_signal_to_a_replica_at_any_stage_delays_no_other(
    stage: str, number: int, is_sparse: bool, run: Callable[..., Run]
) -> None:
    """Twelve trajectories are in flight. Those of the replica that is hit continue on the other one, and it serves
    again after it has loaded a whole version: when it goes on (SIGSTOP), or as a new process (SIGKILL)."""
    one = run(2, is_sparse=is_sparse)
    one.port.load_weights(tensors(1), version(1))
    victim = one.links[1][0]
    for group in range(12):
        one.lease(group, LONG)
    one.until(lambda: all(one.tokens.values()))
    if stage == STAGES[0]:  # a new communicator is built after a failure
        one.versions.sender.leave("replica 1")
    victim.ask("signal_at", (stage, number), LIMIT_S)
    if stage == STAGES[0]:
        one.versions.sender.join("replica 1", one.port.replicas[1].engine.direct)  # type: ignore[attr-defined]
    one.port.load_weights(tensors(2), version(2))
    assert one.serving == [0], "the load does not wait for the victim's deadlines"
    one.until(lambda: sum(any(n == 2 for _, n in tokens) for tokens in one.tokens.values()) >= ProcessEngine.slots)
    if number == signal.SIGSTOP:
        victim.cont()
    one.load(3)
    assert one.refused, "trajectories have moved"
    for lease_id in list(one.leases):
        one.port.send(Abort(lease_id))
    one.until(lambda: not one.leases)
    one.check_tokens()


def test_a_replica_that_is_killed_while_it_generates_is_started_again(run: Callable[..., Run]) -> None:
    one = run(2)
    one.port.load_weights(tensors(1), version(1))
    for group in range(12):
        one.lease(group, 200)
    one.until(lambda: all(one.tokens.values()))
    os.kill(one.links[1][0].process.pid, signal.SIGKILL)
    one.until(lambda: one.serving == [0])
    one.until(lambda: not one.leases)
    assert {len(tokens) for tokens in one.tokens.values()} == {200}
    one.check_tokens()
    one.until(lambda: one.port.replicas[1].is_running)
    assert one.serving == [0], "the new process has no whole version"
    one.load(2)


def test_without_any_replica_the_run_ends_with_the_causes(run: Callable[..., Run]) -> None:
    one = run(2, restart=RestartRule(max_failures=0))
    for links in one.links:
        os.kill(links[0].process.pid, signal.SIGKILL)
    for group in range(12):
        one.lease(group, 5)
    with pytest.raises(EngineFault, match=r"no replica serves version 0 \(replica 0: .*; replica 1: .*\); finished"):
        one.until(lambda: False)
    with pytest.raises(EngineFault, match="no replica serves version 1"):
        one.port.load_weights(tensors(1), version(1))


def test_a_version_that_was_replaced_is_never_served_under_its_name() -> None:
    link = ProcessLink()
    direct = DirectTransfer("gloo")
    versions = DirectVersions(direct, TIMEOUT_S)
    try:
        own = DirectTransfer("gloo", versions=versions, replica="a")
        load = DirectLoad(Client(link), own, 1, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        versions.offer(tensors(1), version(1))
        versions.offer(tensors(2), version(2))
        with pytest.raises(WeightsFault, match="version 2 has replaced version 1"):
            load.load({}, version(1))
        load.load({}, version(2))
        assert link.ask("served", None, LIMIT_S)["w0"] == [2.0] * 4
    finally:
        versions.close()
        link.close()


def test_an_engine_that_cannot_be_closed_leaves_no_other_open() -> None:
    closed: list[int] = []

    class Idle:
        slots = 8

        def __init__(self, index: int) -> None:
            self.index = index

        def close(self) -> None:
            closed.append(self.index)
            if self.index == 0:
                raise OSError("no space left on device")

    versions: Any = SimpleNamespace(close=lambda: None, metrics=dict)
    port = ReplicaTransport(2, Idle, versions, version(0))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no space left"):
        port.close()
    assert set(closed) == {0, 1}
    before = list(closed)
    port.close()
    assert closed == before


def test_a_late_replica_skips_versions_and_keeps_none_of_them_in_memory() -> None:
    may_end, loaded = Event(), ([], [])

    class Loads:
        slots, stats = 8, EngineStats()

        def __init__(self, index: int) -> None:
            self.index = index

        def load_weights(self, given: dict[str, torch.Tensor], wanted: PolicyVersion) -> None:
            if self.index == 1:
                assert may_end.wait(LIMIT_S)
            loaded[self.index].append(wanted.number)

        def step(self) -> list[FromWorker]:
            return []

        def close(self) -> None: ...

    versions: Any = SimpleNamespace(
        offer=lambda given, _: given, withdraw=lambda: None, close=lambda: None, metrics=dict
    )
    port = ReplicaTransport(2, Loads, versions, version(0))  # type: ignore[arg-type]
    alive = []
    try:
        for number in (1, 2, 3):
            whole = {"w": torch.zeros(1)}
            alive.append(weakref.ref(whole["w"]))
            port.load_weights(whole, version(number))
            del whole
        assert alive[1]() is None, "version 2"
        may_end.set()
        until_s = time.monotonic() + LIMIT_S
        while port.slots < 16 or any(one() is not None for one in alive):
            port.receive(0.1)
            assert time.monotonic() < until_s, alive
        assert loaded == ([1, 2, 3], [1, 3])
    finally:
        may_end.set()
        port.close()
