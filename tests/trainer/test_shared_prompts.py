"""A prompt that responses share gives the logprobs and gradients of a prompt of their own."""

import random

import pytest
import torch
from test_packing import gpt2, llama, mistral
from trainer_cases import (
    SMOOTH,
    VOCAB,
    largest_difference,
    make_group,
    make_trainer,
    parameters,
    policy,
    tiny_model,
)

from baton.errors import UserError
from baton.policy import logprobs, packing
from baton.policy.head import RequestedScores
from baton.policy.logprobs import packed_scores, packs_as_it_pads, padded_scores
from baton.policy.packing import concatenated, pieces, prefer_packed_attention
from baton.policy.settings import LoraSettings
from baton.trainer import model_setup
from baton.trainer.settings import TrainerSettings
from baton.types import Batch

pytestmark = pytest.mark.numerics


def batch_of(step=1, *, prompts=(9, 5, 12), sizes=(3, 4, 2), longest=6, seed=0):
    """Groups of `sizes` responses of 1 to `longest` tokens to prompts of the given lengths."""
    rng = random.Random(1000 * seed + step)

    def tokens(count):
        return tuple(rng.randrange(2, VOCAB) for _ in range(count))

    groups = []
    for group_id, (length, size) in enumerate(zip(prompts, sizes, strict=True)):
        responses = [[policy(*tokens(rng.randint(1, longest)), version=step - 1, logprob=-4.2)] for _ in range(size)]
        rewards = [1.0, *(float(rng.random() < 0.5) for _ in range(size - 2)), 0.0][:size]
        groups.append(make_group(group_id, rewards, responses, prompt_ids=tokens(length)))
    return Batch(step, tuple(groups))


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of every pass without padding."""
    found, original = [], packing.packed_hidden_states

    def recorded(model, tokens):
        found.append(tokens.shapes)
        return original(model, tokens)

    monkeypatch.setattr(logprobs, "packed_hidden_states", recorded)
    return found


# ---- one pass --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "responses"),
    [
        ([7], [[4, 4, 4]]),  # equal lengths
        ([7, 1, 3], [[9, 5, 2, 1], [1, 6], [5]]),  # several pieces; a prompt of one token; a group of one
        ([2], [[1, 1]]),  # the prompt alone predicts all
        ([30, 2], [[3] * 5, [40, 1]]),
    ],
)
@pytest.mark.parametrize("make", [tiny_model, llama, mistral, gpt2])
def test_logprobs_and_gradients_equal_those_of_rows_with_their_own_prompt(make, prompts, responses):
    """Grouped heads, a tied head, learned positions and a window of 4 tokens included."""
    torch.manual_seed(1)
    rows, prompt_lengths = [], []
    for length, sizes in zip(prompts, responses, strict=True):
        prompt = torch.randint(2, VOCAB, (length,))
        rows += [torch.cat([prompt, torch.randint(2, VOCAB, (size,))]) for size in sizes]
        prompt_lengths += [length] * len(sizes)
    lengths = [len(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(ids.shape[1]).expand_as(ids)
    is_scored = (places >= torch.tensor(prompt_lengths)[:, None]) & (places < torch.tensor(lengths)[:, None])
    tokens = concatenated(ids, is_scored, prompt_lengths, lengths, [len(sizes) for sizes in responses])
    assert len(tokens.input_ids) == sum(prompts) + sum(map(sum, responses))

    weights, found = torch.randn(len(tokens.places)), []
    wanted = RequestedScores(0.8, with_entropy=True, entropy_has_gradient=True)
    for is_shared in (False, True):
        model = make()
        if is_shared:
            prefer_packed_attention(model)
            scores = packed_scores(model, tokens, wanted)
            found_logprobs, entropies = scores.logprobs, scores.entropy
        else:
            alone = [
                padded_scores(model, row[None], first=first, wanted=wanted)
                for row, first in zip(rows, prompt_lengths, strict=True)
            ]
            found_logprobs = torch.cat([scores.logprobs[0] for scores in alone])
            entropies = torch.cat([scores.entropy[0] for scores in alone])
        ((found_logprobs + 0.1 * entropies) * weights).sum().backward()
        found.append((found_logprobs.detach(), entropies.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1][:2], found[0][:2], atol=2e-5, rtol=1e-5)
    largest = max(gradient.abs().max().item() for gradient in found[0][2])
    for one, other in zip(found[1][2], found[0][2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * largest, rtol=1e-4)


def test_no_response_attends_to_another():
    """A change of one response changes no logprob of the others."""
    model = llama()
    prefer_packed_attention(model)
    ids = torch.arange(2, 2 + 4 * 9).view(4, 9)
    ids[:, :5] = ids[0, :5].clone()
    is_scored = torch.arange(9).expand_as(ids) >= 5
    found = []
    for last in (7, 11):
        ids[1, 5:8] = last
        tokens = concatenated(ids, is_scored, [5] * 4, [9] * 4, [4])
        with torch.no_grad():
            found.append(packed_scores(model, tokens).logprobs.view(4, 4))
    assert (found[0] - found[1])[1].abs().min() > 1e-4
    torch.testing.assert_close(found[0][[0, 2, 3]], found[1][[0, 2, 3]], atol=1e-6, rtol=0)


def test_responses_of_similar_length_are_computed_together():
    assert pieces([]) == []
    assert pieces([8, 7, 4, 3, 3, 1]) == [slice(0, 3), slice(3, 5), slice(5, 6)]
    assert pieces([1, 8]) == [slice(0, 1), slice(1, 2)]


# ---- train steps -----------------------------------------------------------------------------------------------------


CASES = {
    "whole groups": {},
    "parts of groups": {"max_tokens_per_microbatch": 20},
    "minibatches and epochs": {"num_minibatches": 2, "num_epochs": 2},
    "packed otherwise": {"packing": "always"},
    "recomputed": {"activation_checkpointing": True},
    "gspo": {"name": "gspo", "num_minibatches": 1},
    "dapo": {"name": "dapo", "num_minibatches": 1},
    "dr_grpo": {"name": "dr_grpo"},
    "entropy": {"entropy_coef": 0.1},
    "reference": {"kl_coef": 0.1},
    "separate critic": {"name": "ppo", "num_minibatches": 1},
    "shared critic": {"name": "ppo", "num_minibatches": 1, "critic": "shared"},
    "LoRA": {"lora": LoraSettings(rank=4, alpha=8)},
    "LoRA and reference": {"lora": LoraSettings(rank=4, alpha=8), "kl_coef": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_with_and_without(case, shapes):
    found, settings = [], {**SMOOTH, **CASES[case]}
    for share_prompts in (False, True):
        shapes.clear()
        model = tiny_model(num_key_value_heads=2, num_attention_heads=4)
        needs_reference = "kl_coef" in settings and "lora" not in settings
        reference = tiny_model(seed=3, num_key_value_heads=2) if needs_reference else None
        trainer = make_trainer(model, reference=reference, share_prompts=share_prompts, **settings)
        start = parameters(trainer)
        metrics = [trainer.step(batch_of(step)) for step in (1, 2)]
        found.append((parameters(trainer), metrics))
    assert any(len(shape) > 2 for one in shapes for shape in one)
    (expected, before), (weights, after) = found
    assert largest_difference(weights, expected) < 1e-3 * largest_difference(start, expected)
    for one, other in zip(after, before, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"tokens/padding_frac"}:
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=2e-5), key
    assert after[0]["tokens/padding_frac"] == 0.0


def test_rows_without_advantage_share_too(shapes):
    """A group of equal rewards runs forward only, if the metrics are of all tokens."""
    equal = make_group(9, [0.5] * 3, [[policy(5, 6)], [policy(7)], [policy(8, 9)]], prompt_ids=tuple(range(2, 34)))
    batch = Batch(1, (*batch_of().groups, equal))
    found = []
    for share_prompts in (False, True):
        trainer = make_trainer(name="dr_grpo", share_prompts=share_prompts, metrics_of_all_tokens=True, **SMOOTH)
        found.append((trainer.step(batch), parameters(trainer)))
    assert ((32, 2, 2, 1),) in shapes
    assert largest_difference(found[0][1], found[1][1]) < 1e-4
    assert found[1][0]["policy/entropy"] == pytest.approx(found[0][0]["policy/entropy"], rel=1e-4)


def test_groups_of_one_are_computed_beside_groups_that_share(shapes):
    batch, found = batch_of(prompts=(9, 20, 7), sizes=(1, 4, 1)), []
    for share_prompts in (False, True):
        trainer = make_trainer(name="reinforce_pp", num_minibatches=1, share_prompts=share_prompts, **SMOOTH)
        trainer.step(batch)
        found.append(parameters(trainer))
    assert sorted(map(len, shapes[-1])) == [1, 1, 5]
    assert largest_difference(*found) < 1e-4


def test_in_bfloat16_the_gradients_are_close():
    found = []
    for share_prompts in (False, True):
        trainer = make_trainer(dtype="bfloat16", share_prompts=share_prompts)
        trainer.step(batch_of(prompts=(40, 50, 60), sizes=(8, 8, 8)))
        found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.99


# ---- where it is refused ---------------------------------------------------------------------------------------------


def test_a_model_that_scores_shared_prompts_otherwise_is_refused(monkeypatch):
    model = llama()
    prefer_packed_attention(model)
    assert packs_as_it_pads(model, shares=(1, 3, 2))
    eager = llama()
    eager.set_attn_implementation("eager")
    assert not packs_as_it_pads(eager, shares=(1, 3, 2))
    with pytest.raises(
        UserError, match=r"trainer\.share_prompts: got true, but LlamaForCausalLM on cpu does not score"
    ):
        make_trainer(eager, share_prompts=True)
    monkeypatch.setattr(model_setup, "packs_as_it_pads", lambda model, shares: model is not reference)
    reference = tiny_model(seed=3)
    with pytest.raises(UserError, match="does not score responses to a shared prompt"):
        make_trainer(reference=reference, kl_coef=0.1, share_prompts=True)


@pytest.mark.parametrize("other", [{"ranks": 2}, {"compile": True}, {"moe_replay": "proximal"}])
def test_settings_that_were_not_tested_with_it_are_refused(other):
    with pytest.raises(ValueError, match="share_prompts: got true with"):
        TrainerSettings(share_prompts=True, **other)
    assert TrainerSettings(**other).share_prompts is False
