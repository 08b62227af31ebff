"""One, two and four ranks make the update that one process makes. See rank_pool.py for how they run."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rank_pool import RankPool
from safetensors.torch import load_file
from trainer_cases import (
    INVENTED,
    SMOOTH,
    environment,
    make_group,
    policy,
    random_batch,
    tiny_model,
    tiny_tokenizer,
)
from transformers import AutoModelForCausalLM

from baton.errors import RankLost, TrainingDiverged, UserError
from baton.policy.settings import LoraSettings
from baton.policy.stored_tensors import StoredTensors
from baton.policy.tensors import weights_digest
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.factory import make_trainer
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.parallel.balance import balanced
from baton.trainer.parallel.local_ranks import LocalRanks
from baton.trainer.parallel.messages import TrainerSetup
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.trainer.samples import training_samples
from baton.trainer.settings import TrainerSettings
from baton.trainer.trainer import Trainer
from baton.types import (
    Batch,
    Episode,
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Trajectory,
)

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

TIMEOUT_S = 300.0


def setup_of(model_path: str, *, lora: LoraSettings | None = None, **settings: Any) -> TrainerSetup:
    """Settings of the algorithm and of the trainer, by name; updates of different sums are compared, so SMOOTH."""
    algorithm = AlgorithmSettings(**{k: settings.pop(k) for k in AlgorithmSettings.model_fields if k in settings})
    return TrainerSetup(
        model_path=model_path,
        device="cpu",
        attention="sdpa",
        trainer=TrainerSettings(**{**SMOOTH, **INVENTED, "max_tokens_per_microbatch": 48, **settings}).model_dump(),
        algorithm=algorithm.model_dump(),
        lora=None if lora is None else lora.model_dump(),
        temperature=1.0,
        total_steps=10,
        max_new_tokens=16,
        max_staleness=2,
        publish_dtype="float32",
        version=PolicyVersion("first", 0),
        seed=0,
    )


def alone(setup: TrainerSetup) -> LocalTrainer:
    return make_trainer(setup, tiny_tokenizer())


def ranked(pool: RankPool, size: int, setup: TrainerSetup) -> RankedTrainer:
    return RankedTrainer(pool.lend(size), setup, TIMEOUT_S)


def in_products(setup: TrainerSetup, ranks: int, tensor_parallel: int) -> TrainerSetup:
    return msgspec.structs.replace(setup, trainer={**setup.trainer, "ranks": ranks, "tensor_parallel": tensor_parallel})


def two_version_batch(step: int) -> Batch:
    """Beside random groups: trajectories of two versions with a tool's words between, one group of equal rewards."""
    old, new = max(0, step - 2), step - 1
    mixed = make_group(
        90, (1.0, 0.0), [[policy(5, 6, version=old), environment(7), policy(8, 9, 10, version=new)], [policy(11)]]
    )
    flat = make_group(91, (1.0, 1.0), [[policy(5, version=new)], [policy(6, 7, version=new)]])
    return Batch(step, (*random_batch(step).groups, mixed, flat))


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "dapo": {"name": "dapo", "overlong_frac": 0.25, "num_minibatches": 2},
    "gspo": {"name": "gspo", "num_minibatches": 2},
    "ppo": {"name": "ppo", "num_minibatches": 2, "num_epochs": 1},
    "ppo shared": {"name": "ppo", "critic": "shared", "num_minibatches": 1, "num_epochs": 2},
    "kl in loss": {"name": "grpo", "kl_coef": 0.1, "num_epochs": 2, "entropy_coef": 0.01},
    "kl in reward": {"name": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"},
    "second moment": {"name": "decoupled_ppo", "correction": "second_moment"},
    "lora": {"name": "grpo", "kl_coef": 0.05, "lora": LoraSettings(rank=2), "num_epochs": 2},
    "packed": {"name": "grpo", "packing": "always", "num_minibatches": 2},
    "unequal speeds": {"name": "grpo", "num_minibatches": 2, "ranks": 4, "speeds": (4.0, 1.0, 2.0, 0.5)},
    "checkpointed": {"name": "dapo", "num_minibatches": 1, "activation_checkpointing": True, "shard_gradients": True},
    "bfloat16": {"name": "grpo", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("key", ["mismatch_kl", "logprob_diff"])
def test_the_limits_of_the_mismatch_are_for_the_batch_and_not_for_the_rows_of_a_rank(
    key: str, pool: RankPool, model_path: str
) -> None:
    """With one row per microbatch, the ranks have rows of very different mismatch."""
    metric = {"mismatch_kl": "policy/mismatch_kl", "logprob_diff": "policy/logprob_diff_max"}[key]
    batch, small = two_version_batch(1), {"name": "grpo", "max_tokens_per_microbatch": 1}
    mean = alone(setup_of(model_path, **small)).step(batch)[metric]
    above, below = (setup_of(model_path, **small, **{f"max_{key}": (0.1, share * mean)}) for share in (1.01, 0.9))
    with pytest.raises(TrainingDiverged) as expected:
        alone(below).step(batch)
    assert expected.value.suspects
    for size in (2, 4):
        ranked(pool, size, above).step(batch)
        with pytest.raises(TrainingDiverged) as found:
            ranked(pool, size, below).step(batch)
        assert found.value.suspects == expected.value.suspects


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_makes_the_update_of_one_process(name: str, pool: RankPool, model_path: str) -> None:
    setup = setup_of(model_path, **CASES[name])
    one = alone(setup)
    expected = [one.step(two_version_batch(step)) for step in (1, 2)]
    weights = tensors(one)
    is_coarse = setup.trainer["dtype"] == "bfloat16"
    for size in (1, 2, 4) if name in ("grpo", "ppo") else (2, 4) if name == "lora" else (4,):
        many = ranked(pool, size, setup)
        found = [many.step(two_version_batch(step)) for step in (1, 2)]
        assert many.version == PolicyVersion("first", 2)
        assert_close(tensors(many), weights, atol=1e-3 if is_coarse else 1e-5)
        # In bfloat16 a token's weight may fall on the other side of a bound: two of the batch's 70 tokens are allowed.
        tolerance = {"rel": 0.05, "abs": 0.03} if is_coarse else {"rel": 1e-3, "abs": 1e-4}
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.pop("tokens/imbalance", 1.0) > 1.0) == (size > 1)
            assert ours.pop("perf/trainer_peak_bytes") > 0  # in one process, the loop adds it
            assert ours.pop("perf/trainer_peak_tokens") > 0
            apart = {"tokens/padding_frac"}
            assert ours.keys() == theirs.keys()
            for key in ours.keys() - apart:
                assert ours[key] == pytest.approx(theirs[key], **tolerance), key


def gradients(trainer: Trainer, directory: Path, batch: Batch | None = None) -> dict[str, torch.Tensor]:
    """The gradients of a first update, before clipping and optimiser: with beta_1 = 0 they are the first moments."""
    trainer.step(batch or two_version_batch(1))
    trainer.save(directory)
    stored = StoredTensors.in_files(sorted((directory / "baton").rglob("*.safetensors")))
    return {name: stored.whole(name) for name in stored.shapes if name.startswith("exp_avg/")}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    squares = sum((tensor - expected[name]).square().sum().item() for name, tensor in found.items())
    return (squares / sum(tensor.square().sum().item() for tensor in expected.values())) ** 0.5


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}),
    "four": (4, {}),
    "four that reduce each": (4, {"shard_gradients": True}),
    "two copies of two": (4, {"shard_size": 2}),
    "two copies of two that reduce each": (4, {"shard_size": 2, "shard_gradients": True}),
    "two copies of unequal speed": (4, {"shard_size": 2, "speeds": (2.0, 2.0, 0.7, 0.7)}),
    "two that share products": (2, {"tensor_parallel": 2}),
    "two by two that share products": (4, {"tensor_parallel": 2}),
}


