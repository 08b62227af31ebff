"""Packing: one forward pass processes rows of different lengths, concatenated without padding. Attention stays within
each row. Rows with the same prompt may share the prompt's tokens, in the order prompt, response, response, …

On CUDA in bfloat16 without shared prompts, torch's variable-length kernel computes attention for all rows together.
Without this kernel, attention is computed row by row, except that similarly long responses to one prompt are computed
together. No attention mask over all pairs of tokens is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from baton.policy.memory import sent

PACKED = "baton_packed"
"""Name under which `_attend` is registered with transformers."""

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""

Shapes = tuple[tuple[int, ...], ...]
"""Lengths of packed rows. A row that shares no prompt is a tuple (length of the row,). Rows that share a prompt form
one tuple (length of the prompt, length of the first response, length of the second response, …)."""

SIMILAR = 0.5
"""Attention pads consecutive responses to a shared prompt to one length and computes them together, as long as the
shortest response has at least this fraction of the longest response's length."""


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of a pass without padding."""

    input_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64 positions. They start at 0 in each row, but at the prompt's length in a response to a shared prompt."""
    places: torch.Tensor
    """[N] indices of the tokens to score, row by row."""
    before: torch.Tensor
    """[N] index of the token before each token to score. The token before the first token of a response is the last
    token of the prompt, even if the prompt is shared and not adjacent."""
    ends: torch.Tensor
    """[len(`shapes`) + 1] int32: 0, followed by the index in `input_ids` at which each element of `shapes` ends."""
    shapes: Shapes

    def to(self, device: torch.device) -> PackedTokens:
        tensors = self.input_ids, self.positions, self.places, self.before, self.ends
        ids, positions, places, before, ends = (sent(tensor, device) for tensor in tensors)
        return PackedTokens(ids, positions, places, before, ends, self.shapes)


_packed: ContextVar[PackedTokens | None] = ContextVar("packed", default=None)
"""Tokens of the current packed pass; None in a padded pass."""


def concatenated(
    input_ids_BS: torch.Tensor,
    is_scored_BS: torch.Tensor,
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    shares: Sequence[int] = (),
    multiple: int = 1,
) -> PackedTokens:
    """Concatenate rows on the host, without the padding on their right.

    `shares`: for each distinct prompt, the number of consecutive rows that start with it. Of the rows that share a
    prompt, only the first keeps the prompt. If `shares` is empty, every row keeps its prompt. Tokens of a shared prompt
    cannot be scored. `multiple`: if T is not a multiple of this number, a row of tokens with id 0 is appended, so that
    T becomes such a multiple.
    """
    num_rows, width = input_ids_BS.shape
    shapes: list[tuple[int, ...]] = []
    firsts: list[int] = []
    for size in shares or [1] * num_rows:
        begin = len(firsts)
        prompt, ends = prompt_lengths[begin], lengths[begin : begin + size]
        shapes.append((ends[0],) if size == 1 else (prompt, *(end - prompt for end in ends)))
        firsts += [begin] * size
    positions_BS = torch.arange(width).expand(num_rows, -1)
    rows_B, firsts_B = torch.arange(num_rows), torch.tensor(firsts)
    is_prompt_BS = positions_BS < torch.tensor(prompt_lengths)[:, None]
    is_row_BS = positions_BS < torch.tensor(lengths)[:, None]
    is_kept_BS = is_row_BS & ~(is_prompt_BS & (firsts_B != rows_B)[:, None])
    places_BS = (is_kept_BS.flatten().cumsum(0) - 1).view_as(is_kept_BS)
    places_BS = places_BS[torch.where(is_prompt_BS, firsts_B[:, None], rows_B[:, None]), positions_BS]
    ids_T, positions_T = input_ids_BS[is_kept_BS], positions_BS[is_kept_BS]
    if extra := -len(ids_T) % multiple:
        ids_T = torch.cat([ids_T, ids_T.new_zeros(extra)])
        positions_T = torch.cat([positions_T, torch.arange(extra)])
        shapes.append((extra,))
    before_BS = torch.nn.functional.pad(places_BS[:, :-1], (1, 0))
    ends_R = torch.tensor([*accumulate(map(sum, shapes), initial=0)], dtype=torch.int32)
    return PackedTokens(ids_T, positions_T, places_BS[is_scored_BS], before_BS[is_scored_BS], ends_R, tuple(shapes))


