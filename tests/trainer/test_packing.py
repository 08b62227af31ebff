"""Rows laid one behind the other score as each does by itself, and no mask of all by all is made for it."""

import math

import pytest
import torch
from trainer_cases import VOCAB, make_trainer, random_batch, tiny_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from baton.errors import UserError
from baton.policy import packing
from baton.policy.head import RequestedScores, find_head
from baton.policy.logprobs import compute_in, packed_scores, packs_as_it_pads, padded_scores
from baton.policy.packing import PACKED, concatenated, prefer_packed_attention
from baton.recipe.support import support_table
from baton.trainer import model_setup
from tests.model_families import tiny_config

pytestmark = pytest.mark.numerics

LENGTHS = [9, 3, 6, 2]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).eval()


def gpt2():
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**shape)).eval()


def laid():
    torch.manual_seed(1)
    ids = torch.randint(2, VOCAB, (sum(LENGTHS),))
    rows = torch.nn.utils.rnn.pad_sequence(torch.split(ids, LENGTHS), batch_first=True)
    places = torch.arange(max(LENGTHS)).expand_as(rows)
    is_scored = (places > 0) & (places < torch.tensor(LENGTHS)[:, None])
    return ids, concatenated(rows, is_scored, [1] * len(LENGTHS), LENGTHS)


def by_themselves(model, ids, temperature):
    with torch.no_grad():
        wanted = RequestedScores(temperature)
        rows = [padded_scores(model, row[None], first=1, wanted=wanted) for row in torch.split(ids, LENGTHS)]
    return torch.cat([row.logprobs[0] for row in rows])


@pytest.mark.parametrize("packed_attention", [True, False])
@pytest.mark.parametrize("make", [tiny_model, llama, mistral, gpt2])
def test_packed_equals_alone(make, packed_attention):
    """Sliding windows and grouped heads included; without our attention transformers' own mask does it."""
    model, (ids, tokens) = make(), laid()
    expected = by_themselves(model, ids, 0.8)
    if packed_attention:
        prefer_packed_attention(model)
    found = packed_scores(model, tokens, RequestedScores(0.8, with_entropy=True))
    torch.testing.assert_close(found.logprobs, expected, atol=1e-5, rtol=1e-5)
    assert found.entropy.shape == found.logprobs.shape
    assert packs_as_it_pads(model)
    torch.testing.assert_close(by_themselves(model, ids, 0.8), expected, atol=1e-6, rtol=0)  # padded is as it was


def test_no_mask_of_all_tokens_by_all_tokens_is_made(monkeypatch):
    model, (_, tokens) = tiny_model(), laid()
    prefer_packed_attention(model)
    find_head(model)  # not within what is counted
    made = []
    original = packing.sdpa_attention_forward
    monkeypatch.setattr(
        packing,
        "sdpa_attention_forward",
        lambda m, q, k, v, mask, **kw: made.append(mask) or original(m, q, k, v, mask, **kw),
    )
    packed_scores(model, tokens)
    assert made == [None] * len(LENGTHS) * 2  # rows × layers


def test_in_bfloat16_it_is_close_and_attention_is_in_float32():
    model, (ids, tokens) = tiny_model(), laid()
    expected = by_themselves(model, ids, 1.0)
    prefer_packed_attention(model)
    with compute_in(torch.bfloat16, torch.device("cpu")):
        found = packed_scores(model, tokens).logprobs
        assert packs_as_it_pads(model)
    assert 0 < (found - expected).abs().mean() < 0.05


def families_with_window():
    """Tested families whose configuration can have a sliding window."""
    tested = next(entry for entry in support_table().support if entry.test and "architecture" in entry.when)
    kinds = {name: type(tiny_config(name)) for name in tested.when["architecture"]}
    return [name for name, kind in kinds.items() if hasattr(kind(), "sliding_window")]


def test_packed_rows_longer_than_the_window_equal_padded_rows_in_every_family():
    """Some families pass the window to attention, others (phimoe, qwen2_moe) have it only in the mask."""
    names = families_with_window()
    assert {"mistral", "phimoe", "qwen2_moe", "qwen3"} <= set(names)
    for name in names:
        torch.manual_seed(0)
        config = tiny_config(name, sliding_window=12, use_sliding_window=True, max_window_layers=1)
        config.initializer_range = 0.3
        model = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.randint(2, config.vocab_size, (2, 40))
        with torch.no_grad():
            expected = padded_scores(model, ids, first=1).logprobs.flatten()
            prefer_packed_attention(model)
            if packs_as_it_pads(model):
                found = packed_scores(model, concatenated(ids, torch.arange(80).view(2, 40) % 40 > 0, [1, 1], [40, 40]))
                torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=1e-4, msg=name)
            else:
                assert name == "gpt_oss"  # its eager attention does not separate packed rows