@pytest.mark.parametrize("kind", ["full", "lora", "experts"])
def test_the_gradients_of_ranks_are_those_of_one_process(
    kind: str, pool: RankPool, model_path: str, expert_path: str, tmp_path: Path
) -> None:
    """In float32; and in bfloat16, where shapes round differently, at most twice as far from float32 as one process."""
    path = expert_path if kind == "experts" else model_path
    lora = LoraSettings(rank=2) if kind == "lora" else None
    # No bound cuts a token, and no gradient is clipped: rounding cannot become a different update.
    smooth = {"name": "grpo", "correction": "none", "max_grad_norm": math.inf, "betas": (0.0, 0.999), "lora": lora}
    exact = gradients(alone(setup_of(path, **smooth)), tmp_path / "exact")
    rounded = gradients(alone(setup_of(path, **smooth, dtype="bfloat16")), tmp_path / "rounded")
    assert distance(rounded, exact) > 1e-4  # bfloat16 computes something else
    for name, (size, shape) in SHAPES.items():
        if kind != "full" and "tensor_parallel" in shape:
            continue  # refused
        found = gradients(ranked(pool, size, setup_of(path, **smooth, ranks=size, **shape)), tmp_path / name)
        assert distance(found, exact) < 1e-5, name
        if name in ("two", "four", "two copies of two", "two by two that share products"):
            coarse = setup_of(path, **smooth, ranks=size, dtype="bfloat16", **shape)
            found = gradients(ranked(pool, size, coarse), tmp_path / f"{name}, rounded")
            assert distance(found, exact) < 2 * distance(rounded, exact), name


