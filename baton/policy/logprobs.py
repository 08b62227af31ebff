"""Computes log-probabilities of given tokens under a Hugging Face causal LM, at the sampling temperature.

Shapes: B rows, S positions of a padded row, K positions to score at the end of each row, T positions of concatenated
rows, N tokens to score, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from baton.errors import UserError
from baton.policy.head import RequestedScores, find_head, head_scores, score
from baton.policy.packing import PackedTokens, concatenated, packed_hidden_states, prefer_packed_attention, recomputing
from baton.policy.sampling_masks import kept_logits, places_in

ONLY_LOGPROBS = RequestedScores()
"""Log-probabilities at temperature 1."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of given tokens under a policy. N may stand for several dimensions, such as [B, K]."""

    logprobs: torch.Tensor
    """[N] float32 log π at the sampling temperature."""
    entropy: torch.Tensor | None
    """[N] entropies in nats; None unless requested."""
    hidden: torch.Tensor | None
    """[N, H] hidden states at the position before each token. None if `find_head` does not support the model's head."""


def padded_scores(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    *,
    first: int,
    wanted: RequestedScores = ONLY_LOGPROBS,
    kept: torch.Tensor | None = None,
) -> TokenScores:
    """Score the tokens at positions `first` … S − 1 of padded rows. The scores have shape [B, K] with K = S − `first`.
    Rows are padded on the right; scores at padding are meaningless. If `find_head` does not support the model's head,
    all logits are computed in one tensor. `kept`: sampling masks [B, K, ids]."""
    assert 1 <= first < input_ids_BS.shape[1], f"first={first} for rows of {input_ids_BS.shape[1]} positions"
    num_kept = input_ids_BS.shape[1] - first
    targets_BK = input_ids_BS[:, first:]
    if (head := find_head(model)) is not None:
        # No attention mask is passed, because fast kernels do not accept a mask. Under causal attention, no token
        # attends to the padding after it.
        hidden_BKH = hidden_states(model, input_ids_BS[:, :-1])[:, -num_kept:]
        return TokenScores(*head_scores(head, hidden_BKH, targets_BK, wanted, kept), hidden_BKH)
    # If `forward` has the argument `logits_to_keep`, the model computes no logits before position `first`.
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep: dict[str, Any] = {"logits_to_keep": num_kept} if can_keep else {}
    logits_BKV = model(input_ids=input_ids_BS[:, :-1], use_cache=False, **keep).logits[:, -num_kept:]
    if kept is not None:
        logits_BKV, targets_BK = kept_logits(logits_BKV, kept), places_in(kept, targets_BK)
    logprobs, _, entropy = score(logits_BKV, targets_BK, wanted)
    return TokenScores(logprobs, entropy, None)


def packed_scores(
    model: PreTrainedModel,
    tokens: PackedTokens,
    wanted: RequestedScores = ONLY_LOGPROBS,
    kept: torch.Tensor | None = None,
) -> TokenScores:
    """Score the tokens at the positions `tokens.places` of concatenated rows, which have no padding. The scores have
    shape [N]. `kept`: sampling masks [N, ids].

    If the model does not use the attention of `packing.py`, transformers builds a mask from the positions to separate
    the rows, and rows must not share a prompt. Requires a head that `find_head` supports.
    """
    head = find_head(model)
    assert head is not None, f"{type(model).__name__} has no known head"
    hidden_NH, targets_N = packed_hidden_states(model, tokens)[tokens.before], tokens.input_ids[tokens.places]
    return TokenScores(*head_scores(head, hidden_NH, targets_N, wanted, kept), hidden_NH)


