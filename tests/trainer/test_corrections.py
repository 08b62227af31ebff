"""What a token sampled by another policy counts for: by hand for a trajectory of two versions, and against NumPy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.corrections import CORRECTIONS, CorrectionShape, second_moment_cutoff, weights
from baton.trainer.losses import LossInputs, LossShape, clipped

pytestmark = pytest.mark.numerics

# A trajectory of two versions and a token that is not trained. The first two tokens are of an older version:
BEHAVIOR = [0.5, 0.1, 0.25, 0.9]
PROXIMAL = [0.25, 0.4, 0.25, 0.1]  # weights ½, 4, 1
CURRENT = [0.2875, 0.36, 0.275, 0.3]  # ratios to proximal 1.15, 0.9, 1.1; to behavior 0.575, 3.6, 1.1
MASK = [True, True, True, False]
SHAPE = CorrectionShape(cap=2.0, floor=0.5, delta=0.4)
OBJECTIVE = LossShape(clip_low=0.2, clip_high=0.2, aggregation="sequence_mean", divisor=1.0)


def trajectory(advantage=1.0, behavior=BEHAVIOR, proximal=PROXIMAL, current=CURRENT, mask=MASK):
    logprobs = torch.tensor([current], dtype=torch.float64).log().requires_grad_()
    others = [torch.tensor([p], dtype=torch.float64).log() for p in (proximal, behavior)]
    return LossInputs(logprobs, *others, torch.full_like(others[0], advantage), torch.tensor([mask]))


def corrected(name, inputs, **shape):
    anchor = CORRECTIONS[name](inputs, replace(SHAPE, **shape))
    loss = clipped(inputs, anchor, OBJECTIVE).loss
    loss.backward()
    return anchor, loss.item(), inputs.logprobs.grad[0].tolist()


@pytest.mark.parametrize(
    ("name", "shape", "expected_weights", "terms", "is_cut"),
    [
        # terms are w_t · min(r_t, clip(r_t, 0.8, 1.2)); the loss is −Σ/3 and the gradient −w_t r_t / 3 where unclipped
        ("none", {}, [1, 1, 1, 0], [1.15, 0.9, 1.1], [0, 0, 0]),
        ("bypass", {}, [1, 1, 1, 0], [0.575, 1.2, 1.1], [0, 0, 0]),  # the second is clipped
        ("token_tis", {}, [0.5, 2, 1, 0], [0.575, 1.8, 1.1], [0, 1, 0]),
        ("token_tis", {"cap": math.inf}, [0.5, 4, 1, 0], [0.575, 3.6, 1.1], [0, 0, 0]),
        ("sequence_tis", {"cap": 3.0}, [2, 2, 2, 0], [2.3, 1.8, 2.2], [0, 0, 0]),  # ½ · 4 · 1
        ("sequence_tis", {"cap": 1.5}, [1.5, 1.5, 1.5, 0], [1.725, 1.35, 1.65], [1, 1, 1]),
        ("icepop", {}, [0.5, 0, 1, 0], [0.575, 0.0, 1.1], [0, 1, 0]),
        ("icepop", {"floor": 0.6, "cap": 5.0}, [0, 4, 1, 0], [0.0, 3.6, 1.1], [1, 0, 0]),
        # squares of ln ½, ln 4, 0 are 0.480453, 1.921812, 0: without the second the mean is 0.240227
        ("second_moment", {"cutoff": 0.5}, [0.5, 0, 1, 0], [0.575, 0.0, 1.1], [0, 1, 0]),
    ],
)
def test_a_trajectory_of_two_versions_by_hand(name, shape, expected_weights, terms, is_cut):
    anchor, loss, gradient = corrected(name, trajectory(), **shape)
    assert anchor.weights[0].tolist() == pytest.approx(expected_weights)
    assert loss == pytest.approx(-sum(terms) / 3)  # a token that a correction drops stays in the divisor
    is_clipped = [name == "bypass" and place == 1 for place in range(3)]
    assert gradient == pytest.approx([0.0 if c else -t / 3 for c, t in zip(is_clipped, terms, strict=True)] + [0.0])
    assert anchor.is_cut[0].tolist() == [*map(bool, is_cut), False]
    assert not anchor.weights.requires_grad


def test_opsm_drops_a_bad_trajectory_that_the_policy_has_left_behind():
    # drift: (ln (0.5 / 0.25) + ln (0.5 / 0.4)) / 2 = (0.693147 + 0.223144) / 2 = 0.458145
    left = {"behavior": [0.5, 0.5], "proximal": [0.25, 0.4], "current": [0.25, 0.4], "mask": [True, True]}
    assert corrected("opsm", trajectory(-1.0, **left))[1:] == (0.0, [0.0, 0.0])
    anchor, loss, gradient = corrected("opsm", trajectory(-1.0, **left), delta=0.46)
    assert (anchor.weights[0].tolist(), anchor.is_cut.any().item()) == ([1.0, 1.0], False)
    assert (loss, gradient) == (pytest.approx(1.0), pytest.approx([0.5, 0.5]))
    assert corrected("opsm", trajectory(1.0, **left))[1] == pytest.approx(-1.0)  # a good one is kept however far
    came = trajectory(-1.0)  # and one that has become likelier, too: mean of ln 0.575, ln 3.6, ln 1.1 is 0.274
    assert corrected("opsm", came)[0].weights[0].tolist() == [1, 1, 1, 0]


def test_the_second_moments_cutoff_is_the_largest_square_that_may_stay():
    apart = [torch.tensor([0.1, -0.3]), torch.tensor([[0.2], [-0.6]])]  # squares 0.01, 0.09, 0.04, 0.36
    # ascending means: 0.01, 0.025, 0.046667, 0.125
    assert second_moment_cutoff(apart, 0.2) == pytest.approx(0.36)
    assert second_moment_cutoff(apart, 0.04) == pytest.approx(0.04)
    assert second_moment_cutoff(apart, 0.005) < 0.0  # nothing may stay
    assert second_moment_cutoff([], 0.04) == math.inf
    assert second_moment_cutoff([torch.zeros(3)], 0.04) == 0.0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_without_a_gap_every_correction_is_none(name):
    """Behavior = proximal, and the drift within opsm's bound: the update of the uncorrected objective."""
    plain = corrected("none", trajectory(-1.0, behavior=PROXIMAL))
    same = corrected(name, trajectory(-1.0, behavior=PROXIMAL), cutoff=0.0)
    assert same[1:] == (pytest.approx(plain[1]), pytest.approx(plain[2]))
    assert not same[0].is_cut.any()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_a_masked_token_holds_is_of_no_consequence(name):
    wild = trajectory()
    for tensor in (wild.logprobs.data, wild.proximal_logprobs, wild.behavior_logprobs):
        tensor[0, 3] = math.nan
    _, loss, gradient = corrected(name, wild, cutoff=0.5)
    _, expected, clean = corrected(name, trajectory(), cutoff=0.5)
    assert (loss, gradient) == (expected, clean)
    assert gradient[3] == 0.0


