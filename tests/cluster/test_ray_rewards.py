"""The reward model of a plan on a real Ray cluster: its actors have the GPUs of the plan, and their loss is noticed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from plans import plan_of, replica, scoring, stage
from test_ray_run import QUICK, ROOT, Nodes, Witness, assert_nothing_is_left, loader, nodes, ray, wait_until, written

from baton.errors import EngineFault
from baton.policy.reward_model import RewardModel
from baton.policy.tokenizer import load_tokenizer
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.specs.model import read_model
from baton.specs.plan import Plan
from baton.stop import StopRequest
from baton.types import Message
from tests.reward_models import make_reward_model

pytestmark = [pytest.mark.timing, pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["nodes", "ray"]
POLICY = ROOT / "models" / "quickstart"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "judge", POLICY)


def plan_with(model: Path, trainer: str, engine: str, *rewards: str) -> Plan:
    """One rank, one engine, and the reward model on these GPUs."""
    spec = read_model(model)
    size = {"model": spec.name, "params": spec.params, "num_layers": spec.num_layers, "batch_tokens": 16384}
    reward = scoring("L20", *rewards, **size)
    return plan_of([stage("H100", trainer)], [replica("L20", engine, share=1.0)], reward=reward)


def own_reward(model: Path) -> str:
    return f'reward=[{{kind = "model", model = "{model}"}}]'


def test_a_reward_model_runs_on_the_gpus_of_the_plan_and_is_started_again(
    nodes: Nodes, model: Path, tmp_path: Path
) -> None:
    """Kill an actor, and take the machine of the other: every trajectory has the score that the model gives here."""
    from baton.cluster.ray.run import RayRun, train_on_ray

    a, b = nodes.add(gpu_type_H100=1), nodes.add(gpu_type_L20=2)
    c = nodes.add(gpu_type_L20=1)
    plan = plan_with(model, f"{a}:0", f"{b}:0", f"{b}:1", f"{c}:0")

    def kill_an_actor() -> None:
        assert len(nodes.own_processes("ray::RewardActor")) == 2
        os.kill(nodes.own_processes("ray::RewardActor")[0], signal.SIGKILL)

    def take_a_machine() -> None:
        witness.await_line(r"reward-\d on .* is started again")
        nodes.remove(c)
        witness.await_line(f"machine {c} has left the cluster")

    witness = Witness({1: kill_an_actor, 3: take_a_machine})
    load = loader(tmp_path, "run.steps=5", own_reward(model))
    train_on_ray(RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK), witness, StopRequest())
    assert witness.steps == [1, 2, 3, 4, 5]
    assert {f"reward-0 on {b}: 1 L20", f"reward-1 on {c}: 1 L20"} <= set(witness.lines)
    assert any(re.fullmatch(r"reward-\d on .* was lost: .*", line) for line in witness.lines)
    rows = [row for row in read_metrics(load(()).run.path) if "reward/mean" in row]
    assert [row["judge/failed"] for row in rows] == [0.0] * 5
    here, tokenizer = RewardModel(str(model), "cpu", "float32", 1), load_tokenizer(str(POLICY))
    run = RunDirectory.open(tmp_path / "r")
    members = [(group.prompt, member) for step in (1, 2, 5) for group in run.groups(step) for member in group.members]
    for prompt, member in members:
        said = Message("assistant", tokenizer.text(member.trajectory.token_ids))
        (score,) = here.scores([here.ids([*prompt.messages, said])])
        assert member.judgement.reward == pytest.approx(score, rel=1e-4, abs=1e-4)
    assert len({member.judgement.reward for _, member in members}) > len(members) / 2
    wait_until(lambda: not nodes.own_processes("ray::RewardActor"), "reward models to end")
    for name in (a, b):
        nodes.remove(name)
    assert_nothing_is_left(nodes)


def test_a_generative_reward_model_runs_on_the_gpus_of_the_plan(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers, of which one is killed: every trajectory has the reward that its text gives. The servers are those
    of tests/fake_vllm, which rate a message by its length."""
    from baton.cluster.ray.run import RayRun, train_on_ray

    fake = ROOT / "tests" / "fake_vllm"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fake), os.environ.get("PYTHONPATH", "")]))
    a, b = nodes.add(gpu_type_H100=1), nodes.add(gpu_type_L20=3)
    spec = read_model(POLICY)
    size = {"model": spec.name, "params": spec.params, "num_layers": spec.num_layers, "batch_tokens": 16384}
    limits = {"concurrency": 4, "context_tokens": 256}
    reward = scoring("L20", f"{b}:1", f"{b}:2", **size, **limits)
    plan = plan_of([stage("H100", f"{a}:0")], [replica("L20", f"{b}:0", share=1.0)], reward=reward)

    def kill_a_server() -> None:
        running = nodes.own_processes("vllm.entrypoints.openai.api_server")
        assert len(running) == 2
        os.kill(running[0], signal.SIGKILL)

    witness = Witness({1: kill_a_server})
    keys = 'template = "{response}", pattern = "Rating: (.+)", max_new_tokens = 16, concurrency = 4'
    own = f'reward=[{{kind = "model", model = "{POLICY}", {keys}, context_tokens = 256}}]'
    load = loader(tmp_path, "run.steps=4", own)
    train_on_ray(RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK), witness, StopRequest())
    assert witness.steps == [1, 2, 3, 4]
    rows = [row for row in read_metrics(load(()).run.path) if "reward/mean" in row]
    assert [row["judge/failed"] for row in rows] == [0.0] * 4
    assert all(row["time/reward_model_busy"] > 0 for row in rows)
    tokenizer, run = load_tokenizer(str(POLICY)), RunDirectory.open(tmp_path / "r")
    members = [member for step in (1, 2, 3, 4) for group in run.groups(step) for member in group.members]
    for member in members:
        assert member.judgement.reward == len(tokenizer.text(member.trajectory.token_ids))
    wait_until(lambda: not nodes.own_processes("vllm.entrypoints.openai.api_server"), "the servers to end")
    for name in (a, b):
        nodes.remove(name)
    assert_nothing_is_left(nodes)


def test_a_run_whose_last_reward_model_is_lost_ends_with_a_sentence(nodes: Nodes, model: Path, tmp_path: Path) -> None:
    from baton.cluster.ray.run import RayRun, train_on_ray

    a, b, c = nodes.add(gpu_type_H100=1), nodes.add(gpu_type_L20=1), nodes.add(gpu_type_L20=1)
    plan = plan_with(model, f"{a}:0", f"{b}:0", f"{c}:0")
    witness = Witness({1: lambda: nodes.remove(c)})
    load = loader(tmp_path, "run.steps=50", own_reward(model))
    order = RayRun(load, written(plan, tmp_path), nodes.address, rules=QUICK)
    with pytest.raises(EngineFault, match=f"no process of the reward model of .*'model' is left: reward-0 .*{c}.*plan"):
        train_on_ray(order, witness, StopRequest())
    rows: list[dict[str, Any]] = [row for row in read_metrics(load(()).run.path) if "reward/mean" in row]
    assert rows
    assert all(row["judge/failed"] == 0 for row in rows)
    for name in (a, b):
        nodes.remove(name)
    assert_nothing_is_left(nodes)
