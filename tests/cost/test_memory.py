"""The memory law, worked by hand on a model of round numbers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.cost.memory import (
    MAX_LOGITS,
    PACKED_MOMENTS_BYTES,
    PRODUCT_ROWS,
    EngineShape,
    RankShape,
    adapter_params,
    engine_terms,
    fitting_logits,
    largest,
    most_layers,
    overhead,
    rank_phases,
    stage_bytes,
    state_bytes_per_param,
    table_params,
)
from baton.policy import head
from baton.specs.model import ModelSpec
from tests.cost.round_numbers import MODEL

SHAPE = RankShape(tokens=300, shards=4)
"""Four ranks in bfloat16, with recomputation, that shard their gradients."""
PARAMS = 10.2e6
TABLE = 1e5
STATE = ("weights", "gradients", "moments")


def _phase(name: str, shape: RankShape = SHAPE, layers: int = 10, model: ModelSpec = MODEL) -> float:
    return next(float(p.bytes(layers)) for p in rank_phases(model, shape) if p.name == name)


def test_the_head_adds_its_gradient_to_a_quarter_of_the_state() -> None:
    """16 bytes a parameter over four ranks; per token and layer the input (2 · 100), the last norm 8 · 100; the head
    and the next block gathered in bfloat16; the head's gradient in float32, and again on a GPU, because it has fewer
    rows than are computed at a time, on a CPU in bfloat16; 10 bytes a logit, and the gradient of the hidden states.
    A tied head is gathered with the embedding, and stays so."""
    state = 16 * PARAMS / 4
    kept = 300 * (10 * 2 * 100 + 8 * 100)
    work = 2 * TABLE + 2 * 1e6 + 8 * TABLE + 10 * 300 * 1000 + 2 * 300 * 100
    assert _phase("backward pass of the head") == pytest.approx(state + kept + work)
    on_cpu = msgspec.structs.replace(SHAPE, on_cpu=True)
    assert _phase("backward pass of the head", on_cpu) == pytest.approx(state + kept + work - 2 * TABLE)
    tied = msgspec.structs.replace(MODEL, is_tied=True)
    expected = 16 * (PARAMS - TABLE) / 4 + kept + work
    assert _phase("backward pass of the head", model=tied) == pytest.approx(expected)


def test_sampling_masks_take_four_bytes_an_id_twice_and_a_batch_is_held_on_a_cpu() -> None:
    """300 tokens with up to 512 ids: those of the policy, and by place in a padded pass. The law's vocabulary of 1,000
    needs two bytes in a mask; 5,000 tokens of a batch."""
    masked = msgspec.structs.replace(SHAPE, max_kept=512, masked_tokens=5000.0)
    for name in ("forward pass", "backward pass of the head"):
        assert _phase(name, masked) == pytest.approx(_phase(name) + 300 * 512 * 8)
    assert _phase("backward pass of a block", masked) == _phase("backward pass of a block")
    on_cpu = (msgspec.structs.replace(shape, on_cpu=True) for shape in (masked, SHAPE))
    masked_peak, peak = (_phase("backward pass of a block", shape) for shape in on_cpu)
    assert masked_peak == pytest.approx(peak + 5000 * 512 * 2)


def test_replayed_experts_take_two_bytes_each_and_reported_ones_a_byte_on_a_cpu() -> None:
    """8 of 64 experts in each of 10 layers: 80 values for each of 7,000 tokens of the rank. Of 5,000 tokens in a batch,
    the engine reported a byte for each value, in one object of 41 bytes for each token; two bytes above 256 experts."""
    few, many = (msgspec.structs.replace(MODEL, num_experts=n, experts_per_token=8) for n in (64, 512))
    replays = msgspec.structs.replace(SHAPE, replayed_tokens=7000.0, reported_tokens=5000.0)
    for name in ("forward pass", "backward pass of a block"):
        assert _phase(name, replays, model=few) == pytest.approx(_phase(name, model=few) + 7000 * 80 * 2)
    on_cpu = [msgspec.structs.replace(shape, on_cpu=True) for shape in (replays, SHAPE)]
    for model, width in ((few, 1), (many, 2)):
        with_experts, without = (_phase("forward pass", shape, model=model) for shape in on_cpu)
        assert with_experts == pytest.approx(without + 7000 * 80 * 2 + 5000 * (80 * width + 41))


def test_a_block_gathers_itself_and_the_next() -> None:
    """Two blocks in bfloat16, one gradient in float32 and its shard; a token's activations: norms 16 · 100, heads
    10 · (80 + 20), MLP 8 · 2000, and gradients of 2 · (2 · 2000 + 100). Of a tied head, the gathered table and its
    gradient are kept too. A head larger than a block is reduced while the last block is computed."""
    mlp = 6e5 / 3 / 100
    tokens = 300 * (16 * 100 + 10 * (80 + 20) + 8 * mlp + 2 * (2 * mlp + 100))
    expected = 16 * PARAMS / 4 + 300 * 10 * 2 * 100 + 1e6 * (2 * 2 + 4 + 4 / 4) + tokens
    assert _phase("backward pass of a block") == pytest.approx(expected)
    tied, large = (msgspec.structs.replace(MODEL, **change) for change in ({"is_tied": True}, {"vocab": 20_000}))
    assert _phase("backward pass of a block", model=tied) == pytest.approx(expected - 16 * TABLE / 4 + (2 + 2) * TABLE)
    more = 16 * 2 * (2e6 - TABLE) / 4 + 4 * 2e6 - 1e6 * (4 + 4 / 4)
    assert _phase("backward pass of a block", model=large) == pytest.approx(expected + more)


def test_whole_gradients_are_kept_by_each_rank() -> None:
    whole = msgspec.structs.replace(SHAPE, whole_gradients=True)
    assert _phase("forward pass", whole) - _phase("forward pass") == pytest.approx(4 * PARAMS * 3 / 4)
    alone = RankShape(tokens=300)
    assert rank_phases(MODEL, alone) == rank_phases(MODEL, msgspec.structs.replace(alone, whole_gradients=True))


def test_a_process_without_ranks_gathers_nothing_and_autocast_copies_the_weights() -> None:
    """A copy of two bytes of each linear layer, and of the head, until the forward pass ends; the residual stream is
    float32; a publication copies the weights."""
    shape = RankShape(tokens=300, on_cpu=True, published_bytes=2)
    state = 16 * PARAMS
    kept = 300 * (10 * 4 * 100 + 16 * 100)
    assert _phase("forward pass", shape) == pytest.approx(state + kept + 2 * (1e7 + TABLE) + 10 * 300 * 1000)
    assert _phase("publication", shape) == pytest.approx(state + 2 * PARAMS)
    assert "checkpoint" not in [phase.name for phase in rank_phases(MODEL, shape)], "it is written tensor by tensor"
    assert "publication" not in [phase.name for phase in rank_phases(MODEL, SHAPE)]


def test_a_trainer_that_sends_differences_keeps_the_version_before_also_if_it_trains_an_adapter() -> None:
    for adapter in (0.0, 1e5):
        alone = RankShape(tokens=300, published_bytes=2, adapter_params=adapter)
        keeps = msgspec.structs.replace(alone, previous_bytes=2)
        for phase in ("forward pass", "publication"):
            assert _phase(phase, keeps) - _phase(phase, alone) == pytest.approx(2 * PARAMS)


def test_moments_in_eight_bits_are_a_byte_and_a_scale_per_256_values() -> None:
    """Two codes and two float32 scales per 256 values: 2.03125 instead of 8 bytes. An update adds the new moments of
    the largest tensor, the head, in float32."""
    alone = RankShape(tokens=300)
    packed = msgspec.structs.replace(alone, moments_bytes=PACKED_MOMENTS_BYTES)
    before, after = (largest(rank_phases(MODEL, shape), 10) for shape in (alone, packed))
    assert float(before.bytes(10) - after.bytes(10)) == pytest.approx((8 - 2.03125) * PARAMS)
    assert _phase("update", packed) == pytest.approx((8 + 2.03125) * PARAMS + 8 * TABLE)


def test_an_adapter_trains_few_parameters_on_frozen_weights() -> None:
    """Rank 2 on q, k, v, o (4 · 100 + 2 · 80 + 2 · 20) and the MLP (3 · 100 + 3 · 2000) of 10 layers."""
    adapter = adapter_params(MODEL, 2)
    assert adapter == 2 * 10 * (400 + 160 + 40 + 300 + 6000)
    shape = msgspec.structs.replace(SHAPE, adapter_params=adapter)
    forward = _phase("forward pass") - _phase("forward pass", shape)
    assert forward == pytest.approx((12 * PARAMS - 16 * adapter) / 4)
    alone = RankShape(tokens=300, recomputes=False, adapter_params=adapter)
    half = msgspec.structs.replace(alone, base_bytes=2)
    copied = 2 * (1e7 + TABLE)  # autocast copies what is float32, and no frozen weights in bfloat16
    narrow = 300 * (10 * (26 - 16) * 100 + 8 * 100)  # norms of a bfloat16 residual stream
    assert _phase("forward pass", alone) - _phase("forward pass", half) == pytest.approx(2 * PARAMS + copied + narrow)


def test_critic_and_reference_add_to_the_state() -> None:
    """The critic has all layers and the embedding, but no head. Its activations are kept together with the policy's: 2
    bytes for each of 300 tokens, 100 values and 10 layers. A critic has all weights also beside an adapter."""
    plain = _phase("forward pass")
    with_critic = msgspec.structs.replace(SHAPE, has_critic=True)
    own = 16 * (PARAMS - TABLE) / 4
    assert _phase("forward pass", with_critic) - plain == pytest.approx(own + 300 * 2 * 100 * 10)
    adapter = msgspec.structs.replace(SHAPE, adapter_params=1000.0, base_bytes=2.0)
    beside = msgspec.structs.replace(adapter, has_critic=True)
    assert _phase("forward pass", beside) - _phase("forward pass", adapter) == pytest.approx(own + 300 * 2 * 100 * 10)
    with_reference = msgspec.structs.replace(SHAPE, reference_bytes=2.0)
    assert _phase("forward pass", with_reference) - plain == pytest.approx(2 * PARAMS / 4)
    assert float(state_bytes_per_param(MODEL, SHAPE)) == pytest.approx(12 / 4)


def test_only_the_last_stage_has_a_head_and_only_the_first_an_embedding() -> None:
    stages = [rank_phases(MODEL, SHAPE, *flags, 2) for flags in ((True, False), (False, False), (False, True))]
    first, between, last = ([float(phase.bytes(3)) for phase in phases[:2]] for phases in stages)
    table = 16 * TABLE / 4
    assert first == pytest.approx([each + table for each in between])
    assert all(ours > theirs + table for ours, theirs in zip(last, between, strict=True))
    assert float(table_params(msgspec.structs.replace(MODEL, is_tied=True), True, True)) == TABLE


def test_a_first_stage_keeps_the_activations_of_as_many_microbatches_as_there_are_stages() -> None:
    """Of 3 stages: 2 · 100 bytes for each token, layer and microbatch, and for its output; one more for a message."""
    shape = msgspec.structs.replace(SHAPE, is_stage=True)
    one, three = (
        next(p for p in rank_phases(MODEL, shape, True, False, count) if p.name == "backward pass of a block")
        for count in (1, 3)
    )
    assert float(three.bytes(4) - one.bytes(4)) == pytest.approx(2 * 300 * (4 + 1) * 2 * 100)
    between = next(term for term in three.terms if term.name == "hidden states between stages")
    assert float(between.bytes(4)) == pytest.approx((3 + 1) * 300 * 2 * 100)
    alone = msgspec.structs.replace(shape, shards=1)  # FSDP gathers on one rank, too
    terms = {term.name: term for term in rank_phases(MODEL, alone)[0].terms}
    assert terms["copies in bfloat16"].bytes(4) == 0
    assert terms["gathered head"].bytes(4) > 0


def test_layers_that_fit_are_those_whose_memory_does() -> None:
    phases = rank_phases(MODEL, SHAPE, True, False, 2)
    most = float(most_layers(phases, 5e7))
    assert stage_bytes(phases, most) <= 5e7 < stage_bytes(phases, most + 1)


def test_tensor_parallel_ranks_split_the_blocks_and_not_the_tables() -> None:
    """Embedding and head are whole on each of the ranks that split a product; Megatron's are not."""
    split = msgspec.structs.replace(SHAPE, split=2)
    tables = 2 * TABLE
    held = sum(float(t.bytes(10)) for t in rank_phases(MODEL, split)[0].terms if t.name in STATE)
    assert held == pytest.approx(16 * ((PARAMS - tables) / 2 + tables) / 4)
    megatron = msgspec.structs.replace(split, splits_tables=True)
    held = sum(float(t.bytes(10)) for t in rank_phases(MODEL, megatron)[0].terms if t.name in STATE)
    assert held == pytest.approx(16 * PARAMS / 2 / 4)
    alone = msgspec.structs.replace(split, shards=1)  # FSDP gathers on one data rank, too
    assert float({t.name: t for t in rank_phases(MODEL, alone)[0].terms}["gathered head"].bytes(4)) > 0


