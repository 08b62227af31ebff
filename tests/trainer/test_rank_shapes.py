"""Every shape of a sharded trainer makes the update of one process, resumes the others' checkpoints, and ends when a
rank is lost. The dense model has grouped heads as Qwen3 has: 8 query heads and 4 key/value heads, which 2 and 4 divide.
The other model is a Qwen3-MoE, for every shape without TP, which is for dense models."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool
from test_ranks import TIMEOUT_S, alone, assert_close, distance, gradients, ranked, setup_of, tensors, two_version_batch
from trainer_cases import random_batch, tiny_model, tiny_tokenizer

from baton.errors import RankLost
from baton.trainer.parallel.local_ranks import LocalRanks
from baton.trainer.parallel.messages import TrainStep
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.trainer.trainer import Trainer
from tests.all_cases import chosen

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

SHAPES: dict[str, dict[str, Any]] = {
    "one process": {"ranks": 1},
    "FSDP": {"ranks": 3},
    "FSDP that reduces each": {"ranks": 4, "shard_gradients": True},
    "HSDP": {"ranks": 4, "shard_size": 2},
    "TP": {"ranks": 4, "tensor_parallel": 4},
    "FSDP x TP": {"ranks": 4, "tensor_parallel": 2, "shard_gradients": True},
}


@pytest.fixture(scope="module")
def grouped_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("grouped")
    tiny_model(num_attention_heads=8, num_key_value_heads=4, head_dim=8).save_pretrained(path)
    tiny_tokenizer().hf.save_pretrained(path)
    return str(path)


ROUNDS = {
    "there": ["one process", "FSDP", "HSDP", "FSDP x TP", "TP", "one process"],
    "and back": ["TP", "HSDP", "FSDP that reduces each", "TP", "FSDP", "FSDP x TP", "HSDP", "one process"],
    "experts": ["HSDP", "one process", "FSDP", "FSDP that reduces each", "HSDP", "one process"],
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ROUNDS)
def test_every_shape_goes_on_from_the_checkpoint_of_another_as_one_process_does(
    order: str, pool: RankPool, grouped_path: str, expert_path: str, tmp_path: Path
) -> None:
    """Each shape takes a step from the last one's checkpoint, with its moments, and saves the next."""
    path = expert_path if order == "experts" else grouped_path
    one = alone(setup_of(path, name="grpo", num_minibatches=2))
    for step, name in enumerate(ROUNDS[order], start=1):
        shape = SHAPES[name]
        setup = setup_of(path, name="grpo", num_minibatches=2, **shape)
        trainer: Trainer = alone(setup) if shape["ranks"] == 1 else ranked(pool, shape["ranks"], setup)
        if step > 1:
            trainer.restore(tmp_path / f"{step - 1}")
        expected, found = one.step(two_version_batch(step)), trainer.step(two_version_batch(step))
        for key in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), (name, key)
        assert_close(tensors(trainer), tensors(one), atol=3e-5)
        trainer.save(tmp_path / f"{step}")


@pytest.mark.slow
def test_eight_ranks_compute_the_gradients_of_one_process(grouped_path: str, expert_path: str, tmp_path: Path) -> None:
    smooth = {"name": "grpo", "correction": "none", "max_grad_norm": math.inf, "betas": (0.0, 0.999)}
    paths = {"dense": grouped_path, "experts": expert_path}
    exact = {kind: gradients(alone(setup_of(path, **smooth)), tmp_path / kind) for kind, path in paths.items()}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    pool = RankPool(scratch, 8)
    try:
        for name, shape in {"FSDP": {}, "HSDP": {"shard_size": 4}, "FSDP x TP": {"tensor_parallel": 4}}.items():
            for kind in ("dense",) if "tensor_parallel" in shape else paths:
                setup = setup_of(paths[kind], **smooth, ranks=8, **shape)
                found = gradients(ranked(pool, 8, setup), tmp_path / f"{name} {kind}")
                assert distance(found, exact[kind]) < 1e-5, (name, kind)
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "number"),
    chosen(
        [("FSDP x TP", signal.SIGKILL), ("HSDP", signal.SIGSTOP)],
        [("FSDP", signal.SIGKILL), ("FSDP", signal.SIGSTOP), ("FSDP x TP", signal.SIGSTOP), ("HSDP", signal.SIGKILL)],
    ),
)
def test_a_rank_that_is_killed_or_stopped_in_a_step_ends_every_shape_within_its_deadline(
    shape: str, number: int, grouped_path: str, expert_path: str
) -> None:
    """It is stopped before the step, so that the others wait for it in a collective. A killed rank is named at once, a
    stopped one when the request's time is over. For FSDP, `test_ranks.py` kills one of two ranks."""
    ranks = LocalRanks(SHAPES[shape]["ranks"])
    setup = setup_of(expert_path if shape == "HSDP" else grouped_path, name="grpo", **SHAPES[shape])
    RankedTrainer(ranks, setup, 10 * TIMEOUT_S)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    is_killed = number == signal.SIGKILL
    if is_killed:
        threading.Timer(0.5, os.kill, (ranks.pids[1], signal.SIGKILL)).start()
    message = r"trainer rank 1 \(pid \d+\) ended by SIGKILL" if is_killed else r"trainer rank .*1.* did not answer"
    with pytest.raises(RankLost, match=message):
        ranks.ask(TrainStep(random_batch(1)), TIMEOUT_S if is_killed else 5.0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.pids)
