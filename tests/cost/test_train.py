"""Training and publication, worked by hand on a model and a GPU of round numbers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.cost.train import (
    forward_passes,
    in_flight,
    microbatches,
    mixed_terms,
    publish_s,
    rank_of,
    rank_speeds,
    row_shares,
    stage_terms,
    tail_s,
)
from baton.specs.workload import measured
from tests.cost.round_numbers import MODEL, PLACE, WORK

IDEALISED = msgspec.structs.replace(WORK, trainer="idealised")
"""Data parallelism without FSDP: weights are gathered once per update."""


def test_a_step_is_worth_so_many_forward_passes() -> None:
    """One epoch: forward, backward twice that, recomputation; proximal log-probabilities; and what is switched on."""
    assert forward_passes(WORK) == 3 + 1 + 1
    assert forward_passes(msgspec.structs.replace(WORK, recompute=False, has_proximal_forward=False)) == 3
    assert forward_passes(msgspec.structs.replace(WORK, epochs=2, has_reference=True)) == 8 + 2
    assert forward_passes(msgspec.structs.replace(WORK, has_critic=True)) == 2 * 4 + 2


def test_compute_of_a_layer() -> None:
    """100 trajectories of 300 tokens; 2 · 10⁶ FLOPs a token, 320 a pair, half the square; 5 passes over 4 GPUs'
    10¹²/s."""
    terms = stage_terms(MODEL, IDEALISED, PLACE, 8, 1, 4)
    flops = 100 * (300 * 2e6 + 320 * 300**2 / 2)
    assert terms.per_layer_s == pytest.approx(5 * flops / 4e12)
    assert terms.head_s == pytest.approx(5 * 100 * 300 * 2 * 1e5 / 4e12)


def test_trajectories_that_do_not_divide_wait_for_the_fullest_rank() -> None:
    """100 trajectories on 8 ranks: 13 on the fullest, as if there were 104."""
    even, uneven = (stage_terms(MODEL, IDEALISED, PLACE, 8, 1, dp).per_layer_s for dp in (4, 8))
    assert uneven / even == pytest.approx(4 / 8 * 104 / 100)


def test_tensor_parallel_sums() -> None:
    """6 sums in the update (2 forward, 2 backward, 2 again) and 2 for proximal log-probabilities, per token and layer:
    30 000 tokens · 100 · 2 bytes, each GPU sending 2 · ½ of it at 10⁹/s."""
    one, two = (stage_terms(MODEL, WORK, PLACE, 8, tp, 1) for tp in (1, 2))
    assert two.per_layer_s == pytest.approx(one.per_layer_s / 2 + 8 * 30_000 * 100 * 2 / 1e9)
    assert two.head_s == pytest.approx(one.head_s), "each rank computes the whole head"
    assert stage_terms(MODEL, IDEALISED, PLACE, 8, 2, 1).head_s == pytest.approx(one.head_s / 2)


def test_gradients_take_the_link_of_their_group() -> None:
    """6 bytes a parameter, (dp − 1)/dp of them: 10⁶ · 6 · 3/4 within a node at 10⁹/s, across nodes at 10⁸/s."""
    within, across = (stage_terms(MODEL, IDEALISED, PLACE, node, 1, 4).gradients_per_layer_s for node in (8, 2))
    assert within == pytest.approx(4.5e6 / 1e9)
    assert across == pytest.approx(4.5e6 / 1e8)
    assert stage_terms(MODEL, IDEALISED, PLACE, 8, 1, 1).gradients_per_layer_s == 0


def test_fsdp_gathers_a_layer_for_each_pass_over_a_microbatch_while_it_computes_another() -> None:
    """25 microbatches on each of 4 ranks, gathered forward, backward and for proximal log-probabilities, 2 bytes of 3/4
    of 10⁶ parameters at 10⁹/s: more than the 0.0768 s of compute. Gradients: 4 bytes, once."""
    terms = stage_terms(MODEL, WORK, PLACE, 8, 1, 4)
    assert terms.per_layer_s == pytest.approx(25 * 3 * 2 * 0.75e6 / 1e9)
    assert terms.gradients_per_layer_s == pytest.approx(4 * 0.75e6 / 1e9)
    fast = msgspec.structs.replace(PLACE, link_bytes_per_s=1e13)
    hidden = stage_terms(MODEL, WORK, fast, 8, 1, 4).per_layer_s
    assert hidden == pytest.approx(stage_terms(MODEL, IDEALISED, PLACE, 8, 1, 4).per_layer_s)
    sharded = stage_terms(MODEL, msgspec.structs.replace(WORK, shard_gradients=True), PLACE, 8, 1, 4)
    assert sharded.per_layer_s == pytest.approx(25 * (3 * 2 + 4) * 0.75e6 / 1e9), "reduced after each microbatch"
    assert sharded.gradients_per_layer_s == 0


def test_copies_gather_within_a_machine_and_add_their_gradients_across_machines() -> None:
    """4 ranks on machines of 2: a copy gathers ½ of 10⁶ parameters at 10⁹/s, and each machine sends 2 · ½ of 4 bytes
    per gradient at 10⁸/s; an optimiser's shard is half of a layer, not a quarter."""
    copies = stage_terms(MODEL, msgspec.structs.replace(WORK, shard_size=2), PLACE, 2, 1, 4)
    one = stage_terms(MODEL, WORK, PLACE, 2, 1, 4)
    compute = stage_terms(MODEL, IDEALISED, PLACE, 2, 1, 4).per_layer_s
    assert copies.per_layer_s == pytest.approx(max(compute, 25 * 3 * 2 * 0.5e6 / 1e9))
    assert one.per_layer_s == pytest.approx(25 * 3 * 2 * 0.75e6 / 1e8)
    assert copies.gradients_per_layer_s == pytest.approx(4 * (0.5e6 / 1e9 + 1e6 / 1e8))
    assert copies.optimizer_per_layer_s == pytest.approx(2 * one.optimizer_per_layer_s)
    assert (copies.rank.shards, one.rank.shards) == (2, 4)
    sharded = stage_terms(MODEL, msgspec.structs.replace(WORK, shard_size=2, shard_gradients=True), PLACE, 2, 1, 4)
    assert sharded.per_layer_s == pytest.approx(25 * (3 * 2 * 0.5e6 / 1e9 + 4 * (0.5e6 / 1e9 + 1e6 / 1e8)))