def prefer_packed_attention(*models: PreTrainedModel | None) -> None:
    """Replace the attention function of those models that use SDPA by `_attend`, which computes attention only within
    each packed row. Passes over padded rows are unaffected."""
    AttentionInterface.register(PACKED, _attend)
    AttentionMaskInterface.register(PACKED, sdpa_mask)
    for model in models:
        if model is not None and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(PACKED)


def packed_hidden_states(model: PreTrainedModel, tokens: PackedTokens) -> torch.Tensor:
    """Return the hidden states [T, H] of concatenated rows."""
    assert sum(map(sum, tokens.shapes)) == len(tokens.input_ids)
    separates = model.config._attn_implementation == PACKED
    # `_attend` ignores its mask. The mask passed here has four dimensions, because transformers forwards such a mask
    # unchanged. Without a mask, transformers would synchronise with the device to find out that no mask is needed.
    mask = {"attention_mask": tokens.input_ids[None, None, None]} if separates else {}
    with _in_pass(tokens if separates else None):
        hidden: torch.Tensor = model.base_model(
            input_ids=tokens.input_ids[None], position_ids=tokens.positions[None], use_cache=False, **mask
        ).last_hidden_state
    return hidden[0]


def recomputing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a block's forward pass and its recomputation: the `context_fn` of activation checkpointing.
    The second context sets the current `PackedTokens` again for two reasons: the end of the forward pass has reset
    them, and on CUDA the backward pass, which recomputes the block, runs in another thread."""
    return nullcontext(), _in_pass(_packed.get())


@contextmanager
def _in_pass(tokens: PackedTokens | None) -> Iterator[None]:
    token = _packed.set(tokens)
    try:
        yield
    finally:
        _packed.reset(token)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each pass has other lengths, so each would compile again
def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for query, key, value [1, heads, T, D]; return [1, T, heads, D], as transformers does."""
    tokens = _packed.get()
    if query.device.type == "cpu":  # bfloat16 attention is several times slower than float32
        with torch.autocast("cpu", enabled=False):
            return _by_rows(module, (query.float(), key.float(), value.float()), attention_mask, tokens, kwargs), None
    shares = tokens is not None and any(len(shape) > 1 for shape in tokens.shapes)
    if tokens is not None and not shares and torch.is_autocast_enabled(query.device.type):
        heads = query.shape[1], key.shape[1], query.shape[3]
        if (kernel := _kernel(query.device, heads, torch.get_autocast_dtype(query.device.type))) is not None:
            return _by_kernel(module, kernel, (query, key, value), tokens, kwargs), None
    return _by_rows(module, (query, key, value), attention_mask, tokens, kwargs), None