@pytest.mark.parametrize("name", ["ppo", "ppo shared"])
def test_a_critic_has_a_float32_head_under_parameters_gathered_in_bfloat16(
    name: str, pool: RankPool, model_path: str
) -> None:
    setup = setup_of(model_path, **CASES[name], dtype="bfloat16")
    one, many = alone(setup), ranked(pool, 2, setup)
    expected, found = one.step(two_version_batch(1)), many.step(two_version_batch(1))
    for key in ("policy/loss", "value/loss", "policy/grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=0.05, abs=0.03), key


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo"])
def test_the_paths_of_an_episode_may_be_on_different_ranks(name: str, pool: RankPool, model_path: str) -> None:
    """Three paths each, of very different lengths, which are divided over four ranks."""
    members = []
    for index, reward in enumerate((1.0, 0.0)):
        paths = [
            Trajectory(7, index, (2,) * size, (policy(*range(5, 5 + size)),), FinishReason.STOP) for size in (9, 8, 1)
        ]
        episode = Episode(earlier=tuple(paths[:-1]))
        members.append(ScoredTrajectory(paths[-1], RewardResult(reward, {}, reward == 1.0), episode))
    batch = Batch(1, (*random_batch(1).groups, Group(7, Prompt("p", "case", ()), tuple(members))))
    rows = training_samples(batch.groups, AlgorithmSettings())
    dealt = balanced([float(len(row.token_ids)) for row in rows], 4)
    for episode in ("7/0", "7/1"):
        assert sum(any(rows[place].name == episode for place in places) for places in dealt) > 1
    own = {"num_epochs": 2, "correction": "sequence_tis"} if name == "gspo" else {}
    setup = setup_of(model_path, name=name, num_minibatches=1, **own)
    one, many = alone(setup), ranked(pool, 4, setup)
    assert many.step(batch)["policy/loss"] == pytest.approx(one.step(batch)["policy/loss"], abs=1e-5)
    assert_close(tensors(many), tensors(one))


def test_ranks_that_have_nothing_to_train_keep_the_others_company(pool: RankPool, model_path: str) -> None:
    """One group of two short rows over four ranks; and a batch of equal rewards, where no rank has a gradient."""
    setup = setup_of(model_path, name="grpo")
    one, many = alone(setup), ranked(pool, 4, setup)
    few = Batch(1, (make_group(0, (1.0, 0.0)),))
    flat = Batch(2, (make_group(1, (1.0, 1.0)),))
    for batch in (few, flat):
        assert many.step(batch)["policy/loss"] == pytest.approx(one.step(batch)["policy/loss"], abs=1e-6)
        assert_close(tensors(many), tensors(one))


@pytest.mark.parametrize(("name", "size"), [("grpo", 2), ("ppo shared", 4), ("packed", 4)])
def test_ranks_that_share_products_make_the_update_of_one_process(
    name: str, size: int, pool: RankPool, model_path: str, tmp_path: Path
) -> None:
    """Tensor parallelism over two ranks, beside it shards over size / 2; and their checkpoint is one like any other."""
    setup = setup_of(model_path, **CASES[name])
    one, many = alone(setup), ranked(pool, size, in_products(setup, size, 2))
    for step in (1, 2):
        expected, found = one.step(two_version_batch(step)), many.step(two_version_batch(step))
        for key in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3), key
    assert_close(tensors(many), tensors(one))
    many.save(tmp_path / "checkpoint")
    again, other = ranked(pool, 2, in_products(setup, 2, 2)), alone(setup)
    for each in (again, other):
        each.restore(tmp_path / "checkpoint")
        each.step(two_version_batch(3))
    assert_close(tensors(again), tensors(other))


