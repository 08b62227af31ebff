"""Colocated plans on a real Ray cluster: ranks and engines use the same GPUs alternately, whatever happens to one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from plans import plan_of, replica, stage
from safetensors.torch import load_file
from test_ray_run import QUICK, Nodes, Witness, assert_nothing_is_left, loader, nodes, wait_until, written

from baton.cluster.ray.run import RayRun, train_on_ray
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.run.assemble import build_loop
from baton.stop import StopRequest
from baton.trainer.checkpoint import list_checkpoints

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.timing, pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(900)]
__all__ = ["nodes"]
ALIKE = ("run.threads=1", "rollout.max_new_tokens=16", "eval.at_start=false")


class InPhases(Witness):
    """Does something when a phase of a step begins: (phase, how often the phase has begun) → action."""

    def __init__(self, actions: dict[tuple[str, int], Callable[[], None]]) -> None:
        super().__init__()
        self._of_phases, self._begun = actions, dict[str, int]()

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        self._begun[name] = self._begun.get(name, 0) + 1
        if action := self._of_phases.pop((name, self._begun[name]), None):
            action()
        yield lambda done: None


def trained_here(directory: Path, *overrides: str) -> RunDirectory:
    recipe = loader(directory, *ALIKE, *overrides)(())
    loop = build_loop(recipe, Witness(), resume=False, overwrite=False)
    try:
        loop.train()
    finally:
        loop.close()
    return loop.run


def assert_same_run(one: RunDirectory, other: RunDirectory) -> None:
    """Tokens, logprobs, versions and rewards of all steps, and the weights, bit by bit."""
    assert one.recorded_steps() == other.recorded_steps() != []
    for step in one.recorded_steps():
        for ours, theirs in zip(one.groups(step), other.groups(step), strict=True):
            for a, b in zip(ours.members, theirs.members, strict=True):
                assert a.trajectory == b.trajectory
                assert a.judgement.reward == b.judgement.reward
    saved = [list_checkpoints(run.checkpoints)[-1] for run in (one, other)]
    mine, its = (load_file(next(found.glob("*.safetensors"))) for found in saved)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


def test_a_colocated_plan_gives_the_bits_of_a_colocated_run_without_ray(nodes: Nodes, tmp_path: Path) -> None:
    """The trainer is in the process of the command, the engine in a worker on the same core."""
    (head,) = (machine.name for machine in nodes.machines())
    plan = plan_of([stage("CPU", f"{head}:0")], [replica("CPU", f"{head}:0", share=1.0)], is_colocated=True)
    load, witness = loader(tmp_path, *ALIKE, "run.steps=3"), Witness()
    order = RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK)
    loop = train_on_ray(order, witness, StopRequest())
    assert f"worker-0 on {head}: 1 core, 16 slots, 100 % of the work, alternating with rank 0" in witness.lines
    local = trained_here(tmp_path / "here", "run.steps=3", 'rollout.placement="colocated"')
    assert_same_run(loop.run, local)
    rows = [row for row in read_metrics(loop.run.path) if "memory/engine_bytes" in row]
    assert len(rows) == 3
    assert all(row["memory/engine_bytes"] > 0 and row["memory/trainer_bytes"] > 0 for row in rows)
    assert_nothing_is_left(nodes)


def test_ranks_and_engines_take_turns_and_outlive_a_killed_engine_and_a_killed_rank(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Two GPUs, each with a rank and an engine. An engine is killed while it generates and while it sleeps, and one
    hangs; a rank is killed while it trains. Each step is complete, and all its tokens are of one version."""
    a = nodes.add(gpu_type_H100=2)
    replicas = [replica("H100", f"{a}:{gpu}", share=0.5) for gpu in (0, 1)]
    plan = plan_of([stage("H100", f"{a}:0", f"{a}:1")], replicas, is_colocated=True)

    def a_worker() -> int:
        return wait_until(lambda: nodes.own_processes("-m baton worker"), "a worker")[0]

    def end_one_that_generates() -> None:
        os.kill(a_worker(), signal.SIGKILL)

    def end_one_that_sleeps() -> None:
        ended = a_worker()
        others = {*nodes.own_processes("-m baton worker")} - {ended}  # none if the worker killed before is not back yet
        os.kill(ended, signal.SIGKILL)
        witness.await_line(r"worker-\d on .* ended with exit code -9.*restarting it", len(witness.lines))
        running = {*nodes.own_processes("-m baton worker")}
        assert running <= others, "a rank uses the GPU, so no engine is started"

    def stop_one_that_sleeps() -> None:
        os.kill(a_worker(), signal.SIGSTOP)

    def end_a_rank() -> None:
        os.kill(nodes.own_processes("ray::RankActor")[-1], signal.SIGKILL)

    witness = InPhases(
        {
            ("generate", 2): end_one_that_generates,
            ("train", 3): end_one_that_sleeps,
            ("train", 4): stop_one_that_sleeps,
            ("train", 5): end_a_rank,
        }
    )
    load = loader(tmp_path, *ALIKE, "run.steps=6", "rollout.stall_timeout_s=20")
    loop = train_on_ray(RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK), witness, StopRequest())
    said = "\n".join(witness.lines)
    assert f"worker-1 on {a}: 1 H100, 16 slots, 50 % of the work, alternating with rank 1" in witness.lines
    assert re.search(r"worker-\d on \S+ did not answer `(held|wake)` in 20 s; restarting it", said), said
    assert re.search(r"trainer rank \d on .* was lost", said), said
    assert "restart 1 of 3 from the last checkpoint" in witness.lines
    assert witness.steps == [1, 2, 3, 4, 5, 6]
    assert loop.run.recorded_steps() == [1, 2, 3, 4, 5, 6]
    for step in loop.run.recorded_steps():
        members = [member for group in loop.run.groups(step) for member in group.members]
        assert len(members) == 16
        used = {segment.policy_version for member in members for segment in member.trajectory.segments}
        assert used == {step - 1}, "an engine that has slept or is new serves only the version of the step"
    nodes.remove(a)
    assert_nothing_is_left(nodes)
