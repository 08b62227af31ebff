"""The embedded engine computes what the model says, bit for bit the same whatever else it is doing."""

from __future__ import annotations

import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_cases import other_architectures
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, Qwen3NextConfig, T5Config

from baton.errors import UserError
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.embedded.network import Network, prefill_shape
from baton.rollout.engines.sampling import noise_key, uniforms
from baton.types import PolicyVersion, Segment

pytestmark = pytest.mark.numerics

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(80) for _ in range(length)] for length in lengths]


def teacher_forced(model, prompt_ids, token_ids):
    """[L] log-probabilities of the tokens by one plain forward of the whole sequence."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1].float()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


RAGGED = (1, 2, 7, 31, 32, 33, 34, 64, 65, 66, 100, 129, 130, 200, 257, 258, 290, 5, 5, 12)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_greedy_ids_equal_generate_and_logprobs_equal_the_full_forward(name, embedded, load, driver):
    """20 ragged prompts through 8 slots, across every prefill bucket and the 64, 128 and 256 marks of the cache."""
    model, given = load(name), prompts(RAGGED)
    engine = embedded(name, max_context_tokens=400)
    grown = driver.run(engine, [driver.lease(i, p, 12, temperature=0.0) for i, p in enumerate(given)])
    for i, prompt in enumerate(given):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )[0, len(prompt) :].tolist()
        assert grown[i].token_ids == expected, f"prompt of {len(prompt)} tokens"
        difference = teacher_forced(model, prompt, expected) - torch.tensor(grown[i].behavior_logprobs)
        assert difference.abs().max() <= 1e-4
    assert engine.stats.prefilled_tokens == sum(len(p) - 1 for p in given)
    assert engine.stats.decoded_tokens == 12 * len(given)
    assert len({tuple(t.token_ids) for t in grown.values()}) > 15, "the models must have something to say"


def test_a_trajectory_is_bit_equal_alone_in_a_crowd_in_any_slot_and_while_the_batch_drains(
    embedded, driver, one_thread
):
    """Lengths differ, so the engine drains through all widths that its probe found to give the same bits on this CPU.

    There may be none but the widest: then it does not drain, and an engine of fewer slots may compute other bits. On
    several threads a row's bits depend on its slot, since each thread computes a share of the rows."""
    rng = random.Random(1)
    given = prompts([rng.choice((1, 5, 20, 40, 60, 120, 250, 300, 420)) for _ in range(48)], seed=1)
    leases = [
        driver.lease(i, p, rng.choice((2, 8, 20, 70)), temperature=rng.choice((0.0, 1.0, 1.0, 0.7)), top_k=i % 3 * 5)
        for i, p in enumerate(given)
    ]
    wide = embedded(slots=64, max_context_tokens=512)
    crowd = driver.run(wide, leases)
    widths = wide.network.widths
    assert (wide.stats.decode_rows < 64 * wide.stats.decode_steps) == (len(widths) > 1), "it drains where it can"
    few = driver.run(embedded(slots=24 if 24 in widths else 64, max_context_tokens=512), leases[::-1])
    single = embedded(slots=16 if 16 in widths else 64, max_context_tokens=512)
    for lease in leases:
        i = lease.lease_id
        alone = driver.run(single, [lease])[i] if i % 3 == 0 else crowd[i]
        assert crowd[i].token_ids == few[i].token_ids == alone.token_ids
        assert crowd[i].behavior_logprobs == few[i].behavior_logprobs == alone.behavior_logprobs


def test_a_batch_drains_through_the_narrowest_widths_that_take_it(embedded, driver):
    """Of 20 rows 10 end after 2 tokens: two steps of 32 rows, then three of 16. Whether bits change is not asked."""
    engine = embedded(slots=64)
    engine.network.widths = (16, 32, 64)
    driver.run(engine, [driver.lease(i, [5, 6, 7], 2 if i < 10 else 5) for i in range(20)])
    assert (engine.stats.decode_steps, engine.stats.decode_rows) == (5, 2 * 32 + 3 * 16)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resume_from_ids_at_every_position_continues_with_the_same_ids(temperature, embedded, driver):
    prompt, length = prompts([23])[0], 24
    engine = embedded()
    whole = driver.run(engine, [driver.lease(0, prompt, length, group_id=5, temperature=temperature)])[0]
    resumed = [
        driver.lease(
            cut,
            prompt,
            length,
            group_id=5,
            segments=(Segment(tuple(whole.token_ids[:cut]), tuple(whole.behavior_logprobs[:cut]), 0),),
            temperature=temperature,
        )
        for cut in range(1, length)
    ]
    for cut, trajectory in driver.run(engine, resumed).items():
        assert trajectory.token_ids == whole.token_ids, f"cut at {cut}"
        torch.testing.assert_close(trajectory.behavior_logprobs, whole.behavior_logprobs, atol=1e-4, rtol=0)