def test_products_that_cannot_be_shared_are_refused_in_a_sentence(pool: RankPool, model_path: str) -> None:
    setup = setup_of(model_path, name="grpo")
    with pytest.raises(UserError, match="got 4, but Qwen3ForCausalLM has 2 query heads, 2 key/value heads and 64 col"):
        ranked(pool, 4, in_products(setup, 4, 4))


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 2), (0, 2), (2, 0), (2, -4), (-4, 2)])
def test_a_checkpoint_is_resumed_by_another_number_of_ranks(
    before: int, after: int, pool: RankPool, model_path: str, tmp_path: Path
) -> None:
    """0 stands for a trainer without ranks, which writes one file instead of shards, and −4 for two copies of two."""
    setup = setup_of(model_path, name="ppo", num_minibatches=2, num_epochs=1)
    copies = msgspec.structs.replace(setup, trainer={**setup.trainer, "ranks": 4, "shard_size": 2})

    def make(size: int) -> Trainer:
        return ranked(pool, abs(size), setup if size > 0 else copies) if size else alone(setup)

    trainer = make(before)
    trainer.step(two_version_batch(1))
    trainer.save(tmp_path / "checkpoint")
    saved, version = tensors(trainer), trainer.version
    expected = trainer.step(two_version_batch(2))
    weights = tensors(trainer)

    other = make(after)
    other.restore(tmp_path / "checkpoint")
    assert other.version == version
    assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors(other).items())
    found = other.step(two_version_batch(2))  # with the moments of the policy and of the critic, or it would differ
    assert_close(tensors(other), weights)
    for key in ("policy/loss", "policy/grad_norm", "value/loss", "value/grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-3), key


def test_as_many_ranks_go_on_with_the_same_bits(pool: RankPool, model_path: str, tmp_path: Path) -> None:
    setup = setup_of(model_path, name="ppo", num_minibatches=2)
    unbroken = ranked(pool, 2, setup)
    unbroken.step(two_version_batch(1))
    unbroken.save(tmp_path / "checkpoint")
    unbroken.step(two_version_batch(2))
    expected, version = tensors(unbroken), unbroken.version
    resumed = ranked(pool, 2, setup)
    resumed.restore(tmp_path / "checkpoint")
    resumed.step(two_version_batch(2))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(resumed).items())
    assert resumed.version == version


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_checkpoint_of_ranks_is_what_hugging_face_loads_and_holds_no_pickle(
    kind: str, pool: RankPool, model_path: str, expert_path: str, tmp_path: Path
) -> None:
    trainer = ranked(pool, 2, setup_of(expert_path if kind == "experts" else model_path, name="grpo"))
    trainer.step(random_batch(1))
    trainer.save(tmp_path / "checkpoint")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors(trainer).items())
    shards = sorted((tmp_path / "checkpoint" / "baton" / "optimizer").iterdir())
    assert len(shards) == 2
    assert all(file.suffix == ".safetensors" for file in shards)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    whole, parts = tensors(trainer)["model.embed_tokens.weight"], [load_file(file) for file in shards]
    assert sum(part["exp_avg/model.embed_tokens.weight"].numel() for part in parts) == whole.numel()


