"""The GRPO objective: its value and gradient against numbers worked by hand and against NumPy in float64."""

import numpy as np
import pytest
import torch

from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.losses import OBJECTIVES, Anchor, LossInputs, LossShape, divisor
from baton.trainer.losses import clipped as objective

pytestmark = pytest.mark.numerics

# Row 0, A = +1, ratios 1.1, 1.5, 0.9: min with clip to [0.8, 1.2] → 1.1, 1.2 (clipped), 0.9; mean 3.2 / 3
# Row 1, A = −2, ratios 0.5, 1.5, one masked: min(−1, −1.6) = −1.6 (clipped), min(−3, −2.4) = −3; mean −4.6 / 2
RATIOS = [[1.1, 1.5, 0.9], [0.5, 1.5, 7.0]]
MASK = [[True, True, True], [True, True, False]]
ADVANTAGES = [1.0, -2.0]


def inputs_of(ratios, mask, advantages):
    proximal = torch.linspace(-3.0, -1.0, len(ratios) * len(ratios[0])).view(len(ratios), -1)
    logprobs = (proximal + torch.tensor(ratios).log()).requires_grad_()
    by_token = torch.tensor(advantages)[:, None].expand_as(proximal)
    return LossInputs(logprobs, proximal, torch.zeros_like(proximal), by_token, torch.tensor(mask))


def grpo(inputs, shape):
    """Without a correction: every weight is 1."""
    mask = inputs.mask
    return objective(inputs, Anchor(inputs.proximal_logprobs, mask.to(inputs.logprobs.dtype), ~mask & mask), shape)


def shape_of(aggregation, divided_by, clip_low=0.2, clip_high=0.2):
    return LossShape(clip_low=clip_low, clip_high=clip_high, aggregation=aggregation, divisor=divided_by)


def test_sequence_mean_by_hand():
    inputs = inputs_of(RATIOS, MASK, ADVANTAGES)
    result = grpo(inputs, shape_of("sequence_mean", divisor(2, 5, "sequence_mean", 0)))
    # loss = −(3.2/3 − 2.3) / 2 = 0.6166667
    assert result.loss.item() == pytest.approx(0.6166667, abs=1e-6)
    result.loss.backward()
    # ∂loss/∂logprob = −A r / (2 T_i) where unclipped: −1.1/6, 0, −0.9/6;  0, −(−2)(1.5)/4 = 0.75, masked 0
    expected = torch.tensor([[-0.1833333, 0.0, -0.15], [0.0, 0.75, 0.0]])
    torch.testing.assert_close(inputs.logprobs.grad, expected, atol=1e-6, rtol=0)
    assert inputs.logprobs.grad[1, 2].item() == 0.0
    assert result.is_clipped.tolist() == [[False, True, False], [True, False, False]]


def test_token_mean_by_hand():
    inputs = inputs_of(RATIOS, MASK, ADVANTAGES)
    result = grpo(inputs, shape_of("token_mean", divisor(2, 5, "token_mean", 0)))
    # loss = −(3.2 − 4.6) / 5 = 0.28, gradient −A r / 5 where unclipped
    assert result.loss.item() == pytest.approx(0.28, abs=1e-6)
    result.loss.backward()
    expected = torch.tensor([[-0.22, 0.0, -0.18], [0.0, 0.6, 0.0]])
    torch.testing.assert_close(inputs.logprobs.grad, expected, atol=1e-6, rtol=0)


def test_clip_higher_lets_good_tokens_grow_further():
    inputs = inputs_of([[1.25, 1.25]], [[True, True]], [1.0])
    assert grpo(inputs, shape_of("token_mean", 2.0)).is_clipped.all()
    assert not grpo(inputs, shape_of("token_mean", 2.0, clip_high=0.28)).is_clipped.any()
    falling = inputs_of([[0.75]], [[True]], [-1.0])
    assert grpo(falling, shape_of("token_mean", 1.0, clip_high=0.28)).is_clipped.all()  # the low side stays at 0.2


