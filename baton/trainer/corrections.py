"""How much a token sampled by another policy counts: behavior → proximal, apart from proximal → current.

The objective's ratio is π_θ / π_anchor; a correction says what the anchor is and gives each token a weight, without
gradient, that stands before the surrogate. The anchor is the proximal policy (decoupled PPO, arXiv 2110.00641), so
that the clip bounds what this train step changes, and the weight answers for what happened before it: older versions
and the engine's own rounding. With x_t = log π_proximal − log π_behavior at trained tokens:

| name            | anchor    | weight                                                                                |
|-----------------|-----------|---------------------------------------------------------------------------------------|
| `none`          | proximal  | 1                                                                                     |
| `bypass`        | behavior  | 1: the clip does the correction                                                       |
| `token_tis`     | proximal  | min(exp x_t, cap)                                                                     |
| `sequence_tis`  | proximal  | min(exp Σ_t x_t, cap), one for the trajectory                                         |
| `icepop`        | proximal  | exp x_t where it lies within [floor, cap], else 0                                     |
| `opsm`          | proximal  | 0 for a trajectory of A < 0 whose mean log π_behavior − log π_θ exceeds δ, else 1     |
| `second_moment` | proximal  | exp x_t, 0 at the fewest tokens without which the mean of x² is within the limit      |

A token of weight 0 is still counted in the divisors; one outside the mask is not.
To join: write a function with `Correction`'s signature and name it in `CORRECTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.losses import MAX_LOG_RATIO, Anchor, LossInputs, k3, log_ratio

Scalar = TypeVar("Scalar", torch.Tensor, float)


@dataclass(frozen=True, slots=True)
class CorrectionShape:
    """What a correction is told beside the tensors."""

    cap: float
    """Largest weight."""
    floor: float
    """Smallest weight that `icepop` keeps."""
    delta: float
    """`opsm`: nats per token."""
    cutoff: float = math.inf
    """`second_moment`: tokens of a larger x² are dropped; see `second_moment_cutoff`."""


Correction = Callable[[LossInputs, CorrectionShape], Anchor]


def none(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Do not correct: what APRIL's public code does (arXiv 2509.18521). Stale tokens are trained as if fresh."""
    return _anchor(inputs, inputs.proximal_logprobs, inputs.mask, is_cut=False)


