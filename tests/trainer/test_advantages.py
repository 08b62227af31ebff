"""Advantages by hand, and what must hold of them whatever the rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.trainer.advantages import (
    ESTIMATORS,
    Outcome,
    Turns,
    gae,
    group_mean,
    group_std,
    leave_one_out,
    normalized,
    overlong_penalty,
    return_to_go,
)
from baton.trainer.algorithm import GROUP_RELATIVE, AlgorithmSettings

pytestmark = pytest.mark.numerics

SHAPE = AlgorithmSettings()


def outcomes(*groups):
    """(group id, rewards): trajectories of one token each."""
    return [
        Outcome(group_id, f"{group_id}/{index}", reward, 1)
        for group_id, rewards in groups
        for index, reward in enumerate(rewards)
    ]


def flat(found):
    return [float(value) for values in found for value in values]


# ---- within groups ---------------------------------------------------------------------------------------------------


def test_group_std_is_rewards_standardised_with_the_unbiased_std():
    # mean 1/2; Σ(R − mean)² = 4 · 1/4 = 1; std = √(1/3) = 0.5773503; A = ± 0.5 / (0.5773503 + 1e-6) = ± 0.8660239
    found = flat(group_std(outcomes((7, [1.0, 0.0, 0.0, 1.0])), SHAPE))
    assert found == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-7)
    # mean 2; Σ = 1 + 0 + 1 = 2; std = √(2/2) = 1; A = ∓ 1 / 1.000001
    assert flat(group_std(outcomes((0, [1.0, 2.0, 3.0])), SHAPE)) == pytest.approx([-0.999999, 0.0, 0.999999], abs=1e-9)


def test_group_mean_and_leave_one_out_by_hand():
    rewards = outcomes((0, [3.0, 0.0, 0.0]))
    assert flat(group_mean(rewards, SHAPE)) == pytest.approx([2.0, -1.0, -1.0])
    # others' means: 0, 3/2, 3/2
    assert flat(leave_one_out(rewards, SHAPE)) == pytest.approx([3.0, -1.5, -1.5])


@pytest.mark.parametrize("name", sorted(GROUP_RELATIVE))
@pytest.mark.parametrize(("reward", "size"), [(0.1, 3), (0.7, 7), (-1.3, 5), (0.0, 2)])
def test_a_group_of_equal_rewards_gets_exactly_zero(name, reward, size):
    assert flat(ESTIMATORS[name](outcomes((0, [reward] * size)), SHAPE)) == [0.0] * size


@pytest.mark.parametrize("name", sorted(GROUP_RELATIVE))
def test_they_follow_the_group_id_whatever_the_place_and_size(name):
    estimator = ESTIMATORS[name]
    given_in = outcomes((9, [0.0, 1.0]), (4, [3.0, 3.0, 0.0]))
    straight = dict(zip([o.name for o in given_in], flat(estimator(given_in, SHAPE)), strict=True))
    mixed = [given_in[i] for i in (3, 0, 4, 2, 1)]
    assert dict(zip([o.name for o in mixed], flat(estimator(mixed, SHAPE)), strict=True)) == straight
    assert flat(estimator(given_in[:2], SHAPE)) == [straight["9/0"], straight["9/1"]]  # others do not matter


@pytest.mark.parametrize("name", sorted(GROUP_RELATIVE))
@given(st.lists(st.integers(-8, 8), min_size=2, max_size=9), st.integers(-50, 50))
def test_they_sum_to_zero_and_do_not_move_with_the_reward_of_all(name, rewards, shift):
    found = flat(ESTIMATORS[name](outcomes((0, [float(r) for r in rewards])), SHAPE))
    moved = flat(ESTIMATORS[name](outcomes((0, [float(r + shift) for r in rewards])), SHAPE))
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    assert moved == pytest.approx(found, abs=1e-9)


def test_a_kl_taken_off_the_reward_counts_before_the_group_is_compared():
    """RLOO's reward (arXiv 2402.14740, equation 2): R − β Σ_t KL_t, the same advantage for every token."""
    given_in = [
        Outcome(0, "0/0", 1.0, 2, token_rewards=np.array([-0.25, -0.25])),  # 0.5 in all
        Outcome(0, "0/1", 0.0, 1, token_rewards=np.array([-0.5])),  # −0.5
    ]
    first, second = leave_one_out(given_in, SHAPE)
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [-1.0])


def test_a_small_kl_is_all_there_is_in_a_group_of_equal_rewards():
    """`group_std` makes of a KL of 5e-4 what it makes of a reward of 1; the others keep its size."""
    penalties = [-5e-4, 0.0, 0.0, -5e-4]
    given_in = [Outcome(0, f"0/{i}", 1.0, 1, token_rewards=np.array([p])) for i, p in enumerate(penalties)]
    # ± 2.5e-4 / (5e-4 · √(1/3) + 1e-6) = ± 0.8630357
    a, b = -0.8630357, 0.8630357
    assert flat(group_std(given_in, SHAPE)) == pytest.approx([a, b, b, a], abs=1e-6)
    assert flat(group_mean(given_in, SHAPE)) == pytest.approx([-2.5e-4, 2.5e-4, 2.5e-4, -2.5e-4])


def test_a_group_of_one_outcome_cannot_be_compared():
    with pytest.raises(AssertionError, match="group 5 has one scored trajectory"):
        group_mean(outcomes((5, [1.0])), SHAPE)


# ---- token by token --------------------------------------------------------------------------------------------------