def test_a_trajectory_that_joins_others_midway_is_the_same_too(embedded, driver):
    """Admitted into a free slot beside running rows, and into one that an abort has just freed."""
    prompt = prompts([17])[0]
    alone = driver.run(embedded(), [driver.lease(1, prompt, 12)])[1]
    engine = embedded()
    for i in (10, 11):
        engine.submit(driver.lease(i, prompt, 40))
    engine.step()
    assert driver.run_beside(engine, driver.lease(1, prompt, 12)) == alone
    engine.abort(10)
    assert driver.run_beside(engine, driver.lease(1, prompt, 12)) == alone


def test_tokens_are_those_that_noise_and_probabilities_decide(embedded, load, driver):
    """Each draw worked again by plain forwards: the first id whose running probability exceeds the uniform number."""
    model, prompt = load("qwen3"), prompts([17])[0]
    grown = driver.run(embedded(), [driver.lease(0, prompt, 20, group_id=6, sample_index=3, temperature=1.5)])[0]
    key = np.array([noise_key(driver.noise_seed, 6, 3)], dtype=np.uint64)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *grown.token_ids]])).logits[0, len(prompt) - 1 : -1]
        running = torch.softmax(logits.double() / 1.5, -1).cumsum(-1)
    for position, token in enumerate(grown.token_ids):
        uniform = float(uniforms(key, np.array([position]))[0])
        assert token == int((running[position] <= uniform).sum()), f"token {position}"


def test_samples_of_a_group_differ_and_the_run_seed_changes_them_all(embedded, driver):
    prompt = prompts([9])[0]
    leases = [driver.lease(i, prompt, 20, group_id=3, sample_index=i) for i in range(8)]
    first = driver.run(embedded(), leases)
    driver.noise_seed = 12
    other = driver.run(embedded(), [driver.lease(i, prompt, 20, group_id=3, sample_index=i) for i in range(8)])
    assert len({tuple(t.token_ids) for t in [*first.values(), *other.values()]}) == 16


def test_a_group_is_prefilled_once_even_while_its_siblings_wait_for_slots(embedded, driver):
    """20 siblings of 41 ids and 3 of 10 through 8 slots: 40 + 9 prefilled tokens."""
    long, short = prompts([41, 10])
    leases = [driver.lease(i, long, 4 + i, group_id=0, sample_index=i) for i in range(20)]
    leases += [driver.lease(20 + i, short, 6, group_id=1, sample_index=i) for i in range(3)]
    engine = embedded()
    driver.run(engine, leases)
    assert engine.stats.prefilled_tokens == 49


def test_a_prefill_is_filled_up_with_prompts_that_wait_and_shrinks_when_none_do(embedded, driver, monkeypatch):
    """40 prompts of 10 ids through 8 slots: the first 8 take 24 waiting ones along, 8 are left; 32 is most."""
    engine, batches = embedded(), []
    prefill = engine.network.prefill

    def noted(ids, pasts):
        batches.append(len(ids))
        return prefill(ids, pasts)

    monkeypatch.setattr(engine.network, "prefill", noted)
    driver.run(engine, [driver.lease(i, p, 3 + i % 5) for i, p in enumerate(prompts([10] * 40))])
    assert batches == [32, 8]
    assert engine.stats.prefilled_tokens == 40 * 9


def test_a_prompt_of_one_token_needs_no_prefill(embedded, driver):
    engine = embedded()
    driver.run(engine, [driver.lease(0, [4], 3)])
    assert engine.stats.prefilled_tokens == 0


def test_prefill_shapes_follow_from_the_length_alone_and_hold_it():
    for length in range(1, 600):
        rows, padded, _ = prefill_shape(length)
        assert length <= padded < length + 64
        assert rows * padded <= 512 or rows == 1
        assert padded % 16 == 0


