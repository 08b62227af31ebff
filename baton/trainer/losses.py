"""Policy-gradient objectives as pure functions of tensors, in shared words: log-ratio, clip, aggregate, masks.

To join: write a function with `Objective`'s signature and name it in `OBJECTIVES`. Rows whose advantages are 0 are
run without gradient, so an objective must be flat in them.
Shapes: B trajectories, K places of a padded row. Masks are True at tokens that are trained.

Three policies. `behavior` sampled the tokens, `proximal` is the policy at the start of the train step, and the one
being optimised carries the gradient. A correction (`corrections.py`) turns the first two into an `Anchor`: what the
ratio is taken against, and a weight per token.

Normalisers. A minibatch reaches an objective in pieces (microbatches, later ranks), so no mean is taken here: sums
are divided by a `divisor` that the caller takes over the whole minibatch, and the pieces add up to the whole.
Whether a fully masked trajectory stays in the divisor follows from the aggregation, for every objective alike:

| aggregation       | divisor                           | a fully masked trajectory                                    |
|-------------------|-----------------------------------|--------------------------------------------------------------|
| `sequence_mean`   | trajectories                      | stays: the others keep their weight, the update gets smaller |
| `sequence_sum`    | trajectories                      | stays, likewise                                              |
| `length_constant` | trajectories × the longest length | stays, likewise                                              |
| `token_mean`      | trained tokens                    | has none, so is not counted: the others' tokens weigh more   |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from baton.trainer.algorithm import Aggregation, KlEstimator


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One microbatch, as an objective sees it."""

    logprobs: torch.Tensor
    """[B, K] under the policy being optimised; carries gradient."""
    proximal_logprobs: torch.Tensor
    """[B, K] under the policy at the start of the train step; no gradient."""
    behavior_logprobs: torch.Tensor
    """[B, K] under the policy that sampled each token; no gradient."""
    advantages: torch.Tensor
    """[B, K]"""
    mask: torch.Tensor
    """[B, K] bool"""


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where an objective's ratio is taken from; made by a correction."""

    logprobs: torch.Tensor
    """[B, K] of PPO's old policy: the proximal one, or the behavior policy itself."""
    weights: torch.Tensor
    """[B, K] before each token's surrogate, without gradient; 0 at masked tokens."""
    is_cut: torch.Tensor
    """[B, K] bool: tokens whose weight the correction has truncated or set to 0; False at masked tokens."""


@dataclass(frozen=True, slots=True)
class LossShape:
    """What an objective is told beside the tensors."""

    clip_low: float
    clip_high: float
    aggregation: Aggregation
    divisor: float
    """Over the whole minibatch; see `divisor`."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What an objective returns. The loss is this microbatch's share of the minibatch's."""

    loss: torch.Tensor
    """Scalar with gradient."""
    ratio: torch.Tensor
    """[B, K] detached; 1 at masked tokens."""
    is_clipped: torch.Tensor
    """[B, K] bool: tokens whose gradient the clip has cut; False at masked tokens."""


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """Estimates of a KL divergence, by token."""

    nats: torch.Tensor
    """[B, K] with the gradient of the log-probabilities; 0 at masked tokens."""
    is_clamped: torch.Tensor
    """[B, K] bool: tokens whose estimate was above its bound, and which so have no gradient; False at masked tokens."""


MAX_LOG_RATIO = 20.0
"""|log ratio| and |log weight| are held within this, so that neither is infinite whatever was sampled."""

MAX_K3 = 10.0
"""Nats; largest k3 estimate of a token's KL divergence."""

Objective = Callable[[LossInputs, Anchor, LossShape], Loss]


