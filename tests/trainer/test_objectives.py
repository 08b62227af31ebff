"""Every objective by hand and against NumPy, value and gradient; the identities between them; the KL estimators."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.trainer import losses
from baton.trainer.corrections import CORRECTIONS, CorrectionShape
from baton.trainer.losses import OBJECTIVES, Anchor, LossInputs, LossShape, divisor, kl

pytestmark = pytest.mark.numerics

AGGREGATIONS = ["sequence_mean", "token_mean", "sequence_sum", "length_constant"]
LONGEST = 10
CORRECTION = CorrectionShape(cap=2.0, floor=0.5, delta=0.1)

# Two trajectories. Weights before proximal are ½ and 1½ on two tokens of the first, which an older version wrote.
#   row 0, A = +1: ratios 1.1, 1.5, 0.9, weights ½, 1½, 1        row 1, A = −2: ratios 0.5, 1.5, one token masked
RATIOS = [[1.1, 1.5, 0.9], [0.5, 1.5, 7.0]]
WEIGHTS = [[0.5, 1.5, 1.0], [1.0, 1.0, 0.0]]
MASK = [[True, True, True], [True, True, False]]
ADVANTAGES = [[1.0] * 3, [-2.0] * 3]


def case(ratios=RATIOS, weights=WEIGHTS, mask=MASK, advantages=ADVANTAGES):
    ratio = torch.tensor(ratios, dtype=torch.float64)
    anchored = torch.linspace(-3.0, -1.0, ratio.numel(), dtype=torch.float64).view_as(ratio)
    leaf = (anchored + ratio.log()).requires_grad_()
    kept = torch.tensor(mask)
    inputs = LossInputs(leaf, anchored, anchored, torch.tensor(advantages, dtype=torch.float64), kept)
    return inputs, Anchor(anchored, torch.tensor(weights, dtype=torch.float64), ~kept & kept)


def shape_of(aggregation="token_mean", low=0.2, high=0.2, num_rows=2, num_tokens=5):
    return LossShape(low, high, aggregation, divisor(num_rows, num_tokens, aggregation, LONGEST))


def run(name, shape, **changes):
    inputs, anchor = case(**changes)
    found = OBJECTIVES[name](inputs, anchor, shape)
    found.loss.backward()
    return found, found.loss.item(), inputs.logprobs.grad.numpy()


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_clipped_by_hand():
    found, loss, gradient = run("clipped", shape_of())
    # w min(rA, clip(r)A): ½·1.1, 1½·1.2 (clipped), 0.9;  −1.6 (clipped: min(−1, −1.6)), −3;  Σ = 3.25 − 4.6 = −1.35
    assert loss == pytest.approx(1.35 / 5)
    # −w r A / 5 where unclipped
    assert gradient == pytest.approx(np.array([[-0.55, 0.0, -0.9], [0.0, 3.0, 0.0]]) / 5)
    assert found.is_clipped.tolist() == [[False, True, False], [True, False, False]]


def test_policy_gradient_by_hand():
    found, loss, gradient = run("policy_gradient", shape_of("sequence_sum"))
    # w r A: 0.55 + 2.25 + 0.9 − 1 − 3 = −0.3, over two trajectories
    assert loss == pytest.approx(0.15)
    assert gradient == pytest.approx(np.array([[-0.55, -2.25, -0.9], [1.0, 3.0, 0.0]]) / 2)
    assert not found.is_clipped.any()


def test_cispo_by_hand():
    found, loss, gradient = run("cispo", shape_of(low=1.0, high=0.3))
    # sg(min(r, 1.3)) w A log π: every token keeps a gradient, and it is the weight alone that is bounded
    weight = np.array([[0.5 * 1.1, 1.5 * 1.3, 0.9], [0.5 * -2, 1.3 * -2, 0.0]])
    inputs, _ = case()
    logprobs = np.where(MASK, inputs.logprobs.detach().numpy(), 0.0)
    assert loss == pytest.approx(-(weight * logprobs).sum() / 5)
    assert gradient == pytest.approx(-weight / 5)
    assert found.is_clipped.tolist() == [[False, True, False], [False, True, False]]


def test_gspo_by_hand():
    ratios = [[1.2, 1.0, 1.2], [0.9, 1.6, 7.0]]
    # s_0 = 1.44^(1/3) = 1.1292432 (free below 1.2), s_1 = 1.44^(1/2) = 1.2 over the two trained tokens alone
    ones = [[1.0] * 3, [1.0, 1.0, 0.0]]
    found, loss, gradient = run("gspo", shape_of("sequence_mean", high=0.3), ratios=ratios, weights=ones)
    s_0, s_1 = 1.44 ** (1 / 3), 1.2
    assert loss == pytest.approx(-(s_0 - 2 * s_1) / 2)
    # ∂s_i/∂logprob_t = s_i / T_i
    expected = [[-s_0 / 6] * 3, [s_1 / 2, s_1 / 2, 0.0]]
    assert gradient == pytest.approx(np.array(expected))
    assert found.ratio[0].tolist() == pytest.approx([s_0] * 3)
    held, loss, gradient = run("gspo", shape_of("sequence_mean", high=0.1), ratios=ratios, weights=ones)
    assert loss == pytest.approx(-(1.1 - 2 * s_1) / 2)  # the first is clipped whole, the bad one never from above
    assert gradient[0] == pytest.approx(np.zeros(3))
    assert held.is_clipped.tolist() == [[True] * 3, [False] * 3]


def test_gspo_with_mixed_versions_has_its_weights_by_token_and_its_ratio_over_the_trained_tokens():
    """A prefix too old to be trained is masked: neither its ratio 7 nor its weight is in anything."""
    mask, ratios = [[False, True, True]], [[7.0, 1.21, 1.0]]
    _, loss, gradient = run(
        "gspo",
        shape_of("sequence_mean", high=0.3, num_rows=1),
        ratios=ratios,
        mask=mask,
        weights=[[0.0, 0.5, 2.0]],
        advantages=[[1.0] * 3],
    )
    # s = 1.21^(1/2) = 1.1; J = mean of w_t s = 1.25 · 1.1; ∂/∂logprob_t = w_t s / 2
    assert loss == pytest.approx(-1.375)
    assert gradient == pytest.approx(np.array([[0.0, -0.275, -1.1]]))


# Weights π_proximal / π_behavior ½, 4, 1: `icepop` within [½, 2] and `second_moment` with cutoff ½ drop the second.
DROPPING = {"icepop": {}, "second_moment": {"cutoff": 0.5}}


@pytest.mark.parametrize("correction", DROPPING)
def test_a_token_that_a_correction_drops_leaves_gspos_ratio_and_gradient(correction):
    found = []
    for dropped_ratio in (7.0, 1e-3):
        ratio = torch.tensor([[1.21, dropped_ratio, 1.0]], dtype=torch.float64)
        proximal = torch.tensor([[0.25, 0.4, 0.25]], dtype=torch.float64).log()
        behavior = torch.tensor([[0.5, 0.1, 0.25]], dtype=torch.float64).log()
        leaf = (proximal + ratio.log()).requires_grad_()
        inputs = LossInputs(leaf, proximal, behavior, torch.ones_like(ratio), torch.ones(1, 3, dtype=torch.bool))
        anchor = CORRECTIONS[correction](inputs, replace(CORRECTION, **DROPPING[correction]))
        result = OBJECTIVES["gspo"](inputs, anchor, shape_of("sequence_mean", high=0.3, num_rows=1))
        result.loss.backward()
        found.append((result.loss.item(), leaf.grad[0].tolist(), result.is_clipped.any().item()))
    # s = (1.21 · 1)^(1/2) = 1.1; J = (½ · 1.1 + 0 + 1 · 1.1) / 3 = 0.55; the gradient of the loss is −w_t s / 3
    assert found[0] == (pytest.approx(-0.55), pytest.approx([-0.55 / 3, 0.0, -1.1 / 3]), False)
    assert found[1] == found[0]  # whatever the dropped token's own ratio


def test_a_trajectory_whose_tokens_are_all_dropped_is_flat_under_every_objective():
    for name in OBJECTIVES:
        found, loss, gradient = run(name, shape_of(), weights=[[0.0] * 3] * 2)
        assert loss == 0.0
        assert not gradient.any()
        assert not (name == "gspo" and found.is_clipped.any())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_dropped_token_changes_no_other_tokens_gradient_under_any_objective(name):
    weights = [[0.5, 0.0, 1.0], [1.0, 1.0, 0.0]]
    given = [run(name, shape_of(), ratios=[[1.1, r, 0.9], [0.5, 1.5, 7.0]], weights=weights) for r in (1.0, 1e-3, 50.0)]
    for _, _, gradient in given:
        assert gradient[0, 1] == 0.0
        assert np.array_equal(gradient, given[0][2])


# ---- against NumPy ---------------------------------------------------------------------------------------------------


def by_numpy(name, logprobs, anchored, weights, advantages, mask, aggregation, at):
    """−J trajectory by trajectory in float64; `at` is where what stands behind a stop-gradient is taken."""
    total = 0.0
    for row, kept in enumerate(mask):
        if not kept.any():
            continue
        apart, fixed = (logprobs - anchored)[row][kept], (at - anchored)[row][kept]
        a, w = advantages[row][kept], weights[row][kept]
        ratio = np.exp(apart)
        if name == "gspo":  # GSPO-token: the mean is behind a stop-gradient
            ratio = np.exp(fixed[w > 0].mean() + apart - fixed)
        if name in ("clipped", "gspo"):
            terms = w * np.minimum(ratio * a, np.clip(ratio, 0.8, 1.3) * a)
        elif name == "cispo":
            terms = w * np.clip(np.exp(fixed), 0.8, 1.3) * a * logprobs[row][kept]
        else:
            terms = w * ratio * a
        total += terms.mean() if aggregation == "sequence_mean" else terms.sum()
    return -total / {"token_mean": mask.sum(), "length_constant": len(mask) * LONGEST}.get(aggregation, len(mask))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_agree_with_numpy_and_finite_differences(name, aggregation, seed):
    rng = np.random.default_rng(seed)
    anchored = rng.normal(-2.0, 1.0, (4, 5))
    logprobs = anchored + rng.normal(0.0, 0.3, (4, 5))
    weights, mask = rng.uniform(0.0, 2.0, (4, 5)), rng.random((4, 5)) < 0.7
    weights[:, 1] = np.where(weights[:, 0] > 0.3, 0.0, weights[:, 1])  # tokens that a correction drops
    advantages = rng.normal(size=(4, 1 if name == "gspo" else 5)) + np.zeros((4, 5))
    mask[3] = False
    leaf = torch.tensor(logprobs, requires_grad=True)
    kept = torch.tensor(mask)
    inputs = LossInputs(leaf, torch.tensor(anchored), torch.tensor(anchored), torch.tensor(advantages), kept)
    anchor = Anchor(torch.tensor(anchored), torch.where(kept, torch.tensor(weights), 0.0), ~kept & kept)
    shape = shape_of(aggregation, high=0.3, num_rows=4, num_tokens=int(mask.sum()))
    loss = OBJECTIVES[name](inputs, anchor, shape).loss
    loss.backward()
    rest = (anchored, weights, advantages, mask, aggregation, logprobs)
    assert loss.item() == pytest.approx(by_numpy(name, logprobs, *rest), abs=1e-12)
    for place in np.ndindex(4, 5):
        bump = np.zeros((4, 5))
        bump[place] = 1e-6
        slope = (by_numpy(name, logprobs + bump, *rest) - by_numpy(name, logprobs - bump, *rest)) / 2e-6
        assert leaf.grad[place].item() == pytest.approx(slope, abs=1e-7)
        if not mask[place]:
            assert leaf.grad[place].item() == 0.0  # exactly


# ---- identities ------------------------------------------------------------------------------------------------------


def test_decoupled_ppo_is_dapo_where_nothing_is_stale_and_the_clip_is_symmetric():
    """behavior = proximal: the weights are 1, and decoupled PPO is the clipped token mean without clip-higher."""
    inputs, _ = case()
    values = {}
    for correction in ("token_tis", "none"):
        anchor = CORRECTIONS[correction](inputs, CORRECTION)
        loss = OBJECTIVES["clipped"](inputs, anchor, shape_of("token_mean")).loss
        values[correction] = loss.item(), torch.autograd.grad(loss, inputs.logprobs)[0].tolist()
    assert values["token_tis"] == values["none"]


def test_gspo_is_grpo_at_length_1():
    ratios, ones = [[1.1], [1.5], [0.5]], [[1.0]] * 3
    given = {"ratios": ratios, "weights": ones, "mask": [[True]] * 3, "advantages": [[1.0], [1.0], [-2.0]]}
    shape = shape_of("sequence_mean", num_rows=3)
    a, b = run("gspo", shape, **given), run("clipped", shape, **given)
    assert a[1] == pytest.approx(b[1], abs=1e-15)
    assert a[2] == pytest.approx(b[2], abs=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_at_ratio_1_every_objective_has_the_gradient_of_reinforce(aggregation):
    """Each token by its own weight, also GSPO's."""
    expected = None
    for name in OBJECTIVES:
        _, _, gradient = run(name, shape_of(aggregation), ratios=[[1.0] * 3] * 2, weights=WEIGHTS)
        expected = gradient if expected is None else expected
        assert gradient == pytest.approx(expected), name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_at_advantage_0_every_objective_is_flat(name):
    """Which is why such rows are run without gradient."""
    _, loss, gradient = run(name, shape_of(), advantages=[[0.0] * 3] * 2)
    assert loss == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_whether_a_fully_masked_trajectory_stays_in_the_divisor(name, aggregation):
    """It does wherever trajectories are counted; per token there is nothing of it to count."""
    _, alone, gradient = run(
        name,
        shape_of(aggregation, num_rows=1, num_tokens=3),
        ratios=RATIOS[:1],
        weights=WEIGHTS[:1],
        mask=MASK[:1],
        advantages=ADVANTAGES[:1],
    )
    # the same tokens at the same log-probabilities: `case` lays them from −3 on, so only half as far apart here
    inputs, anchor = case(ratios=RATIOS[:1], weights=WEIGHTS[:1], mask=MASK[:1], advantages=ADVANTAGES[:1])
    twice = [torch.cat((t, t)) for t in (inputs.logprobs.detach(), inputs.proximal_logprobs, inputs.advantages)]
    leaf, kept = twice[0].requires_grad_(), torch.tensor([MASK[0], [False] * 3])
    both = LossInputs(leaf, twice[1], twice[1], twice[2], kept)
    weights = torch.where(kept, torch.cat((anchor.weights, anchor.weights)), 0.0)
    shape = shape_of(aggregation, num_rows=2, num_tokens=3)
    loss = OBJECTIVES[name](both, Anchor(twice[1], weights, ~kept & kept), shape).loss
    loss.backward()
    factor = 1.0 if aggregation == "token_mean" else 0.5
    assert loss.item() == pytest.approx(alone * factor)
    assert leaf.grad.numpy() == pytest.approx(np.concatenate((gradient * factor, np.zeros((1, 3)))))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_pieces_add_up_to_the_whole(name, aggregation):
    inputs, anchor = case()
    shape = shape_of(aggregation)
    whole = OBJECTIVES[name](inputs, anchor, shape).loss.item()
    total = 0.0
    for row in (slice(0, 1), slice(1, 2)):
        piece = LossInputs(
            inputs.logprobs[row],
            inputs.proximal_logprobs[row],
            inputs.behavior_logprobs[row],
            inputs.advantages[row],
            inputs.mask[row],
        )
        total += OBJECTIVES[name](
            piece, Anchor(anchor.logprobs[row], anchor.weights[row], anchor.is_cut[row]), shape
        ).loss.item()
    assert total == pytest.approx(whole, abs=1e-12)


