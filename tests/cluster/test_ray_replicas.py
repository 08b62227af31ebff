"""vLLM replicas as actors on a Ray cluster of several nodes: each receives every version over its own communicator, and
a signal to one at any stage of a transfer delays no other. The actors have Baton's protocol and gloo, but no vLLM."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import plan_of, replica, stage
from ray_replicas import ModelServer, ValueServer
from test_ray_run import QUICK, Nodes, Witness, assert_nothing_is_left, loader, nodes, ray, wait_until, written

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from test_replicas import LIMIT_S, LONG, STAGES, Run, tensors, version

from baton.clock import RestartRule
from baton.cluster.inventory import CPU, Machine
from baton.cluster.placement import ProcessPart, ProcessSpec
from baton.errors import UserError
from baton.records.metrics import read_metrics
from baton.rollout.engine import EngineSettings, VllmSettings
from baton.rollout.engines.vllm.direct import DirectVersions
from baton.rollout.processes.protocol import Start
from baton.rollout.replicas import ReplicaTransport
from baton.stop import StopRequest
from baton.types import Abort
from baton.weights.direct.settings import DirectTransfer
from tests.all_cases import ALL

pytestmark = [pytest.mark.timing, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["nodes", "ray"]
TIMEOUT_S = 5.0
"""Deadline of each phase of a transfer, and of each answer of an actor."""
SIGNALS = [(STAGES[3], signal.SIGSTOP)]
TRAINERS = ["two ranks on other nodes"]
SIGNALS_TO_MACHINES = [(2, signal.SIGKILL, STAGES[2])]
if ALL:
    SIGNALS_TO_MACHINES += [(rank, number, "") for rank in (1, 2) for number in (signal.SIGKILL, signal.SIGSTOP)]
    SIGNALS = list(product(STAGES, (signal.SIGKILL, signal.SIGSTOP)))
    TRAINERS.append("in the run's process")
"""Three cases, because each takes about a minute. All of them: `BATON_ALL_STAGES=1 pytest
tests/cluster/test_ray_replicas.py`. `tests/rollout/test_replicas.py` tests all of them without Ray."""


@pytest.fixture(scope="module", autouse=True)
def pids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory for the process ids of actors. The environment of all nodes, whose actors import this directory."""
    made = tmp_path_factory.mktemp("pids")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_TEST_PIDS", str(made))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        yield made


@pytest.fixture(scope="module")
def two(pids: Path) -> Iterator[tuple[Nodes, list[str], Path]]:
    """A cluster with a node for each of two replicas, besides that of the driver."""
    made = Nodes()
    names = [made.add(), made.add()]
    yield made, names, pids
    if ray.is_initialized():
        ray.shutdown()
    made.cluster.shutdown()


class RayRun(Run):
    """A transport over two replicas on different nodes, and the loop of a controller."""

    def __init__(self, made: Nodes, names: list[str], *, is_sparse: bool = False, further: str = "") -> None:
        """further: another machine for the second replica."""
        from baton.cluster.ray.connection import RayCluster
        from baton.cluster.ray.replicas import RayReplicas

        self.cluster = RayCluster(made.address)
        direct = DirectTransfer("gloo", is_sparse, host=self.cluster.own_address, is_remote=True)
        self.versions = DirectVersions(direct, TIMEOUT_S)
        specs = [
            ProcessSpec(f"worker-{i}", "worker", name, CPU, (f"{name}:0",), {"CPU": 1.0}, 1, slots=8)
            for i, name in enumerate(names)
        ]
        if further:
            part = ProcessPart(further, (f"{further}:0",), {"CPU": 1.0}, 1)
            ids = (*specs[1].gpu_ids, *part.gpu_ids)
            specs[1] = msgspec.structs.replace(specs[1], gpu_ids=ids, tp=2, further=(part,))
        self.lines: list[str] = []

        def machines() -> dict[str, Machine]:
            return {machine.name: machine for machine in made.machines()}

        self.replicas = RayReplicas(self.cluster, specs, machines, direct, self.lines.append)
        self.replicas.server = ValueServer
        own = EngineSettings(kind="vllm", slots=64, vllm=VllmSettings(answer_timeout_s=TIMEOUT_S))
        start = Start("m", "cpu", "sdpa", own.model_dump(), version(0))

        def build(index: int) -> Any:
            each = DirectTransfer("gloo", is_sparse, versions=self.versions, replica=f"replica {index}", is_remote=True)
            return self.replicas.build(index, start, each)

        rule = RestartRule(first_wait_s=0.1, longest_wait_s=0.5)
        self.port = ReplicaTransport(2, build, self.versions, version(0), restart=rule)
        self.leases, self.tokens, self.refused, self.lost, self.number = {}, {}, [], 0, 0

    def close(self) -> None:
        self.port.close()
        self.replicas.close()
        self.cluster.leave()

    def call(self, index: int, method: str, info: Any) -> None:
        self.port.replicas[index].engine.call_workers(method, info, LIMIT_S)  # type: ignore[attr-defined]