SLOW = msgspec.structs.replace(PLACE, gpu=msgspec.structs.replace(PLACE.gpu, flops=4e11))
FIVE = msgspec.structs.replace(WORK, microbatch_tokens=1500)
"""Microbatches of five of the longest trajectories."""


def test_speeds_of_unlike_ranks_and_the_smallest_microbatch() -> None:
    """A slow rank's microbatch has at least one trajectory, so it counts as at least 1/1 or 1/5 as fast, unless ranks
    of different types do not wait for each other in each pass."""
    slower = msgspec.structs.replace(PLACE, gpu=msgspec.structs.replace(PLACE.gpu, flops=1e11))
    assert rank_speeds(FIVE, [SLOW, PLACE, slower]) == pytest.approx([0.4, 1, 0.2])
    assert rank_speeds(WORK, [SLOW, PLACE]) == [1, 1]
    copies = msgspec.structs.replace(WORK, shard_size=2)
    assert rank_speeds(copies, [SLOW, PLACE]) == pytest.approx([0.4, 1])
    assert rank_speeds(msgspec.structs.replace(copies, shard_gradients=True), [SLOW, PLACE]) == [1, 1]


def test_unlike_ranks_end_when_together_they_have_ended_the_batch() -> None:
    """100 trajectories on 4 ranks of speed 1 and 4 of speed 0.4. In the time of 18 on a fast rank, the ranks end 4 · 18
    and 4 · 7 = 100; in that of 17.9, 4 · 17 + 4 · 7. On 3 and 2 ranks: 27 and 10 are 101, 26 and 10 only 98."""
    fast, slow = row_shares(FIVE, [1, 0.4], [np.array([4, 3]), np.array([4, 2])])
    assert fast.own * 100 == pytest.approx([18, 27])
    assert slow.own * 100 == pytest.approx([7, 10])
    assert slow.largest == pytest.approx(fast.own)


