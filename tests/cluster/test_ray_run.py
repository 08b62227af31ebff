"""A plan carried out on a real Ray cluster of several nodes on this machine, whatever happens to its parts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plans import plan_of, replica, stage

from baton.cluster.inventory import machines
from baton.cluster.placement import place
from baton.cluster.supervision import SupervisionRules
from baton.planner.problem import Inputs
from baton.planner.solve import make_plan
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import recipe_workload
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.specs.cluster import ClusterSettings
from baton.specs.model import read_model
from baton.specs.plan import Plan, write_plan
from baton.specs.workload import constant
from baton.stop import StopRequest
from baton.trainer.factory import make_trainer
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.types import Batch
from benchmarks.unlike_nodes.run import batch, setup_in, weights_of

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.timing, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
"""No wait is longer, however busy the machine is."""
QUICK = SupervisionRules(first_wait_s=0.1, settle_s=0.5)
NOTICED_SOON = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500}
"""Ray checks nodes every 0.5 s instead of every 3 s. It still waits 10 s for each answer, and five of them must fail: a
busy machine loses no node."""


def wait_until(is_so: Callable[[], Any], what: str, seen: Sequence[str] = ()) -> Any:
    """Wait for what others do, and return what `is_so` says. seen: what was seen until the end of the wait."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < end_s, f"waited {PATIENCE_S:.0f} s: {what}; seen: {list(seen)}"
        time.sleep(0.05)
    return found


class Nodes:
    """A cluster whose nodes come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's spelling. With Ray's default, 15, other tests take the cores
        self.before = in_memory()
        # without the processes that monitor the autoscaler and the logs, which Baton does not use
        spared = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        head = {**spared, "_system_config": NOTICED_SOON, **_size(num_cpus=1)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.by_name: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **resources: float) -> str:
        """Add a node with one core, and return what Baton calls it."""
        node = self.cluster.add_node(**_size(num_cpus=1, resources=resources))
        name = next(m.name for m in self.machines() if m.id == node.node_id)
        self.by_name[name] = node
        return name

    def remove(self, name: str) -> None:
        self.cluster.remove_node(self.by_name.pop(name), allow_graceful=False)

    def machines(self) -> Any:
        """As `ray.nodes()` shows them to a driver, without becoming one."""
        return machines(self.cluster.global_state.node_table())

    def held(self) -> dict[str, float]:
        """What is reserved, but for Ray's own account of memory, whose objects go when Ray sees fit."""
        state = self.cluster.global_state
        total, free = state.cluster_resources(), state.available_resources()
        left = {name: amount - free.get(name, 0.0) for name, amount in total.items() if "memory" not in name}
        return {name: amount for name, amount in left.items() if amount > 1e-6}

    def own_processes(self, title: str) -> list[int]:
        """Of this machine, below this cluster: those whose command line has the title."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    if title in line and self._is_ours(int(entry.name)):
                        found.append(int(entry.name))
                except (FileNotFoundError, ProcessLookupError):
                    continue
        return sorted(found)

    def _is_ours(self, pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
        return False


def _size(**arguments: Any) -> dict[str, Any]:
    return {"object_store_memory": 100 * 2**20, **arguments}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """One cluster for each test: a test that fails leaves no nodes to the next."""
    made = Nodes()
    yield made
    if ray.is_initialized():
        ray.shutdown()
    made.cluster.shutdown()


class Witness:
    """An observer that does something at a step, and remembers what was said."""

    def __init__(self, actions: dict[int, Callable[[], None]] | None = None) -> None:
        self.lines: list[str] = []
        self.steps: list[int] = []
        self._actions = actions or {}

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda done: None

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)
        action = self._actions.pop(step, None)
        if action is not None:
            action()

    def evaluated(self, step: int, results: Sequence[Any]) -> None:
        pass

    def said(self, text: str) -> None:
        self.lines.append(text)

    def await_line(self, pattern: str, after: int = 0) -> None:
        """Wait until it is said."""
        wait_until(lambda: any(re.search(pattern, line) for line in self.lines[after:]), pattern, self.lines)


def loader(directory: Path, *more: str) -> Callable[[Sequence[str]], Recipe]:
    """A recipe that trains in a moment."""
    small = [
        f"run.directory={directory}", "run.name=r", "run.steps=10", "trainer.warmup_steps=1", "rollout.batch_groups=4",
        "rollout.group_size=4", "rollout.max_new_tokens=24", "engine.processes=0", "engine.slots=16", "eval.every=0",
        "eval.num_prompts=4", "eval.samples=1", "checkpoint.every=2", "log.trace=false", *more,
    ]  # fmt: skip
    return lambda overrides: load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", [*small, *overrides])


def written(plan: Plan, directory: Path) -> Path:
    write_plan(plan, directory / "plan.json")
    return directory / "plan.json"


def in_memory() -> set[Path]:
    """What ranks have in this machine's memory, also those of other runs."""
    return set(Path("/dev/shm").glob("baton-rank-*"))