def test_candidates_are_computed_together() -> None:
    """An array of widths gives what each width gives."""
    many = rank_phases(MODEL, msgspec.structs.replace(SHAPE, shards=np.array([1, 2, 8]), split=np.array([1, 2, 1])))
    one = [rank_phases(MODEL, msgspec.structs.replace(SHAPE, shards=s, split=t)) for s, t in ((1, 1), (2, 2), (8, 1))]
    assert stage_bytes(many, 10).tolist() == [float(stage_bytes(phases, 10)) for phases in one]


def test_an_engine_holds_weights_and_a_fixed_cache() -> None:
    """40 values per token and layer: 800 bytes a token in bfloat16."""
    shape = EngineShape(slots=4, context_tokens=50, value_bytes=2, kept_contexts=8)
    held = {term.name: float(term.bytes(10)) for term in engine_terms(MODEL, shape)}
    assert held["engine: weights"] == 2 * PARAMS
    assert held["engine: KV cache"] == 4 * 50 * 800
    assert held["engine: kept keys and values"] == 8 * 50 * 800
    packed = engine_terms(MODEL, msgspec.structs.replace(shape, packs=True, adapter_params=1.0))
    assert {term.name: float(term.bytes(10)) for term in packed}["engine: packed weights"] == 2 * (PARAMS - TABLE)
    assert largest(rank_phases(MODEL, SHAPE), 10).name == "backward pass of a block"