def test_no_weight_is_infinite_whatever_was_sampled():
    inputs = trajectory(behavior=[1e-300, 1.0, 1.0, 1.0], proximal=[1.0, 1e-300, 1.0, 1.0])
    assert weights(inputs)[0].tolist() == pytest.approx([math.exp(20), math.exp(-20), 1, 1])
    anchor = CORRECTIONS["token_tis"](inputs, replace(SHAPE, cap=math.inf))
    assert torch.isfinite(anchor.weights).all()


# ---- against NumPy, in float64, trajectory by trajectory -------------------------------------------------------------


def loss_by_numpy(name, logprobs, proximal, behavior, advantages, mask, at):
    """−1/N Σ_i 1/T_i Σ_t w min(r A, clip(r) A); `at` is where weights that depend on the policy are taken."""
    total = 0.0
    for row in range(len(logprobs)):
        kept = mask[row]
        if not kept.any():
            continue
        apart = (proximal - behavior)[row][kept]
        w = {
            "none": np.ones_like(apart),
            "bypass": np.ones_like(apart),
            "token_tis": np.minimum(np.exp(apart), 2.0),
            "sequence_tis": np.full_like(apart, min(np.exp(apart.sum()), 2.0)),
            "icepop": np.where((np.exp(apart) >= 0.5) & (np.exp(apart) <= 2.0), np.exp(apart), 0.0),
            "opsm": np.full_like(apart, not (advantages[row] < 0 and (behavior - at)[row][kept].mean() > 0.05)),
            "second_moment": np.where(apart**2 <= 0.3, np.exp(apart), 0.0),
        }[name]
        ratio = np.exp((logprobs - (behavior if name == "bypass" else proximal))[row][kept])
        total += np.mean(w * np.minimum(ratio * advantages[row], np.clip(ratio, 0.8, 1.2) * advantages[row]))
    return -total / len(logprobs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_value_and_gradient_agree_with_numpy_and_finite_differences(name, seed):
    rng = np.random.default_rng(seed)
    behavior = rng.normal(-2.0, 1.0, (4, 6))
    proximal = behavior + rng.normal(0.0, 0.5, (4, 6))
    logprobs = proximal + rng.normal(0.0, 0.2, (4, 6))
    advantages, mask = rng.normal(size=4), rng.random((4, 6)) < 0.7
    mask[3] = False
    leaf = torch.tensor(logprobs, requires_grad=True)
    by_token = torch.tensor(advantages)[:, None].expand_as(leaf)
    inputs = LossInputs(leaf, torch.tensor(proximal), torch.tensor(behavior), by_token, torch.tensor(mask))
    anchor = CORRECTIONS[name](inputs, CorrectionShape(cap=2.0, floor=0.5, delta=0.05, cutoff=0.3))
    loss = clipped(inputs, anchor, replace(OBJECTIVE, divisor=4.0)).loss
    loss.backward()
    fixed = (proximal, behavior, advantages, mask, logprobs)
    assert loss.item() == pytest.approx(loss_by_numpy(name, logprobs, *fixed), abs=1e-12)
    for place in np.ndindex(4, 6):
        bump = np.zeros((4, 6))
        bump[place] = 1e-6
        slope = (loss_by_numpy(name, logprobs + bump, *fixed) - loss_by_numpy(name, logprobs - bump, *fixed)) / 2e-6
        assert leaf.grad[place].item() == pytest.approx(slope, abs=1e-7)


def test_every_correction_that_settings_allow_is_there():
    for name in CORRECTIONS:
        assert AlgorithmSettings(correction=name).correction == name
    with pytest.raises(ValueError, match="'token_tis'"):
        AlgorithmSettings(correction="tis")


# ---- exactly on a bound ----------------------------------------------------------------------------------------------


def at_a_bound(behavior, proximal, *, advantage=1.0, current=None):
    """Log-probabilities as they are given; those of these tests are sums of powers of two, and so exact."""
    given = torch.tensor([proximal], dtype=torch.float64), torch.tensor([behavior], dtype=torch.float64)
    logprobs = (given[0] if current is None else torch.tensor([current], dtype=torch.float64)).clone().requires_grad_()
    return LossInputs(logprobs, *given, torch.full_like(given[0], advantage), torch.ones(given[0].shape) > 0)


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "icepop"])
def test_a_weight_of_exactly_the_cap_or_the_floor_is_kept_and_not_counted_as_cut(name):
    equal = at_a_bound([-1.0, -2.0], [-1.0, -2.0])  # all weights are exactly 1
    for shape in ({"cap": 1.0, "floor": 0.5}, {"cap": 2.0, "floor": 1.0}):
        anchor = CORRECTIONS[name](equal, replace(SHAPE, **shape))
        assert anchor.weights.tolist() == [[1.0, 1.0]]
        assert not anchor.is_cut.any()