def bypass(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Take the behavior policy itself as PPO's old policy. A weight besides would count the same thing twice."""
    return _anchor(inputs, inputs.behavior_logprobs, inputs.mask, is_cut=False)


def token_tis(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Decoupled PPO with truncated importance sampling by token: w_t = min(π_proximal / π_behavior, cap)."""
    found = weights(inputs)
    return _anchor(inputs, inputs.proximal_logprobs, found.clamp(max=shape.cap), found > shape.cap)


def sequence_tis(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Truncated importance sampling by trajectory: w = min(Π_t π_proximal / π_behavior, cap), over trained tokens."""
    found = _behavior_to_proximal(inputs).sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _anchor(inputs, inputs.proximal_logprobs, found.clamp(max=shape.cap), found > shape.cap)


def icepop(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Masked importance sampling (IcePop of Ring, arXiv 2510.18855): a weight outside [floor, cap] drops the token."""
    found = weights(inputs)
    is_dropped = (found < shape.floor) | (found > shape.cap)
    return _anchor(inputs, inputs.proximal_logprobs, torch.where(is_dropped, 0.0, found), is_dropped)


def opsm(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): drop bad trajectories the policy has left behind.

    A trajectory whose advantages are negative (summed over its trained tokens) gets weight 0 when the mean over its
    trained tokens of log π_behavior − log π_θ exceeds delta.
    """
    count = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    drift = -log_ratio(inputs.logprobs.detach(), inputs.behavior_logprobs, inputs.mask).sum(-1, keepdim=True) / count
    is_bad = torch.where(inputs.mask, inputs.advantages, 0.0).sum(-1, keepdim=True) < 0
    is_dropped = is_bad & (drift > shape.delta)
    return _anchor(inputs, inputs.proximal_logprobs, ~is_dropped, is_dropped)


def second_moment(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """M2PO's mask (arXiv 2510.01161): importance weights, without the tokens that make their second moment large."""
    is_dropped = _behavior_to_proximal(inputs).square() > shape.cutoff
    return _anchor(inputs, inputs.proximal_logprobs, torch.where(is_dropped, 0.0, weights(inputs)), is_dropped)


def second_moment_cutoff(log_weights: Sequence[torch.Tensor], limit: float) -> float:
    """Return the largest x² that may stay so that the mean of x² over what stays is at most `limit`.

    `log_weights` are the x of all trained tokens of a minibatch, in any number of pieces. Largest ones go first.
    """
    if not sum(piece.numel() for piece in log_weights):
        return math.inf
    squares = torch.cat([piece.flatten() for piece in log_weights]).square().sort().values
    means = squares.double().cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    num_kept = int((means <= limit).sum())  # means of ascending numbers ascend
    return float(squares[num_kept - 1]) if num_kept else -1.0


def correction_shape(
    algorithm: AlgorithmSettings,
    at_start: Iterable[LossInputs],
    all_of: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda own: [own],
) -> CorrectionShape:
    """Return what a correction is told of a whole minibatch.

    `second_moment` needs the minibatch's loss inputs `at_start` of the train step, and `all_of`, which returns the
    vectors of all ranks.
    """
    cutoff = math.inf
    if algorithm.correction == "second_moment":
        own = [(inputs.proximal_logprobs - inputs.behavior_logprobs)[inputs.mask] for inputs in at_start]
        cutoff = second_moment_cutoff(all_of(torch.cat(own) if own else torch.zeros(0)), algorithm.second_moment_limit)
    return CorrectionShape(algorithm.weight_cap, algorithm.weight_floor, algorithm.opsm_delta, cutoff)


class BehaviorDistance(NamedTuple, Generic[Scalar]):
    """How far the proximal policy is from the behavior policy: sums over trained tokens."""

    weight: Scalar
    """π_proximal / π_behavior before truncation, and its square."""
    weight_square: Scalar
    current: Scalar
    """Tokens of the trainer's own version: engine and trainer hold equal weights. The next three are of these."""
    mismatch: Scalar
    """k3 of KL(behavior ‖ proximal)."""
    abs_diff: Scalar
    max_diff: Scalar
    """A maximum, not a sum."""


@torch.no_grad()
def behavior_distance(inputs: LossInputs, is_current: torch.Tensor) -> BehaviorDistance[torch.Tensor]:
    """Return the sums over a microbatch; `is_current` [B, K] marks tokens of the trainer's own version."""
    is_current = inputs.mask & is_current
    diff = log_ratio(inputs.proximal_logprobs, inputs.behavior_logprobs, is_current)
    raw = torch.where(inputs.mask, weights(inputs), 0.0)
    # In KL(behavior ‖ proximal) k3's x is log π_behavior − log π_proximal.
    sums = raw.sum(), raw.square().sum(), is_current.sum(), k3(-diff).sum(), diff.abs().sum()
    return BehaviorDistance(*sums, diff.abs().max())


def weights(inputs: LossInputs) -> torch.Tensor:
    """[B, K] π_proximal / π_behavior, detached; 1 at masked tokens. Neither truncated nor masked: see `Anchor`."""
    return _behavior_to_proximal(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _behavior_to_proximal(inputs: LossInputs) -> torch.Tensor:
    return log_ratio(inputs.proximal_logprobs, inputs.behavior_logprobs, inputs.mask)


def _anchor(inputs: LossInputs, logprobs: torch.Tensor, values: torch.Tensor, is_cut: torch.Tensor | bool) -> Anchor:
    """Spread values per token or per trajectory over the trained tokens."""
    kept = torch.where(inputs.mask, values, 0.0).to(inputs.logprobs.dtype)
    return Anchor(logprobs, kept.detach(), inputs.mask & is_cut)


CORRECTIONS: Mapping[str, Correction] = {
    "none": none,
    "bypass": bypass,
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
    "opsm": opsm,
    "second_moment": second_moment,
}
"""Name in `algorithm.correction` → how."""