def assert_nothing_is_left(nodes: Nodes) -> None:
    """No actor, no worker, no reservation, no file in memory."""
    wait_until(lambda: not nodes.own_processes("baton worker"), "workers to end")
    wait_until(lambda: not nodes.own_processes("ray::RankActor"), "ranks to end")
    wait_until(lambda: not nodes.held(), "resources to be given back")

    def of_ended_processes() -> set[Path]:
        return {path for path in in_memory() - nodes.before if not Path(f"/proc/{path.name.split('-')[-2]}").exists()}

    # A test beside this one kills a process and resumes its run, which removes the directory.
    wait_until(lambda: not of_ended_processes(), "directories of ended processes to be removed")


def test_a_run_outlives_its_workers_its_machines_and_its_trainers_ranks(nodes: Nodes, tmp_path: Path) -> None:
    """Kill a worker, take a machine, give another, kill a rank: every step is made, in order, and nothing is left."""
    from baton.cluster.ray.run import RayRun, train_on_ray

    a, b, c = nodes.add(gpu_type_H100=2), nodes.add(gpu_type_L20=1), nodes.add(gpu_type_L20=1)
    plan = plan_of(
        [stage("H100", f"{a}:0", f"{a}:1")],
        [replica("L20", f"{b}:0", share=0.5), replica("L20", f"{c}:0", share=0.5)],
    )
    added: list[str] = []

    def kill_a_worker() -> None:
        os.kill(nodes.own_processes("-m baton worker")[0], signal.SIGKILL)
        witness.await_line(r"worker-\d on .* ended with exit code -9.*restarting it")

    def take_a_machine() -> None:
        nodes.remove(c)
        witness.await_line(f"machine {c} has left the cluster with worker-1")
        witness.await_line(r"new plan \(")

    def give_a_machine() -> None:
        said = len(witness.lines)
        added.append(nodes.add(gpu_type_L20=1))
        witness.await_line(f"machine {added[0]} has joined", said)
        witness.await_line(rf"worker-\d on {added[0]}: 1 L20, .* of the work", said)

    def kill_a_rank() -> None:
        os.kill(nodes.own_processes("ray::RankActor")[-1], signal.SIGKILL)

    witness = Witness({1: kill_a_worker, 2: take_a_machine, 4: give_a_machine, 7: kill_a_rank})
    load = loader(tmp_path)
    loop = train_on_ray(RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK), witness, StopRequest())
    assert loop.state.step == 10
    assert witness.steps == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10], "from the checkpoint after step 6"
    assert any(re.search(r"trainer rank \d on .* was lost", line) for line in witness.lines)
    assert "restart 1 of 3 from the last checkpoint" in witness.lines
    assert [row["step"] for row in read_metrics(load(()).run.path) if "perf/step_time" in row] == list(range(1, 11))
    for name in (a, b, *added):
        nodes.remove(name)
    assert_nothing_is_left(nodes)