@pytest.mark.parametrize(("delta", "is_dropped"), [(0.5, False), (0.4999, True)])
def test_opsm_drops_what_drifted_further_than_delta_and_not_what_drifted_as_far(delta, is_dropped):
    # drift: ((−1 + 1.25) + (−1 + 1.75)) / 2 = 0.5
    left = at_a_bound([-1.0, -1.0], [-1.0, -1.0], advantage=-1.0, current=[-1.25, -1.75])
    anchor = CORRECTIONS["opsm"](left, replace(SHAPE, delta=delta))
    assert anchor.is_cut.tolist() == [[is_dropped] * 2]
    assert anchor.weights.tolist() == [[float(not is_dropped)] * 2]


def test_opsm_keeps_a_trajectory_whose_advantages_sum_to_zero():
    left = at_a_bound([-1.0, -1.0], [-1.0, -1.0], current=[-3.0, -3.0])
    left = replace(left, advantages=torch.tensor([[-1.0, 1.0]], dtype=torch.float64))
    assert not CORRECTIONS["opsm"](left, SHAPE).is_cut.any()


def test_opsm_counts_trained_tokens_alone():
    """Of three tokens one is masked: the drift is 1 / 2, not 1 / 3."""
    left = at_a_bound([-1.0, -1.0, -9.0], [-1.0, -1.0, -1.0], advantage=-1.0, current=[-1.5, -1.5, -1.0])
    left = replace(left, mask=torch.tensor([[True, True, False]]))
    assert CORRECTIONS["opsm"](left, replace(SHAPE, delta=0.4)).is_cut.tolist() == [[True, True, False]]