def by_numpy(logprobs, proximal, advantages, mask, aggregation):
    """The same objective, trajectory by trajectory, in float64."""
    total = 0.0
    for row in range(len(logprobs)):
        kept = mask[row]
        ratio = np.exp(logprobs[row][kept] - proximal[row][kept])
        terms = np.minimum(ratio * advantages[row], np.clip(ratio, 0.8, 1.2) * advantages[row])
        if kept.any():
            total += terms.mean() if aggregation == "sequence_mean" else terms.sum()
    return -total / (len(logprobs) if aggregation == "sequence_mean" else mask.sum())


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_agree_with_numpy_and_finite_differences(aggregation, seed):
    rng = np.random.default_rng(seed)
    proximal = rng.normal(-2.0, 1.0, (4, 6))
    logprobs = proximal + rng.normal(0.0, 0.3, (4, 6))
    advantages, mask = rng.normal(size=4), rng.random((4, 6)) < 0.7
    mask[3] = False
    leaf = torch.tensor(logprobs, requires_grad=True)
    by_token = torch.tensor(advantages)[:, None].expand_as(leaf)
    inputs = LossInputs(leaf, torch.tensor(proximal), leaf.detach(), by_token, torch.tensor(mask))
    loss = grpo(inputs, shape_of(aggregation, divisor(4, int(mask.sum()), aggregation, 0))).loss
    loss.backward()
    assert loss.item() == pytest.approx(by_numpy(logprobs, proximal, advantages, mask, aggregation), abs=1e-12)
    for place in np.ndindex(4, 6):
        bump = np.zeros((4, 6))
        bump[place] = 1e-6
        up = by_numpy(logprobs + bump, proximal, advantages, mask, aggregation)
        down = by_numpy(logprobs - bump, proximal, advantages, mask, aggregation)
        assert leaf.grad[place].item() == pytest.approx((up - down) / 2e-6, abs=1e-7)


def test_a_fully_masked_trajectory_stays_in_the_divisor_of_sequence_mean():
    whole = inputs_of([[1.1, 0.9], [1.3, 0.7]], [[True, True], [False, False]], [1.0, 1.0])
    alone = inputs_of([[1.1, 0.9]], [[True, True]], [1.0])
    with_masked = grpo(whole, shape_of("sequence_mean", divisor(2, 2, "sequence_mean", 0))).loss
    without = grpo(alone, shape_of("sequence_mean", divisor(1, 2, "sequence_mean", 0))).loss
    assert with_masked.item() == pytest.approx(without.item() / 2)
    # … while per token there is nothing of it to count
    assert divisor(2, 2, "token_mean", 0) == divisor(1, 2, "token_mean", 0) == 2.0


def test_pieces_add_up_to_the_whole():
    whole = inputs_of(RATIOS, MASK, ADVANTAGES)
    shape = shape_of("sequence_mean", 2.0)
    expected = grpo(whole, shape).loss
    pieces = [
        LossInputs(
            whole.logprobs[i : i + 1],
            whole.proximal_logprobs[i : i + 1],
            whole.behavior_logprobs[i : i + 1],
            whole.advantages[i : i + 1],
            whole.mask[i : i + 1],
        )
        for i in range(2)
    ]
    assert sum(grpo(piece, shape).loss.item() for piece in pieces) == pytest.approx(expected.item(), abs=1e-7)


def test_a_masked_token_gives_exactly_zero_however_wild_its_ratio():
    inputs = inputs_of([[1.0, 1.0]], [[True, False]], [1.0])
    wild = inputs.logprobs.detach() + torch.tensor([[0.0, 200.0]])  # exp(200) is infinite in float32
    wild.requires_grad_()
    result = grpo(
        LossInputs(wild, inputs.proximal_logprobs, inputs.behavior_logprobs, inputs.advantages, inputs.mask),
        shape_of("sequence_mean", 1.0),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-1.0)
    assert wild.grad.tolist() == [[pytest.approx(-1.0), 0.0]]


def test_every_objective_that_settings_allow_is_there():
    for name in OBJECTIVES:
        assert AlgorithmSettings(objective=name).objective == name
