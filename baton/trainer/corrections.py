"""Off-policy corrections for the difference between behavior and proximal policy. The objective's clip handles the
difference between proximal and current policy.

The objective's ratio is π_θ / π_anchor. A correction chooses the anchor policy and computes a weight for each token.
The weight has no gradient and multiplies the surrogate. With the proximal policy as anchor (decoupled PPO, arXiv
2110.00641), the clip bounds the change of the policy within a train step. With this anchor, the weight corrects the
difference between behavior and proximal policy, which results from older policy versions and the engine's rounding. x_t
= log π_proximal − log π_behavior is the log weight of a trained token t.

Tokens of weight 0 count in the divisor of the loss (`losses.py`), whereas tokens that are not trained do not count. To
add a correction, write a function with `Correction`'s signature and list it in `CORRECTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import torch

from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.losses import MAX_LOG_RATIO, Anchor, LossInputs, k3, log_ratio


@dataclass(frozen=True, slots=True)
class CorrectionShape:
    """The parameters of a correction."""

    cap: float
    floor: float
    """Minimum importance weight that `icepop` keeps."""
    delta: float
    """Threshold of `opsm` in nats per token."""
    cutoff: float = math.inf
    """Maximum x² of a token that `second_moment` keeps (`second_moment_cutoff`)."""


Correction = Callable[[LossInputs, CorrectionShape], Anchor]


def none(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Apply no correction: tokens of older policy versions are trained like tokens of the current version, as in
    APRIL's public code (arXiv 2509.18521)."""
    return _anchor(inputs, inputs.proximal_logprobs, inputs.mask, is_cut=False)


