"""The critic: a value per token, and PPO's value loss.

Shapes: B rows, K positions of a padded row, H width of the hidden states.
"""

from __future__ import annotations

import copy
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from transformers import PreTrainedModel

Scalar = TypeVar("Scalar", torch.Tensor, float)


class Critic(torch.nn.Module):
    """A value head on a Hugging Face causal LM: the policy itself, or a separate model.

    The value before token t is computed from the hidden state at token t − 1, from which the logits of token t are also
    computed. The head is initialised to zero, so all values are 0 before the first update.
    """

    float32_parts = ("head",)
    """Submodules whose parameters are gathered in float32, even if other parameters are gathered in bfloat16."""

    def __init__(self, policy: PreTrainedModel, *, is_separate: bool) -> None:
        """Create a critic. A separate critic copies the policy's body, in float32 even if the policy is frozen and has
        another dtype; a shared critic has only the head."""
        super().__init__()
        self.trunk: PreTrainedModel | None = None
        if is_separate:
            self.trunk = copy.deepcopy(cast(PreTrainedModel, policy.base_model)).float()  # type: ignore[no-untyped-call]
        device = None if policy.device.type == "meta" else policy.device  # no model file contains the head
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, device=device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, hidden_BKH: torch.Tensor) -> torch.Tensor:
        """Return float32 values [B, K] from hidden states [B, K, H]. Any number of leading dimensions is allowed."""
        with torch.autocast(hidden_BKH.device.type, enabled=False):  # three digits (bfloat16) are too few for values
            values: torch.Tensor = self.head(hidden_BKH.float()).squeeze(-1)
        return values


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of clipped squared errors, and a mask [B, K] of the tokens whose gradient the clip removed.

    The sum is Σ_t ½ max((V_t − R_t)², (clip(V_t, V_old ± clip) − R_t)²) as in PPO's original code (arXiv 2005.12729,
    table 1): a value that has moved towards its return by more than `clip` gets no gradient.
    """
    held = old_values + (values - old_values).clamp(-clip, clip)
    free_error, held_error = (values - returns).square(), (held - returns).square()
    loss = torch.where(mask, torch.maximum(free_error, held_error) / 2, 0.0).sum()
    is_outside = (values - old_values).abs() > clip  # inside the clip, the two errors differ only by rounding
    return loss, (mask & is_outside & (held_error > free_error)).detach()


class ValueSums(NamedTuple, Generic[Scalar]):
    """Sums over trained tokens."""

    tokens: Scalar
    clipped: Scalar
    """Number of tokens whose gradient the clip removed."""
    error: Scalar
    """Sum of the squared errors of the values that the critic had at the start of the train step."""
    total: Scalar
    """Sum of the returns."""
    square: Scalar
    """Sum of the squared returns."""


@torch.no_grad()
def value_sums(
    is_clipped: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> ValueSums[torch.Tensor]:
    """Return the sums over a microbatch."""
    kept = torch.where(mask, returns, 0.0)
    error = torch.where(mask, returns - old_values, 0.0).square().sum()
    return ValueSums(mask.sum(), is_clipped.sum(), error, kept.sum(), kept.square().sum())
