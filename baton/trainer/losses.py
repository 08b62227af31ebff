"""Policy-gradient objectives as pure functions of tensors, in shared words: log-ratio, clip, aggregate, masks.

To join: write a function with `Objective`'s signature and name it in `OBJECTIVES`. Rows whose advantages are 0 are
run without gradient, so an objective must be flat in them.
Shapes: B trajectories, K places of a padded row. Masks are True at tokens that are trained.

Three policies. `behavior` sampled the tokens, `proximal` is the policy at the start of the train step, and the one
being optimised carries the gradient. A correction (`corrections.py`) turns the first two into an `Anchor`: what the
ratio is taken against, and a weight per token.

Normalisers. A minibatch reaches an objective in pieces (microbatches, later ranks), so no mean is taken here: sums
are divided by a `divisor` that the caller takes over the whole minibatch, and the pieces add up to the whole.
For `sequence_mean` the divisor is the number of trajectories, those without any trained token included: masking
one makes the update smaller and leaves the others' weight as it was, so it does not depend on who else was masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from baton.trainer.settings import Aggregation


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


Objective = Callable[[LossInputs, Anchor, LossShape], Loss]


def grpo(inputs: LossInputs, anchor: Anchor, shape: LossShape) -> Loss:
    """GRPO without its KL term (arXiv 2402.03300, equation 3), minimised.

    J = 1/N Σ_i 1/T_i Σ_t w_t min(r_t A_i, clip(r_t, 1 − clip_low, 1 + clip_high) A_i), r_t = π_θ / π_anchor
    for `sequence_mean`; `token_mean` (arXiv 2503.14476, equation 8) takes 1/ΣT_i Σ_i Σ_t instead.
    """
    ratio = log_ratio(inputs.logprobs, anchor.logprobs, inputs.mask).exp()
    unclipped = ratio * inputs.advantages
    clipped = clip(ratio, shape.clip_low, shape.clip_high) * inputs.advantages
    surrogate = anchor.weights * torch.minimum(unclipped, clipped)
    loss = -aggregate(surrogate, inputs.mask, shape.aggregation) / shape.divisor
    return Loss(loss, ratio.detach(), (inputs.mask & (clipped < unclipped)).detach())


def log_ratio(logprobs: torch.Tensor, baseline_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, K] log (π_θ / π_baseline), 0 at masked tokens: masked before any exp, as 0 · inf in a gradient is NaN."""
    return torch.where(mask, logprobs - baseline_logprobs, 0.0)


def clip(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Hold a ratio within [1 − low, 1 + high]."""
    return ratio.clamp(1.0 - low, 1.0 + high)


def aggregate(values: torch.Tensor, mask: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """Sum [B, K] to a scalar that still waits for its divisor.

    `sequence_mean`: Σ_i (1/T_i) Σ_t, T_i the trained tokens of trajectory i; one without any gives 0.
    `token_mean`: Σ_i Σ_t.
    """
    sums = torch.where(mask, values, 0.0).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() if aggregation == "sequence_mean" else sums.sum()


def divisor(num_trajectories: int, num_trained_tokens: int, aggregation: Aggregation) -> float:
    """Return what `aggregate` is divided by: counts over a whole minibatch, fully masked trajectories included."""
    return float(max(1, num_trajectories if aggregation == "sequence_mean" else num_trained_tokens))


OBJECTIVES: Mapping[str, Objective] = {"grpo": grpo}
"""Algorithm name → its objective."""