def bypass(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Use the behavior policy as anchor (PPO's old policy): the clip bounds the whole ratio, and all weights are 1."""
    return _anchor(inputs, inputs.behavior_logprobs, inputs.mask, is_cut=False)


def token_tis(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Decoupled PPO with truncated importance sampling by token: w_t = min(π_proximal / π_behavior, cap)."""
    found = weights(inputs)
    return _anchor(inputs, inputs.proximal_logprobs, found.clamp(max=shape.cap), found > shape.cap)


def sequence_tis(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Truncated importance sampling by episode: w = min(Π_t π_proximal / π_behavior, cap), over trained tokens."""
    apart = inputs.episode_sum("sequence_tis", _behavior_to_proximal(inputs))
    found = apart.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _anchor(inputs, inputs.proximal_logprobs, found.clamp(max=shape.cap), found > shape.cap)


def icepop(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Masked importance sampling (IcePop, arXiv 2510.18855): drops tokens whose weight is outside [floor, cap]."""
    found = weights(inputs)
    is_dropped = (found < shape.floor) | (found > shape.cap)
    return _anchor(inputs, inputs.proximal_logprobs, torch.where(is_dropped, 0.0, found), is_dropped)


def opsm(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).

    An episode gets weight 0 if, over its trained tokens, the sum of its advantages is negative and the mean of log
    π_behavior − log π_θ exceeds delta.
    """
    count = inputs.episode_sum("opsm, tokens", inputs.mask).clamp(min=1)
    change = log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask)
    drift = -inputs.episode_sum("opsm", change) / count
    is_bad = inputs.episode_sum("opsm, advantage", inputs.advantages) < 0
    is_dropped = is_bad & (drift > shape.delta)
    return _anchor(inputs, inputs.proximal_logprobs, ~is_dropped, is_dropped)


def second_moment(inputs: LossInputs, shape: CorrectionShape) -> Anchor:
    """M2PO's mask (arXiv 2510.01161): the weight is exp x_t. The tokens of largest x_t² get weight 0 instead, until the
    mean x_t² of the other tokens is at most `algorithm.second_moment_limit`."""
    is_dropped = _behavior_to_proximal(inputs).square() > shape.cutoff
    return _anchor(inputs, inputs.proximal_logprobs, torch.where(is_dropped, 0.0, weights(inputs)), is_dropped)


def second_moment_cutoff(log_weights: Sequence[torch.Tensor], limit: float) -> float:
    """Return the largest x² for which the mean over all smaller and equal x² is at most `limit`. Return −1 if every x²
    exceeds `limit`, and infinity if there are no tokens. `log_weights`: the x of all trained tokens of a minibatch, in
    any number of tensors."""
    if not sum(piece.numel() for piece in log_weights):
        return math.inf
    squares = torch.cat([piece.flatten() for piece in log_weights]).square().sort().values
    # Computed on the CPU, because torch has no deterministic running sum on CUDA.
    squares = squares.cpu()
    means = squares.double().cumsum(0) / torch.arange(1, len(squares) + 1)
    num_kept = int((means <= limit).sum())  # the running means of ascending numbers are ascending
    return float(squares[num_kept - 1]) if num_kept else -1.0


def correction_shape(
    algorithm: AlgorithmSettings,
    at_start: Iterable[LossInputs],
    all_of: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda own: [own],
) -> CorrectionShape:
    """Return the parameters of the algorithm's correction for a whole minibatch. Only `second_moment` uses `at_start`
    and `all_of`. `at_start`: the minibatch's loss inputs at the start of the train step. `all_of`: gathers a vector
    from every rank."""
    cutoff = math.inf
    if algorithm.correction == "second_moment":
        own = [(inputs.proximal_logprobs - inputs.behavior_logprobs)[inputs.mask] for inputs in at_start]
        cutoff = second_moment_cutoff(all_of(torch.cat(own) if own else torch.zeros(0)), algorithm.second_moment_limit)
    return CorrectionShape(algorithm.weight_cap, algorithm.weight_floor, algorithm.opsm_delta, cutoff)


class BehaviorDistance(NamedTuple):
    """Distance between proximal and behavior policy in one or several rows. Each field is a sum over trained tokens,
    unless the field says otherwise."""

    weighed: float = 0.0
    """Number of tokens that `weight` and `weight_square` cover."""
    weight: float = 0.0
    """π_proximal / π_behavior before truncation."""
    weight_square: float = 0.0
    current: float = 0.0
    """Number of current tokens: tokens that the engine sampled with the trainer's current version."""
    mismatch: float = 0.0
    """k3 estimate of KL(behavior ‖ proximal) over current tokens."""
    abs_diff: float = 0.0
    """|log π_proximal − log π_behavior| over current tokens."""
    max_diff: float = 0.0
    """Maximum (not sum) of the absolute difference over current tokens."""

    def plus(self, other: BehaviorDistance) -> BehaviorDistance:
        """Return the distance in the rows of both."""
        return BehaviorDistance(*map(add, self, other))._replace(max_diff=max(self.max_diff, other.max_diff))


@torch.no_grad()
def row_distances(inputs: LossInputs, is_current: torch.Tensor, *, has_start: bool) -> torch.Tensor:
    """Return [B, 8]: the fields of `BehaviorDistance` for each row, and the position in K of the maximum difference.
    `is_current`: [B, K], True at tokens of the current version. `has_start`: whether `inputs` has the proximal logprobs
    of the start of the train step; otherwise, the row has no weights."""
    is_current = inputs.mask & is_current
    diff = log_ratio(inputs.proximal_logprobs, inputs.behavior_logprobs, is_current)
    is_weighed = inputs.mask & has_start
    raw = torch.where(is_weighed, weights(inputs), 0.0)
    # For KL(behavior ‖ proximal), `k3` needs x = log π_behavior − log π_proximal, which is −`diff`.
    sums = [values.sum(-1) for values in (is_weighed, raw, raw.square(), is_current, k3(-diff), diff.abs())]
    return torch.stack([column.float() for column in (*sums, *diff.abs().max(-1))], -1)


def weights(inputs: LossInputs) -> torch.Tensor:
    """Return π_proximal / π_behavior [B, K], before truncation or masking by a correction; 1 at masked tokens."""
    return _behavior_to_proximal(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _behavior_to_proximal(inputs: LossInputs) -> torch.Tensor:
    return log_ratio(inputs.proximal_logprobs, inputs.behavior_logprobs, inputs.mask)


def _anchor(inputs: LossInputs, logprobs: torch.Tensor, values: torch.Tensor, is_cut: torch.Tensor | bool) -> Anchor:
    """Return an anchor. `values` and `is_cut` are per token or per trajectory, and are broadcast over the trained
    tokens."""
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