@pytest.fixture
def run(two: tuple[Nodes, list[str], Path]) -> Iterator[Callable[..., RayRun]]:
    running: list[RayRun] = []

    def start(**named: Any) -> RayRun:
        running.append(RayRun(two[0], two[1], **named))
        return running[-1]

    yield start
    for one in running:
        one.close()


def pids_of(one: RayRun, index: int, directory: Path) -> dict[int, int]:
    """Rank in the replica's communicator → process."""
    for each in directory.iterdir():
        each.unlink()
    one.call(index, "pid", None)
    return {int(each.read_text()): int(each.name) for each in directory.iterdir()}


def pid_of(one: RayRun, index: int, directory: Path) -> int:
    return pids_of(one, index, directory)[1]


def test_actors_on_two_nodes_share_the_leases_and_each_loads_every_version(
    run: Callable[..., RayRun], two: tuple[Nodes, list[str], Path]
) -> None:
    one = run()
    assert one.lines == [
        f"worker-{i} on {name}: 1 core, 8 slots, 0 % of the work; receives weights directly"
        for i, name in enumerate(two[1])
    ]
    assert one.port.slots == 16
    number, loaded = 0, []
    for _ in range(3):
        number = one.load(number + 1)
        loaded.append(number)
        for group in range(12):  # more than the slots of one replica
            one.lease(100 * number + group, 3)
        one.until(lambda: not one.leases)
        one.check_tokens()
    assert {n for tokens in one.tokens.values() for _, n in tokens} == set(loaded)
    assert one.port.stats().decoded_tokens == 3 * 12 * 3
    size = sum(tensor.nbytes for tensor in tensors(1).values())
    assert one.port.metrics({})["perf/weights_sent_bytes"] >= 2 * 3 * size


@pytest.mark.parametrize(("stage_of_load", "number"), SIGNALS)
def test_a_signal_to_an_actor_at_any_stage_delays_no_other(
    stage_of_load: str, number: int, run: Callable[..., RayRun], two: tuple[Nodes, list[str], Path]
) -> None:
    """Twelve trajectories are in flight. Those of the actor that is hit continue on the other one. It is started again
    as a new actor, and serves after it has loaded a whole version."""
    one = run(is_sparse=True)
    held = one.load(1)
    victim = pid_of(one, 1, two[2])
    for group in range(12):
        one.lease(group, LONG)
    one.until(lambda: all(one.tokens.values()))
    link = one.port.replicas[1].engine.direct  # type: ignore[attr-defined]
    if stage_of_load == STAGES[0]:  # a new communicator is built after a failure
        one.versions.sender.leave("replica 1")
    one.call(1, "signal_at", [stage_of_load, int(number)])
    if stage_of_load == STAGES[0]:
        one.versions.sender.join("replica 1", link)
    one.port.load_weights(tensors(held + 1), version(held + 1))
    assert one.serving == [0], "the load does not wait for the victim's deadlines"
    one.until(lambda: sum(any(n == held + 1 for _, n in tokens) for tokens in one.tokens.values()) >= 8)
    one.until(lambda: one.port.replicas[1].is_running is False or one.port.replicas[1].cause != "")
    one.load(held + 2)
    assert pid_of(one, 1, two[2]) != victim
    wait_until(lambda: not Path(f"/proc/{victim}").exists(), "the actor that was hit to end")
    assert one.refused, "trajectories have moved"
    for lease_id in list(one.leases):
        one.port.send(Abort(lease_id))
    one.until(lambda: not one.leases)
    one.check_tokens()


