"""From a batch to padded microbatches: nothing lost, nothing moved, nothing trained that the policy did not write."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import environment, make_group, policy, random_batch

from baton.errors import UserError
from baton.trainer.advantages import group_relative
from baton.trainer.batch import Row, batch_metrics, minibatches, pad, rows, split_evenly, under_budget
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
    assert micro.advantages.tolist() == [0.5, 0.0]
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
        "judge/groups_lost": 0.0,
        "tokens/trained": 6.0,
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