def test_what_tensors_do_not_show_is_labelled() -> None:
    assert overhead(1e10, on_cpu=False).is_assumed
    assert float(overhead(1e10, on_cpu=False).fixed) > float(overhead(1e10, on_cpu=True).fixed) > 4e8


def test_the_law_has_the_constants_of_the_head() -> None:
    """Modules of one layer do not import each other."""
    assert (MAX_LOGITS, PRODUCT_ROWS) == (head.MAX_LOGITS, head.PRODUCT_ROWS)


def test_pieces_of_logits_take_half_of_the_room_below_the_peak() -> None:
    """10 bytes a logit, under a block's backward pass; none where the head is the peak."""
    tokens = 100_000
    shape = msgspec.structs.replace(SHAPE, tokens=tokens)
    block, of_head = (_phase(f"backward pass of {part}", shape) for part in ("a block", "the head"))
    assert fitting_logits(rank_phases(MODEL, shape), 10) == MAX_LOGITS + int((block - of_head) / 2 / 10)
    many = msgspec.structs.replace(MODEL, vocab=100_000)
    assert fitting_logits(rank_phases(many, SHAPE), 10) == MAX_LOGITS
    assert fitting_logits(rank_phases(MODEL, msgspec.structs.replace(shape, tokens=10**8)), 10) == 2**28
