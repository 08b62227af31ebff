"""A run whose trainer is two ranks: the recipe says so, and nothing else changes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.console import Console
from baton.errors import Damaged, RankLost
from baton.files import verify
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.recipe import Recipe
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.run import assemble as build
from baton.trainer.checkpoint import list_checkpoints
from baton.trainer.parallel.local_ranks import LocalRanks
from baton.views.terminal.progress import TerminalObserver
from tests.model_families import tiny_config
from tests.run.stopping import StopWhen

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

STEPS = 3


@pytest.fixture(scope="module")
def run_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run-model")
    tokenizer = scratch_tokenizer(["1+2-3=0"], 300)
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def recipe(model: Path, directory: Path, ranks: int = 2, stages: int = 1, *, background: bool = False) -> Recipe:
    tree: dict[str, Any] = {
        "run": {"name": "r", "directory": str(directory), "steps": STEPS, "threads": 1, "seed": 3},
        "model": {"path": str(model), "device": "cpu"},
        "task": [{"name": "chain_sum", "form": "compact", "params": {"max_terms": 3, "max_digits": 1}}],
        "answer": {"format": "last_line", "instruct": False},
        "reward": [{"kind": "function", "function": "tests.run.test_resume:evenness", "isolate": False}],
        "rollout": {"batch_groups": 4, "group_size": 4, "max_new_tokens": 12},
        "engine": {"slots": 16, "max_context_tokens": 64},
        "trainer": {"lr": 1e-3, "decay": "linear", "ranks": ranks, "stages": stages},
        "algorithm": {"num_minibatches": 2},
        "eval": {"every": 4, "num_prompts": 4},
        "checkpoint": {"every": 1, "keep": 3, "background": background},
    }
    return Recipe.model_validate(tree)


def train(wanted: Recipe, *, resume: bool = False, stop_after: int = STEPS) -> None:
    def should_stop() -> bool:
        steps = RunDirectory(wanted.run.path).recorded_steps() if wanted.run.path.exists() else []
        return bool(steps) and steps[-1] >= stop_after

    with open(os.devnull, "w") as nowhere, TerminalObserver(Console(file=nowhere), STEPS) as observer:  # noqa: PTH123
        loop = build.build_loop(wanted, observer, resume=resume, overwrite=False, stop=StopWhen(should_stop))
        try:
            loop.train()
        finally:
            loop.close()


def weights(wanted: Recipe) -> dict[str, torch.Tensor]:
    found = list_checkpoints(RunDirectory.open(wanted.run.path).checkpoints)[-1]
    return load_file(found / "model.safetensors")


@pytest.fixture(scope="module")
def expert_run_model(run_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with the tokenizer of `run_model`."""
    path = tmp_path_factory.mktemp("expert-run-model")
    config = tiny_config("qwen3_moe")
    config.update({"vocab_size": 300, "num_key_value_heads": 2})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    load_tokenizer(str(run_model)).hf.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "model"), [(1, "run_model"), (2, "run_model"), (1, "expert_run_model")])
def test_a_run_by_ranks_that_is_stopped_and_resumed_equals_one_never_stopped(
    stages: int,
    model: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_model = request.getfixturevalue(model)
    asked = []

    def lend(count: int, *, threads: int, publish_in: Path) -> LocalRanks:
        asked.append((count, threads))
        return pool.lend(count)

    monkeypatch.setattr(build, "LocalRanks", lend)
    unbroken, stopped = (recipe(run_model, tmp_path / name, stages=stages, background=name == "b") for name in "ab")
    train(unbroken)
    train(stopped, stop_after=1)
    train(stopped, resume=True)
    assert asked == [(2, 1)] * 3
    expected, found = weights(unbroken), weights(stopped)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    rows = [[row["policy/grad_norm"] for row in read_metrics(r.run.path) if "policy/grad_norm" in row]
            for r in (unbroken, stopped)]  # fmt: skip
    assert rows[0] == rows[1]
    assert len(rows[0]) == STEPS
    assert any(norm > 0 for norm in rows[0])


def test_a_rank_that_is_lost_ends_the_run_with_its_name_and_the_run_can_go_on(
    run_model: Path, tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LocalRanks", lambda count, *, threads, publish_in: pool.lend(count))
    wanted = recipe(run_model, tmp_path)
    train(wanted, stop_after=1)
    checkpoint = list_checkpoints(RunDirectory(wanted.run.path).checkpoints)[-1]
    shard = next((checkpoint / "baton" / "optimizer").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Damaged, match=re.escape(shard.name)):
        verify(checkpoint)
    shard.write_bytes(whole)
    message = "trainer rank 1 (pid 5) ended by SIGKILL; continue from the last checkpoint"

    def lost(self: LocalRanks, message_to: object, timeout_s: float) -> list[Any]:
        if type(message_to).__name__ == "TrainStep":
            raise RankLost(message)
        return asked(self, message_to, timeout_s)

    asked: Any = LocalRanks.ask
    with monkeypatch.context() as patched:
        patched.setattr(LocalRanks, "ask", lost)
        with pytest.raises(RankLost, match="trainer rank 1"):
            train(wanted, resume=True)
    train(wanted, resume=True)
    assert RunDirectory(wanted.run.path).recorded_steps()[-1] == STEPS
