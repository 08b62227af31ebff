"""Policy-gradient objectives as pure functions of tensors, built from shared parts: log-ratio, clip, aggregate, masks.

To add an objective, write a function with `Objective`'s signature, list it in `OBJECTIVES` and add its name to
`ObjectiveName` in `algorithm.py`. An objective must have no gradient at tokens of advantage 0, because rows whose
advantages are all 0 get no backward pass.

Shapes: B rows, K positions of a padded row. A row is one path of an episode; in a single-turn task, an episode has one
path. Masks are True at trained tokens.

Three policies: the behavior policy sampled the tokens, the proximal policy is the one at the start of the train step,
and the update changes the current policy. From behavior and proximal logprobs, a correction (`corrections.py`) computes
an `Anchor`: the denominator of the ratio, and a weight per token.

Normalisation: an objective gets one microbatch of a minibatch, so it cannot compute a mean over the minibatch. The
caller computes a `divisor` from the whole minibatch on all ranks, and the objective divides its sums by this number.
The losses of the microbatches then sum to the minibatch's loss. The aggregation determines whether a fully masked
episode counts in the divisor:

| aggregation       | divisor                       | a fully masked episode                                  |
|-------------------|-------------------------------|---------------------------------------------------------|
| `sequence_mean`   | episodes                      | counts: the update is smaller                           |
| `sequence_sum`    | episodes                      | counts: the update is smaller                           |
| `length_constant` | episodes × the maximum length | counts: the update is smaller                           |
| `token_mean`      | trained tokens                | does not count: the tokens of other episodes weigh more |

No divisor depends on an episode's number of turns or paths, so the loss does not depend on these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from baton.trainer.algorithm import Aggregation, KlEstimator


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of an objective: one microbatch."""

    logprobs: torch.Tensor
    """[B, K] log-probabilities under the current policy, with gradient."""
    proximal_logprobs: torch.Tensor
    """[B, K] log-probabilities under the policy at the start of the train step, without gradient."""
    behavior_logprobs: torch.Tensor
    """[B, K] log-probabilities under the policy that sampled each token, without gradient."""
    advantages: torch.Tensor
    """[B, K] advantage of each token."""
    mask: torch.Tensor
    """[B, K] bool: True at trained tokens."""
    episode_tokens: torch.Tensor | None = None
    """[B] number of trained tokens of each row's episode, summed over all paths of the episode; None if each row is a
    whole episode."""
    elsewhere: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[B, 1] For each `episode_sum`, by name: the part of the sum that comes from the other paths of each row's
    episode, without gradient. Empty if each row is a whole episode."""
    own_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B, 1] For each computed `episode_sum`, by name: the part of the sum that comes from the row itself."""

    def episode_sum(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` [B, K] over the trained tokens of each row's episode, in all its paths; [B, 1] without
        gradient."""
        own = self.own_sums[name] = torch.where(self.mask, values.detach(), 0).sum(-1, keepdim=True)
        return own + self.elsewhere[name] if name in self.elsewhere else own


@dataclass(frozen=True, slots=True)
class Anchor:
    """The denominator of an objective's ratio, and the weight of each token, computed by a correction."""

    logprobs: torch.Tensor
    """[B, K] logprobs under PPO's old policy: the proximal or the behavior policy."""
    weights: torch.Tensor
    """[B, K] factor of each token's surrogate, without gradient; 0 at masked tokens."""
    is_cut: torch.Tensor
    """[B, K] bool: True at trained tokens whose weight the correction truncated or set to 0."""


@dataclass(frozen=True, slots=True)
class LossShape:
    """The parameters of an objective."""

    clip_low: float
    clip_high: float
    aggregation: Aggregation
    divisor: float


@dataclass(frozen=True, slots=True)
class Loss:
    """The result of an objective: this microbatch's share of the minibatch's loss."""

    loss: torch.Tensor
    """Scalar with gradient."""
    ratio: torch.Tensor
    """[B, K] ratio π_θ / π_anchor, detached; 1 at masked tokens."""
    is_clipped: torch.Tensor
    """[B, K] bool: True at trained tokens whose ratio the clip changed."""


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """Estimates of a KL divergence per token."""

    nats: torch.Tensor
    """[B, K] estimate in nats, with gradient to the log-probabilities; 0 at masked tokens."""
    is_clamped: torch.Tensor
    """[B, K] bool: True at trained tokens whose estimate exceeded its bound. The estimate of such a token has no
    gradient."""


MAX_LOG_RATIO = 20.0
"""Maximum of |log ratio| and |log weight|; larger values are clamped, so that their exponentials stay finite."""

MAX_K3 = 10.0
"""Maximum k3 estimate of a token's KL divergence, in nats."""

Objective = Callable[[LossInputs, Anchor, LossShape], Loss]


def clipped(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """PPO's clip (arXiv 1707.06347, eq. 7), also in GRPO (2402.03300, eq. 3) and DAPO (2503.14476, eq. 8).

    J = Σ_i Σ_t w_t min(r_t A_t, clip(r_t, 1 − clip_low, 1 + clip_high) A_t) with r_t = π_θ / π_anchor, aggregated. With
    the proximal policy as anchor and the weights π_proximal / π_behavior, this objective is decoupled PPO (2110.00641).
    """
    ratio = to_anchor(inputs, anchor).exp()
    return _least(ratio, inputs, anchor, shape)


def gspo(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """GSPO-token (arXiv 2507.18071, section 4.3): PPO's clip, applied to one ratio per episode. Each token has a
    gradient of its own.

    s_i = exp(mean_t log π_θ / π_proximal) and s_it = sg(s_i) π_θ(t) / sg(π_θ(t)). Each s_it has the value s_i, but only
    π_θ(t) has a gradient: an unclipped token t gets w_t s_i A ∇ log π_θ(t). With equal weights, GSPO-token equals GSPO
    (equation 5). The mean is over trained tokens of weight above 0, so tokens that a correction drops do not affect the
    ratio.
    """
    kept = anchor.weights > 0
    apart = torch.where(kept, to_anchor(inputs, anchor), 0.0)
    mean = inputs.episode_sum("gspo", apart) / inputs.episode_sum("gspo, tokens", kept).clamp(min=1)
    ratio = (mean + apart - apart.detach()).exp()
    return _least(torch.where(kept, ratio, 1.0), inputs, anchor, shape)


def cispo(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """CISPO (arXiv 2506.13585, equation 4): J = Σ_i Σ_t w_t sg(clip(r_t, 1 − clip_low, 1 + clip_high)) A_t log π_θ.
    Every token keeps a gradient; the clip only bounds its coefficient."""
    ratio = to_anchor(inputs, anchor).exp().detach()
    bounded = clip(ratio, shape.clip_low, shape.clip_high)
    surrogate = anchor.weights * bounded * inputs.advantages * torch.where(inputs.mask, inputs.logprobs, 0.0)
    return Loss(_loss(surrogate, inputs, shape), ratio, inputs.mask & (bounded != ratio))


def policy_gradient(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """REINFORCE with importance sampling: J = Σ_i Σ_t w_t r_t A_t; at r_t = 1, the gradient is w_t A_t ∇ log π_θ."""
    ratio = to_anchor(inputs, anchor).exp()
    surrogate = anchor.weights * ratio * inputs.advantages
    return Loss(_loss(surrogate, inputs, shape), ratio.detach(), torch.zeros_like(inputs.mask))


def _least(ratio: torch.Tensor, inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    free = ratio * inputs.advantages
    held = clip(ratio, shape.clip_low, shape.clip_high) * inputs.advantages
    surrogate = anchor.weights * torch.minimum(free, held)
    return Loss(_loss(surrogate, inputs, shape), ratio.detach(), (inputs.mask & (held < free)).detach())


def _loss(surrogate: torch.Tensor, inputs: LossInputs, shape: LossShape) -> torch.Tensor:
    return -aggregate(surrogate, inputs, shape.aggregation) / shape.divisor


def kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor, name: KlEstimator) -> KlEstimate:
    """Estimate KL(π_θ ‖ π_reference) from sampled tokens, [B, K] in nats; 0 at masked tokens.

    With x = log π_θ − log π_reference: k1 = x, k2 = x²/2, k3 = e^(−x) − 1 + x (joschu.net/blog/kl-approx.html). k3
    grows exponentially in −x, so it is bounded as in verl: x is clamped to ±20, then the estimate to `MAX_K3`. A token
    whose estimate exceeds `MAX_K3` (x below about −2.6 or above 11 nats) gets no gradient. k1 and k2 need no bound,
    because their derivatives are 1 and x.
    """
    apart = log_ratio(logprobs, reference_logprobs, mask)
    if name == "k1":
        return KlEstimate(apart, torch.zeros_like(mask))
    if name == "k2":
        return KlEstimate(apart.square() / 2, torch.zeros_like(mask))
    free = k3(apart)
    return KlEstimate(free.clamp(max=MAX_K3), free.detach() > MAX_K3)


def k3(apart: torch.Tensor) -> torch.Tensor:
    """Return e^(−x) − 1 + x, with x clamped to ±20 so that the result is finite."""
    bounded = apart.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-bounded).expm1() + bounded


def log_ratio(logprobs: torch.Tensor, baseline_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [B, K] log (π_θ / π_baseline), 0 at masked tokens."""
    # Mask before any exp: an infinite value at a masked token would give the gradient 0 · ∞ = NaN.
    return torch.where(mask, logprobs - baseline_logprobs, 0.0)


def to_anchor(inputs: LossInputs, anchor: Anchor) -> torch.Tensor:
    """Return [B, K] log (π_θ / π_anchor), clamped to ±20 because e^89 overflows float32."""
    return log_ratio(inputs.logprobs, anchor.logprobs, inputs.mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Clamp a ratio to [1 − low, 1 + high]."""
    return ratio.clamp(1.0 - low, 1.0 + high)


def aggregate(values: torch.Tensor, inputs: LossInputs, aggregation: Aggregation) -> torch.Tensor:
    """Sum values [B, K] to a scalar, which the caller divides by `divisor`.

    `sequence_mean`: Σ_i (1/T_i) Σ_t with T_i trained tokens in the episode of row i; a row without trained tokens adds
    0. The other aggregations sum the values of all trained tokens: Σ_i Σ_t.
    """
    sums = torch.where(inputs.mask, values, 0.0).sum(-1)
    if aggregation != "sequence_mean":
        return sums.sum()
    lengths = inputs.mask.sum(-1) if inputs.episode_tokens is None else inputs.episode_tokens
    return (sums / lengths.clamp(min=1)).sum()


def divisor(num_episodes: int, num_trained_tokens: int, aggregation: Aggregation, longest: int) -> float:
    """Return the divisor of `aggregate`, from counts over a whole minibatch (table in the module's docstring).
    `longest` is the maximum length of an episode in policy tokens."""
    if aggregation == "token_mean":
        return float(max(1, num_trained_tokens))
    return float(max(1, num_episodes) * (longest if aggregation == "length_constant" else 1))


OBJECTIVES: Mapping[str, Objective] = {
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}