def test_a_model_whose_window_packed_attention_does_not_know_does_not_pack(monkeypatch):
    """The rows that are compared are shorter than the usual windows, so the windows are limited meanwhile."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4096)).eval()
    prefer_packed_attention(model)
    assert packs_as_it_pads(model)
    monkeypatch.setattr(packing, "attention_window", lambda module, kwargs: None)
    assert not packs_as_it_pads(model)
    assert model.config.sliding_window == 4096


@pytest.mark.parametrize("window", [None, 4])
def test_what_is_handed_to_torchs_kernel_for_rows_of_different_lengths(window):
    """The kernel runs on CUDA alone; here a plain one of its signature takes its place."""

    def kernel(query, key, value, begins, ends, longest, _, *, scale, window_size, enable_gqa):
        assert query.shape == (sum(LENGTHS), 4, 8)
        assert key.shape == value.shape == (sum(LENGTHS), 2, 8)
        assert (begins.tolist(), longest, enable_gqa) == ([0, 9, 12, 18, 20], 9, True)
        assert torch.equal(begins, ends)
        found = []
        for begin, end in zip(begins.tolist(), begins.tolist()[1:], strict=False):
            q, k, v = (t[begin:end].transpose(0, 1).float() for t in (query, key, value))
            k, v = (t.repeat_interleave(2, 0) for t in (k, v))
            behind = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            kept = behind >= 0 if window_size[0] < 0 else (behind >= 0) & (behind <= window_size[0])
            weights = (q @ k.transpose(1, 2) * scale).masked_fill(~kept, -math.inf).softmax(-1)
            found.append((weights @ v).transpose(0, 1))
        return torch.cat(found)

    torch.manual_seed(0)
    query = torch.randn(1, 4, sum(LENGTHS), 8)
    key, value = torch.randn(2, 1, 2, sum(LENGTHS), 8).unbind()
    module = llama().model.layers[0].self_attn
    kwargs = {"scaling": 8**-0.5, "sliding_window": window}
    _, tokens = laid()
    by_rows = packing._by_rows(module, (query, key, value), None, tokens, kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        by_kernel = packing._by_kernel(module, kernel, (query, key, value), tokens, kwargs)
    assert by_kernel.shape == by_rows.shape == (1, sum(LENGTHS), 4, 8)
    torch.testing.assert_close(by_kernel.float(), by_rows, atol=0.03, rtol=0.03)


def test_a_model_that_does_not_pack_is_padded_or_refused(monkeypatch):
    monkeypatch.setattr(model_setup, "packs_as_it_pads", lambda model, **_: False)
    with pytest.raises(UserError, match=r"trainer\.packing: got 'always', but Qwen3ForCausalLM on cpu does not score"):
        make_trainer(packing="always")
    assert not make_trainer().passes.is_packed


def test_a_packed_pass_has_no_padding():
    metrics = make_trainer(packing="always", max_tokens_per_microbatch=10_000).step(random_batch(1))
    assert metrics["tokens/padding_frac"] == 0.0


def test_a_reference_that_does_not_pack_is_padded_or_refused(monkeypatch):
    reference = tiny_model(1)
    monkeypatch.setattr(model_setup, "packs_as_it_pads", lambda model, **_: model is not reference)
    with pytest.raises(UserError, match=r"trainer\.packing: got 'always', but Qwen3ForCausalLM on cpu does not score"):
        make_trainer(packing="always", reference=reference, kl_coef=0.1)
    assert make_trainer(packing="always", reference=reference).passes.is_packed, "without a KL term it is not used"


def test_activations_of_a_separate_critic_are_recomputed_too():
    batch, found = random_batch(1), []
    for recomputes in (False, True):
        trainer = make_trainer(name="ppo", num_minibatches=2, activation_checkpointing=recomputes)
        critic = trainer.passes.critic
        blocks = [part for part in critic.trunk.modules() if isinstance(part, GradientCheckpointingLayer)]
        assert len(blocks) == 2
        assert all(block.gradient_checkpointing and block.training for block in blocks) == recomputes
        trainer.step(batch)
        found.append({name: p.grad for name, p in critic.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_a_checkpoint_knows_nothing_of_it(tmp_path):
    trainer = make_trainer(packing="always")
    trainer.step(random_batch(1))
    trainer.save(tmp_path / "a")
    assert trainer.model.config._attn_implementation == PACKED
    assert PACKED not in (tmp_path / "a" / "config.json").read_text()


def test_activations_are_recomputed_with_the_rows_of_the_forward_pass():
    """The recomputation runs in the backward pass, when the forward pass is over."""
    batch, found = random_batch(1), []
    for settings in ({}, {"packing": "always"}, {"packing": "always", "activation_checkpointing": True}):
        trainer = make_trainer(**settings)
        trainer.step(batch)
        found.append({name: p.grad for name, p in trainer.model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)
        assert torch.equal(found[2][name], found[1][name])