def test_return_to_go_by_hand():
    penalties = np.array([-0.1, -0.2, -0.3])
    (found,) = return_to_go([Outcome(0, "0/0", 1.0, 3, token_rewards=penalties)], SHAPE)
    assert found == pytest.approx([0.4, 0.5, 0.7])  # 1 − 0.6, 1 − 0.5, 1 − 0.3
    (found,) = return_to_go([Outcome(0, "0/0", 1.0, 3)], AlgorithmSettings(gamma=0.5))
    assert found == pytest.approx([0.25, 0.5, 1.0])
    assert penalties.tolist() == [-0.1, -0.2, -0.3]  # not written into


def test_gae_by_hand():
    values = np.array([0.5, 0.4, 0.8])
    shape = AlgorithmSettings(gamma=0.9, gae_lambda=0.5)
    (found,) = gae([Outcome(0, "0/0", 1.0, 3, values=values)], shape)
    # δ = 0.9·0.4 − 0.5 = −0.14;  0.9·0.8 − 0.4 = 0.32;  1 − 0.8 = 0.2
    # A_2 = 0.2;  A_1 = 0.32 + 0.45·0.2 = 0.41;  A_0 = −0.14 + 0.45·0.41 = 0.0445
    assert found == pytest.approx([0.0445, 0.41, 0.2])


def test_rewards_by_turn_by_hand():
    """An episode of turns of 2 and 1 tokens with rewards 1 and 2, discount ½: returns 2, 2. Another of return −1."""
    given_in = [
        Outcome(0, "0/0", 0.0, 3, values=np.full(3, 0.5), turns=Turns((2, 1), (1.0, 2.0), 0.5)),
        Outcome(0, "0/1", 0.0, 1, values=np.full(1, 0.5), turns=Turns((1,), (-1.0,), 0.5)),
    ]
    assert flat(group_mean(given_in, SHAPE)) == pytest.approx([1.0, 1.0, 1.0, -2.0])  # mean (2 + 2 − 1) / 3
    assert flat(group_std(given_in, SHAPE)) == pytest.approx([3**-0.5] * 3 + [-2 * 3**-0.5], abs=1e-5)  # std √(6/2)
    assert flat(leave_one_out(given_in, SHAPE)) == pytest.approx([3.0, 3.0, 3.0, -3.0])  # other episodes: −1, and 2
    assert flat(return_to_go(given_in, SHAPE)) == [2.0, 2.0, 2.0, -1.0]
    # token rewards 0, 1, 2; γ ½ after each token, and the discount ½ after the turn: 1 + ¼ · 2, then half of it
    assert flat(return_to_go(given_in, AlgorithmSettings(gamma=0.5))) == [0.75, 1.5, 2.0, -1.0]
    assert flat(gae(given_in, AlgorithmSettings(gae_lambda=1.0))) == pytest.approx([1.5, 1.5, 1.5, -1.5])
    # λ 0: r + γ d V' − V with values ½: 0 + ½ − ½, 1 + ¼ − ½, 2 − ½
    assert flat(gae(given_in, AlgorithmSettings(gae_lambda=0.0))) == pytest.approx([0.0, 0.75, 1.5, -1.5])


def test_a_penalty_at_the_last_token_is_discounted_like_the_reward_of_the_last_turn():
    (found,) = return_to_go([Outcome(0, "0/0", -1.0, 2, turns=Turns((1, 1), (1.0, 0.0), 0.5))], SHAPE)
    assert found.tolist() == [0.5, -1.0]


def test_gae_has_the_lambda_of_its_paper_unless_told_otherwise():
    assert (SHAPE.gamma, SHAPE.gae_lambda) == (1.0, 0.95)


def test_gae_with_lambda_1_is_the_return_less_the_value_and_with_0_the_td_error():
    values, penalties = np.array([0.5, 0.4, 0.8]), np.array([-0.1, 0.0, -0.2])
    given_in = [Outcome(0, "0/0", 1.0, 3, token_rewards=penalties, values=values)]
    (monte_carlo,) = gae(given_in, AlgorithmSettings(gamma=1.0, gae_lambda=1.0))
    assert monte_carlo == pytest.approx(return_to_go(given_in, SHAPE)[0] - values)
    (td,) = gae(given_in, AlgorithmSettings(gamma=1.0, gae_lambda=0.0))
    assert td == pytest.approx([-0.1 + 0.4 - 0.5, 0.8 - 0.4, 0.8 - 0.8])


def test_normalized_is_over_all_tokens_of_the_batch():
    # 1, 1, 4: mean 2, variance (1 + 1 + 4) / 3 = 2 (with divisor N − 1 it would be 3)
    first, second = normalized([np.array([1.0, 1.0]), np.array([4.0])])
    assert first == pytest.approx([-0.7071063, -0.7071063], abs=1e-6)
    assert second == pytest.approx([1.4142126], abs=1e-6)
    assert [a.tolist() for a in normalized([np.array([0.3, 0.3]), np.array([0.3])])] == [[0.0, 0.0], [0.0]]
    assert normalized([]) == []


def test_overlong_penalty_is_daps_piecewise_line():
    """20480 = 16384 + 4096 as in the paper: 0 up to 16384, −½ in the middle of the zone, −1 at the end and beyond."""
    found = [overlong_penalty(length, 20480, 0.2, 1.0) for length in (100, 16384, 18432, 20480, 30000)]
    assert found == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    assert overlong_penalty(20480, 20480, 0.0, 1.0) == 0.0
    assert overlong_penalty(18432, 20480, 0.2, 3.0) == pytest.approx(-1.5)


def test_every_estimator_that_settings_allow_is_there():
    for name in ESTIMATORS:
        assert AlgorithmSettings(advantage=name).advantage == name
    with pytest.raises(ValueError, match="'group_std'"):
        AlgorithmSettings(advantage="grpo")