@pytest.mark.parametrize(("rank", "number", "stage_of_load"), SIGNALS_TO_MACHINES)
def test_a_signal_to_one_machine_of_a_replica_fails_it_as_a_whole_and_delays_no_other(
    rank: int,
    number: int,
    stage_of_load: str,
    run: Callable[..., RayRun],
    two: tuple[Nodes, list[str], Path],
) -> None:
    """The second replica has an actor on each of two machines, and the workers of both receive each version. If one is
    hit, both actors are replaced."""
    (head,) = {machine.name for machine in two[0].machines()} - set(two[1])
    one = run(further=head)
    assert f"worker-1 on {two[1][1]} and {head}: 2 cores" in one.lines[1]
    held = one.load(1)
    one.call(1, "holds", held)
    victims = pids_of(one, 1, two[2])
    assert sorted(victims) == [1, 2]
    for group in range(12):
        one.lease(group, LONG)
    one.until(lambda: all(one.tokens.values()))
    if stage_of_load:
        one.call(1, "signal_at", [stage_of_load, int(number), rank])
        one.port.load_weights(tensors(held + 1), version(held + 1))
    else:
        os.kill(victims[rank], number)
    one.until(lambda: one.port.replicas[1].cause != "")
    assert one.serving == [0]
    counts = {lease_id: len(tokens) for lease_id, tokens in one.tokens.items()}
    one.until(lambda: any(len(tokens) > counts.get(lease_id, 0) for lease_id, tokens in one.tokens.items()))
    last = one.load(held + 2)
    one.call(1, "holds", last)
    assert not set(victims.values()) & set(pids_of(one, 1, two[2]).values())
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in victims.values()), "both actors to end")
    assert one.refused, "trajectories have moved"
    for lease_id in list(one.leases):
        one.port.send(Abort(lease_id))
    one.until(lambda: not one.leases)
    one.check_tokens()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_sends_its_versions_to_actors_and_outlives_one_and_its_machine(
    trainer: str, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actors generate with Baton's engine, from weights that only the direct transfer brings: in `sync`, the
    trainer would give tokens of stale weights other probabilities."""
    from baton.cluster.ray.replicas import RayReplicas
    from baton.cluster.ray.run import RayRun as Order
    from baton.cluster.ray.run import train_on_ray

    monkeypatch.setattr(RayReplicas, "server", ModelServer)
    (head,) = (machine.name for machine in nodes.machines())
    is_ranked = trainer != "in the run's process"
    ranks = [f"{nodes.add()}:0", f"{nodes.add()}:0"] if is_ranked else [f"{head}:0"]
    b, c = nodes.add(), nodes.add()
    plan = plan_of(
        [stage(CPU, *ranks)], [replica(CPU, f"{b}:0", share=0.5, batch=12), replica(CPU, f"{c}:0", share=0.5)]
    )

    made: list[Any] = []
    build = RayReplicas.build

    def build_seen(*given: Any) -> Any:
        made.append(build(*given))
        return made[-1]

    monkeypatch.setattr(RayReplicas, "build", build_seen)

    def kill_an_actor() -> None:
        assert len(nodes.own_processes("ray::ModelServer")) == 2
        os.kill(nodes.own_processes("ray::ModelServer")[-1], signal.SIGKILL)

    def take_a_machine() -> None:
        """As soon as the new actor serves: it receives one of the versions after its start."""
        wait_until(lambda: len(made) == 3, "a new actor", witness.lines)
        if c in nodes.by_name and made[-1].version.number > 0:
            nodes.remove(c)

    num_steps = 12
    witness = Witness({1: kill_an_actor, **dict.fromkeys(range(3, num_steps - 1), take_a_machine)})
    load = loader(
        tmp_path, f"run.steps={num_steps}", "engine.kind=vllm", "rollout.mode=sync", "trainer.lr=1e-3",
        "engine.vllm.answer_timeout_s=60", f"weights.transport={'direct' if is_ranked else 'sparse'}",
    )  # fmt: skip
    loop = train_on_ray(Order(load, written(plan, tmp_path), nodes.address, rules=QUICK), witness, StopRequest())
    assert loop.state.step == num_steps
    assert f"worker-0 on {b}: 1 core, 8 slots, 50 % of the work; receives weights directly" in witness.lines
    assert c not in nodes.by_name
    assert not list((tmp_path / "r").rglob("weights/*"))
    rows = [row for row in read_metrics(load(()).run.path) if "policy/loss" in row]
    assert [row["step"] for row in rows] == [*range(1, num_steps + 1)]
    assert max(row["policy/logprob_diff_max"] for row in rows) < 1e-3
    assert all(row["perf/weights_sent_bytes"] > 0 for row in rows[1:])
    wait_until(lambda: not nodes.own_processes("ray::ModelServer"), "actors to end")
    for name in (b, *(one.rpartition(":")[0] for one in ranks if is_ranked)):
        nodes.remove(name)
    assert_nothing_is_left(nodes)


def test_a_trainer_and_replicas_on_different_kinds_of_devices_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    from baton.cluster.ray.run import RayRun as Order
    from baton.cluster.ray.run import train_on_ray

    a, b = nodes.add(), nodes.add(gpu_type_L20=1)
    plan = plan_of([stage(CPU, f"{a}:0")], [replica("L20", f"{b}:0", share=1.0)])
    load = loader(tmp_path, "engine.kind=vllm", "weights.transport=direct")
    with pytest.raises(UserError, match='"direct" with --ray, but the trainer is on CPU and a replica on L20'):
        train_on_ray(Order(load, written(plan, tmp_path), nodes.address), Witness(), StopRequest())
    assert not (tmp_path / "r").exists()
