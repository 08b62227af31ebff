"""Generation, worked by hand on a model and a GPU of round numbers."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from baton.cost.generate import (
    context_bytes,
    decode_s,
    drain_s,
    largest_batch,
    prefill_s,
    prefills_per_trajectory,
    read_context_tokens,
    replica_cost,
    scanned_tokens,
    split_layers,
    weight_bytes,
)
from baton.specs.workload import constant, measured
from tests.cost.round_numbers import GPU, IDEAL, MODEL, PLACE, WORK


def test_decode_reads_weights_and_the_cache_of_every_trajectory() -> None:
    """Weights without the input embedding: 10.1 · 10⁶ · 2 bytes. Cache: 8 · 200 tokens · 40 · 10 layers · 2 bytes =
    1.28 MB.

    At 10¹⁰ bytes/s: 2.02 ms + 0.128 ms. Arithmetic is 8 · (2 · 10.1 · 10⁶ + 10 · 4 · 80 · 200) = 0.21 GFLOP: 0.21 ms,
    hidden.
    """
    assert decode_s(MODEL, WORK, PLACE, 1, (10,), 8, 200) == pytest.approx(2.02e-3 + 0.128e-3)


def test_decode_is_bound_by_arithmetic_once_the_batch_is_large() -> None:
    slow = msgspec.structs.replace(GPU, flops=1e10)
    place = msgspec.structs.replace(PLACE, gpu=slow)
    flops = 100 * (2 * 10.1e6 + 10 * 4 * 8 * 10 * 200)
    assert decode_s(MODEL, WORK, place, 1, (10,), 100, 200) == pytest.approx(flops / 1e10)


def test_tensor_parallel_halves_reading_and_adds_sums() -> None:
    """Two sums a layer over 8 · 100 · 2 bytes, each GPU sending 2 · (2 − 1)/2 of them: 20 · 1600 / 10⁹ = 32 µs."""
    alone = decode_s(MODEL, WORK, PLACE, 1, (10,), 8, 200)
    assert decode_s(MODEL, WORK, PLACE, 2, (10,), 8, 200) == pytest.approx(alone / 2 + 32e-6)


def test_more_gpus_than_kv_heads_repeat_the_cache() -> None:
    assert context_bytes(MODEL, WORK, 2, (10,), 300) == 300 * 40 * 10 * 2 / 2
    assert context_bytes(MODEL, WORK, 8, (10,), 300) == context_bytes(MODEL, WORK, 2, (10,), 300)


def test_pipeline_stages_take_turns_on_parts_of_the_batch() -> None:
    """Two stages; the head's 10⁵ parameters on the last. Each reads ~10 MB for 4 of 8 trajectories, then sends 800
    bytes."""
    one_stage = (5 * 1e6 + 1e5) * 2 / 1e10 + 4 * 200 * 40 * 5 * 2 / 1e10 + 4 * 100 * 2 / 1e8
    assert decode_s(MODEL, WORK, PLACE, 1, (5, 5), 8, 200) == pytest.approx(2 * one_stage)


def test_only_the_experts_of_a_batch_are_read() -> None:
    experts = msgspec.structs.replace(
        MODEL, ffn_params=4.6e6, active_ffn_params=1.1e6, expert_params=4e6, num_experts=8, experts_per_token=1
    )
    fixed = 10 * (4e5 + 6e5) + 1e5
    for batch, share in ((1, 1 / 8), (2, 1 - (7 / 8) ** 2)):
        cache = batch * 200 * 40 * 10 * 2
        expected = ((fixed + 10 * 4e6 * share) * 2 + cache) / 1e10
        assert decode_s(experts, WORK, PLACE, 1, (10,), batch, 200) == pytest.approx(expected)


def test_the_batch_is_what_memory_holds() -> None:
    """10⁸ bytes less 20.4 MB of weights hold 79.6 MB / (200 · 800 bytes) = 497 of mean length; the batch has 100."""
    assert weight_bytes(MODEL, WORK, 1, (10,)) == 2 * 10.2e6
    assert context_bytes(MODEL, WORK, 1, (10,), WORK.longest_tokens) == 300 * 800
    assert largest_batch(MODEL, WORK, PLACE, 1, 1) == 100
    many = msgspec.structs.replace(WORK, groups=1000)
    assert largest_batch(MODEL, many, PLACE, 1, 1) == 497
    tiny = msgspec.structs.replace(PLACE, gpu=msgspec.structs.replace(GPU, hbm_bytes=20.5e6))
    assert largest_batch(MODEL, WORK, tiny, 1, 1) == 0


def test_a_cache_of_fixed_size_has_at_least_eight_slots_and_room_for_eight_kept_contexts() -> None:
    """A context of 400 tokens has 400 · 800 bytes = 0.32 MB. 79.6 MB hold 248 contexts, of which 8 are kept."""
    fixed = msgspec.structs.replace(WORK, groups=1000, engine_context_tokens=400)
    assert largest_batch(MODEL, fixed, PLACE, 1, 1) == 240
    assert replica_cost(MODEL, fixed, PLACE, 1, 1, 240).memory_bytes == 20.4e6 + 248 * 0.32e6
    for num_contexts, expected in ((15.9, 0), (16.0, 8)):
        gpu = msgspec.structs.replace(GPU, hbm_bytes=20.4e6 + num_contexts * 0.32e6)
        assert largest_batch(MODEL, fixed, msgspec.structs.replace(PLACE, gpu=gpu), 1, 1) == expected


@pytest.mark.parametrize(("class_cost", "positions"), [(0, 170), (50, 240), (1000, 400), (math.inf, 400)])
def test_rows_are_divided_into_the_cheapest_one_to_three_classes(class_cost: float, positions: float) -> None:
    """Lengths 10, 20, 30, 100: 2 · 20 + 30 + 100; or 3 · 30 + 100 and one more class; or 4 · 100."""
    found = scanned_tokens(np.array([10.0, 20, 30, 100]), np.arange(1.0, 5), class_cost)
    assert found == pytest.approx(positions / 4)


def test_a_fixed_cache_reads_to_the_longest_row_and_on_a_cpu_to_the_longest_of_a_class() -> None:
    """Contexts are uniform between 100 and 300: classes end at a third, at two thirds and at the end."""
    fixed = msgspec.structs.replace(WORK, engine_context_tokens=400)
    cpu = msgspec.structs.replace(PLACE, gpu=msgspec.structs.replace(GPU, name="CPU"))
    assert read_context_tokens(MODEL, WORK, cpu, 1e6) == 200
    assert read_context_tokens(MODEL, fixed, PLACE, 1e6) == pytest.approx(300)
    assert read_context_tokens(MODEL, fixed, cpu, 1e6) == pytest.approx(100 + (200 / 3 + 400 / 3 + 200) / 3, rel=0.01)


def test_tied_tables_are_held_once_unless_stages_divide_them() -> None:
    tied = msgspec.structs.replace(MODEL, is_tied=True)
    assert weight_bytes(tied, WORK, 1, (10,)) == 2 * 10.1e6
    assert weight_bytes(tied, WORK, 1, (5, 5)) == 2 * 5.1e6
    assert weight_bytes(MODEL, WORK, 2, (10,)) == 10.2e6


def test_prefill_is_arithmetic_over_a_triangle() -> None:
    """2 · 10⁶ FLOPs per token and layer, and 4 · 80 per pair of which a prompt has half its square."""
    assert prefill_s(MODEL, PLACE, 1, (10,), 100, 100**2) == pytest.approx(10 * (2e6 * 100 + 320 * 100**2 / 2) / 1e12)


def test_a_replica_decodes_prefills_and_pauses() -> None:
    """Context at a random time: 100 + 200/2 = 200. A group's prompt is prefilled once for 10. A new version costs each
    of the running trajectories its 200 tokens once more; E[context²] = 100² + 2·100·100 + 200²/3."""
    cost = replica_cost(MODEL, WORK, PLACE, 1, 1, 8)
    step = decode_s(MODEL, WORK, PLACE, 1, (10,), 8, 200)
    prompt = prefill_s(MODEL, PLACE, 1, (10,), 100, 100**2) / 10
    assert cost.tokens_per_s == pytest.approx(1 / (step / 8 + prompt / 200))
    squared = 100**2 + 2 * 100 * 100 + 200**2 / 3
    assert cost.pause_s == pytest.approx(8 * 10 * (2e6 * 200 + 320 * squared / 2) / 1e12)
    kept = replica_cost(MODEL, msgspec.structs.replace(WORK, reprefills=False), PLACE, 1, 1, 8)
    assert kept.pause_s == 0
    assert cost.memory_bytes == 2 * 10.2e6 + 8 * 200 * 800


def test_prefills_are_shared_by_those_that_come_between_two_steps_and_by_groups() -> None:
    """8 trajectories of 200 tokens: one arrives in 25 steps, so nearly each has a step of its own. Where 400 arrive in
    a step they share one prefill; and members of a group of 10 share one whatever happens."""
    alone = msgspec.structs.replace(WORK, shared_prefill=False)
    assert prefills_per_trajectory(alone, 8) == pytest.approx((1 - math.exp(-0.04)) / 0.04)
    assert prefills_per_trajectory(alone, 80_000) == pytest.approx(1 / 400)
    assert prefills_per_trajectory(WORK, 8) == 1 / 10


def test_fixed_times_of_prefills_and_of_handing_over_slow_a_replica() -> None:
    """A prefill of 10 for 20 ms, and a slot that stays empty for one step of its 200."""
    plain = replica_cost(MODEL, WORK, PLACE, 1, 1, 8)
    step = decode_s(MODEL, WORK, PLACE, 1, (10,), 8, 200)
    changed = IDEAL.model_copy(update={"prefill_overhead_s": 0.02, "handover_s": step / 10})
    slower = replica_cost(MODEL, WORK, msgspec.structs.replace(PLACE, efficiency=changed), 1, 1, 8)
    assert 1 / slower.tokens_per_s == pytest.approx(1 / plain.tokens_per_s + (step / 8 + 0.002) / 200)
    assert slower.pause_s == pytest.approx(plain.pause_s + 0.02)


def test_without_overlap_a_batch_empties_to_its_longest() -> None:
    """Half of two trajectories have 100 tokens, half 300. With time per token t(m) = m·a the same work takes the same
    time in any order, so nothing is lost; with t constant the batch waits for its longest: E[max of 2] = 250 tokens."""
    work = msgspec.structs.replace(WORK, max_staleness=0, output=measured([100, 300]), prompt=constant(1))
    overhead = msgspec.structs.replace(PLACE, efficiency=IDEAL.model_copy(update={"step_overhead_s": 1.0}))
    assert drain_s(MODEL, work, overhead, 1, (10,), 2) == pytest.approx(250, rel=0.02)
    assert replica_cost(MODEL, work, overhead, 1, 1, 2).pause_s == pytest.approx(250 - 200, rel=0.1)


@pytest.mark.parametrize(
    ("stages", "head", "expected"),
    [(1, 2.0, (10,)), (2, 0.0, (5, 5)), (2, 2.0, (6, 4)), (3, 1.0, (4, 4, 2)), (4, 0.5, (3, 3, 2, 2))],
)
def test_layers_are_split_so_that_the_slowest_stage_is_fastest(
    stages: int, head: float, expected: tuple[int, ...]
) -> None:
    layers = split_layers(10, stages, head)
    assert sum(layers) == 10
    assert max([*layers[:-1], layers[-1] + head]) == max([*expected[:-1], expected[-1] + head])
