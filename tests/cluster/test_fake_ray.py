"""Ranks and workers on a fake of Ray whose answers the test decides: races and losses that real Ray rarely shows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from plans import plan_of, replica, stage
from ray_rows import row

from baton.cluster.inventory import machines
from baton.cluster.placement import Placement, ProcessSpec
from baton.cluster.ray import ranks
from baton.cluster.ray import run as ray_run
from baton.cluster.ray.connection import RayCluster
from baton.cluster.ray.ranks import RayRanks
from baton.cluster.ray.replicas import RayReplicas
from baton.cluster.ray.rewards import RayRewards
from baton.cluster.ray.run import RayRun, train_on_ray
from baton.cluster.ray.supervisor import EXIT_S, RayWorkerSupervisor, worker_gpus
from baton.errors import EngineFault, RankLost
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.vllm.remote import Done, encode
from baton.rollout.processes.protocol import Start
from baton.specs.plan import write_plan
from baton.stop import StopRequest
from baton.trainer.parallel.messages import Listen
from baton.types import PolicyVersion
from baton.weights.direct.settings import DirectTransfer

ROWS = [row("here"), row("there", gpu_type_H100=1)]
BY_NAME = {machine.name: machine for machine in machines(ROWS)}
GPU = ("there:0",)
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


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
        self.reserved: list[str] = []
        """Placement groups that were reserved and not released."""
        self.num_killed = 0
        self.variables: list[dict[str, str]] = []
        """Environment variables of each actor."""
        self.arguments: list[Any] = []
        """First argument of each actor."""

    def rows(self) -> list[Any]:
        return ROWS

    def alive(self) -> frozenset[str]:
        return frozenset(each["NodeID"] for each in ROWS)

    def reserve(self, bundles: object, name: str) -> Any:
        self.reserved.append(name)
        return SimpleNamespace(name=name, ready=lambda: SimpleFuture(None))

    def release(self, group: Any) -> None:
        if group.name in self.reserved:
            self.reserved.remove(group.name)

    def kill(self, actor: object) -> None:
        self.num_killed += 1

    def options(self, *about: object) -> dict[str, Any]:
        self._on_start()
        self.variables.append({})
        return {"runtime_env": {"env_vars": self.variables[-1]}}

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **named: SimpleNamespace(remote=self._actor))

    def _actor(self, *arguments: object) -> Any:
        self.arguments += arguments[:1]
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


def no_head(*_: object, **__: object) -> Any:
    """Ray raises errors of several types when it has lost its head."""
    raise ConnectionError("no head\nmore lines")


NO_HEAD = "^the connection to the Ray cluster was lost: no head; continue from the last checkpoint with --resume"


@pytest.mark.parametrize("call", ["put", "wait", "get", "remote"])
def test_a_call_of_ray_itself_that_fails_ends_the_ranks(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"pid": lambda: 1, "visible": dict, "handle": lambda data: b"", "close": lambda: None}
    if call == "remote":
        answers["handle"] = no_head
    cluster = FakeCluster(answers)
    spec = ProcessSpec("rank-0", "rank", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1)
    started = RayRanks(cluster, [spec], BY_NAME)  # type: ignore[arg-type]
    monkeypatch.setattr(FakeCluster, "put", lambda self, data: data, raising=False)
    if call != "remote":
        monkeypatch.setattr(FakeCluster, call, no_head, raising=False)
    with pytest.raises(RankLost, match=NO_HEAD):
        started.ask(Listen(), 60.0)
    assert (cluster.num_killed, cluster.reserved) == (1, [])


def test_a_version_that_cannot_be_requested_ends_the_ranks() -> None:
    answers = {"pid": lambda: 1, "visible": dict, "take": no_head, "close": lambda: None}
    cluster = FakeCluster(answers)
    spec = ProcessSpec("rank-0", "rank", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1)
    started = RayRanks(cluster, [spec], BY_NAME)  # type: ignore[arg-type]
    with pytest.raises(RankLost, match=NO_HEAD):
        started.bring("/version")
    assert (cluster.num_killed, cluster.reserved) == (1, [])


@pytest.mark.parametrize("call", ["ready", "options", "pid", "visible"])
def test_ranks_that_cannot_be_started_release_their_resources(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"pid": lambda: 1, "visible": dict, "close": lambda: None}
    if call in answers:
        answers[call] = no_head
    cluster = FakeCluster(answers)
    if call == "ready":
        monkeypatch.setattr(cluster, "wait", no_head)
    elif call == "options":
        monkeypatch.setattr(cluster, "options", no_head)
    spec = ProcessSpec("rank-0", "rank", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1)
    with pytest.raises(RankLost, match=NO_HEAD):
        RayRanks(cluster, [spec], BY_NAME)  # type: ignore[arg-type]
    assert (cluster.num_killed, cluster.reserved) == (int(call in answers), [])


class LosesHead(RayCluster):
    """A cluster whose head is lost when the trainer has lost a rank."""

    here = ROWS[0]["NodeID"]
    own_address = "10.0.0.1"

    def __init__(self, call: str) -> None:
        nodes = [row("here", CPU=4), row("there", CPU=4)]
        task = SimpleNamespace(remote=lambda *_: "future")
        working = {
            "nodes": lambda: nodes,
            "remote": lambda **_: lambda function: task,
            "wait": lambda futures, **_: (futures, []),
            "shutdown": lambda: None,
        }
        self.ray, self._call = SimpleNamespace(**working), call

    def reserve(self, bundles: object, name: str) -> Any:
        setattr(self.ray, self._call, no_head)
        raise RankLost("trainer rank 0 was lost")


@pytest.mark.parametrize("call", ["nodes", "remote", "wait"])
def test_a_command_that_has_lost_a_rank_and_the_head_ends_with_one_sentence(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    lines: list[str] = []
    observer: Any = SimpleNamespace(said=lines.append)
    write_plan(plan_of([stage("CPU", "here:0")], [replica("CPU", "there:0", share=1.0)]), tmp_path / "plan.json")

    def load(overrides: Sequence[str]) -> Recipe:
        return load_recipe(Recipe, RECIPE, [f"run.directory={tmp_path}", *overrides])

    monkeypatch.setattr(ray_run, "RayCluster", lambda address: LosesHead(call))
    with pytest.raises(RankLost, match=NO_HEAD):
        train_on_ray(RayRun(load, tmp_path / "plan.json", "auto"), observer, StopRequest())
    assert lines[-2:] == ["trainer rank 0 was lost", "restart 1 of 3 from the last checkpoint"]


def replicas_on(cluster: FakeCluster) -> RayReplicas:
    spec = ProcessSpec("worker-0", "worker", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1, slots=8)
    direct = DirectTransfer("gloo", is_remote=True)
    return RayReplicas(cluster, [spec], lambda: BY_NAME, direct, lambda line: None)  # type: ignore[arg-type]


START = Start("m", "cpu", "sdpa", EngineSettings(kind="vllm").model_dump(), PolicyVersion("r", 0))


def test_a_replica_whose_actor_cannot_be_created_releases_its_resources() -> None:
    for answers, on_start, num_actors in (({}, no_head, 0), ({"handle": no_head}, lambda: None, 1)):
        cluster = FakeCluster(answers, on_start)
        with pytest.raises(RankLost, match=NO_HEAD):
            replicas_on(cluster).build(0, START, DirectTransfer("gloo", is_remote=True))
        assert (cluster.num_killed, cluster.reserved) == (num_actors, [])


def test_engines_whose_actors_see_all_gpus_of_a_machine_use_those_of_the_plan() -> None:
    """Ray restricts an actor to GPUs only if it requests the resource `GPU`, which such machines do not offer."""
    spec = ProcessSpec("worker-1", "worker", "there", "H100", ("there:2", "there:3"), {"gpu_type_H100": 2.0}, 1, 8)
    assert worker_gpus(spec, []) == (("CUDA_VISIBLE_DEVICES", 2), ("CUDA_VISIBLE_DEVICES", 3))
    of_ray = msgspec.structs.replace(spec, resources={"gpu_type_H100": 2.0, "GPU": 2.0})
    assert worker_gpus(of_ray, []) == worker_gpus(msgspec.structs.replace(spec, gpu="CPU"), []) == ()
    cluster = FakeCluster({"handle": lambda *_: encode(Done())})
    for each in (spec, of_ray):
        direct = DirectTransfer("gloo", versions=SimpleNamespace(sender=SimpleNamespace(join=lambda *_: None)))  # type: ignore[arg-type]
        replicas = RayReplicas(cluster, [each], lambda: BY_NAME, direct, lambda line: None)  # type: ignore[arg-type]
        replicas.build(0, START, direct)
    assert cluster.variables == [{"CUDA_VISIBLE_DEVICES": "2,3"}, {}]


def test_a_replica_ends_also_if_its_transfer_of_weights_cannot_be_closed() -> None:
    """Neither its actor nor its resources are left, and the next replica is closed too."""
    cluster = FakeCluster({"handle": lambda *_: encode(Done())})
    versions: Any = SimpleNamespace(sender=SimpleNamespace(join=lambda *_: None, leave=no_head))
    replicas = replicas_on(cluster)
    for _ in range(2):
        replicas.build(0, START, DirectTransfer("gloo", versions=versions, is_remote=True))
    assert len(cluster.reserved) == 2
    with pytest.raises(ConnectionError):
        replicas.close()
    assert (cluster.num_killed, cluster.reserved) == (2, [])


def test_a_replica_without_a_head_is_an_engine_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster({"handle": lambda *_: encode(Done())})
    monkeypatch.setattr(cluster, "wait", no_head)
    with pytest.raises(EngineFault, match=r"^worker-0 on there was lost: no head$"):
        replicas_on(cluster).build(0, START, DirectTransfer("gloo", is_remote=True))
    assert (cluster.num_killed, cluster.reserved) == (1, [])


def test_of_reward_models_that_cannot_all_be_reserved_none_stays_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster({})
    reserve = cluster.reserve
    monkeypatch.setattr(cluster, "reserve", lambda bundles, name: no_head() if "1" in name else reserve(bundles, name))
    specs = [ProcessSpec(f"reward-{i}", "reward", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1) for i in range(2)]
    with pytest.raises(ConnectionError):
        RayRewards(cluster, specs, BY_NAME, "cuda", lambda line: None)  # type: ignore[arg-type]
    assert cluster.reserved == []


ACCESS: Any = SimpleNamespace(
    url="http://127.0.0.1:1",
    certificate="",
    token=lambda name: "t",
    remove_token=lambda name: None,
    gone=lambda *_: None,
)


def supervisor_of(
    cluster: FakeCluster, resources: dict[str, float], shared: tuple[int, ...] = (), rows: Sequence[Any] = ROWS
) -> RayWorkerSupervisor:
    """Supervises one worker. resources: of the worker. shared: ranks whose GPUs it uses. rows: of the machines at the
    start; the worker runs on the one whose name sorts last."""
    rank = ProcessSpec("rank-0", "rank", "there", "H100", GPU, {"gpu_type_H100": 1.0}, 1)
    names = {machine.id: machine.name for machine in machines(rows)}
    place = list(names.values())[-1]
    worker = ProcessSpec("worker-0", "worker", place, "H100", GPU, resources, 1, slots=8, ranks=shared)
    recipe = SimpleNamespace(
        rollout=SimpleNamespace(stall_timeout_s=60.0),
        model=SimpleNamespace(device="cuda:1"),
        engine=SimpleNamespace(kind="embedded"),
    )
    planner = SimpleNamespace(base_types=(), servers={}, recipe=recipe)
    return RayWorkerSupervisor(
        cluster,  # type: ignore[arg-type]
        Placement((rank,), (worker,), names),
        planner,  # type: ignore[arg-type]
        lambda line: None,
    )


def check_until_fault(supervisor: RayWorkerSupervisor) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        supervisor.check_health()
        time.sleep(0.01)


def test_a_machine_that_was_lost_before_the_supervisor_began_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster({"watch": lambda: Never, "pid": lambda: Never, "leave": lambda: None})
    monkeypatch.setattr(cluster, "rows", lambda: ROWS[:1])
    supervisor = supervisor_of(cluster, {"gpu_type_H100": 1.0})
    supervisor.begin(ACCESS)
    try:
        with pytest.raises(RankLost, match="machine there, which runs a trainer rank, has left the cluster"):
            check_until_fault(supervisor)
    finally:
        supervisor.close()
    assert cluster.reserved == []


def test_a_worker_uses_the_gpu_that_ray_assigns_and_not_the_index_of_the_recipe() -> None:
    cluster = FakeCluster({"watch": lambda: Never, "pid": lambda: Never, "leave": lambda: None})
    supervisor = supervisor_of(cluster, {"gpu_type_H100": 1.0})
    supervisor.begin(ACCESS)
    try:
        until_s = time.monotonic() + 60
        while not cluster.arguments and time.monotonic() < until_s:
            time.sleep(0.01)
    finally:
        supervisor.close()
    command = cluster.arguments[0].command
    assert command[command.index("--device") + 1] == "cuda"


def test_the_token_of_a_worker_whose_machine_is_lost_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a long run on machines that come and go reaches the hub's maximum number of tokens."""
    started, removed = Event(), Event()
    cluster = FakeCluster({"watch": lambda: Never, "pid": lambda: Never, "leave": lambda: None}, started.set)
    rows = [*ROWS, row("yonder", gpu_type_H100=1)]
    monkeypatch.setattr(cluster, "rows", lambda: ROWS if started.is_set() else rows)
    supervisor = supervisor_of(cluster, {"gpu_type_H100": 1.0}, rows=rows)
    access = SimpleNamespace(
        **{**vars(ACCESS), "remove_token": lambda name: removed.set() if name == "worker-0" else 0}
    )
    supervisor.begin(access)  # type: ignore[arg-type]
    try:
        assert removed.wait(60)
    finally:
        supervisor.close()
    assert cluster.reserved == []


