"""Decode attention in which short rows scan fewer positions than the longest row, unlike ordinary masked attention.

On a CPU, attention is computed either per class of rows (`length_classes.py`), over the length of the longest row in
the class, or per row, by a kernel that the machine's C compiler builds (`kernels.c`). On CUDA, torch's variable-length
kernel treats the slots [slots, length, kv_heads, head_dim] as packed sequences, one per slot, and reads only the first
`lengths_W` positions of each slot. The kernel copies nothing and does not repeat grouped heads. With `num_splits = 1`,
the order of summation is fixed, so the bits of a row do not depend on other rows.

Only decode uses this attention. Prefill and plain forwards use the `sdpa` attention of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from baton.policy.packing import attention_window
from baton.rollout.engines.embedded.kernels import LANES, attend
from baton.rollout.engines.embedded.length_classes import SlotRange

NAME = "baton_rows"
_FOREIGN = ("softcap", "s_aux", "position_bias")
"""Arguments that some models pass to attention and that the kernel does not support."""


@dataclass(frozen=True, slots=True)
class Rows:
    """For each row of a decode step: the index of its first position in the slots, and its number of positions."""

    query_starts: Tensor
    """[W + 1] int32: index of each row's query; each row has one query."""
    starts: Tensor
    """[W + 1] int32: index of each slot's first position in the flattened [slots × length]."""
    lengths_W: Tensor
    """[W] int32: number of positions that each row attends to, including the position of its new token."""

    @classmethod
    def of(cls, position_W: Tensor, slot_length: int) -> Rows:
        """Return the rows of a decode step over the slots 0 to W − 1. `position_W`: positions of the new tokens."""
        numbers = torch.arange(len(position_W) + 1, dtype=torch.int32, device=position_W.device)
        return cls(numbers, numbers * slot_length, (position_W + 1).to(torch.int32))


def can_attend_by_class(model: PreTrainedModel) -> bool:
    """Return whether the model uses replaceable `sdpa` attention and passes extra keyword arguments to it."""
    return (
        model.config._attn_implementation == "sdpa"
        and model._can_set_attn_implementation()
        and any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    )


def attend_by_row(model: PreTrainedModel) -> None:
    """Replace a model's attention by `_attention`. The model's forward then accepts `rows`: `Rows` or slot ranges."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it transformers builds no mask for plain forwards
    model.set_attn_implementation(NAME)


def _attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rows: Rows | Sequence[SlotRange] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention, with the signature that transformers requires. `query`: [W, heads, 1, head_dim]. key, value:
    [W, kv_heads, L, head_dim]. Without `rows`, use `sdpa`."""
    if rows is None or any(kwargs.get(name) is not None for name in _FOREIGN):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return found
    if not isinstance(rows, Rows):
        return attend_by_class(module, (query, key, value, attention_mask), rows, **kwargs), None
    window = attention_window(module, kwargs)
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        if query.shape[-1] % LANES:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        slots = key.transpose(1, 2), value.transpose(1, 2)
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        return attend(query[:, :, 0], *slots, rows.lengths_W, scale, window or 0)[:, None], None
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


def attend_by_class(
    module: Module, states: tuple[Tensor, Tensor, Tensor, Tensor | None], ranges: Sequence[SlotRange], **kwargs: Any
) -> Tensor:
    """Compute `sdpa` attention separately for each range of slots, over the positions that this range scans. `states`:
    query, key, value, mask [W, 1, 1, L]."""
    query, key, value, mask = states
    assert mask is not None, "decode always has a mask"
    found = [
        sdpa_attention_forward(module, query[b:e], key[b:e, :, :n], value[b:e, :, :n], mask[b:e, ..., :n], **kwargs)[0]
        for b, e, n in ranges
    ]
    return torch.cat(found)