@pytest.mark.parametrize("shape", ["stages", "tensor_parallel"])
def test_a_pipeline_over_two_gpu_types_and_tensor_parallel_ranks_train_as_planned(
    shape: str, nodes: Nodes, tmp_path: Path
) -> None:
    """Two stages of unequal layers, each on a node of its type; or two ranks of one node that split products."""
    from baton.cluster.ray.run import RayRun, train_on_ray

    a, b = nodes.add(gpu_type_H100=1), nodes.add(gpu_type_L20=3)
    depth = read_model(ROOT / "models" / "quickstart").num_layers
    stages, expected = {
        "stages": ([stage("L20", f"{b}:0", layers=(0, 1)), stage("H100", f"{a}:0", layers=(1, depth))], [1, depth - 1]),
        "tensor_parallel": ([stage("L20", f"{b}:0", f"{b}:1", tp=2, layers=(0, depth))], 2),
    }[shape]
    plan = plan_of(stages, [replica("L20", f"{b}:2", share=1.0)])
    witness, load = Witness(), loader(tmp_path, "run.steps=2")
    train_on_ray(RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK), witness, StopRequest())
    assert witness.steps == [1, 2]
    second = f"rank-1 on {a}: 1 H100" if shape == "stages" else f"rank-1 on {b}: 1 L20"
    assert {f"rank-0 on {b}: 1 L20", second} <= set(witness.lines)
    assert RunDirectory.open(tmp_path / "r").recipe()["trainer"][shape] == expected
    for name in (a, b):
        nodes.remove(name)
    assert_nothing_is_left(nodes)


def test_a_planned_stage_over_two_gpu_types_trains_rows_by_speed_as_one_process(nodes: Nodes, tmp_path: Path) -> None:
    """The planner puts one rank on each of two types, of which one is twice as fast. The run has the plan's speeds, and
    its ranks, on their nodes, make the updates of one process."""
    from baton.cluster.ray.connection import RayCluster
    from baton.cluster.ray.ranks import RayRanks
    from baton.cluster.ray.run import RayRun, train_on_ray

    a, b = nodes.add(gpu_type_H100=1), nodes.add(gpu_type_L20=2)
    load = loader(tmp_path, "run.steps=2")
    shown: dict[str, Any] = {"links": {"inter_node_gb_per_s": 10, "latency_us": 0}, "name": "unlike"}
    shown["nodes"] = [{"gpu": "H100", "gpus": 1, "name": a}, {"gpu": "L20", "gpus": 2, "name": b}]
    shown["gpu"] = {name: {"bf16_tflops": tflops} for name, tflops in (("H100", 0.2), ("L20", 0.1))}
    work = msgspec.structs.replace(recipe_workload(load(())), prompt=constant(12), output=constant(24))
    spec = read_model(ROOT / "models" / "quickstart")
    plan = make_plan(Inputs(ClusterSettings.model_validate(shown).build(), spec, work, mixed_stages=True))
    assert plan.training.is_mixed
    assert set(plan.training.gpu_ids) == {f"{a}:0", f"{b}:0"}
    witness = Witness()
    train_on_ray(RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK), witness, StopRequest())
    assert witness.steps == [1, 2]
    assert {f"rank-0 on {b}: 1 L20", f"rank-1 on {a}: 1 H100"} <= set(witness.lines)
    trainer = RunDirectory.open(tmp_path / "r").recipe()["trainer"]
    assert (trainer["ranks"], trainer["stages"], trainer["speeds"]) == (2, 1, [0.6667, 1.3333])

    cluster = RayCluster(nodes.address)
    try:
        there = {machine.name: machine for machine in machines(cluster.rows())}
        placed = place(plan, list(there.values()))
        given = dict(override.removeprefix("trainer.").split("=") for override in placed.overrides)
        settings = {key: json.loads(value) for key, value in given.items()}
        ranks = RayRanks(cluster, placed.ranks, there)
        alone = make_trainer(setup_in(str(tmp_path / "m"), {}), load_tokenizer(str(tmp_path / "m")))
        many = RankedTrainer(ranks, setup_in(str(tmp_path / "m"), settings), 5 * PATIENCE_S)
        try:
            for step in (1, 2):
                few = Batch(step, batch(step).groups[:3])
                alone.step(few)
                many.step(few)
            for name, tensor in weights_of(many).items():
                torch.testing.assert_close(tensor, alone.publish().tensors[name], atol=1e-5, rtol=1e-4)
        finally:
            many.close()
    finally:
        cluster.leave()
    for name in (a, b):
        nodes.remove(name)
    assert_nothing_is_left(nodes)