def test_an_adapter_of_ranks_is_what_peft_loads(pool: RankPool, model_path: str, tmp_path: Path) -> None:
    setup = setup_of(model_path, lora=LoraSettings(rank=2), name="grpo")
    many, one = ranked(pool, 2, setup), alone(setup)
    many.step(random_batch(1))
    many.save(tmp_path / "checkpoint")
    one.restore(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, tensors(many)[name]) for name, tensor in tensors(one).items())
    assert weights_digest(tensors(many)) == many.version.digest


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_weights_are_published_in_the_engines_dtype_with_the_digest_of_one_process(
    kind: str, pool: RankPool, model_path: str, expert_path: str
) -> None:
    path = expert_path if kind == "experts" else model_path
    setup = msgspec.structs.replace(setup_of(path), publish_dtype="bfloat16")
    many, one = ranked(pool, 2, setup).publish(), alone(setup).publish()
    assert many.version == one.version
    assert {tensor.dtype for tensor in many.tensors.values()} == {torch.bfloat16}


def test_a_number_that_is_not_finite_on_one_rank_stops_all_and_leaves_the_weights(
    pool: RankPool, model_path: str, tmp_path: Path
) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = float("nan")  # one row's token: one rank's share; the head is tied
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num(0.0))
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().hf.save_pretrained(tmp_path / "model")
    setup = setup_of(str(tmp_path / "model"), name="grpo")
    many = ranked(pool, 4, setup)
    good = make_group(0, (1.0, 0.0))
    bad = make_group(7, (1.0, 0.0), [[policy(63, 5)], [policy(6, 7)]])
    before = tensors(many)
    with pytest.raises(
        TrainingDiverged, match=r"train step 1: the loss is nan over groups (0, )?7.*are still those of version 0"
    ):
        many.step(Batch(1, (good, bad)))
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in tensors(many).items())
    many.step(Batch(1, (good, make_group(8, (1.0, 0.0)))))  # and they can go on


def test_a_trajectory_that_no_rank_can_confirm_is_named_by_all_and_they_can_go_on_without_it(
    pool: RankPool, model_path: str
) -> None:
    """It is in the second minibatch, and on one rank."""
    limits = {"max_logprob_diff": (5.0, 15.0), "max_mismatch_kl": (0.01, math.inf)}
    many = ranked(pool, 2, setup_of(model_path, name="grpo", num_minibatches=2, **limits))
    good = [make_group(index, (1.0, 0.0)) for index in range(4)]
    bad = make_group(9, (1.0, 0.0), [[policy(5)], [policy(6, 7, logprob=-40.0)]])
    before = tensors(many)
    with pytest.raises(TrainingDiverged, match="weights are still those of version 0") as caught:
        many.step(Batch(1, (*good[:3], bad)))
    assert [suspect.name for suspect in caught.value.suspects] == ["9/1"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(many).items())
    many.step(Batch(1, tuple(good)))


