from __future__ import annotations

import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import make_group, policy

from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.microbatches import IDLE_ROW, MiniBatch, cut
from baton.trainer.parallel.balance import BatchShare, balanced
from baton.trainer.samples import training_samples, with_advantages

COSTS = st.lists(st.floats(0.1, 1e4), max_size=60)


@given(COSTS, st.integers(1, 9))
def test_every_row_is_dealt_once_and_no_part_exceeds_the_mean_by_more_than_a_row(costs, count):
    parts = balanced(costs, count)
    assert sorted(place for part in parts for place in part) == list(range(len(costs)))
    assert len(parts) == count
    assert all(part == sorted(part) for part in parts)
    loads = [sum(costs[place] for place in part) for part in parts]
    bound = sum(costs) / count + (1 - 1 / count) * max(costs, default=0.0)
    assert max(loads) <= bound * (1 + 1e-9)


@given(COSTS, st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_at_unequal_speeds_no_rank_takes_longer_than_the_mean_by_more_than_its_last_row(costs, speeds):
    parts = balanced(costs, len(speeds), speeds)
    assert sorted(place for part in parts for place in part) == list(range(len(costs)))
    for part, speed in zip(parts, speeds, strict=True):
        own = [costs[place] for place in part]
        # when a part got its last row, its smallest, every other part would have taken at least as long with it
        last = min(own, default=0.0)
        assert sum(own) / speed <= (sum(costs) + (len(speeds) - 1) * last) / sum(speeds) * (1 + 1e-9)


def test_rows_go_to_the_rank_that_ends_first_with_them():
    # speeds 2 and 1: 6 → A (3 s < 6 s), 5 → B (5 s < 5.5 s), 3 → A (4.5 s < 8 s), 2 → A (5.5 s < 7 s)
    assert balanced([2, 6, 3, 5], 2, [2, 1]) == [[0, 1, 2], [3]]
    assert BatchShare(1, 2, speeds=(2.0, 1.0)).limits(48) == [48, 24]
    assert BatchShare(1, 2, speeds=(2.0, 1.0)).speed == pytest.approx(2 / 3)


@given(COSTS, st.integers(1, 9))
def test_all_ranks_deal_alike(costs, count):
    assert balanced(costs, count) == balanced(list(costs), count)


def test_the_dearest_go_first_each_to_the_lightest():
    # 7 → A, 5 → B, 4 → B (5 < 7) and has 9, 3 → A and has 10, 2 → B and has 11
    assert balanced([3, 5, 7, 2, 4], 2) == [[0, 2], [1, 3, 4]]


def test_long_rows_weigh_more_than_their_tokens():
    share = BatchShare(0, 2, even_tokens=100.0)
    assert share.cost(100) == 200.0  # attention costs as much as the rest
    assert share.cost(1) == pytest.approx(1.01)


def test_lognormal_lengths_on_eight_ranks_are_within_a_hundredth_of_even():
    rng = random.Random(1)
    lengths = [rng.lognormvariate(6, 1) for _ in range(512)]
    loads = [sum(lengths[place] for place in part) for part in balanced(lengths, 8)]
    assert max(loads) / statistics.fmean(loads) < 1.01


def minibatch(share: BatchShare, *, lengths: list[int], flat: int = 0, **changes: object) -> MiniBatch:
    """A group per pair of lengths; the last `flat` groups have equal rewards."""
    groups = []
    for index in range(0, len(lengths), 2):
        rewards = (1.0, 1.0) if index // 2 >= len(lengths) // 2 - flat else (1.0, 0.0)
        groups.append(make_group(index, rewards, [[policy(*[5] * n)] for n in lengths[index : index + 2]]))
    algorithm = AlgorithmSettings(name="grpo")
    (found,) = with_advantages([training_samples(groups, algorithm)], algorithm)
    return cut(found, max_tokens_per_microbatch=16, device=torch.device("cpu"), share=share, **changes)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8).map(lambda found: found + found),
    flat=st.integers(0, 8),
    speeds=st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=1, max_size=5),
    is_even=st.booleans(),
    is_packed=st.booleans(),
)
def test_ranks_share_all_rows_and_make_equal_numbers_of_passes_of_each_kind(lengths, flat, speeds, is_even, is_packed):
    shares = [BatchShare(rank, len(speeds), speeds=() if is_even else tuple(speeds)) for rank in range(len(speeds))]
    cuts = [minibatch(share, lengths=lengths, flat=flat, is_packed=is_packed) for share in shares]
    kinds = [[micro.has_gradient for micro in found.microbatches] for found in cuts]
    assert all(kind == kinds[0] and kind == sorted(kind, reverse=True) for kind in kinds)
    trained = [row.name for found in cuts for micro in found.microbatches for row in micro.rows if row is not IDLE_ROW]
    assert sorted(trained) == sorted(row.name for row in cuts[0].rows)
    assert len({(found.num_episodes, found.num_trained_tokens) for found in cuts}) == 1
    idle = [micro for found in cuts for micro in found.microbatches if micro.is_idle]
    assert all(micro.num_tokens == 0 and not micro.mask.any() for micro in idle)
