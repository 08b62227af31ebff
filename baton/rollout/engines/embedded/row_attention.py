"""Decode attention that costs each row only its own length, with torch's variable-length kernel. For CUDA.

Masked attention scans as many positions for every row as the longest row has. The variable-length kernel reads the
slots in place: [slots, length, kv_heads, head_dim] is one packed sequence of `length` positions per slot, of which it
uses the first `lengths_W`. Nothing is copied, grouped heads are not repeated, and `num_splits = 1` fixes the order of a
row's sum, so that its bits do not depend on its neighbours.

Only decode uses it; prefill and plain forwards use the `sdpa` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "baton_rows"
_FOREIGN = ("softcap", "s_aux", "position_bias")
"""Arguments of some models' attention that the kernel does not support."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Positions of a decode step's rows within the slots."""

    query_starts: Tensor
    """[W + 1] int32: one query per row."""
    starts: Tensor
    """[W + 1] int32: first position of each slot, counted over all slots."""
    lengths_W: Tensor
    """[W] int32: positions that each row attends to, its new one included."""

    @classmethod
    def of(cls, position_W: Tensor, slot_length: int) -> Rows:
        """Return the rows of the lowest W slots, each at its own position."""
        numbers = torch.arange(len(position_W) + 1, dtype=torch.int32, device=position_W.device)
        return cls(numbers, numbers * slot_length, (position_W + 1).to(torch.int32))


def attend_by_row(model: PreTrainedModel) -> None:
    """Register this attention for a model: its forward then takes `Rows` as the keyword `rows`."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it transformers builds no mask for plain forwards
    model.set_attn_implementation(NAME)


def _attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Signature of transformers' attention functions: query [W, heads, 1, head_dim], key, value [W, kv_heads, L, …]."""
    if rows is None or any(kwargs.get(name) is not None for name in _FOREIGN):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return found
    window = kwargs.get("sliding_window")
    attended = varlen_attn(
        query[:, :, 0].contiguous(),
        key.transpose(1, 2).flatten(0, 1),  # a view of the slots, no copy
        value.transpose(1, 2).flatten(0, 1),
        rows.query_starts,
        rows.starts,
        1,
        key.shape[2],
        scale=kwargs.get("scaling"),
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=True,
        seqused_k=rows.lengths_W,
        num_splits=1,
    )
    assert isinstance(attended, Tensor)
    return attended[:, None], None