def test_what_is_wrong_with_a_batch_is_said_as_by_one_process(pool: RankPool, model_path: str) -> None:
    many = ranked(pool, 2, setup_of(model_path, name="grpo", num_minibatches=3))
    with pytest.raises(UserError, match="num_minibatches: got 3, allowed are at most 1, the groups of a batch"):
        many.step(Batch(1, (make_group(0, (1.0, 0.0)),)))
    with pytest.raises(UserError, match=r"model\.path: "):
        ranked(pool, 2, setup_of("no such directory"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": True}, "compile: got true with ranks above 1"),
        ({"tensor_parallel": 3}, "tensor_parallel: got 3 with ranks = 2; allowed are divisors"),
        ({"shard_size": 3}, "shard_size: got 3 with ranks = 2 and tensor_parallel = 1; it must divide ranks / stages"),
        ({"shard_size": 1, "tensor_parallel": 2}, "shard_size: got 1 with ranks = 2 and tensor_parallel = 2"),
        ({"speeds": (2, 1, 1)}, r"speeds: got \[2.0, 1.0, 1.0\]; allowed is an empty list, or 2 positive numbers"),
        ({"speeds": (2, 0)}, r"speeds: got \[2.0, 0.0\]; allowed is an empty list, or 2 positive numbers"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerSettings(ranks=2, **settings)


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_a_step_is_named_at_once_and_none_is_left(model_path: str) -> None:
    """It is stopped first, so that the other has begun and waits for it in a collective when it dies."""
    ranks = LocalRanks(2)
    trainer = RankedTrainer(ranks, setup_of(model_path, name="grpo"), 10 * TIMEOUT_S)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (ranks.pids[1], signal.SIGKILL)).start()
    with pytest.raises(
        RankLost, match=r"trainer rank 1 \(pid \d+\) ended by SIGKILL; continue from the last checkpoint"
    ):
        trainer.step(random_batch(1))
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.pids)
    trainer.close()


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that belongs to no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@contextmanager
def growths(pids: list[int]) -> Iterator[list[int]]:
    """Return a list, which at the end holds by how many bytes each process grew at most. Samples may miss a peak."""
    before, found, is_over = [anonymous_bytes(pid) for pid in pids], [0] * len(pids), threading.Event()

    def sample() -> None:
        while not is_over.wait(0.005):
            for index, pid in enumerate(pids):
                found[index] = max(found[index], anonymous_bytes(pid) - before[index])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_no_process_holds_more_than_its_shards_and_a_block(tmp_path: Path) -> None:
    """Growth as a share of the model in float32. A shard is a quarter, and a block, of which two are gathered, a
    twentieth; a step adds gradients and moments, three quarters."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 20, "num_key_value_heads": 2}
    for name, shape in {"small": {"num_key_value_heads": 2}, "large": wide}.items():
        # a file in float32 would be mapped, not read
        model = tiny_model(**shape).to(torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().hf.save_pretrained(tmp_path / name)
        size = 4 * model.num_parameters()
    settings: dict[str, Any] = {"name": "grpo", "shard_gradients": True, "activation_checkpointing": True}
    with closing(RankPool(tmp_path, returns_memory=True)) as pool:
        small = ranked(pool, 4, setup_of(str(tmp_path / "small"), **settings))  # loads all modules
        small.step(random_batch(1))
        small.publish()
        small.save(tmp_path / "small checkpoint")
        pids = [process.pid for process in pool.processes]
        assert len(pids) == 4
        with growths(pids) as start:
            large = ranked(pool, 4, setup_of(str(tmp_path / "large"), **settings))
        with growths(pids) as publication:
            large.publish()
        with growths(pids) as step:
            large.step(random_batch(1))
        with growths(pids) as checkpoint:
            large.save(tmp_path / "large checkpoint")
    found = {"start": start, "publication": publication, "step": step, "checkpoint": checkpoint}
    shares = {name: max(growth) / size for name, growth in found.items()}
    assert shares["start"] < 0.6, shares
    assert shares["publication"] < 0.25, shares
    assert shares["step"] < 1.25, shares
    assert shares["checkpoint"] < 0.25, shares
