"""Mixtures of experts are trained like any other model, and their routing can be held over a train step."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from trainer_cases import (
    SMOOTH,
    VOCAB,
    are_bit_equal,
    make_trainer,
    parameters,
    random_batch,
    tiny_model,
    tiny_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from baton.errors import EngineFault, UserError
from baton.policy.load import load_model, load_skeleton, save_merged
from baton.policy.routing import RoutingReplay, num_bytes, routers_of
from baton.policy.settings import LoraSettings
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.embedded.network import Network
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import WorkerClient
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.microbatches import FEW_SHAPES, cut
from baton.trainer.samples import training_samples
from baton.types import (
    Batch,
    Group,
    PolicyVersion,
    Prompt,
    RewardResult,
    SamplingParams,
    ScoredTrajectory,
    Segment,
    Trajectory,
)
from tests.model_families import tiny_config

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def qwen(seed=0, **changes):
    torch.manual_seed(seed)
    shape = {**SHAPE, "moe_intermediate_size": 32, "num_experts": 4, **changes}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()


def mixtral(seed=0):
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)).eval()


FAMILIES = pytest.mark.parametrize("make", [qwen, mixtral])


@FAMILIES
@pytest.mark.parametrize("packing", ["never", "always"])
def test_experts_and_their_gate_learn_and_the_update_does_not_depend_on_the_split(make, packing):
    found = []
    for tokens in (100_000, 24):
        trainer = make_trainer(make(), max_tokens_per_microbatch=tokens, packing=packing)
        trainer.step(random_batch(1, num_groups=5))
        found.append({name: p.grad for name, p in trainer.model.named_parameters()})
    whole, cut = found
    assert whole.keys() == cut.keys()
    assert any("experts" in name and grad.abs().max() > 1e-4 for name, grad in whole.items())
    assert any("gate.weight" in name and grad.abs().max() > 1e-4 for name, grad in whole.items())
    for name, grad in whole.items():
        torch.testing.assert_close(cut[name], grad, atol=1e-5, rtol=1e-4, msg=name)


@FAMILIES
def test_an_engine_serves_what_was_trained(make):
    trainer = make_trainer(make())
    trainer.step(random_batch(1))
    network = Network(make(seed=1), 16, 32)
    network.load(trainer.publish().tensors)
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(network.model(ids).logits, trainer.model(ids).logits, atol=1e-6, rtol=0)


def test_adapters_go_into_the_linear_layers_of_a_mixture():
    trainer = make_trainer(qwen(), lora=LoraSettings(rank=2), lr=1e-2)
    trainer.step(random_batch(1))
    network = Network(qwen(), 16, 32)
    network.load(trainer.publish().tensors)
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(network.model(ids).logits, trainer.model(ids).logits, atol=1e-5, rtol=1e-5)


# ---- routing replay --------------------------------------------------------------------------------------------------


def chosen(model):
    """Experts of every router call, in order."""
    seen = []
    for name, module in model.named_modules():
        if name.endswith("gate"):
            # after the replay's own hook, so that what it made of the choice is seen
            module.register_forward_hook(lambda _, __, output: seen.append(output[2].detach().clone()))
    return seen


@FAMILIES
def test_all_updates_of_a_step_choose_as_the_policy_at_its_start_did(make):
    different = {}
    for replay in ("proximal", "off"):
        trainer = make_trainer(make(), moe_replay=replay, num_epochs=3, lr=3e-2, max_tokens_per_microbatch=100_000)
        trainer.step(random_batch(1))  # finds out about the head, so that what follows is the passes alone
        seen = chosen(trainer.model)
        trainer.step(random_batch(2))
        proximal = seen[: len(seen) // 4]  # of all microbatches; then as many in each of the three updates
        different[replay] = sum((a != b).sum().item() for a, b in zip(proximal * 3, seen[len(proximal) :], strict=True))
    assert different["proximal"] == 0
    assert different["off"] > 0


@FAMILIES
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}, {"packing": "always"}])
def test_a_replayed_choice_has_the_gradient_of_the_choice_itself(make, settings):
    """Before anything has moved the replay changes nothing, to the bit: values and gradients alike."""
    found = []
    for replay in ("off", "proximal"):
        trainer = make_trainer(make(), moe_replay=replay, num_minibatches=1, correction="second_moment", **settings)
        trainer.step(random_batch(1))
        found.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-4, msg=name)
    assert found[1]["model.layers.0.mlp.gate.weight"].abs().max() > 1e-4


def test_weights_that_do_not_sum_to_one_are_replayed_as_they_are():
    for normalized in (True, False):
        trainers = [
            make_trainer(qwen(norm_topk_prob=normalized), moe_replay=replay, correction="second_moment")
            for replay in ("off", "proximal")
        ]
        for trainer in trainers:
            trainer.step(random_batch(1))
        assert are_bit_equal(*map(parameters, trainers)) or all(
            torch.allclose(a.grad, b.grad, atol=1e-6)
            for a, b in zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True)
        )


BIASES = ("e_score_correction_bias", "expert_bias")
"""Names by which a router's bias ends."""


