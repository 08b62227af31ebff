"""Samples one token per row: inverts the cumulative distribution over the vocabulary at a counter-based random draw.

A token is a pure function of the row's logits and of (noise seed, group id, sample index, position). If rounding
changes the logits slightly, the token changes only if the draw is very close to the boundary between two tokens. The
same noise therefore usually gives the same text on other hardware and after a resume. Shapes: W rows, V vocabulary, F
rows with top-p or top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.policy.memory import sent
from baton.policy.sampling_masks import encoded
from baton.types import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1
_SCALE = float(1 << 50)
"""Probabilities are converted to integers in units of 2^-50, so that their cumulative sum is exact and monotonic."""
CHUNK_VALUES = 1 << 18
"""Number of logits that a CPU processes at a time. Intermediate results of this size stay in the processor's cache.
Intermediate results of a whole batch would be so large that the allocator returns their memory to the operating system,
which must then clear the pages again in every step."""


def noise_key(noise_seed: int, group_id: int, sample_index: int) -> int:
    """Return the 64-bit key of the noise of one trajectory."""
    key = 0
    for part in (noise_seed, group_id, sample_index):
        key = mix(key ^ mix((part + _GOLDEN) & _MASK_64))
    return key


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a uniform random number in [0, 1), with 53 random bits, for each row. `keys`: [W] results of `noise_key`.
    `positions`: [W] number of tokens after the prompt."""
    bits = _mix_array(keys ^ _mix_array(positions.astype(np.uint64) + np.uint64(_GOLDEN)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class RowParams:
    """The sampling parameters of W rows as tensors, which are built again only when the rows have changed."""

    temperature_W1: Tensor | None = None
    """[W, 1] temperature of each row, 1 for greedy rows; None if every row has temperature 1."""
    is_greedy_W: Tensor | None = None
    """[W] whether each row is greedy; None if no row is greedy."""
    filtered_F: Tensor | None = None
    """[F] indices of the rows with top-p or top-k; None if there is no such row."""
    top_k_F1: Tensor | None = None
    top_p_F1: Tensor | None = None
    reports_F: Tensor | None = None
    """[F] whether each row of `filtered_F` reports its sampling mask; None if no row does."""
    most: int = 0
    """Largest top-k of the rows of `filtered_F`."""

    def part(self, rows: slice) -> RowParams:
        """Return the parameters of adjacent rows."""
        temperature_W1, is_greedy_W = self.temperature_W1, self.is_greedy_W
        filtered = top_k = top_p = reports = None
        if (filtered_F := self.filtered_F) is not None and self.top_k_F1 is not None and self.top_p_F1 is not None:
            is_inside_F = (filtered_F >= rows.start) & (filtered_F < rows.stop)
            if is_inside_F.any():
                filtered = filtered_F[is_inside_F] - rows.start
                top_k, top_p = self.top_k_F1[is_inside_F], self.top_p_F1[is_inside_F]
                reports = None if self.reports_F is None else self.reports_F[is_inside_F]
        return RowParams(
            None if temperature_W1 is None else temperature_W1[rows],
            None if is_greedy_W is None else is_greedy_W[rows],
            filtered,
            top_k,
            top_p,
            reports,
            self.most,
        )


def row_params(params: Sequence[SamplingParams | None], vocabulary: int, device: torch.device) -> RowParams:
    """Convert the sampling parameters of all rows to tensors. `params`: one element per row, None for an empty row."""
    if all(p is None or (p.temperature == 1 and p.top_p == 1 and not p.top_k) for p in params):
        return RowParams()
    temperatures = [1.0 if p is None or p.temperature == 0 else p.temperature for p in params]
    is_greedy = [p is not None and p.temperature == 0 for p in params]
    filtered = [
        (i, p)
        for i, p in enumerate(params)
        if p is not None and p.temperature != 0 and (p.top_p < 1 or 0 < p.top_k < vocabulary or p.reports_kept)
    ]
    reports = [p.reports_kept for _, p in filtered]
    return RowParams(
        temperature_W1=(
            torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
            if any(t != 1 for t in temperatures)
            else None
        ),
        is_greedy_W=torch.tensor(is_greedy, device=device) if any(is_greedy) else None,
        filtered_F=torch.tensor([i for i, _ in filtered], device=device) if filtered else None,
        top_k_F1=torch.tensor([[p.top_k or vocabulary] for _, p in filtered], device=device) if filtered else None,
        top_p_F1=(
            torch.tensor([[p.top_p] for _, p in filtered], dtype=torch.float64, device=device) if filtered else None
        ),
        reports_F=torch.tensor(reports, device=device) if any(reports) else None,
        most=max((min(p.top_k or vocabulary, vocabulary) for _, p in filtered), default=0),
    )


def sample(
    logits_WV: Tensor, params: RowParams, uniform_W: NDArray[np.float64]
) -> tuple[Tensor, Tensor, list[bytes] | None]:
    """Draw one token per row. Return the ids [W], the behavior logprobs [W], and the sampling masks [W]. The masks are
    None if no row reports one; a row without a mask has empty bytes.

    Logprobs are computed at the row's temperature (1 for greedy rows). They are normalised over the row's sampling
    mask. If the row has no mask, they are normalised over the whole vocabulary, before top-p and top-k. If the logits
    of a row are not finite, the row's logprob is nan and its id is arbitrary.
    """
    width, vocabulary = logits_WV.shape
    size = max(1, CHUNK_VALUES // vocabulary) if logits_WV.device.type == "cpu" else width
    draw_W = sent(torch.from_numpy(uniform_W), logits_WV.device)
    parts = []
    for begin in range(0, width, size):
        rows = slice(begin, begin + size)
        parts.append(_sample(logits_WV[rows], params.part(rows) if size < width else params, draw_W[rows]))
    ids, logprobs, masks = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs), [*chain.from_iterable(masks)] if params.reports_F is not None else None


def _sample(logits_WV: Tensor, params: RowParams, draw_W: Tensor) -> tuple[Tensor, Tensor, list[bytes]]:
    logits_WV = logits_WV.float()
    if params.temperature_W1 is not None:
        logits_WV = logits_WV / params.temperature_W1
    logprobs_WV = torch.log_softmax(logits_WV, dim=-1)
    mass_WV = logprobs_WV.exp().mul_(_SCALE).long()  # a float32 times a power of two is exact
    vocabulary, masks = logits_WV.shape[-1], [b""] * len(logits_WV)
    if params.filtered_F is not None:
        assert params.top_k_F1 is not None
        assert params.top_p_F1 is not None
        own_FV = mass_WV[params.filtered_F]
        mass_FK, order_FK = _filtered(own_FV, params.top_k_F1, params.top_p_F1, params.most)
        mass_WV[params.filtered_F] = torch.zeros_like(own_FV).scatter(-1, order_FK, mass_FK)
        if params.reports_F is not None:
            rows_R = params.filtered_F[params.reports_F]
            kept_RK, order_RK = mass_FK[params.reports_F] > 0, order_FK[params.reports_F]
            logits_RV = logits_WV[rows_R]
            total_R1 = logits_RV.gather(-1, order_RK).masked_fill(~kept_RK, -math.inf).logsumexp(-1, keepdim=True)
            logprobs_WV[rows_R] = logits_RV - total_R1
            for row, mask in zip(rows_R.tolist(), encoded(order_RK, kept_RK, vocabulary), strict=True):
                masks[row] = mask
    ids_W = pick(mass_WV, draw_W)
    if params.is_greedy_W is not None:
        ids_W = torch.where(params.is_greedy_W, logits_WV.argmax(dim=-1), ids_W)
    return ids_W, logprobs_WV.gather(1, ids_W[:, None])[:, 0], masks


def pick(mass_WV: Tensor, uniform_W: Tensor) -> Tensor:
    """Return, for each row, the first id at which the cumulative mass exceeds the draw times the total mass. Such an id
    always exists: a draw is at most 1 - 2^-53 and the total mass is below 2^53, so their product is below the total
    mass, even after rounding. Ids of mass 0 are never drawn."""
    running_WV = mass_WV.cumsum(dim=-1)
    total_W = running_WV[:, -1]
    target_W = (uniform_W * total_W).long()
    ids_W = torch.searchsorted(running_WV, target_W[:, None], right=True)[:, 0]
    return ids_W.clamp_(max=mass_WV.shape[-1] - 1)  # has an effect only if the logits of the row are not finite


def _filtered(mass_FV: Tensor, top_k_F1: Tensor, top_p_F1: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Apply top-k, then top-p. Return the masses and the ids of each row's most likely tokens, both [F, most]. The mass
    of a removed token is 0. `most`: number of tokens to return per row.

    Top-k keeps the k most likely tokens. Top-p then keeps the most likely of these k tokens: the smallest number of
    tokens that together have at least the share p of the mass of the k tokens. Equally likely tokens are ranked by id.
    The most likely token is always kept.
    """
    sorted_FK, order_FK = _likeliest(mass_FV, most)
    rank_K = torch.arange(most, device=mass_FV.device)
    sorted_FK = sorted_FK.masked_fill(rank_K >= top_k_F1, 0)
    running_FK = sorted_FK.cumsum(dim=-1)
    before_FK = running_FK - sorted_FK
    is_outside_FK = before_FK >= top_p_F1 * running_FK[:, -1:]
    is_outside_FK[:, 0] = False
    return sorted_FK.masked_fill(is_outside_FK, 0), order_FK


def _likeliest(mass_FV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the `most` largest masses of each row, descending, and their ids. Equal masses are sorted by id."""
    if most <= mass_FV.shape[-1] // 4:
        top = mass_FV.topk(most)
        if int((mass_FV >= top.values[:, -1:].clamp(min=1)).sum(-1).max()) <= most:  # no tie at the last place
            ids_FK = top.indices.sort(-1).values
            sorted_FK, place_FK = mass_FV.gather(-1, ids_FK).sort(dim=-1, descending=True, stable=True)
            return sorted_FK, ids_FK.gather(-1, place_FK)
    sorted_FV, order_FV = torch.sort(mass_FV, dim=-1, descending=True, stable=True)
    return sorted_FV[:, :most], order_FV[:, :most]


def mix(value: int) -> int:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