def clipped(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """PPO's clip (arXiv 1707.06347, equation 7), as GRPO (2402.03300, equation 3) and DAPO (2503.14476, 8) have it.

    J = Σ_i Σ_t w_t min(r_t A_t, clip(r_t, 1 − clip_low, 1 + clip_high) A_t), r_t = π_θ / π_anchor, aggregated; with
    the proximal policy as anchor and the weights π_proximal / π_behavior this is decoupled PPO (2110.00641).
    """
    ratio = to_anchor(inputs, anchor).exp()
    return _least(ratio, inputs, anchor, shape)


def gspo(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """GSPO-token (arXiv 2507.18071, section 4.3): the clip with one ratio for the trajectory, its gradient by token.

    s_i = exp(mean_t log π_θ / π_proximal) and s_it = sg(s_i) π_θ(t) / sg(π_θ(t)): all s_it equal s_i, and token t gets
    the gradient w_t s_i A ∇ log π_θ(t). With equal weights this is GSPO (equation 5). The mean is over trained tokens
    of weight above 0: a token that is masked, or dropped by a correction, neither moves the ratio nor gets a gradient.
    """
    kept = anchor.weights > 0
    apart = torch.where(kept, to_anchor(inputs, anchor), 0.0)
    mean = apart.detach().sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
    ratio = (mean + apart - apart.detach()).exp()
    return _least(torch.where(kept, ratio, 1.0), inputs, anchor, shape)


def cispo(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """CISPO (arXiv 2506.13585, equation 4): J = Σ_i Σ_t w_t sg(clip(r_t, 1 − clip_low, 1 + clip_high)) A_t log π_θ.

    Every token keeps a gradient; the clip only bounds its weight.
    """
    ratio = to_anchor(inputs, anchor).exp().detach()
    bounded = clip(ratio, shape.clip_low, shape.clip_high)
    surrogate = anchor.weights * bounded * inputs.advantages * torch.where(inputs.mask, inputs.logprobs, 0.0)
    return Loss(_loss(surrogate, inputs, shape), ratio, inputs.mask & (bounded != ratio))


def policy_gradient(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """REINFORCE with importance sampling: J = Σ_i Σ_t w_t r_t A_t, whose gradient at r = 1 is A_t ∇ log π_θ."""
    ratio = to_anchor(inputs, anchor).exp()
    surrogate = anchor.weights * ratio * inputs.advantages
    return Loss(_loss(surrogate, inputs, shape), ratio.detach(), torch.zeros_like(inputs.mask))


def _least(ratio: torch.Tensor, inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    free = ratio * inputs.advantages
    held = clip(ratio, shape.clip_low, shape.clip_high) * inputs.advantages
    surrogate = anchor.weights * torch.minimum(free, held)
    return Loss(_loss(surrogate, inputs, shape), ratio.detach(), (inputs.mask & (held < free)).detach())


def _loss(surrogate: torch.Tensor, inputs: LossInputs, shape: LossShape) -> torch.Tensor:
    return -aggregate(surrogate, inputs.mask, shape.aggregation) / shape.divisor


def kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor, name: KlEstimator) -> KlEstimate:
    """[B, K] estimates of KL(π_θ ‖ π_reference) in nats from sampled tokens; 0 at masked tokens.

    With x = log π_θ − log π_reference: k1 = x, k2 = x²/2, k3 = e^(−x) − 1 + x (joschu.net/blog/kl-approx.html).
    k3 is exponential in −x, so it is bounded as in verl: x to ±20, then the estimate to `MAX_K3`. A token beyond
    the bound, 2.6 nats below the reference or 11 above it, gets no gradient. k1 and k2 have slopes 1 and x: no bound.
    """
    apart = log_ratio(logprobs, reference_logprobs, mask)
    if name == "k1":
        return KlEstimate(apart, torch.zeros_like(mask))
    if name == "k2":
        return KlEstimate(apart.square() / 2, torch.zeros_like(mask))
    free = k3(apart)
    return KlEstimate(free.clamp(max=MAX_K3), free.detach() > MAX_K3)


def k3(apart: torch.Tensor) -> torch.Tensor:
    """Return e^(−x) − 1 + x for log ratios x held within ±20, so that none is infinite."""
    bounded = apart.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-bounded).expm1() + bounded


def log_ratio(logprobs: torch.Tensor, baseline_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, K] log (π_θ / π_baseline), 0 at masked tokens: masked before any exp, as 0 · inf in a gradient is NaN."""
    return torch.where(mask, logprobs - baseline_logprobs, 0.0)


def to_anchor(inputs: LossInputs, anchor: Anchor) -> torch.Tensor:
    """[B, K] log (π_θ / π_anchor) within ±20: e^89 is infinite in float32, and 0 · ∞ in a gradient is NaN."""
    return log_ratio(inputs.logprobs, anchor.logprobs, inputs.mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Hold a ratio within [1 − low, 1 + high]."""
    return ratio.clamp(1.0 - low, 1.0 + high)


def aggregate(values: torch.Tensor, mask: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """Sum [B, K] to a scalar that still waits for its divisor.

    `sequence_mean`: Σ_i (1/T_i) Σ_t, T_i the trained tokens of trajectory i; one without any gives 0. Else Σ_i Σ_t.
    """
    sums = torch.where(mask, values, 0.0).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() if aggregation == "sequence_mean" else sums.sum()


def divisor(num_trajectories: int, num_trained_tokens: int, aggregation: Aggregation, longest: int) -> float:
    """Return what `aggregate` is divided by: counts over a whole minibatch; see the table at the top.

    `longest` is the length a response may have, tokens.
    """
    if aggregation == "token_mean":
        return float(max(1, num_trained_tokens))
    return float(max(1, num_trajectories) * (longest if aggregation == "length_constant" else 1))


OBJECTIVES: Mapping[str, Objective] = {
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}
"""Name in `algorithm.objective` → how."""