def family(model_type, *, biased=False, **changes):
    """A random model of a family. With `biased`, its routers prefer other experts, which get the same weights."""
    config = tiny_config(model_type)
    config.update({"vocab_size": VOCAB, "initializer_range": 0.3, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in model.state_dict().items():
        if biased and name.endswith(BIASES):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return model


SIGMOID = {
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "glm4_moe": {"routed_scaling_factor": 1.5},
    "dots1": {"norm_topk_prob": False},
    "minimax_m2": {},
    "afmoe": {"route_scale": 2.0},
}
"""Families whose routers choose by sigmoid scores plus a bias that the weights of the experts do not contain."""
SOFTMAX = {
    "deepseek_v2": {"routed_scaling_factor": 3.0},
    "flex_olmo": {},
    "gpt_oss": {},
    "granitemoe": {},
    "hunyuan_v1_moe": {},
    "jetmoe": {},
    "olmoe": {"norm_topk_prob": False},
    "qwen2_moe": {},
}


@pytest.mark.parametrize("model_type", [*SIGMOID, *SOFTMAX])
def test_a_replayed_choice_of_any_family_has_the_gradient_of_the_choice_itself(model_type):
    found = []
    for replay in ("off", "proximal"):
        model = family(model_type, biased=True, **{**SIGMOID, **SOFTMAX}[model_type])
        trainer = make_trainer(model, moe_replay=replay, correction="second_moment")
        trainer.step(random_batch(1))
        found.append({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("model_type", SIGMOID)
def test_a_choice_that_a_router_would_not_make_is_weighted_by_its_logits(model_type):
    """The bias changes the choice of experts, not their weights: so a model without it that replays the choice computes
    what the model with it does."""
    biased, plain = (family(model_type, biased=b, **SIGMOID[model_type]) for b in (True, False))
    replays = [RoutingReplay(model) for model in (biased, plain)]
    ids = torch.arange(2, 14)[None]
    with torch.no_grad(), replays[0].recorded() as routing:
        expected = biased(ids).logits
    with torch.no_grad(), replays[1].replayed(routing):
        found = plain(ids).logits
    with torch.no_grad():
        free = plain(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (free - expected).abs().max() > 0.01


def test_a_model_whose_routers_do_not_choose_the_highest_scores_is_refused_with_a_sentence():
    for model in (tiny_model(), family("phimoe")):
        with pytest.raises(UserError, match=rf"trainer\.moe_replay: {type(model).__name__} has no routers, or routers"):
            make_trainer(model, moe_replay="proximal")


def test_a_stage_of_dense_layers_replays_nothing_if_another_stage_has_routers():
    """As the first layers of DeepSeek-V3."""
    model = tiny_model()
    replay = RoutingReplay(model, largest=lambda own: max(own, 1.0))
    ids = torch.arange(2, 8)[None]
    with torch.no_grad(), replay.recorded() as routing, replay.replayed(None):
        model(ids)
    assert routing == {}


def test_experts_beyond_256_take_two_bytes_and_an_unknown_expert_is_refused():
    replay = RoutingReplay(qwen(num_experts=300, moe_intermediate_size=4))
    chosen = {name: torch.tensor([[299, 7]], dtype=torch.int16) for name in routers_of(qwen())}
    (known,) = replay.as_bytes(chosen)
    assert len(known) == 2 * 2 * 2 == num_bytes(routers_of(qwen(num_experts=300, moe_intermediate_size=4)))
    laid = replay.from_engine([known, b""], [1, 2], 3, CPU)
    assert all(each.tolist() == [[-1, -1], [299, 7], [-1, -1]] for each in laid.values())
    with pytest.raises(EngineFault, match="the engine reported expert 300 of a router with 300 experts"):
        replay.from_engine([known[:-2] + (300).to_bytes(2, "little")], [0], 1, CPU)


# ---- the engine's routing --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_replays_the_choices_of_its_start():
    found = []
    for how in ({}, {"moe_replay": "proximal"}, {"moe_replay": "proximal", "compile": True}):
        counters.clear()
        trainer = make_trainer(qwen(), num_epochs=3, **SMOOTH, **how)
        trainer.step(random_batch(1))
        found.append(parameters(trainer))
    assert counters["stats"]["calls_captured"] > 100, "the blocks' operations are in compiled graphs"
    free, replayed, compiled = (torch.cat([p.flatten() for p in each.values()]) for each in found)
    assert (free - replayed).abs().max() > 1e-4, "without replay, later updates choose other experts"
    assert (compiled - replayed).abs().max() < 1e-5


@pytest.mark.parametrize("is_skeleton", [False, True])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "minimax_m2", "afmoe"])
def test_the_bias_of_a_router_stays_float32_in_trainer_and_engine(tmp_path, model_type, is_skeleton):
    """The router's product is zero, so the bias alone chooses: 0 and 2. In bfloat16, all four values would be 1, and
    topk on a CPU would return 2 and 3."""
    model = family(model_type, **({"n_group": 1, "topk_group": 1} if model_type == "deepseek_v3" else {}))
    bias = torch.tensor([1.003, 1.001, 1.002, 1.0])
    for name, tensor in model.state_dict().items():
        if name.endswith(BIASES):
            tensor.copy_(bias)
        elif name.endswith(("mlp.gate.weight", "mlp.router.gate.weight")):
            tensor.zero_()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    save_merged(str(tmp_path), tmp_path / "export", "bfloat16")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert sum(torch.equal(t, bias) for name, t in exported.items() if name.endswith(BIASES)) > 0
    assert {t.dtype for name, t in exported.items() if not name.endswith(BIASES)} == {torch.bfloat16}
    weights = make_trainer(model, publish_dtype=torch.bfloat16).publish()
    assert {t.dtype for name, t in weights.tensors.items() if not name.endswith(BIASES)} == {torch.bfloat16}
    how = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    served = load_skeleton(tmp_path, **how, attention="sdpa") if is_skeleton else load_model(str(tmp_path), **how)
    for name, tensor in served.state_dict().items():
        if name.endswith(BIASES):
            tensor.zero_()  # what is published must replace it
    settings = EngineSettings(slots=16, max_context_tokens=48, dtype="bfloat16")
    engine = EmbeddedEngine(served, tiny_tokenizer(), settings, PolicyVersion("first", 0), (1,))
    engine.load_weights(weights.tensors, weights.version)
    chosen = []
    for side, is_autocast in ((model, False), (model, True), (served, False)):
        bfloat16 = torch.autocast("cpu", torch.bfloat16, enabled=is_autocast)
        with torch.no_grad(), bfloat16, RoutingReplay(side).recorded() as routing:
            side(input_ids=torch.arange(2, 9)[None], use_cache=False)
        chosen.append({name: experts.sort(1).values for name, experts in routing.items()})
    for experts in (each for side in chosen for each in side.values()):
        assert experts.tolist() == [sorted(bias.topk(experts.shape[1]).indices.tolist())] * len(experts)


def generated(model, *, report_routing=True, num=6):
    """Trajectories of an embedded engine at temperature 1, one group of two each, with unequal rewards."""
    settings = EngineSettings(slots=16, max_context_tokens=48, report_routing=report_routing, report_every_tokens=3)
    engine = EmbeddedEngine(model, tiny_tokenizer(), settings, PolicyVersion("first", 0), (1,))
    sweep = EvalRollout(WorkerClient(LocalTransport(engine), max_context_tokens=48))
    requests = [EvalGroup(group_id, (2, 3, 4 + group_id), 2) for group_id in range(num // 2)]
    found = sweep.rollout(requests, SamplingParams(10), noise_seed=0, version=0)
    groups = {}
    for trajectory in found:
        reward = float(trajectory.sample_index)
        judged = ScoredTrajectory(trajectory, RewardResult(reward, {"correct": reward}, reward == 1.0))
        groups.setdefault(trajectory.group_id, []).append(judged)
    return Batch(
        1,
        tuple(
            Group(i, Prompt(f"{i}", "case", ()), tuple(sorted(m, key=lambda j: j.trajectory.sample_index)))
            for i, m in sorted(groups.items())
        ),
    )


def test_an_engine_reports_the_experts_behind_every_token():
    """They are those of the place before the token, in the order of the routers, as a plain forward chooses them."""
    model = qwen()
    batch = generated(qwen())
    seen = chosen(model)
    for trajectory in batch.trajectories:
        assert len(trajectory.routing) == trajectory.num_tokens > 3  # so several reports were merged
        seen.clear()
        with torch.no_grad():
            model(torch.tensor([[*trajectory.prompt_ids, *trajectory.token_ids]]))
        begin = len(trajectory.prompt_ids) - 1
        for index, routing in enumerate(trajectory.routing):
            assert list(routing) == [*seen[0][begin + index].tolist(), *seen[1][begin + index].tolist()]
    assert not any(t.segments[0].routing for t in generated(qwen(), report_routing=False).trajectories)


@pytest.mark.parametrize("packing", ["never", "always"])
def test_the_engines_choice_is_replayed_at_its_places_in_every_pass(packing):
    """Another model's engine made the batch, so that the trainer's own choice is another."""
    batch = generated(qwen(seed=5))
    trainer = make_trainer(qwen(), moe_replay="engine", num_epochs=2, packing=packing, max_tokens_per_microbatch=10_000)
    own = make_trainer(qwen(), num_epochs=2, packing=packing, max_tokens_per_microbatch=10_000)
    seen, free = chosen(trainer.model), chosen(own.model)
    trainer.step(batch)
    own.step(batch)
    rows = training_samples(batch.groups, AlgorithmSettings())
    is_packed = packing == "always"
    (micro,) = cut(rows, max_tokens_per_microbatch=10_000, device=CPU, is_packed=is_packed).microbatches
    routing, places, num_places = micro.inputs.reported_experts()
    assert len(routing) == len(places) == sum(t.num_tokens for t in batch.trajectories)
    assert len(seen) == 6  # three passes of two routers
    for layer in (0, 1):
        for experts in seen[layer::2]:
            assert len(experts) == num_places
            assert experts[places].tolist() == [list(r[2 * layer : 2 * layer + 2]) for r in routing]
        others = sorted(set(range(num_places)) - set(places))
        assert torch.equal(seen[layer][others], free[layer][others]) or layer  # prompts choose for themselves
    assert any((a[places] != b[places]).any() for a, b in zip(seen, free, strict=True))


def test_the_filler_of_a_packed_pass_in_bfloat16_has_no_reported_experts():
    batch = generated(qwen(seed=5))
    rows = training_samples(batch.groups, AlgorithmSettings())
    given = {"max_tokens_per_microbatch": 10_000, "device": CPU, "is_packed": True}
    (micro,) = cut(rows, **given, multiples=FEW_SHAPES).microbatches
    num_tokens = sum(len(row.token_ids) for row in rows)
    assert micro.inputs.reported_experts()[2] == len(micro.inputs.packed.input_ids) > num_tokens
    trainer = make_trainer(qwen(), moe_replay="engine", packing="always", dtype="bfloat16")
    assert math.isfinite(trainer.step(batch)["policy/loss"])


def test_at_equal_weights_replaying_the_engine_changes_nothing():
    batch = generated(qwen())
    found = []
    for replay in ("off", "engine"):
        trainer = make_trainer(qwen(), moe_replay=replay)
        metrics = trainer.step(batch)
        assert metrics["policy/logprob_diff_max"] < 1e-4
        found.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_routing_of_another_model_is_refused():
    batch = generated(qwen(num_experts_per_tok=1))
    with pytest.raises(EngineFault, match="reported other routers than this model's: expected 4 bytes per token"):
        make_trainer(qwen(), moe_replay="engine").step(batch)


def test_routing_survives_the_way_through_segments():
    first = Segment((5, 6), (-1.0, -1.0), 0, routing=(b"ab", b"cd"))
    trajectory = Trajectory(0, 0, (2,)).extended((first, Segment((7,), (-1.0,), 0, routing=(b"ef",))))
    assert trajectory.segments[0].routing == (b"ab", b"cd", b"ef")
    trajectory = trajectory.extended((Segment((8,), (-1.0,), 1),))  # of an engine that does not say
    assert trajectory.routing == [b"ab", b"cd", b"ef", b""]
    with pytest.raises(ValueError, match="a segment of 1 tokens must have as many routing entries or none: got 2"):
        Segment((5,), (-1.0,), 0, routing=(b"ab", b"cd"))
