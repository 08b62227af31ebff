"""Sampling masks as tensors: which tokens top-k and top-p kept, for each sampled token (`types.Segment.kept`).

A truncated policy is the softmax over the kept tokens alone. Engine and trainer use the same masks, so their logprobs
agree ("Keep Sampling Mask" of arXiv 2512.02556, section 3.1). Shapes: N tokens, K ids, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.errors import EngineFault
from baton.types import kept_dtype

_REMOVED = -1e9
"""Logit of a padding column, which stands for no token. The value is finite, because 0 · −∞ is NaN."""


def encoded(ids_NK: Tensor, is_kept_NK: Tensor, vocabulary: int) -> list[bytes]:
    """Return the kept ids of each token as bytes, in ascending order. `is_kept_NK` marks the kept ids in `ids_NK`."""
    ascending_NK = ids_NK.masked_fill(~is_kept_NK, vocabulary).sort(-1).values.cpu().numpy()
    rows = zip(ascending_NK.astype(kept_dtype(vocabulary)), is_kept_NK.sum(-1).tolist(), strict=True)
    return [row[:count].tobytes() for row, count in rows]


def decoded(masks: Sequence[bytes], vocabulary: int) -> Tensor:
    """Return the ids of each mask, padded with −1: [N, K] int32 on the host. K is 0 if all masks are empty. Raises
    EngineFault for an id outside the vocabulary."""
    dtype = np.dtype(kept_dtype(vocabulary))
    counts_N = np.fromiter(map(len, masks), dtype=np.int64, count=len(masks)) // dtype.itemsize
    laid_NK = np.full((len(masks), counts_N.max(initial=0)), -1, dtype=np.int32)
    laid_NK[np.arange(laid_NK.shape[1]) < counts_N[:, None]] = np.frombuffer(b"".join(masks), dtype)
    if laid_NK.max(initial=-1) >= vocabulary:
        raise EngineFault(f"a sampling mask has the id {laid_NK.max()}; allowed are 0 to {vocabulary - 1}")
    return torch.from_numpy(laid_NK)


def kept_logits(products_NV: Tensor, kept_NK: Tensor, shaped: Callable[[Tensor], Tensor] = Tensor.float) -> Tensor:
    """Return the logits [N, K] of the kept tokens. `shaped`: the function that computes logits from the head's matrix
    product, such as `Head.shaped`."""
    chosen_NK = products_NV.gather(-1, kept_NK.clamp(min=0).long())
    return shaped(chosen_NK).masked_fill(kept_NK < 0, _REMOVED)


def places_in(kept_NK: Tensor, targets_N: Tensor) -> Tensor:
    """Return the column of `kept_NK` that contains each target, [N]."""
    return (kept_NK == targets_N[..., None]).int().argmax(-1)
