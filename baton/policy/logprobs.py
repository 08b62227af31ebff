"""Log-probabilities of given tokens under a Hugging Face causal LM, at the sampling temperature.

Shapes: B rows, S places of a padded row, K the last places of a row that are asked for, V vocabulary.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SDPA_FLOAT32 = "sdpa_float32"
"""Name under which transformers finds `_sdpa_float32`."""

_ENTROPY_ROWS = 4096
"""Positions whose [rows, V] probabilities exist at once while the entropy is summed."""


def token_logprobs(
    model: PreTrainedModel, input_ids_BS: torch.Tensor, *, first: int, temperature: float, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log π of the tokens at places first … S−1, each given all tokens before it, and the entropy there.

    Both are float32 [B, K] with K = S − first, whatever the dtype of the model; the entropy (nats, over the whole
    vocabulary) carries no gradient, and is None unless asked for. Rows are padded on the right; what the padding's
    places hold is of no use. No attention mask is passed: behind a causal mask no token sees the padding after it,
    and without a mask the fast kernels apply. The last place predicts nothing and is not fed at all.
    """
    assert 1 <= first < input_ids_BS.shape[1], f"first={first} for rows of {input_ids_BS.shape[1]} places"
    num_kept = input_ids_BS.shape[1] - first
    # Before the first place asked for, logits are not computed where the model can leave them out.
    keep: dict[str, Any] = {"logits_to_keep": num_kept} if _can_keep(model) else {}
    logits_BKV = model(input_ids=input_ids_BS[:, :-1], use_cache=False, **keep).logits[:, -num_kept:].float()
    if temperature != 1.0:
        logits_BKV = logits_BKV / temperature
    # log_softmax followed by gather would hold a second [B, K, V]; gather − logsumexp holds two [B, K].
    normaliser_BK = logits_BKV.logsumexp(-1)
    logprobs_BK = logits_BKV.gather(-1, input_ids_BS[:, first:, None]).squeeze(-1) - normaliser_BK
    entropy_BK = entropy(logits_BKV.detach(), normaliser_BK.detach()) if with_entropy else None
    return logprobs_BK, entropy_BK


@torch.no_grad()
def entropy(logits_BKV: torch.Tensor, normaliser_BK: torch.Tensor) -> torch.Tensor:
    """Return −Σ_v p_v log p_v in nats, [B, K], with log p = logits − normaliser."""
    logits_TV, normaliser_T = logits_BKV.flatten(0, 1), normaliser_BK.flatten()
    parts = []
    for begin in range(0, len(logits_TV), _ENTROPY_ROWS):
        logits, normaliser = logits_TV[begin : begin + _ENTROPY_ROWS], normaliser_T[begin : begin + _ENTROPY_ROWS]
        probs = (logits - normaliser[:, None]).exp_()
        parts.append(normaliser - probs.mul_(logits).sum(-1))
    return torch.cat(parts).view_as(normaliser_BK)


def compute_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a model with float32 parameters computes its linear layers in `dtype`."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def prefer_float32_attention(model: PreTrainedModel) -> None:
    """Let attention run in float32 inside bfloat16 autocast, where that is faster: SDPA on a CPU."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(SDPA_FLOAT32, _sdpa_float32)
        AttentionMaskInterface.register(SDPA_FLOAT32, sdpa_mask)
        model.set_attn_implementation(SDPA_FLOAT32)


def _sdpa_float32(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    with torch.autocast(query.device.type, enabled=False):
        return sdpa_attention_forward(module, query.float(), key.float(), value.float(), *args, **kwargs)


def _can_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
