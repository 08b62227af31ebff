"""Mixtures of experts over ranks: FSDP2 shards the experts, and each rank replays the choices of its own rows."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rank_pool import RankPool
from test_ranks import SHAPES, alone, assert_close, distance, gradients, ranked, setup_of, tensors, two_version_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer_cases import VOCAB, tiny_tokenizer
from transformers import AutoModelForCausalLM

from baton.policy.load import load_empty
from baton.policy.routing import num_bytes, routers_of
from baton.policy.sharding import Sharded
from baton.policy.stored_tensors import StoredTensors
from baton.trainer.parallel.messages import TrainerSetup
from baton.trainer.trainer import Trainer
from baton.types import Author, Batch, Group, Segment
from tests.model_families import tiny_config

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

NUM_EXPERTS = 4


@pytest.fixture(scope="module")
def sigmoid_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random DeepSeek-V3: a dense layer, then two groups of two experts, chosen with a bias, and a shared expert."""
    path = tmp_path_factory.mktemp("sigmoid")
    config = tiny_config("deepseek_v3")
    config.update({"vocab_size": VOCAB, "initializer_range": 0.3, "n_group": 2, "topk_group": 1})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([0.0, 0.2, 0.4, -0.1]))
    model.save_pretrained(path)
    tiny_tokenizer().hf.save_pretrained(path)
    return str(path)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


MODELS = pytest.mark.parametrize("path", ["expert_path", "sigmoid_path"], indirect=True)


def routed(batch: Batch, path: str) -> Batch:
    """The batch with a random choice of experts for every token of the policy, as an engine reports it."""
    routers = routers_of(load_empty(path, dtype=torch.float32))
    assert num_bytes(routers) == 2 * len(routers)
    rng = random.Random(0)

    def chosen(segment: Segment) -> Segment:
        if segment.author is not Author.POLICY:
            return segment
        routing = [bytes(e for _ in routers for e in rng.sample(range(NUM_EXPERTS), 2)) for _ in segment.token_ids]
        return msgspec.structs.replace(segment, routing=routing)

    def of_group(group: Group) -> Group:
        members = [
            msgspec.structs.replace(
                m, trajectory=msgspec.structs.replace(m.trajectory, segments=tuple(map(chosen, m.trajectory.segments)))
            )
            for m in group.members
        ]
        return msgspec.structs.replace(group, members=tuple(members))

    return Batch(batch.step, tuple(map(of_group, batch.groups)))


SMOOTH: dict[str, Any] = {
    "name": "grpo",
    "correction": "none",
    "max_grad_norm": math.inf,
    "betas": (0.0, 0.999),
    "moe_replay": "engine",
}
"""No bound cuts a token, and no gradient is clipped: rounding cannot become a different update."""


@MODELS
def test_the_gradients_of_ranks_that_replay_the_engine_are_those_of_one_process(
    path: str, pool: RankPool, tmp_path: Path
) -> None:
    batch = routed(two_version_batch(1), path)
    exact = gradients(alone(setup_of(path, **SMOOTH)), tmp_path / "exact", batch)
    own = gradients(alone(setup_of(path, **{**SMOOTH, "moe_replay": "off"})), tmp_path / "own", batch)
    assert distance(own, exact) > 0.1  # the routers would choose other experts
    rounded = gradients(alone(setup_of(path, **SMOOTH, dtype="bfloat16")), tmp_path / "rounded", batch)
    packed = {"packing": "always", "activation_checkpointing": True}
    for name, more in {"two": {}, "four": packed, "two copies of two that reduce each": {}}.items():
        size, shape = SHAPES[name]
        setup = setup_of(path, **SMOOTH, **shape, **more, ranks=size)
        assert distance(gradients(ranked(pool, size, setup), tmp_path / name, batch), exact) < 1e-5, name
    coarse = gradients(ranked(pool, 2, setup_of(path, **SMOOTH, ranks=2, dtype="bfloat16")), tmp_path / "coarse", batch)
    assert distance(coarse, exact) < 2 * distance(rounded, exact)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minimax_m2", "afmoe"])
