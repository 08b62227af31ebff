"""Mixtures of experts are trained like any other model, and their routing can be held over a train step."""

import pytest
import torch
from trainer_cases import VOCAB, are_bit_equal, make_trainer, parameters, random_batch, tiny_model
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from baton.errors import UserError
from baton.policy.settings import LoraSettings
from baton.rollout.engines.network import Network

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
        torch.testing.assert_close(found[1][name], grad, atol=1e-7, rtol=1e-5, msg=name)
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


def test_a_model_without_such_routers_is_refused_with_a_sentence():
    with pytest.raises(UserError, match=r"trainer\.moe_replay: Qwen3ForCausalLM has no routers"):
        make_trainer(tiny_model(), moe_replay="proximal")
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"} | {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    with pytest.raises(UserError, match=r"trainer\.moe_replay: .*DeepseekV3ForCausalLM"):
        make_trainer(DeepseekV3ForCausalLM(DeepseekV3Config(**shape)).eval(), moe_replay="proximal")