def _by_rows(
    module: torch.nn.Module, qkv: Qkv, mask: torch.Tensor | None, tokens: PackedTokens | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    if tokens is None:
        return _sdpa(module, qkv, mask, kwargs)
    sizes = [size for shape in tokens.shapes for size in shape]
    # `split` instead of slices: the backward pass of each slice would write a gradient of all T tokens.
    parts = zip(*(torch.split(tensor, sizes, dim=2) for tensor in qkv), strict=True)
    found = []
    for shape in tokens.shapes:
        own, *responses = (next(parts) for _ in shape)
        found.append(_attended(module, own, 0, kwargs))
        for piece in pieces(shape[1:]):
            members = responses[piece]
            queries, *others = (_stacked(tensors) for tensors in zip(*members, strict=True))
            prompts = (prompt.expand(len(members), -1, -1, -1) for prompt in own[1:])
            keys, values = (torch.cat(pair, dim=2) for pair in zip(prompts, others, strict=True))
            output = _attended(module, (queries, keys, values), shape[0], kwargs)
            found += [row[None, :size] for row, size in zip(output, shape[1:][piece], strict=True)]
    return torch.cat(found, dim=1)


def pieces(lengths: Sequence[int]) -> list[slice]:
    """Divide the responses to a shared prompt into ranges of consecutive, similarly long responses (`SIMILAR`)."""
    found, begin = [], 0
    for place in range(1, len(lengths) + 1):
        run = lengths[begin : place + 1]
        if place == len(lengths) or min(run) < SIMILAR * max(run):
            found.append(slice(begin, place))
            begin = place
    return found


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pad tensors [1, heads, L, D] to the longest L, and concatenate them to [rows, heads, longest L, D]."""
    longest = max(tensor.shape[2] for tensor in tensors)
    rows = [(tensor, longest - tensor.shape[2]) for tensor in tensors]
    return torch.cat([torch.nn.functional.pad(row, (0, 0, 0, missing)) if missing else row for row, missing in rows])


def _attended(module: torch.nn.Module, qkv: Qkv, begin: int, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the attention output [rows, queries, heads, D]. The first query is at position `begin`. Each query attends
    to the keys up to its own position."""
    end, device, mask = qkv[1].shape[2], qkv[1].device, None
    window = attention_window(module, kwargs) or end
    if begin or end > window:
        behind = torch.arange(begin, end, device=device)[:, None] - torch.arange(end, device=device)
        mask = ((behind >= 0) & (behind < window))[None, None]
    return _sdpa(module, qkv, mask, kwargs)


def attention_window(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> int | None:
    """Return the sliding window of an attention module: the number of positions that a query attends to, including its
    own; None means all positions. Some families (phimoe, qwen2_moe) do not pass `sliding_window` in `kwargs`, because
    only the mask has the window. For these families, the window is read from the config, from which transformers also
    builds the mask."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"] or None
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _sdpa(module: torch.nn.Module, qkv: Qkv, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = sdpa_attention_forward(module, *qkv, mask, **kwargs)[0]
    return found


def _by_kernel(
    module: torch.nn.Module, kernel: Any, qkv: Qkv, tokens: PackedTokens, kwargs: dict[str, Any]
) -> torch.Tensor:
    dtype, longest = torch.get_autocast_dtype(qkv[0].device.type), max(map(max, tokens.shapes))
    # `squeeze(0)` instead of `[0]`, whose backward pass would allocate a tensor of zeros and copy the gradient into it.
    laid = [tensor.squeeze(0).transpose(0, 1).to(dtype).contiguous() for tensor in qkv]
    window = attention_window(module, kwargs)
    output: torch.Tensor = kernel(
        *laid,
        tokens.ends,
        tokens.ends,
        longest,
        longest,
        scale=kwargs.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=laid[0].shape[1] != laid[1].shape[1],
    )
    return output[None]


@cache
def _kernel(device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype) -> Any:
    """Return torch's variable-length attention, or None if this version of torch or this device does not support its
    forward and backward pass. `heads`: number of query heads, number of key heads, size of a head."""
    ends = torch.tensor([0, 8], dtype=torch.int32, device=device)
    try:
        from torch.nn.attention.varlen import varlen_attn

        with torch.enable_grad():
            given = [torch.zeros(8, n, heads[2], dtype=dtype, device=device, requires_grad=True) for n in heads[:2]]
            found: Any = varlen_attn(
                *(given[0], given[1], given[1], ends, ends, 8, 8),
                window_size=(-1, 0),
                enable_gqa=heads[0] != heads[1],
            )
            torch.autograd.grad(found.sum(), given)
    except (ImportError, RuntimeError, TypeError, ValueError):
        return None
    return varlen_attn