def test_opsm_drops_a_single_token_of_a_small_negative_advantage_and_never_a_good_one():
    one = at_a_bound([-1.0, -1.0], [-1.0, -1.0], advantage=-0.25, current=[-1.5, -1.5])  # drift 0.5 over one token
    one = replace(one, mask=torch.tensor([[True, False]]))
    assert CORRECTIONS["opsm"](one, SHAPE).is_cut.tolist() == [[True, False]]
    good = replace(one, advantages=-one.advantages)
    assert not CORRECTIONS["opsm"](good, SHAPE).is_cut.any()


def test_the_second_moment_may_be_exactly_the_limit_and_a_square_exactly_the_cutoff():
    assert second_moment_cutoff([torch.tensor([0.5, 1.0])], 0.625) == 1.0  # (0.25 + 1) / 2
    assert second_moment_cutoff([torch.tensor([0.5, 1.0])], 0.6249) == 0.25
    assert second_moment_cutoff([torch.tensor([0.5])], 0.2499) == -1.0
    inputs = at_a_bound([-1.0, -1.0], [-1.5, -2.0])  # squares 0.25 and 1
    assert CORRECTIONS["second_moment"](inputs, replace(SHAPE, cutoff=0.25)).is_cut.tolist() == [[False, True]]


@pytest.mark.parametrize("apart", [19.0, 20.0, 21.0, -19.0, -20.0, -21.0])
def test_log_weights_are_held_within_20_token_by_token_and_as_a_sum(apart):
    held = math.exp(min(20.0, max(-20.0, apart)))
    assert weights(at_a_bound([0.0], [apart]))[0].tolist() == pytest.approx([held], rel=1e-12)
    summed = CORRECTIONS["sequence_tis"](at_a_bound([0.0, 0.0], [apart / 2] * 2), replace(SHAPE, cap=math.inf))
    assert summed.weights[0].tolist() == pytest.approx([held] * 2, rel=1e-12)
