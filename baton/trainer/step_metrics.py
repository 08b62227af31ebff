"""Sums over the updates of a train step, and the metrics computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Generic, NamedTuple

import numpy as np
import torch

from baton.trainer.corrections import BehaviorDistance
from baton.trainer.critic import Scalar, ValueSums
from baton.trainer.parallel.group import SingleRank


class TokenSums(NamedTuple, Generic[Scalar]):
    """The loss, and sums over trained tokens."""

    loss: Scalar
    """The loss that the update minimises, including all its terms."""
    tokens: Scalar
    entropy: Scalar
    clipped: Scalar
    """Number of tokens whose probability ratio the objective clipped."""
    moved: Scalar
    """Sum of the k3 estimates of KL(anchor ‖ current). The anchor is the policy at the start of the train step; with
    the correction `bypass`, it is the behavior policy."""
    weight: Scalar
    """Sum of the tokens' importance weights after `algorithm.correction`."""
    cut: Scalar
    """Number of tokens whose importance weight the correction truncated or set to 0."""
    reference_kl: Scalar
    """Sum of the estimates of the KL divergence to the reference model; 0 without a reference model."""
    clamped_kl: Scalar
    """Number of tokens whose estimated KL divergence to the reference exceeded `MAX_K3`; 0 without a reference."""


@dataclass(slots=True)
class Totals:
    """Sums over all updates of a train step."""

    has_reference: bool
    has_critic: bool
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norm of each update, before clipping."""
    value_losses: list[float] = field(default_factory=list)
    """Critic's value loss in each update; empty without a critic."""
    value_grad_norms: list[float] = field(default_factory=list)
    """Gradient norm of a separate critic in each update; empty without a separate critic."""
    tokens: TokenSums[float] = field(default_factory=lambda: TokenSums(*[0.0] * 9))
    distance: BehaviorDistance = field(default_factory=BehaviorDistance)
    values: ValueSums[float] = field(default_factory=lambda: ValueSums(*[0.0] * 5))
    real: float = 0.0
    """Number of tokens in the passes of the updates, without padding."""
    places: float = 0.0
    """Number of tokens in the passes of the updates, including padding."""
    largest: int = 0
    """Number of tokens, including padding, in the largest microbatch of this rank."""
    imbalance: float | None = None
    """Load imbalance: the ratio of the largest `places` of any rank to the mean `places` over ranks. With
    `trainer.speeds`, each rank's `places` is first divided by the rank's relative speed. None with one rank."""

    def add(
        self, tokens: TokenSums[torch.Tensor], rows: torch.Tensor, *, num_tokens: int, num_places: int
    ) -> tuple[float, list[list[float]]]:
        """Add the sums of one microbatch. `rows`: its `row_distances`. Return its loss and `rows` as numbers. Waits
        once for the device."""
        numbers, width = _numbers((*tokens, rows)), rows.shape[1]
        found = TokenSums(*numbers[: len(tokens)])
        of_rows = [numbers[begin : begin + width] for begin in range(len(tokens), len(numbers), width)]
        self.tokens = TokenSums(*map(add, self.tokens, found))
        for *distance, _ in of_rows:
            self.distance = self.distance.plus(BehaviorDistance(*distance))
        self.real += num_tokens
        self.places += num_places
        self.largest = max(self.largest, num_places)
        return found.loss, of_rows

    def add_values(self, sums: ValueSums[torch.Tensor]) -> None:
        self.values = ValueSums(*map(add, self.values, _numbers(sums)))

    def add_ranks(self, parallel: SingleRank) -> None:
        """Replace this rank's sums with sums over all ranks."""
        if parallel.share.size == 1:
            return
        largest_places = parallel.largest(self.places / parallel.share.speed)
        max_diff = parallel.largest(self.distance.max_diff)
        own = [self.losses, self.value_losses, self.tokens, self.distance, self.values, [self.real, self.places]]
        found = parallel.sums(np.array([number for numbers in own for number in numbers]))
        parts = [part.tolist() for part in np.split(found, np.cumsum([len(numbers) for numbers in own])[:-1])]
        self.losses, self.value_losses = parts[:2]
        self.tokens = TokenSums(*parts[2])
        self.distance = BehaviorDistance(*parts[3])._replace(max_diff=max_diff)
        self.values = ValueSums(*parts[4])
        self.real, self.places = parts[5]
        self.imbalance = largest_places * parallel.share.size / max(1.0, self.places)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step. Losses and gradient norms are means over updates. `policy/ess` is the ratio
        of Kish's effective sample size, (Σw)² / Σw², to the number of tokens. The weights w are π_proximal / π_behavior
        before any correction truncates them."""
        sums, distance, num_tokens = self.tokens, self.distance, max(1.0, self.tokens.tokens)
        found = {
            "policy/loss": statistics.fmean(self.losses),
            "policy/grad_norm": statistics.fmean(self.grad_norms),
            "tokens/padding_frac": 1.0 - self.real / max(1, self.places),
        }
        if sums.tokens:
            found |= {
                "policy/entropy": sums.entropy / num_tokens,
                "policy/clip_frac": sums.clipped / num_tokens,
                "policy/approx_kl": sums.moved / num_tokens,
                "policy/weight_mean": sums.weight / num_tokens,
                "policy/weight_cut_frac": sums.cut / num_tokens,
            }
        if self.imbalance is not None:
            found["tokens/imbalance"] = self.imbalance
        if self.has_reference:
            found["kl/ref"] = sums.reference_kl / num_tokens
            found["kl/clamped_frac"] = sums.clamped_kl / num_tokens
        if self.has_critic:
            found |= self._value_metrics()
        if distance.weight_square:
            found["policy/ess"] = distance.weight**2 / (distance.weighed * distance.weight_square)
        if distance.current:
            found["policy/mismatch_kl"] = distance.mismatch / distance.current
            found["policy/logprob_diff_mean"] = distance.abs_diff / distance.current
            found["policy/logprob_diff_max"] = distance.max_diff
        return found

    def _value_metrics(self) -> dict[str, float]:
        """Return the critic's metrics. `value/explained_var`: 1 − Σ (R − V)² / Σ (R − mean R)² over the tokens' returns
        R and values V; absent if all R are equal."""
        sums, num_tokens = self.values, max(1.0, self.values.tokens)
        found = {"value/loss": statistics.fmean(self.value_losses), "value/clip_frac": sums.clipped / num_tokens}
        if self.value_grad_norms:
            found["value/grad_norm"] = statistics.fmean(self.value_grad_norms)
        spread = sums.square - sums.total**2 / num_tokens
        if spread > 1e-9 * max(1.0, sums.square):
            found["value/explained_var"] = 1.0 - sums.error / spread
        return found


def _numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Copy the elements of all tensors from their device in one transfer."""
    found: list[float] = torch.cat([tensor.float().flatten() for tensor in tensors]).tolist()
    return found