def test_the_divisors():
    assert [divisor(4, 30, name, 100) for name in AGGREGATIONS] == [4.0, 30.0, 4.0, 400.0]
    assert [divisor(0, 0, name, 100) for name in AGGREGATIONS] == [1.0, 1.0, 1.0, 100.0]  # nothing to divide


def test_every_objective_ignores_what_a_masked_token_holds():
    for name in OBJECTIVES:
        inputs, anchor = case()
        with torch.no_grad():
            for tensor in (inputs.logprobs, inputs.proximal_logprobs):
                tensor[1, 2] = math.nan
        inputs = replace(inputs, behavior_logprobs=inputs.proximal_logprobs)
        loss = OBJECTIVES[name](inputs, replace(anchor, logprobs=inputs.proximal_logprobs), shape_of()).loss
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
        _, expected, clean = run(name, shape_of())
        assert loss.item() == pytest.approx(expected)
        assert gradient.numpy() == pytest.approx(clean)
        assert gradient[1, 2].item() == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_policy_that_has_run_away_gives_finite_numbers_in_float32(name):
    """Ratios of e^±200 would be infinite and zero."""
    leaf = torch.tensor([[-1.0, -201.0, -1.0]], requires_grad=True)
    proximal = torch.tensor([[-201.0, -1.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    for advantage in (1.0, -1.0):
        inputs = LossInputs(leaf, proximal, proximal, torch.full((1, 3), advantage), mask)
        loss = OBJECTIVES[name](inputs, Anchor(proximal, mask.float(), ~mask), shape_of(num_tokens=3)).loss
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


# ---- KL --------------------------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand_value_and_gradient():
    # x = log π − log π_ref = ln 2 and −ln 2; the third is masked
    logprobs = torch.tensor([[-1.0, -2.0, -9.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.0 - math.log(2), -2.0 + math.log(2), math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    x = 0.6931472
    expected = {
        "k1": ([x, -x], [1.0, 1.0]),
        "k2": ([0.2402265, 0.2402265], [x, -x]),  # x²/2, and x
        "k3": ([0.5 - 1 + x, 2 - 1 - x], [0.5, -1.0]),  # e^−x − 1 + x, and 1 − e^−x
    }
    for name, (values, slopes) in expected.items():
        found = kl(logprobs, reference, mask, name).nats
        assert found[0].tolist() == pytest.approx([*values, 0.0], abs=1e-7)
        (gradient,) = torch.autograd.grad(found.sum(), logprobs)
        assert gradient[0].tolist() == pytest.approx([*slopes, 0.0], abs=1e-7)


@pytest.mark.parametrize(("name", "tolerance"), [("k1", 1e-12), ("k3", 1e-12), ("k2", 0.02)])
def test_k1_and_k3_are_unbiased_and_k2_nearly(name, tolerance):
    """The mean over the policy's own distribution is the KL divergence itself."""
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.full(8, 20.0), size=2)
    exact = (policy * np.log(policy / reference)).sum()
    logs = [torch.tensor(np.log(p))[None] for p in (policy, reference)]
    found = kl(*logs, torch.ones(1, 8, dtype=torch.bool), name).nats[0].numpy()
    assert (policy * found).sum() == pytest.approx(exact, abs=tolerance)


def test_k3_is_bounded_in_value_and_gradient_and_the_tokens_are_counted():
    # x = −2 and −3: e² − 3 = 4.389 and e³ − 4 = 16.09, which counts as 10; 20 and 60 nats below likewise; 12 above: 11
    apart = [-2.0, -3.0, -20.0, -60.0, -200.0, 12.0, 60.0, 5.0]
    logprobs = torch.tensor([apart], requires_grad=True)  # float32: e^89 is infinite
    mask = torch.ones(1, 8, dtype=torch.bool)
    found = kl(logprobs, torch.zeros(1, 8), mask, "k3")
    expected = [math.exp(2) - 3, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, math.exp(-5) + 4]
    assert found.nats[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert found.is_clamped[0].tolist() == [False, True, True, True, True, True, True, False]
    (gradient,) = torch.autograd.grad(found.nats.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([1 - math.exp(2), *[0.0] * 6, 1 - math.exp(-5)], rel=1e-5)
    masked = kl(logprobs, torch.zeros(1, 8), ~mask, "k3")
    assert not masked.is_clamped.any()
    assert not masked.nats.any()


@pytest.mark.parametrize(("name", "value", "slope"), [("k1", -60.0, 1.0), ("k2", 1800.0, -60.0)])
def test_k1_and_k2_need_no_bound(name, value, slope):
    logprobs = torch.tensor([[-60.0]], requires_grad=True)
    found = kl(logprobs, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), name)
    (gradient,) = torch.autograd.grad(found.nats.sum(), logprobs)
    assert (found.nats.item(), gradient.item(), found.is_clamped.any().item()) == (value, slope, False)


@pytest.mark.parametrize("apart", [19.5, 20.5, -19.5, -20.5])
def test_log_ratios_are_held_within_20_nats(apart):
    held = math.exp(min(20.0, max(-20.0, apart)))
    logprobs, anchored = torch.tensor([[apart]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    inputs = LossInputs(logprobs, anchored, anchored, torch.ones_like(anchored), mask)
    found = OBJECTIVES["policy_gradient"](inputs, Anchor(anchored, mask.double(), ~mask), shape_of())
    assert found.ratio.item() == pytest.approx(held, rel=1e-12)
    # k3 = e^(−x) − 1 + x
    x = min(20.0, max(-20.0, apart))
    assert losses.k3(logprobs).item() == pytest.approx(math.exp(-x) - 1 + x, rel=1e-9)


def test_an_estimate_of_exactly_its_bound_is_not_counted_as_clamped(monkeypatch):
    apart = torch.tensor([[-1.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(apart.shape, dtype=torch.bool)
    monkeypatch.setattr(losses, "MAX_K3", losses.k3(apart)[0, 0].item())
    assert not kl(apart, torch.zeros_like(apart), mask, "k3").is_clamped.any()
