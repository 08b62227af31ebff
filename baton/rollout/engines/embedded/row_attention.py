"""Decode attention whose cost follows each row's own length, by torch's variable-length kernel. For CUDA.

A masked product scans for every row as many positions as the longest row has. Here the slots are handed over as they
lie: [slots, length, kv_heads, head_dim] is one packed sequence per slot, each `length` long, of which the first
`lengths_W` positions are used. Nothing is copied, grouped heads are not repeated, and `num_splits = 1` keeps a row's
sum in one order: its bits do not depend on its neighbours (law 5).

Only decode comes here: prefill, and plain forwards, go on to transformers' own `sdpa`.
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
"""What some models add to their products, and the kernel does not know."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a decode step lie."""

    query_starts: Tensor
    """[W + 1] int32: one query per row."""
    starts: Tensor
    """[W + 1] int32: of the slots, in positions."""
    lengths_W: Tensor
    """[W] int32: positions that each row looks at, its own new one included."""

    @classmethod
    def of(cls, position_W: Tensor, slot_length: int) -> Rows:
        """Return the rows of the lowest slots, each at its own position."""
        numbers = torch.arange(len(position_W) + 1, dtype=torch.int32, device=position_W.device)
        return cls(numbers, numbers * slot_length, (position_W + 1).to(torch.int32))


def attend_by_row(model: PreTrainedModel) -> None:
    """Have a model's attention ask for `Rows`: its forward then takes them as the keyword `rows`."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without one a plain forward would see no mask at all
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
    """See transformers' attention functions; query [W, heads, 1, head_dim], key and value [W, kv_heads, length, …]."""
    if rows is None or any(kwargs.get(name) is not None for name in _FOREIGN):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return found
    window = kwargs.get("sliding_window")
    attended = varlen_attn(
        query[:, :, 0].contiguous(),
        key.transpose(1, 2).flatten(0, 1),  # the slots as they lie: a view
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