@other_architectures
def test_other_architectures_equal_their_plain_forward(config, tokenizer, driver):
    """98 ids are padded to 128, past the 100 positions that the first of them has."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    settings = EngineSettings(slots=8, max_context_tokens=100)
    engine = EmbeddedEngine(model, tokenizer, settings, PolicyVersion("run", 0), ())
    given = prompts([3, 30, 60, 98])
    for i, trajectory in driver.run(engine, [driver.lease(i, p, 24) for i, p in enumerate(given)]).items():
        difference = teacher_forced(model, given[i], trajectory.token_ids) - torch.tensor(trajectory.behavior_logprobs)
        assert difference.abs().max() <= 1e-4


@pytest.mark.parametrize("row_attention", [False, pytest.param(True, marks=needs_compiler)])
def test_bfloat16_agrees_with_its_own_forward_to_its_precision(row_attention, load, tokenizer, driver):
    model, plain = load("qwen3").to(torch.bfloat16), load("qwen3").to(torch.bfloat16)
    settings = EngineSettings(slots=8, max_context_tokens=64, dtype="bfloat16", row_attention=row_attention)
    engine = EmbeddedEngine(model, tokenizer, settings, PolicyVersion("run", 0), ())
    prompt = prompts([20])[0]
    grown = driver.run(engine, [driver.lease(i, prompt, 20, sample_index=i) for i in range(5)])
    for trajectory in grown.values():
        difference = teacher_forced(plain, prompt, trajectory.token_ids) - torch.tensor(trajectory.behavior_logprobs)
        assert difference.abs().max() < 0.1


@needs_compiler
def test_compiled_attention_gives_the_same_bits_alone_and_in_a_crowd(load, tokenizer, driver, one_thread):
    model = load("qwen3").to(torch.bfloat16)
    settings = EngineSettings(slots=16, max_context_tokens=128, dtype="bfloat16", row_attention=True)
    engine = EmbeddedEngine(model, tokenizer, settings, PolicyVersion("run", 0), ())
    leases = [driver.lease(i, p, 5 + 2 * i) for i, p in enumerate(prompts(range(2, 66, 4)))]
    crowd = driver.run(engine, leases)
    for lease in leases[::5]:
        alone = driver.run(engine, [lease])[lease.lease_id]
        assert alone.token_ids == crowd[lease.lease_id].token_ids
        assert alone.behavior_logprobs == crowd[lease.lease_id].behavior_logprobs


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (T5Config(vocab_size=80, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2), "encoder-decoder"),
        (
            Qwen3NextConfig(
                vocab_size=80, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
            ),
            "linear_attention",
        ),
    ],
    ids=["encoder-decoder", "linear attention"],
)  # fmt: skip
def test_a_model_without_an_ordinary_cache_is_refused_in_one_sentence(config, sentence, tokenizer):
    from transformers import AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config)
    with pytest.raises(UserError, match=sentence) as caught:
        EmbeddedEngine(model, tokenizer, EngineSettings(slots=8, max_context_tokens=64), PolicyVersion("run", 0), ())
    assert "\n" not in str(caught.value)


def test_a_model_whose_cached_logits_are_wrong_is_refused(load, tokenizer, monkeypatch):
    """Positions shifted by one while decoding: what a model that counts its own positions would do."""
    model = load("llama")
    plain = model.forward

    def shifted(**inputs):
        if inputs.get("position_ids") is not None and inputs["input_ids"].shape[1] == 1:
            inputs["position_ids"] = inputs["position_ids"] // 2
        return plain(**inputs)

    monkeypatch.setattr(model, "forward", shifted)
    with pytest.raises(UserError, match="differ from those of the plain forward"):
        EmbeddedEngine(model, tokenizer, EngineSettings(slots=8, max_context_tokens=64), PolicyVersion("run", 0), ())


@pytest.mark.parametrize("settings", [{"slots": 12}, {"slots": 0}, {"max_context_tokens": 2000}])
def test_shapes_that_cannot_be_are_refused(settings, embedded):
    with pytest.raises((UserError, ValidationError), match=r"allowed|multiple|greater"):
        embedded(**settings)


def test_a_shape_that_changes_bits_is_never_used(embedded, monkeypatch):
    """A decode that differs in its last bits at 32 rows, and at 128 positions, must run at neither."""
    decode = Network.decode

    def fickle(self, ids_W, position_W, kv_length):
        logits = decode(self, ids_W, position_W, kv_length)
        return logits * (1 + 2**-20) if len(ids_W) == 32 or kv_length == 128 else logits

    monkeypatch.setattr(Network, "decode", fickle)
    network = embedded(slots=64, max_context_tokens=512).network
    assert 32 not in network.widths
    assert 128 not in network.kv_lengths
    assert (network.widths[-1], network.kv_lengths[-1]) == (64, 512)


def test_a_number_of_prefill_rows_that_changes_bits_is_never_used(embedded, monkeypatch):
    """A prefill that differs in its last bits at 4 rows must not run at 4; 16 rows of 32 are most."""
    prefill = Network._prefill

    def fickle(self, ids, shape, pasts):
        found = prefill(self, ids, shape, pasts)
        if shape.rows == 4:
            found[0].tensors[-1] = found[0].tensors[-1] * (1 + 2**-20)
        return found

    monkeypatch.setattr(Network, "_prefill", fickle)
    network = embedded().network
    network.prefill([[7] * 30])
    tried = network.prefill_rows[prefill_shape(30)]
    assert 4 not in tried
    assert tried[-1] == 16


def test_the_shapes_of_decode_end_with_the_largest_whatever_the_cpu(embedded):
    """Smaller ones are kept only where they give the same bits, and which do is the CPU's affair."""
    network = embedded(slots=64, max_context_tokens=512).network
    assert network.widths[-1] == 64
    assert network.kv_lengths[-1] == 512
    assert all(a < b for a, b in pairwise(network.widths))
    assert all(a < b for a, b in pairwise(network.kv_lengths))
