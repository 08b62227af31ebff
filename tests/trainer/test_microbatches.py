"""From a batch to padded microbatches: nothing lost, nothing moved, nothing trained that the policy did not write."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import environment, make_group, policy, random_batch

from baton.errors import UserError
from baton.trainer.advantages import group_relative
from baton.trainer.batch import (
    FEW_SHAPES,
    PASS_TOKENS,
    Row,
    batch_metrics,
    minibatches,
    pad,
    rows,
    split_evenly,
    under_budget,
)
from baton.types import Batch, FinishReason

CPU = torch.device("cpu")


def test_only_policy_tokens_are_trained_and_every_value_lies_at_its_token():
    response = [
        policy(10, 11, version=3, logprob=-1.5),
        environment(20, version=4),
        policy(12, version=4, logprob=-2.5),
    ]
    long = make_group(1, [1.0, 0.0], [response, [policy(13)]], prompt_ids=(2, 3, 4))
    short = make_group(2, [0.0, 0.0], [[policy(14)], [policy(15)]], prompt_ids=(6,))
    all_rows = rows([long, short], {1: (0.5, -0.5), 2: (0.0, 0.0)})
    micro = pad([all_rows[0], all_rows[2]], CPU)
    assert micro.first == 1  # the shorter prompt
    assert micro.input_ids.tolist() == [[2, 3, 4, 10, 11, 20, 12], [6, 14, 0, 0, 0, 0, 0]]
    t, f = True, False
    #                              3  4  10 11 20 12     14 and padding
    assert micro.mask.tolist() == [[f, f, t, t, f, t], [t, f, f, f, f, f]]
    assert micro.policy_versions.tolist() == [[0, 0, 3, 3, 0, 4], [0] * 6]
    assert micro.behavior_logprobs.tolist() == [[0, 0, -1.5, -1.5, 0, -2.5], [-4.0, 0, 0, 0, 0, 0]]
    assert micro.advantages.tolist() == [[0, 0, 0.5, 0.5, 0, 0.5], [0] * 6]
    assert (micro.group_ids, micro.num_tokens) == ((1, 2), 9)


def row_of(length: int) -> Row:
    return Row(0, tuple(range(length)), 1, (True,) * (length - 1), (0.0,) * (length - 1), (0,) * (length - 1), 0.0)


@given(st.lists(st.integers(2, 40), max_size=30), st.integers(1, 120))
def test_chunks_hold_every_row_once_within_the_budget_and_depend_on_nothing_else(lengths, budget):
    all_rows = [row_of(length) for length in lengths]
    chunks = under_budget(all_rows, budget)
    assert sorted(id(row) for chunk in chunks for row in chunk) == sorted(id(row) for row in all_rows)
    for chunk in chunks:
        padded = len(chunk) * max(len(row.token_ids) for row in chunk)
        assert padded <= budget or len(chunk) == 1  # a row longer than the budget stands alone
    assert under_budget(all_rows, budget) == chunks


def test_rows_are_sorted_by_length_so_that_little_is_padding():
    chunks = under_budget([row_of(n) for n in (4, 20, 4, 20, 4)], 40)
    assert [[len(row.token_ids) for row in chunk] for chunk in chunks] == [[20, 20], [4, 4, 4]]


def padded_tokens(lengths, budget, multiples):
    """Fewest padded tokens, passes included, over every way to cut lengths that descend; None where a part is over."""
    if not lengths:
        return 0
    width = -(-lengths[0] // multiples[1]) * multiples[1]
    ways = []
    for size in range(1, len(lengths) + 1):
        if size > 1 and size * width > budget:
            break
        filled = -(-size // multiples[0]) * multiples[0]
        ways.append(PASS_TOKENS + filled * width + padded_tokens(lengths[size:], budget, multiples))
    return min(ways)


@given(
    st.lists(st.integers(2, 300), max_size=9), st.integers(1, 1500), st.sampled_from([(1, 1), (1, 8), (2, 4), (8, 16)])
)
def test_no_other_cut_has_fewer_padded_tokens(lengths, budget, multiples):
    chunks = under_budget([row_of(length) for length in lengths], budget, multiples)
    found = sum(PASS_TOKENS + pad(chunk, CPU, multiples).input_ids.numel() for chunk in chunks)
    assert found == padded_tokens(sorted(lengths, reverse=True), budget, multiples)


def test_few_shapes_are_made_of_columns_and_rows_that_nobody_sees():
    """Three rows of at most 21 tokens become 8 of 32; their own values lie where they lay."""
    all_rows = [row_of(n) for n in (21, 9, 4)]
    plain, few = pad(all_rows, CPU), pad(all_rows, CPU, FEW_SHAPES)
    assert few.input_ids.shape == (8, 32)
    assert (few.first, few.num_tokens, few.group_ids) == (plain.first, plain.num_tokens, plain.group_ids)
    for name in ("mask", "behavior_logprobs", "policy_versions", "advantages"):
        whole = getattr(few, name)
        assert whole.shape == (8, 31)
        assert torch.equal(whole[:3, :20], getattr(plain, name)), name
        assert not whole[3:].any()
        assert not whole[:, 20:].any()


def test_rows_without_an_advantage_are_kept_apart_and_have_no_gradient():
    groups = [make_group(0, [1.0, 0.0, 0.0]), make_group(1, [1.0, 1.0, 1.0]), make_group(2, [0.0, 1.0, 1.0])]
    (part,) = minibatches(groups, group_relative(groups), num_minibatches=1, max_tokens_per_microbatch=1000, device=CPU)
    assert [(set(m.group_ids), m.has_gradient) for m in part.microbatches] == [({0, 2}, True), ({1}, False)]
    assert (part.num_trajectories, part.num_trained_tokens) == (9, 9)


@given(st.integers(1, 30), st.integers(1, 30))
def test_minibatches_are_whole_groups_in_order_and_as_even_as_they_go(num_groups, num_parts):
    groups = [make_group(i, [0.0, 1.0]) for i in range(num_groups)]
    if num_parts > num_groups:
        with pytest.raises(UserError, match=rf"got {num_parts}, but each needs a group and the batch has {num_groups}"):
            split_evenly(groups, num_parts)
        return
    parts = split_evenly(groups, num_parts)
    assert [group.group_id for part in parts for group in part] == list(range(num_groups))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_trajectory_without_policy_tokens_is_counted_but_costs_no_forward():
    group = make_group(0, [1.0, 0.0], [[environment(20, 21)], [policy(5, 6)]])
    (part,) = minibatches(
        [group], group_relative([group]), num_minibatches=1, max_tokens_per_microbatch=100, device=CPU
    )
    assert (part.num_trajectories, part.num_trained_tokens) == (2, 2)
    assert [len(micro.input_ids) for micro in part.microbatches] == [1]


def test_batch_metrics_by_hand():
    mixed = make_group(
        0,
        [1.0, 0.0],
        [[policy(5, version=1), environment(9, version=1), policy(6, 7, version=3)], [policy(8, version=3)]],
    )
    equal = make_group(1, [0.5, 0.5], finish_reason=FinishReason.LENGTH)  # one token each, of version 0
    found = batch_metrics(Batch(4, (mixed, equal)))
    assert found == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(0.125**0.5),  # deviations ½, −½, 0, 0
        "reward/zero_std_frac": 0.5,
        "reward/correct/mean": 0.5,
        "accuracy/mean": 0.25,
        "response_length/mean": 7 / 4,  # 4, 1, 1, 1, environment tokens included
        "response_length/max": 4.0,
        "response_length/clip_ratio": 0.5,
        "staleness/mean": 8 / 6,  # the trainer holds version 3: ages 2, 0, 0 | 0 | 3 | 3
        "staleness/max": 3.0,
        "staleness/stale_frac": 0.5,
        "staleness/masked_frac": 0.0,
        "judge/groups_lost": 0.0,
        "tokens/trained": 6.0,
        "tokens/masked": 0.0,
    }
    bounded = batch_metrics(Batch(4, (mixed, equal)), oldest=1)  # the two of version 0 are too old
    assert {name: bounded[name] for name in bounded if name.startswith(("staleness", "tokens"))} == {
        "staleness/mean": 2 / 4,
        "staleness/max": 2.0,
        "staleness/stale_frac": 1 / 6,
        "staleness/masked_frac": 2 / 6,
        "tokens/trained": 4.0,
        "tokens/masked": 2.0,
    }
    assert {n: v for n, v in bounded.items() if n.startswith("reward")} == {
        n: v for n, v in found.items() if n.startswith("reward")
    }


def test_the_same_batch_gives_the_same_microbatches():
    batch = random_batch(1, num_groups=6)

    def split():
        return minibatches(
            batch.groups,
            group_relative(batch.groups),
            num_minibatches=2,
            max_tokens_per_microbatch=40,
            device=CPU,
        )

    for one, other in zip(split(), split(), strict=True):
        assert len(one.microbatches) > 1
        for a, b in zip(one.microbatches, other.microbatches, strict=True):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.mask, b.mask)
