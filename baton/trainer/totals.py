"""What a train step says of its tokens: sums over microbatches, and the means made of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import numpy as np
import torch

from baton.trainer.batch import MicroBatch
from baton.trainer.corrections import weights
from baton.trainer.losses import Anchor, KlEstimate, Loss, LossInputs, k3, log_ratio
from baton.trainer.parallel.group import Alone


@dataclass(slots=True)
class ValueTotals:
    """Sums over the trained tokens of a step's value updates."""

    losses: list[float] = field(default_factory=list)
    """One per update, as are `grad_norms`."""
    grad_norms: list[float] = field(default_factory=list)
    tokens: float = 0.0
    clipped: float = 0.0
    error: float = 0.0
    """Squared, of the values at the start of the step. The next two are of the returns."""
    total: float = 0.0
    square: float = 0.0

    @torch.no_grad()
    def add(self, is_clipped: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Add one microbatch."""
        kept = torch.where(mask, returns, 0.0)
        error = torch.where(mask, returns - old, 0.0).square().sum()
        sums = mask.sum(), is_clipped.sum(), error, kept.sum(), kept.square().sum()
        tokens, clipped, squared, total, square = torch.stack([item.float() for item in sums]).tolist()
        self.tokens += tokens
        self.clipped += clipped
        self.error += squared
        self.total += total
        self.square += square

    def metrics(self) -> dict[str, float]:
        """Return means. `value/explained_var` is 1 − Σ (R − V)² / Σ (R − mean R)², absent where all R are equal."""
        tokens = max(1.0, self.tokens)
        found = {"value/loss": statistics.fmean(self.losses), "value/clip_frac": self.clipped / tokens}
        if self.grad_norms:
            found["value/grad_norm"] = statistics.fmean(self.grad_norms)
        spread = self.square - self.total**2 / tokens
        if spread > 1e-9 * max(1.0, self.square):
            found["value/explained_var"] = 1.0 - self.error / spread
        return found


@dataclass(slots=True)
class Totals:
    """Sums over the trained tokens of a train step, over all its updates."""

    version: int
    """The trainer's at the start of the step."""
    losses: list[float] = field(default_factory=list)
    """One per update, as are `grad_norms`."""
    grad_norms: list[float] = field(default_factory=list)
    reference_kl: float | None = None
    """Summed over trained tokens; None without a reference model."""
    clamped_kl: float = 0.0
    """Tokens whose estimate of that KL was above its bound."""
    values: ValueTotals | None = None
    """None without a critic."""
    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    moved: float = 0.0
    """k3 of KL(proximal ‖ current): how far the step's updates have come."""
    weight: float = 0.0
    """Weights as the correction left them."""
    cut: float = 0.0
    raw_weight: float = 0.0
    """Weights before truncation, and their squares."""
    raw_square: float = 0.0
    current: float = 0.0
    """Tokens sampled from `version`: on these engine and trainer hold equal weights. The next three are of these."""
    mismatch: float = 0.0
    abs_diff: float = 0.0
    max_diff: float = 0.0
    real: float = 0.0
    """Tokens fed, and with padding: places."""
    places: float = 0.0
    imbalance: float | None = None
    """Places fed to the busiest rank over their mean; None where there is one rank."""

    @torch.no_grad()
    def add(
        self,
        micro: MicroBatch,
        inputs: LossInputs,
        anchor: Anchor,
        value: torch.Tensor,
        loss: Loss,
        entropy: torch.Tensor,
        reference_kl: KlEstimate | None,
    ) -> float:
        """Add one microbatch; return `value`, its loss with all its terms, as a number. Here the host waits."""
        current = inputs.mask & (micro.policy_versions == self.version)
        diff = torch.where(current, inputs.proximal_logprobs - inputs.behavior_logprobs, 0.0)
        raw = torch.where(inputs.mask, weights(inputs), 0.0)
        moved = log_ratio(inputs.logprobs.detach(), inputs.proximal_logprobs, inputs.mask)
        sums = (
            value,
            inputs.mask.sum(),
            torch.where(inputs.mask, entropy, 0.0).sum(),
            loss.is_clipped.sum(),
            anchor.weights.sum(),
            anchor.is_cut.sum(),
            raw.sum(),
            raw.square().sum(),
            current.sum(),
            k3(-diff).sum(),  # of KL(behavior ‖ proximal), whose x is log π_behavior − log π_proximal
            diff.abs().sum(),
            diff.abs().max(),
            k3(-moved).sum(),
            *(
                (torch.zeros(()), torch.zeros(()))
                if reference_kl is None
                else (reference_kl.nats.detach().sum(), reference_kl.is_clamped.sum())
            ),
        )
        (
            number,
            tokens,
            entropy_sum,
            clipped,
            weight,
            cut,
            raw_sum,
            raw_square,
            num_current,
            mismatch,
            abs_diff,
            *rest,
        ) = torch.stack([item.float().to(value.device) for item in sums]).tolist()
        if reference_kl is not None:
            self.reference_kl = (self.reference_kl or 0.0) + rest[2]
            self.clamped_kl += rest[3]
        self.tokens += tokens
        self.entropy += entropy_sum
        self.clipped += clipped
        self.moved += rest[1]
        self.weight += weight
        self.cut += cut
        self.raw_weight += raw_sum
        self.raw_square += raw_square
        self.current += num_current
        self.mismatch += mismatch
        self.abs_diff += abs_diff
        self.max_diff = max(self.max_diff, rest[0])
        self.real += micro.num_tokens
        self.places += micro.input_ids.numel()  # of idle ones too: they are computed
        return float(number)

    def add_ranks(self, parallel: Alone) -> None:
        """Turn this rank's sums into those over all ranks, which have made the same updates."""
        size, is_sum = parallel.share.size, self.reference_kl is not None
        if size == 1:
            return
        self.imbalance = parallel.largest(self.places)
        of_values = [] if self.values is None else [*self.values.losses, *_read(self.values, _VALUE_SUMS)]
        own = [*self.losses, *_read(self, _SUMS), self.reference_kl or 0.0, *of_values]
        found = iter(parallel.sums(np.array(own)).tolist())
        self.losses = [next(found) for _ in self.losses]
        for name in _SUMS:
            setattr(self, name, next(found))
        reference_kl = next(found)
        self.reference_kl = reference_kl if is_sum else None
        if self.values is not None:
            self.values.losses = [next(found) for _ in self.values.losses]
            for name in _VALUE_SUMS:
                setattr(self.values, name, next(found))
        self.max_diff = parallel.largest(self.max_diff)
        self.imbalance *= size / max(1.0, self.places)

    def metrics(self) -> dict[str, float]:
        """Return means. `policy/loss` and `policy/grad_norm` (before clipping) are means over updates.

        `policy/ess` is Kish's effective sample size (Σw)² / Σw² as a share of the trained tokens, of the weights
        π_proximal / π_behavior as they are before any truncation: it says how far apart the two policies are,
        whatever the correction makes of it.
        """
        tokens = max(1.0, self.tokens)
        found = {
            "policy/loss": statistics.fmean(self.losses),
            "policy/entropy": self.entropy / tokens,
            "policy/clip_frac": self.clipped / tokens,
            "policy/approx_kl": self.moved / tokens,
            "policy/weight_mean": self.weight / tokens,
            "policy/weight_cut_frac": self.cut / tokens,
            "policy/grad_norm": statistics.fmean(self.grad_norms),
            "tokens/padding_frac": 1.0 - self.real / max(1, self.places),
        }
        if self.imbalance is not None:
            found["tokens/imbalance"] = self.imbalance
        if self.reference_kl is not None:
            found["kl/ref"] = self.reference_kl / tokens
            found["kl/clamped_frac"] = self.clamped_kl / tokens
        if self.values is not None:
            found |= self.values.metrics()
        if self.raw_square:
            found["policy/ess"] = self.raw_weight**2 / (self.tokens * self.raw_square)
        if self.current:
            found["policy/mismatch_kl"] = self.mismatch / self.current
            found["policy/logprob_diff_mean"] = self.abs_diff / self.current
            found["policy/logprob_diff_max"] = self.max_diff
        return found


_SUMS = (
    "tokens",
    "entropy",
    "clipped",
    "clamped_kl",
    "moved",
    "weight",
    "cut",
    "raw_weight",
    "raw_square",
    "current",
    "mismatch",
    "abs_diff",
    "real",
    "places",
)
_VALUE_SUMS = ("tokens", "clipped", "error", "total", "square")


def _read(totals: Totals | ValueTotals, names: tuple[str, ...]) -> list[float]:
    return [getattr(totals, name) for name in names]
