"""Packing: one pass computes concatenated rows of different lengths without padding, with attention only within each
row.

On CUDA in bfloat16, torch's variable-length kernel computes attention for all rows together; otherwise attention is
computed row by row. Neither way allocates a mask of shape [T, T].
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

PACKED = "baton_packed"
"""Name under which `_attend` is registered with transformers."""

_lengths: ContextVar[tuple[int, ...]] = ContextVar("lengths", default=())
"""Lengths of the packed rows in the current pass; empty in a padded pass."""


def prefer_packed_attention(model: PreTrainedModel) -> None:
    """If the model uses SDPA, replace its attention by an attention that separates packed rows. Passes over padded rows
    are unaffected."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED, _attend)
        AttentionMaskInterface.register(PACKED, _mask)
        model.set_attn_implementation(PACKED)


def packed_hidden_states(
    model: PreTrainedModel, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Return the hidden states [T, H] of concatenated rows. position_ids_T: positions, which restart at 0 with each
    row."""
    assert sum(lengths) == len(input_ids_T)
    token = _lengths.set(tuple(lengths) if model.config._attn_implementation == PACKED else ())
    try:
        hidden: torch.Tensor = model.base_model(
            input_ids=input_ids_T[None], position_ids=position_ids_T[None], use_cache=False
        ).last_hidden_state
    finally:
        _lengths.reset(token)
    return hidden[0]


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _lengths.get() else sdpa_mask(*args, **kwargs)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for query, key and value [1, heads, T, D]; return [1, T, heads, D]. transformers requires this
    signature."""
    lengths = _lengths.get()
    if query.device.type == "cpu":  # bfloat16 attention is several times slower than float32
        with torch.autocast("cpu", enabled=False):
            return _by_rows(module, query.float(), key.float(), value.float(), attention_mask, lengths, kwargs)
    if lengths and torch.is_autocast_enabled(query.device.type) and (kernel := _kernel()) is not None:
        return _by_kernel(kernel, query, key, value, lengths, kwargs)
    return _by_rows(module, query, key, value, attention_mask, lengths, kwargs)


def _by_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    lengths: tuple[int, ...],
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    if not lengths:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    found = []
    window = kwargs.get("sliding_window")
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        part = query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end]
        mask = None
        if window is not None and end - begin > window:
            places = torch.arange(end - begin, device=query.device)
            behind = places[:, None] - places[None, :]
            mask = ((behind >= 0) & (behind < window))[None, None]
        found.append(sdpa_attention_forward(module, *part, mask, **kwargs)[0])
    return torch.cat(found, dim=1), None


def _by_kernel(
    kernel: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    dtype, device = torch.get_autocast_dtype(query.device.type), query.device
    laid = [tensor[0].transpose(0, 1).to(dtype).contiguous() for tensor in (query, key, value)]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    window = kwargs.get("sliding_window")
    output = kernel(
        *laid,
        ends,
        ends,
        max(lengths),
        max(lengths),
        scale=kwargs.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=laid[0].shape[1] != laid[1].shape[1],
    )
    return output[None], None


def _kernel() -> Any:
    """Return torch's variable-length attention, or None for a torch version before 2.11."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