def test_a_trainers_machine_that_is_lost_is_replaced_by_another_with_a_new_plan(nodes: Nodes, tmp_path: Path) -> None:
    """One rank, not on this machine's node: its version reaches the hub through the object store."""
    from baton.cluster.ray.run import RayRun, train_on_ray

    a, b, spare = nodes.add(gpu_type_H100=1), nodes.add(gpu_type_L20=1), nodes.add(gpu_type_H100=1)
    plan = plan_of([stage("H100", f"{a}:0")], [replica("L20", f"{b}:0", share=1.0)])
    witness, load = Witness({3: lambda: nodes.remove(a)}), loader(tmp_path, "run.steps=4")
    order = RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK)
    loop = train_on_ray(order, witness, StopRequest())
    assert loop.state.step == 4
    assert witness.steps == [1, 2, 3, 3, 4]
    assert any("new plan (" in line for line in witness.lines)
    assert f"rank-0 on {spare}: 1 H100" in witness.lines or f"rank-0 on {b}: 1 L20" in witness.lines
    for name in (b, spare):
        nodes.remove(name)
    assert_nothing_is_left(nodes)


def test_a_command_that_is_killed_leaves_nothing_and_goes_on_and_ctrl_c_stops_it_cleanly(
    nodes: Nodes, tmp_path: Path
) -> None:
    a = nodes.add(gpu_type_L20=1)
    head = next(m.name for m in nodes.machines() if m.gpu == "CPU" and m.name != a)
    plan = written(plan_of([stage("CPU", f"{head}:0")], [replica("L20", f"{a}:0", share=1.0)]), tmp_path)
    recipe = tmp_path / "r.toml"
    recipe.write_text((ROOT / "recipes" / "quickstart.toml").read_text())
    overrides = [
        f"run.directory={tmp_path}", "run.name=r", "run.steps=500", "rollout.batch_groups=4", "rollout.group_size=4",
        "rollout.max_new_tokens=24", "engine.processes=0", "engine.slots=16", "eval.every=0", "eval.num_prompts=4",
        "checkpoint.every=2",
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "baton", "train", str(recipe), "--plan", str(plan), "--ray", nodes.address, *overrides
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def steps() -> int:
        path = tmp_path / "r" / "metrics.jsonl"
        return max((int(row["step"]) for row in read_metrics(tmp_path / "r")), default=0) if path.exists() else 0

    with (tmp_path / "first.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        wait_until(lambda: steps() >= 3 or process.poll() is not None, "three steps")
        assert process.poll() is None, (tmp_path / "first.log").read_text()[-2000:]
        process.kill()
        process.wait()
    wait_until(lambda: not nodes.own_processes("baton worker"), "workers to end with their driver")
    before = steps()
    with (tmp_path / "second.log").open("wb") as log:
        process = subprocess.Popen([*command, "--resume"], stdout=log, stderr=log, env=environment, cwd=ROOT)
        wait_until(lambda: steps() > before or process.poll() is not None, "a step more")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "second.log").read_text()[-2000:]
    said = (tmp_path / "second.log").read_text()
    assert "rank-0 runs in this process" in said
    assert "stopped after step" in said
    nodes.remove(a)
    assert_nothing_is_left(nodes)