@pytest.mark.parametrize("call", ["watch", "wait", "rows", "get of pid", "get of watch"])
def test_a_supervisor_without_a_head_reports_one_sentence(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"watch": lambda: Never, "pid": lambda: Never, "leave": lambda: None}
    cluster = FakeCluster(answers | ({call: no_head} if call == "watch" else {}))
    supervisor = supervisor_of(cluster, {"gpu_type_H100": 1.0})
    if call == "wait":
        monkeypatch.setattr(cluster, "wait", no_head)
    elif call.startswith("get"):
        answers[call.removeprefix("get of ")] = lambda: 1
        cluster = FakeCluster(answers)
        supervisor = supervisor_of(cluster, {"gpu_type_H100": 1.0})
        monkeypatch.setattr(cluster, "get", no_head)
    elif call == "rows":
        monkeypatch.setattr(
            cluster, "rows", partial(RayCluster.rows, SimpleNamespace(ray=SimpleNamespace(nodes=no_head)))
        )
    supervisor.begin(ACCESS)
    try:
        with pytest.raises(RankLost, match=NO_HEAD):
            check_until_fault(supervisor)
    finally:
        supervisor.close()
    assert cluster.reserved == []


@pytest.mark.parametrize("call", ["wait", "get"])
def test_workers_that_do_not_free_a_gpu_of_a_lost_cluster_are_one_sentence(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is lost while the controller asks whether a worker has ended, or whether its processes have."""
    started = Event()
    answers = {"watch": lambda: Never, "pid": lambda: 1, "leave": lambda: None, "use_device": lambda *_: Never}
    cluster = FakeCluster(answers, started.set)
    supervisor = supervisor_of(cluster, {}, (0,))
    supervisor.ranks = None, ({"CUDA_VISIBLE_DEVICES": "0"},)
    wait, ended = cluster.wait, SimpleFuture(ConnectionError("no head\nmore lines"))
    monkeypatch.setattr(cluster, "run_on", lambda *_: ended, raising=False)
    if call == "wait":
        monkeypatch.setattr(
            cluster, "wait", lambda futures, timeout, **_: no_head() if timeout == EXIT_S else wait(futures)
        )
    supervisor.begin(ACCESS)
    try:
        assert started.wait(60)
        with pytest.raises(RankLost, match=NO_HEAD):
            supervisor.sleep()
    finally:
        supervisor.close()


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
    supervisor = supervisor_of(FakeCluster(answers, on_start), {}, (0,))
    supervisor.ranks = None, ({"CUDA_VISIBLE_DEVICES": "0"},)
    supervisor.begin(ACCESS)
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
