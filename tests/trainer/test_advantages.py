"""Advantages are relative to the group, and to nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import make_group

from baton.errors import UserError
from baton.trainer.advantages import group_relative


def test_group_relative_advantages_are_rewards_standardised_with_the_unbiased_std():
    # mean 1/2; Σ(R − mean)² = 4 · 1/4 = 1; std = √(1/3) = 0.5773503; A = ± 0.5 / (0.5773503 + 1e-6) = ± 0.8660239
    found = group_relative([make_group(7, [1.0, 0.0, 0.0, 1.0])])
    assert found[7] == pytest.approx((0.8660239, -0.8660239, -0.8660239, 0.8660239), abs=1e-7)
    # mean 2; Σ = 1 + 0 + 1 = 2; std = √(2/2) = 1; A = ∓ 1 / 1.000001
    assert group_relative([make_group(0, [1.0, 2.0, 3.0])])[0] == pytest.approx((-0.999999, 0.0, 0.999999), abs=1e-9)


@pytest.mark.parametrize(("reward", "size"), [(0.1, 3), (0.7, 7), (-1.3, 5), (0.0, 2)])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward, size):
    assert group_relative([make_group(0, [reward] * size)])[0] == (0.0,) * size


def test_advantages_follow_the_group_id_whatever_the_order_and_sizes_of_groups():
    small, large = make_group(9, [0.0, 1.0]), make_group(4, [3.0, 3.0, 0.0])
    forwards, backwards = group_relative([small, large]), group_relative([large, small])
    assert forwards == backwards
    assert len(forwards[9]) == 2
    assert len(forwards[4]) == 3
    assert forwards[9] == group_relative([small])[9]  # other groups do not matter


def test_a_group_of_one_is_refused_by_name():
    with pytest.raises(UserError, match=r"group 5 has 1 member, allowed are 2 or more"):
        group_relative([make_group(5, [1.0])])


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=9), st.integers(-50, 50))
def test_advantages_sum_to_zero_and_do_not_move_with_the_reward_of_all(rewards, shift):
    found = group_relative([make_group(0, [float(r) for r in rewards])])[0]
    moved = group_relative([make_group(0, [float(r + shift) for r in rewards])])[0]
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    assert moved == pytest.approx(found, abs=1e-9)
