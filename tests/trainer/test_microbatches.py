"""From a batch to padded microbatches: nothing lost, nothing moved, nothing trained that the policy did not write."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import environment, make_group, policy, random_batch

from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.microbatches import (
    COPIED_TOKEN,
    FEW_SHAPES,
    PASS_TOKENS,
    ROW_TOKENS,
    cost,
    cut,
    first_fit,
    pad,
    under_budget,
)
from baton.trainer.parallel.balance import BatchShare
from baton.trainer.samples import TrainingSample, batch_metrics, split_evenly, training_samples, with_advantages
from baton.types import Batch, FinishReason

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")
GRPO = AlgorithmSettings()


def cut_of(groups, max_tokens, **choices):
    (all_rows,) = with_advantages([training_samples(groups, GRPO)], GRPO)
    return cut(all_rows, max_tokens_per_microbatch=max_tokens, device=CPU, **choices)


def test_only_policy_tokens_are_trained_and_every_value_lies_at_its_token():
    response = [
        policy(10, 11, version=3, logprob=-1.5),
        environment(20, version=4),
        policy(12, version=4, logprob=-2.5),
    ]
    long = make_group(1, [1.0, 0.0], [response, [policy(13)]], prompt_ids=(2, 3, 4))
    short = make_group(2, [0.0, 0.0], [[policy(14)], [policy(15)]], prompt_ids=(6,))
    all_rows = training_samples([long, short], GRPO)
    micro = pad([replace(all_rows[0], advantages=np.full(3, 0.5)), replace(all_rows[2], advantages=np.zeros(1))], CPU)
    assert micro.inputs.first == 1  # the shorter prompt
    assert micro.inputs.input_ids.tolist() == [[2, 3, 4, 10, 11, 20, 12], [6, 14, 0, 0, 0, 0, 0]]
    t, f = True, False
    #                              3  4  10 11 20 12     14 and padding
    assert micro.mask.tolist() == [[f, f, t, t, f, t], [t, f, f, f, f, f]]
    assert micro.policy_versions.tolist() == [[0, 0, 3, 3, 0, 4], [0] * 6]
    assert micro.behavior_logprobs.tolist() == [[0, 0, -1.5, -1.5, 0, -2.5], [-4.0, 0, 0, 0, 0, 0]]
    assert micro.advantages.tolist() == [[0, 0, 0.5, 0.5, 0, 0.5], [0] * 6]
    assert micro.inputs.policy_mask.tolist() == micro.mask.tolist()
    assert ([row.name for row in micro.rows], micro.num_tokens) == (["1/0", "2/0"], 9)


def test_a_token_too_old_is_the_policys_but_not_trained():
    group = make_group(1, [1.0, 0.0], [[policy(10, version=1), policy(11, version=2)], [policy(12, version=2)]])
    micro = pad(
        [replace(row, advantages=np.ones(row.num_policy)) for row in training_samples([group], GRPO, oldest=2)], CPU
    )
    assert micro.mask.tolist() == [[False, True], [True, False]]
    assert micro.inputs.policy_mask.tolist() == [[True, True], [True, False]]
    assert micro.advantages.tolist() == [[1, 1], [1, 0]]
    assert micro.policy_versions.tolist() == [[0, 2], [2, 0]]


def test_values_of_the_policys_tokens_go_to_their_places_and_back():
    response = [policy(10, 11), environment(20), policy(12)]
    group = make_group(1, [1.0, 0.0], [response, [policy(13)]], prompt_ids=(2, 3))
    micro = pad(training_samples([group], GRPO), CPU, FEW_SHAPES)
    by_row = [np.array([0.1, 0.2, 0.3]), np.array([0.4])]
    laid = micro.spread(by_row)
    assert laid[:2, :4].tolist() == pytest.approx(np.array([[0.1, 0.2, 0, 0.3], [0.4, 0, 0, 0]]))
    assert not laid[2:].any()
    for found, expected in zip(micro.gather(laid), by_row, strict=True):
        assert found == pytest.approx(expected)


def test_packed_rows_lie_one_behind_the_other():
    response = [policy(10, 11), environment(20), policy(12)]
    group = make_group(1, [1.0, 0.0], [response, [policy(13)]], prompt_ids=(2, 3))
    tokens = pad(training_samples([group], GRPO), CPU, is_packed=True).inputs.packed
    assert tokens.shapes == ((6,), (3,))
    assert tokens.input_ids.tolist() == [2, 3, 10, 11, 20, 12, 2, 3, 13]
    assert tokens.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert tokens.input_ids[tokens.places].tolist() == [10, 11, 12, 13]
    assert tokens.before.tolist() == [place - 1 for place in tokens.places.tolist()]


def test_a_shared_prompt_lies_before_its_responses_once():
    response = [policy(10, 11), environment(20), policy(12)]
    group = make_group(1, [1.0, 0.0], [response, [policy(13)]], prompt_ids=(2, 3))
    other = make_group(2, [1.0, 0.0], [[policy(14)], [policy(15)]], prompt_ids=(4,))
    all_rows = training_samples([group, other], GRPO)
    inputs = pad([*all_rows[:3], all_rows[0]], CPU, FEW_SHAPES, shares_prompts=True).inputs
    tokens = inputs.packed
    assert inputs.shares == (2, 1, 1)
    assert inputs.num_repeated == 2
    assert tokens.shapes == ((2, 4, 1), (2,), (6,), (113,))  # the last row fills up to 128 tokens
    assert tokens.input_ids.tolist() == [2, 3, 10, 11, 20, 12, 13, 4, 14, 2, 3, 10, 11, 20, 12, *[0] * 113]
    assert tokens.positions.tolist() == [0, 1, 2, 3, 4, 5, 2, 0, 1, 0, 1, 2, 3, 4, 5, *range(113)]
    assert tokens.input_ids[tokens.places].tolist() == [10, 11, 12, 13, 14, 10, 11, 12]
    assert tokens.before.tolist() == [1, 2, 4, 1, 7, 10, 11, 13]


def prompted(prompt: int, length: int, which: int) -> TrainingSample:
    """A row of `length` tokens whose prompt is given by its length and first id."""
    ids = (*range(which, which + prompt), *[0] * (length - prompt))
    size = length - prompt
    return TrainingSample(which, "0/0", ids, prompt, (True,) * size, (True,) * size, (0.0,) * size, (0,) * size, 0.0)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6)), max_size=6),
    st.integers(1, 120),
)
def test_parts_of_groups_hold_every_row_once_within_the_budget(groups, budget):
    all_rows = [prompted(p, p + size, which) for which, (p, sizes) in enumerate(groups) for size in sizes]
    chunks = first_fit(all_rows, budget, shares_prompts=True)
    assert sorted(id(row) for chunk in chunks for row in chunk) == sorted(id(row) for row in all_rows)
    for chunk in chunks:
        inputs = pad(chunk, CPU, shares_prompts=True).inputs
        firsts = accumulate(inputs.shares[:-1], initial=0)
        copies = sum(
            (size - 1) * math.ceil(COPIED_TOKEN * inputs.rows[first].prompt_length)
            for first, size in zip(firsts, inputs.shares, strict=True)
        )
        num_tokens = sum(map(sum, inputs.packed.shapes))
        assert num_tokens == sum(len(row.token_ids) for row in chunk) - inputs.num_repeated
        assert num_tokens + copies <= budget or len(chunk) == 1
    if sum(len(row.token_ids) for row in all_rows) <= budget:  # whole groups stay together
        assert len(chunks) <= 1


def test_the_cost_counts_tokens_and_pairs_by_hand():
    rows = [prompted(60, 95, 1) for _ in range(8)]
    share = BatchShare(even_tokens=1000.0)
    assert cost(rows) == PASS_TOKENS + 8 * 95
    shared = PASS_TOKENS + 8 * ROW_TOKENS + 60 + 8 * 35
    assert cost(rows, shares_prompts=True) == shared
    pairs = 60 * 60 / 2 + 8 * 35 * 95  # the upper half of a mask is skipped only in a whole row
    assert cost(rows, share, shares_prompts=True) == pytest.approx(shared + pairs * 2 / 1000.0)
    assert cost(rows, share) == pytest.approx(PASS_TOKENS + 8 * (95 + 95 * 95 / 1000.0))
    assert cost([rows[0], prompted(60, 61, 1)], multiples=(8, 16)) == PASS_TOKENS + 8 * 96
    assert cost([rows[0], prompted(60, 61, 1)], is_packed=True) == PASS_TOKENS + 95 + 61
    assert cost([prompted(1, 10_000, 1)] * 2, shares_prompts=True) == math.inf  # a mask of 1e8 entries


@pytest.mark.parametrize(
    ("prompt", "response", "size", "even_tokens", "is_shared"),
    [
        (60, 35, 8, math.inf, True),
        (60, 35, 1, math.inf, False),  # nothing to share
        (3, 90, 8, math.inf, False),  # a row saves 3 tokens and costs 4
        (60, 35, 2, math.inf, True),
        (100, 300, 8, 1e9, True),  # a fifth of the tokens is saved
        (100, 300, 8, 100.0, False),  # attention is most of the cost, and a whole mask costs more than is saved
    ],
)
def test_prompts_are_shared_where_that_costs_less(prompt, response, size, even_tokens, is_shared):
    rows = [prompted(prompt, prompt + response, which) for which in range(3) for _ in range(size)]
    part = cut(
        rows,
        max_tokens_per_microbatch=100_000,
        device=CPU,
        shares_prompts=True,
        share=BatchShare(even_tokens=even_tokens),
    )
    assert {bool(micro.inputs.shares) for micro in part.microbatches} == {is_shared}
    if is_shared:
        assert [micro.inputs.shares for micro in part.microbatches] == [(size,) * 3]
    assert sum(len(micro.rows) for micro in part.microbatches) == 3 * size


@given(st.lists(st.integers(2, 40), max_size=30), st.integers(1, 120))
def test_packing_holds_every_row_once_within_the_budget(lengths, budget):
    all_rows = [row_of(length) for length in lengths]
    chunks = first_fit(all_rows, budget)
    assert sorted(id(row) for chunk in chunks for row in chunk) == sorted(id(row) for row in all_rows)
    assert all(sum(len(row.token_ids) for row in chunk) <= budget or len(chunk) == 1 for chunk in chunks)
    for one in range(len(chunks)):  # no two chunks would have gone into one
        for other in range(one):
            assert sum(len(row.token_ids) for row in (*chunks[one], *chunks[other])) > budget


class CountedTokens(int):
    """A number of tokens that counts the comparisons with it and with its differences."""

    comparisons = 0

    def __sub__(self, other: int) -> "CountedTokens":
        return CountedTokens(int(self) - other)

    def __lt__(self, other: int) -> bool:
        CountedTokens.comparisons += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        CountedTokens.comparisons += 1
        return int(self) > other

    def __ge__(self, other: int) -> bool:
        CountedTokens.comparisons += 1
        return int(self) >= other


def test_packing_four_times_as_many_rows_needs_about_four_times_as_many_comparisons():
    """Each chunk holds one row, so a search through all chunks would need 16 times as many."""

    def count(num_rows: int) -> int:
        CountedTokens.comparisons = 0
        assert len(first_fit([row_of(30)] * num_rows, CountedTokens(40))) == num_rows
        return CountedTokens.comparisons

    assert 0 < count(512) < 7 * count(128)


def row_of(length: int) -> TrainingSample:
    size = length - 1
    return TrainingSample(
        0, "0/0", tuple(range(length)), 1, (True,) * size, (True,) * size, (0.0,) * size, (0,) * size, 0.0
    )


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
        filled = max(size, min(-(-size // multiples[0]) * multiples[0], budget // width))
        ways.append(PASS_TOKENS + filled * width + padded_tokens(lengths[size:], budget, multiples))
    return min(ways)


@given(
    st.lists(st.integers(2, 300), max_size=9), st.integers(1, 1500), st.sampled_from([(1, 1), (1, 8), (2, 4), (8, 16)])
)
def test_no_other_cut_has_fewer_padded_tokens(lengths, budget, multiples):
    chunks = under_budget([row_of(length) for length in lengths], budget, multiples)
    found = sum(PASS_TOKENS + pad(chunk, CPU, multiples, budget).inputs.input_ids.numel() for chunk in chunks)
    assert found == padded_tokens(sorted(lengths, reverse=True), budget, multiples)


@given(st.lists(st.integers(2, 300), min_size=1, max_size=9), st.integers(1, 1500))
def test_empty_rows_do_not_exceed_the_maximum_of_a_microbatch(lengths, budget):
    rows = [row_of(length) for length in lengths]
    for micro in cut(rows, max_tokens_per_microbatch=budget, device=CPU, multiples=FEW_SHAPES).microbatches:
        num_rows, width = micro.inputs.input_ids.shape
        assert num_rows * width <= budget or num_rows == 1  # a longer row forms a microbatch alone


def test_few_shapes_are_made_of_columns_and_rows_that_nobody_sees():
    """Three rows of at most 21 tokens become 8 of 32; their own values lie where they lay."""
    all_rows = [row_of(n) for n in (21, 9, 4)]
    plain, few = pad(all_rows, CPU), pad(all_rows, CPU, FEW_SHAPES)
    assert few.inputs.input_ids.shape == (8, 32)
    assert (few.inputs.first, few.num_tokens, few.rows) == (plain.inputs.first, plain.num_tokens, plain.rows)
    for name in ("mask", "behavior_logprobs", "policy_versions", "advantages"):
        whole = getattr(few, name)
        assert whole.shape == (8, 31)
        assert torch.equal(whole[:3, :20], getattr(plain, name)), name
        assert not whole[3:].any()
        assert not whole[:, 20:].any()


def test_rows_without_an_advantage_are_kept_apart_and_have_no_gradient():
    groups = [make_group(0, [1.0, 0.0, 0.0]), make_group(1, [1.0, 1.0, 1.0]), make_group(2, [0.0, 1.0, 1.0])]
    part = cut_of(groups, 1000)
    assert [({r.group_id for r in m.rows}, m.has_gradient) for m in part.microbatches] == [({0, 2}, True), ({1}, False)]
    assert (part.num_episodes, part.num_trained_tokens) == (9, 9)
    skipped = cut_of(groups, 1000, skips_flat=True)
    assert [{r.group_id for r in m.rows} for m in skipped.microbatches] == [{0, 2}]
    assert (skipped.num_episodes, skipped.num_trained_tokens) == (9, 9), "the divisors are those of all rows"
    (whole,) = cut_of(groups, 1000, is_flat=False).microbatches  # a KL term, say: there all have a gradient
    assert (len(whole.rows), whole.has_gradient) == (9, True)


def test_a_trajectory_without_policy_tokens_is_counted_but_costs_no_forward():
    group = make_group(0, [1.0, 0.0], [[environment(20, 21)], [policy(5, 6)]])
    part = cut_of([group], 100)
    assert (part.num_episodes, part.num_trained_tokens) == (2, 2)
    assert [len(micro.inputs.input_ids) for micro in part.microbatches] == [1]


def test_a_wholly_masked_trajectory_costs_a_forward_only_where_others_are_compared_with_what_it_says():
    group = make_group(0, [1.0, 0.0], [[policy(5, version=1)], [policy(6, version=3)]])
    all_rows = training_samples([group], GRPO, oldest=3)
    (micro,) = cut(all_rows, max_tokens_per_microbatch=100, device=CPU).microbatches
    assert [row.name for row in micro.rows] == ["0/1"]
    (micro,) = cut(all_rows, max_tokens_per_microbatch=100, device=CPU, keeps_masked=True).microbatches
    assert ([row.name for row in micro.rows], micro.mask.tolist()) == (["0/0", "0/1"], [[False], [True]])


def test_overlong_filtering_masks_what_was_cut_and_keeps_it_in_every_count():
    cut_off = make_group(0, [1.0, 0.0], [[policy(5, 6)], [policy(7)]], finish_reason=FinishReason.LENGTH)
    whole = make_group(1, [1.0, 0.0])
    found = training_samples([cut_off, whole], AlgorithmSettings(overlong_filter=True))
    assert [row.num_trained for row in found] == [0, 0, 1, 1]
    part = cut(found, max_tokens_per_microbatch=100, device=CPU)
    assert (part.num_episodes, part.num_trained_tokens) == (4, 2)
    metrics = batch_metrics(Batch(1, (cut_off, whole)), found, AlgorithmSettings(overlong_filter=True))
    assert (metrics["tokens/filtered"], metrics["tokens/trained"], metrics["tokens/masked"]) == (3, 2, 0)


def test_the_same_batch_gives_the_same_microbatches():
    batch = random_batch(1, num_groups=6)

    def split():
        return [cut_of(part, 40) for part in split_evenly(batch.groups, 2)]

    for one, other in zip(split(), split(), strict=True):
        assert len(one.microbatches) > 1
        for a, b in zip(one.microbatches, other.microbatches, strict=True):
            assert torch.equal(a.inputs.input_ids, b.inputs.input_ids)
            assert torch.equal(a.mask, b.mask)