def test_a_mixed_stage_takes_its_slowest_rank_and_its_slowest_link() -> None:
    """18 trajectories on a fast rank, in three microbatches of five. A layer is gathered three times in each, 2 bytes
    of 7/8 of 10⁶ parameters over 10⁸/s, which takes longer than to compute it."""
    counts = [np.array([4]), np.array([4])]
    flops = 100 * (300 * 2e6 + 320 * 300**2 / 2)
    fast, _ = mixed_terms(MODEL, FIVE, [PLACE, SLOW], counts, np.array([1e8]))
    assert fast.per_layer_s == pytest.approx(3 * 3 * 2 * 0.875e6 / 1e8)
    assert fast.gradients_per_layer_s == pytest.approx(4 * 0.875e6 / 1e8)
    assert (fast.rank.shards, fast.rank.tokens) == (8, 1500)
    quick = mixed_terms(MODEL, FIVE, [PLACE, SLOW], counts, np.array([1e12]))
    assert [each.per_layer_s.item() for each in quick] == pytest.approx(
        [5 * flops * 0.18 / 1e12, 5 * flops * 0.07 / 4e11]
    )
    copies = mixed_terms(MODEL, msgspec.structs.replace(FIVE, shard_size=2), [PLACE, SLOW], counts, np.array([1e8]))
    gathers = 3 * 3 * 2 * 0.5e6 / 1e9
    assert copies[0].per_layer_s == pytest.approx(max(gathers, 5 * flops * 0.18 / 1e12))
    assert copies[0].gradients_per_layer_s == pytest.approx(4 * (0.5e6 / 1e9 + 2 * 0.75e6 / 1e8))
    even = mixed_terms(MODEL, FIVE, [PLACE, PLACE], counts, np.array([1e8]))
    one = stage_terms(MODEL, FIVE, PLACE, 2, 1, np.array([8]))
    for key in ("per_layer_s", "head_s", "gradients_per_layer_s", "optimizer_per_layer_s"):
        assert getattr(even[0], key) == pytest.approx(getattr(one, key)), "equal types are no special case"


def test_a_rank_alone_publishes_and_a_stage_gathers() -> None:
    rank = stage_terms(MODEL, WORK, PLACE, 8, 1, 1).rank
    assert (rank_of(WORK, rank, 1, 1).published_bytes, rank_of(WORK, rank, 1, 2).published_bytes) == (2, 0)
    assert rank_of(WORK, rank, 2, 1).is_stage
    assert rank_of(IDEALISED, rank, 2, 1) == rank


def test_microbatches_are_longest_trajectories() -> None:
    """100 trajectories of 300 tokens, longest 300: 25 on each of 4 ranks, 12 in each of two updates."""
    assert microbatches(WORK, 4) == 25
    assert microbatches(msgspec.structs.replace(WORK, minibatches=2), 4) == 12
    assert microbatches(msgspec.structs.replace(WORK, groups=1, group_size=1), 4) == 1
    assert microbatches(msgspec.structs.replace(WORK, microbatch_tokens=1500), 4) == 5


def test_a_first_stage_may_keep_microbatches_of_the_longest_trajectories() -> None:
    """100 trajectories of 100 + 100 or 300 tokens: means of 300, at most 400. On 25 ranks 4 microbatches of at most
    400, but 3 of the mean length."""
    mixed = msgspec.structs.replace(WORK, output=measured([100, 300]))
    assert in_flight(mixed, 8, 25) == 4
    assert in_flight(mixed, 2, 25) == 2
    assert in_flight(msgspec.structs.replace(mixed, trainer="idealised"), 8, 25) == 3


def test_the_table_of_a_stage_counts_as_layers_of_its_tail() -> None:
    assert tail_s(MODEL, 2.0, 3, np.array(True), np.array(False)) == pytest.approx(2.0 * 3.1)


def test_publication_adds_up_what_crosses_each_link() -> None:
    """20.4 MB: a quarter from place 0 and three quarters from place 1 reach place 1 at 10⁶ and 10⁷ bytes/s."""
    size = 2 * 10.2e6
    rates = np.array([[1e7, 1e6], [1e6, 1e7]])
    times = publish_s(MODEL, WORK, np.array([0.25, 0.75]), rates, np.array([1.0, 2.0]))
    assert times == pytest.approx([2 + size * (0.25 / 1e7 + 0.75 / 1e6), 2 + size * (0.25 / 1e6 + 0.75 / 1e7)])
    assert publish_s(MODEL, WORK, np.array([1.0, 0.0]), rates, np.array([1.0, 2.0]))[0] == pytest.approx(1 + size / 1e7)


def test_the_papers_publications_are_met_after_calibration() -> None:
    """AReaL-Hex table 2 across types, fitted there to 0.253 GB/s of a 1.5 GB/s link: a share of 0.17, within 10 %."""
    for params, seconds in ((7.615e9, 58.34), (14.77e9, 112.93)):
        model = msgspec.structs.replace(MODEL, num_layers=1, ffn_params=params - 4e5 - 2e5)
        times = publish_s(model, WORK, np.array([1.0, 0.0]), np.full((2, 2), 1.5e9 * 0.17), np.array([0.0, 0.0]))
        assert times[1] == pytest.approx(seconds, rel=0.1)