def test_ranks_in_bfloat16_choose_experts_by_the_float32_bias_of_their_router(
    model_type: str, pool: RankPool, tmp_path: Path
) -> None:
    """The router's product is zero, so the bias alone chooses: 0 and 2. In bfloat16, all four values would be 1, and
    topk on a CPU would return 2 and 3."""
    config = tiny_config(model_type)
    config.update({"vocab_size": VOCAB, **({"n_group": 1, "topk_group": 1} if model_type == "deepseek_v3" else {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    biases = []
    for name, tensor in model.state_dict().items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.copy_(torch.tensor([1.003, 1.001, 1.002, 1.0]))
            biases.append(name)
        elif name.endswith(("mlp.gate.weight", "mlp.router.gate.weight")):
            tensor.zero_()
    assert biases
    model.save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    setup, batch = setup_of(str(tmp_path), **{**SMOOTH, "moe_replay": "off"}), two_version_batch(1)
    exact = gradients(alone(setup), tmp_path / "exact", batch)

    def changed(**trainer: Any) -> TrainerSetup:
        return msgspec.structs.replace(setup, trainer={**setup.trainer, "dtype": "bfloat16", **trainer})

    rounded = gradients(alone(changed()), tmp_path / "rounded", batch)
    for more in ({}, {"activation_checkpointing": True, "packing": "always"}):
        ranks = ranked(pool, 2, changed(ranks=2, **more))
        found = gradients(ranks, tmp_path / f"ranks{len(more)}", batch)
        trained = {
            name: {place for place, one in enumerate(tensor) if one.abs().max() > 0}
            for name, tensor in found.items()
            if ".experts." in name and tensor.dim() == 3
        }
        assert trained
        assert all(experts == {0, 2} for experts in trained.values()), trained
        assert distance(found, exact) < 2 * distance(rounded, exact)
        published = ranks.publish().tensors
        assert all(torch.equal(published[name], torch.tensor([1.003, 1.001, 1.002, 1.0])) for name in biases)


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "flint"])
def test_ranks_in_bfloat16_train_the_float32_weights_of_a_router_as_one_process_does(
    model_type: str, pool: RankPool, tmp_path: Path
) -> None:
    """Hidden states are positive, so experts 0 and 2 get the largest products. In bfloat16, all four rows of the
    router's weight would be equal, and topk on a CPU would return 2 and 3."""
    rows = torch.tensor([1.003, 1.001, 1.002, 1.0]) / 16  # a sigmoid of large products would be 1 for all four
    config = tiny_config(model_type)
    config.update({"vocab_size": VOCAB})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.data.abs_().add_(1.0)
    model.get_parameter("model.layers.1.mlp.gate.weight").data.copy_(rows[:, None].expand(4, config.hidden_size))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    setup = setup_of(str(tmp_path), **{**SMOOTH, "moe_replay": "off"})

    def changed(**trainer: Any) -> TrainerSetup:
        return msgspec.structs.replace(setup, trainer={**setup.trainer, "dtype": "bfloat16", **trainer})

    def of_sinks(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in found.items() if name.endswith("sinks")}

    exact = gradients(alone(setup), tmp_path / "exact")
    rounded = gradients(alone(changed()), tmp_path / "rounded")
    shapes = {"two": {"activation_checkpointing": True}, "two copies of two that reduce each": {}, "stages": {}}
    for name, more in shapes.items():
        size, shape = SHAPES.get(name, (4, {"stages": 2}))
        ranks = ranked(pool, size, changed(ranks=size, **shape, **more))
        found = gradients(ranks, tmp_path / name)
        experts = {name: tensor for name, tensor in found.items() if ".experts." in name and tensor.dim() == 3}
        assert experts
        for each in experts.values():
            assert [place for place, one in enumerate(each) if one.abs().max() > 0] == [0, 2]
        assert distance(found, exact) < 2 * distance(rounded, exact), name
        if model_type == "flint":  # the router's own gradients cancel over tokens, so rounding dominates them
            assert distance(of_sinks(found), of_sinks(exact)) < 0.1
        other = alone(changed())
        other.restore(tmp_path / name)
        assert_close(tensors(other), tensors(ranks), atol=0)
        other.save(tmp_path / f"{name} again")
        again = StoredTensors.in_files(sorted((tmp_path / f"{name} again" / "baton").rglob("*.safetensors")))
        assert all(torch.equal(again.whole(name), tensor) for name, tensor in found.items())


def test_ranks_gather_the_parameters_in_float32_that_a_family_keeps_in_float32() -> None:
    """Torch's fake process group copies this rank's shard only, but casts like a real one."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = AutoModelForCausalLM.from_config(tiny_config("flint"))
        seen: dict[str, torch.dtype] = {}

        def note(module: torch.nn.Module, name: str) -> None:
            seen.update({f"{name}.{key}": p.dtype for key, p in module.named_parameters(recurse=False)})

        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda part, _, name=name: note(part, name))
        sharded = Sharded(model, init_device_mesh("cpu", (2,)), torch.bfloat16)
        sharded.run(lambda whole: whole(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits)
    finally:
        torch.distributed.destroy_process_group()
    exact = {name for name, dtype in seen.items() if dtype is torch.float32}
    layers = range(model.config.num_hidden_layers)
    assert exact == {"model.layers.1.mlp.gate.weight", *(f"model.layers.{place}.self_attn.sinks" for place in layers)}
    assert exact == set(sharded.unsharded)
    assert set(seen.values()) == {torch.float32, torch.bfloat16}


@MODELS
@pytest.mark.parametrize("settings", [{"moe_replay": "off"}, {"moe_replay": "proximal", "packing": "always"}])
def test_experts_over_ranks_make_the_updates_of_one_process_and_resume_with_any_number(
    path: str, settings: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    setup = setup_of(path, name="grpo", num_minibatches=2, num_epochs=2, **settings)

    def make(size: int) -> Trainer:
        if size == 1:
            return alone(setup)
        return ranked(pool, size, msgspec.structs.replace(setup, trainer={**setup.trainer, "ranks": size}))

    one, four = make(1), make(4)
    for step in (1, 2):
        expected, found = one.step(two_version_batch(step)), four.step(two_version_batch(step))
        for key in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
    assert_close(tensors(four), tensors(one))
    four.save(tmp_path / "checkpoint")
    one.step(two_version_batch(3))
    for size in (2, 1):
        other = make(size)
        other.restore(tmp_path / "checkpoint")
        other.step(two_version_batch(3))
        assert_close(tensors(other), tensors(one))