def packs_as_it_pads(model: PreTrainedModel, shares: Sequence[int] = (1, 1, 1), *, has_head: bool = True) -> bool:
    """Return whether packed rows get the same scores as the same rows in separate passes. `shares`: for each prompt,
    the number of consecutive rows that share it. If `has_head` is False (a pipeline stage without the head), hidden
    states are compared instead of scores."""
    if has_head and find_head(model) is None:
        return False
    vocabulary: int = model.config.get_text_config().vocab_size
    num_rows, lengths = sum(shares), [(5, 9, 8)[row % 3] for row in range(sum(shares))]
    ids = torch.arange(num_rows * 9).mul(7).remainder(vocabulary).view(num_rows, 9)
    ids[:, :2] = torch.repeat_interleave(ids[: len(shares), :2], torch.tensor(shares), dim=0)
    places = torch.arange(9).expand(num_rows, -1)
    is_scored = (places > 1) & (places < torch.tensor(lengths)[:, None])
    with torch.no_grad(), _limit_windows(model, 6):
        try:
            tokens = concatenated(ids, is_scored, [2] * num_rows, lengths, shares).to(model.device)
            if has_head:
                packed = packed_scores(model, tokens).logprobs
            else:
                packed = packed_hidden_states(model, tokens)[tokens.before]
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return False
        alone = [
            padded_scores(model, row[None, :length], first=2).logprobs[0]
            if has_head
            else hidden_states(model, row[None, : length - 1])[0, 1:]
            for row, length in zip(ids.to(model.device), lengths, strict=True)
        ]
    tolerance = 0.1 if torch.is_autocast_enabled(model.device.type) else 1e-3
    expected = torch.cat(alone)
    largest = 1.0 if has_head else float(expected.abs().max())
    return torch.allclose(packed, expected, atol=tolerance * largest, rtol=tolerance)


@contextmanager
def _limit_windows(model: PreTrainedModel, most: int) -> Iterator[None]:
    """Limit the sliding windows of a model to `most` positions, so that short rows are longer than the windows."""
    owners: list[Any] = [owner for module in model.modules() for owner in (module, getattr(module, "config", None))]
    found = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    windows = [(owner, window) for owner, window in found if isinstance(window, int) and window > most]
    try:
        for owner, _ in windows:
            owner.sliding_window = most
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window


def hidden_states(model: PreTrainedModel, input_ids_BS: torch.Tensor) -> torch.Tensor:
    """Return the hidden states [B, S, H] that are the input of the model's head."""
    hidden: torch.Tensor = model.base_model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
    return hidden


def compute_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a model with float32 parameters computes linear layers in `dtype`."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def prefer_float32_attention(*models: PreTrainedModel | None) -> None:
    """On a CPU, make SDPA compute in float32 within bfloat16 autocast, because float32 attention is faster on a CPU
    (`packing.py`)."""
    prefer_packed_attention(*(model for model in models if model is not None and model.device.type == "cpu"))


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each block's activations in the backward pass. Raises UserError for an unsupported model."""
    # Newer releases of transformers renamed `gradient_checkpointing_enable` to `activation_checkpointing_enable`.
    enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False, "context_fn": recomputing})
    blocks = _blocks(model)
    if not blocks:
        raise UserError(
            f"trainer.activation_checkpointing: {type(model).__name__} has no blocks that can recompute their "
            "activations; allowed is false"
        )
    # transformers recomputes activations only in training mode. `model.train()` is not called, because it would also
    # enable dropout in the blocks' modules.
    for block in blocks:
        block.training = True


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each block with torch, except the attention of `packing.py`. Blocks of one class share their compiled
    code. If transformers does not mark a model's blocks, the whole model except its head is compiled."""
    blocks = _blocks(model)
    for block in blocks:
        if block.gradient_checkpointing:
            # The block is compiled inside the checkpoint, because torch cannot compile a checkpoint with a
            # `context_fn`. Forward pass and recomputation must save the same tensors, so both are compiled.
            block._gradient_checkpointing_func = partial(_compiled, block._gradient_checkpointing_func)
        else:
            block.compile(dynamic=True)
    if not blocks:
        model.base_model.compile(dynamic=True)


def _compiled(checkpoint: Any, block: partial[Any], *arguments: Any) -> Any:
    """Run the compiled forward pass of a block with activation checkpointing. `block`: a `partial` of the forward
    method of the block's class, as transformers passes it."""
    return checkpoint(partial(_compiled_function(block.func), *block.args, **block.keywords), *arguments)


@cache
def _compiled_function(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


def _blocks(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
