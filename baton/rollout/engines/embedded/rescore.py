"""`Rescorer`: recomputes the logprobs of reported tokens, and checks that the trajectory's noise could have drawn these
tokens.

A draw is a pure function of the logits and of (noise seed, group, sample, position) (`rollout/engines/sampling.py`).
The weights therefore determine both the logprob of a reported token and the token that must be drawn. One prefill of
the whole response computes the logprobs and the draws of all its tokens.

**The draw gap.** Token t is drawn if the uniform number u lies in its interval [F(t−1), F(t)) of the distribution
function F. The draw gap is the distance between u and this interval. Rounding moves the bounds of the interval. If no
logit moves by more than δ, the log-odds log F/(1−F) of a bound move by at most 2δ, for any F. The gap is therefore
measured in log-odds, where one tolerance suits all tokens. With a tolerance in probability, such as 1 %, unlikely
tokens would pass too easily: a token of almost zero probability would be accepted if its interval were within 1 % of
the draw.

**Prefill is the reference.** Each segment is scored under the version that sampled it. All earlier ids are prefilled
under that version, as in a resume. Tokens that were generated with the keys and values of an older version (weights
loaded in flight) cannot be verified in this way.

Shapes: B rows, S positions of a padded row, N scored tokens, V vocabulary, F tokens drawn with top-p or top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from baton.policy.adapters import BaseWeights
from baton.policy.head import find_head, logit_pieces
from baton.policy.logprobs import hidden_states
from baton.policy.sampling_masks import decoded
from baton.policy.tensors import load_version
from baton.rollout.engines.sampling import RowParams, noise_key, row_params, uniforms
from baton.rollout.rescoring import Claim, Rescored

MAX_TOKENS = 1024
"""Maximum tokens of one forward, including padding; a longer row is computed alone. The hidden states of 1024 tokens
fit into a CPU's cache; with more tokens, a forward takes longer per token."""
_MAX_LOGITS = 2**22
"""Maximum number of logits in memory at the same time. Scoring makes several float64 copies of the logits."""
_BORDER = 0.05
"""Relative tolerance for the bounds of top-p and top-k. If a token is this close to a bound, rounding decides whether
the token is kept or removed."""
_LEAST = 2.0**-48
"""A token below this probability may be missing in a sampling mask, because `sample` computes in units of 2^-50."""
_MAX_GAP = 1e3
"""Upper bound of a gap, in nats. A token that the draw cannot select with any rounding has this gap."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The tokens of a claim that were sampled under the loaded version."""

    claim: Claim
    ids: tuple[int, ...]
    """Ids of the prompt and of the response before the last scored token."""
    places: tuple[int, ...]
    """[N] Token positions after the prompt."""
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    masks: tuple[bytes, ...]


class Rescorer:
    """Scores reported trajectories (`Claim`) under one version at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take ownership of a model. Adapters are merged into its weights, until `load` replaces all weights."""
        self.model = model.requires_grad_(False)
        self.model.train(False)
        self.version: int | None = None
        """Number of the loaded version; None until the first `load`."""
        self._base = BaseWeights()
        self._vocabulary = int(model.config.get_text_config().vocab_size)

    def load(self, tensors: Mapping[str, Any], version: int) -> None:
        """Load the weights of a version: a whole model, or an adapter for the last whole model. Raises EngineFault,
        without changing any weight, for tensors that do not fit."""
        load_version(self.model, self._base, tensors, f"version {version} does")
        self.version = version

    def score(self, claims: Sequence[Claim]) -> list[Rescored]:
        """For each claim, score the policy tokens that the loaded version generated. Return one result per claim. All
        ids must be within the vocabulary, which `swarm/verification/checks.py` verifies first."""
        assert self.version is not None, "no version has been loaded"
        rows = [_row(claim, self.version) for claim in claims]
        found = [self._result(row, ((), (), ())) for row in rows]
        for batch in self._batches([i for i, row in enumerate(rows) if row.places], rows):
            for i, rescored in zip(batch, self._scored([rows[i] for i in batch]), strict=True):
                found[i] = rescored
        return found

    def _batches(self, indices: list[int], rows: Sequence[_Row]) -> Iterator[list[int]]:
        """Yield batches of row indices, sorted by length. A padded batch of several rows has at most `MAX_TOKENS`."""
        budget = MAX_TOKENS
        if find_head(self.model) is None:  # the forward then computes the logits of all positions
            budget = min(budget, max(1, _MAX_LOGITS // self._vocabulary))
        batch: list[int] = []
        for i in sorted(indices, key=lambda i: len(rows[i].ids)):
            if batch and (len(batch) + 1) * len(rows[i].ids) > budget:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    @torch.inference_mode()
    def _scored(self, rows: Sequence[_Row]) -> list[Rescored]:
        device, length = self.model.device, max(len(row.ids) for row in rows)
        ids_BS = torch.tensor([[*row.ids, *[0] * (length - len(row.ids))] for row in rows], device=device)
        row_N = [b for b, row in enumerate(rows) for _ in row.places]
        before_N = [len(row.claim.trajectory.prompt_ids) + place - 1 for row in rows for place in row.places]
        targets_N = torch.tensor([i for row in rows for i in row.token_ids], device=device)
        params_N = [row.claim.sampling for row in rows for _ in row.places]
        uniform_N = torch.from_numpy(np.concatenate([_draws(row) for row in rows])).to(device)
        # no padding mask is needed: padding comes last, and causal attention does not look ahead
        head = find_head(self.model)
        states = hidden_states(self.model, ids_BS) if head else self.model(input_ids=ids_BS, use_cache=False).logits
        states_N = states[torch.tensor(row_N, device=device), torch.tensor(before_N, device=device)]
        kept_NK = decoded([mask for row in rows for mask in row.masks], self._vocabulary)
        parts: list[tuple[Tensor, ...]] = []
        for piece in logit_pieces(len(targets_N), self._vocabulary, _MAX_LOGITS):
            logits_NV = head.logits(states_N[piece]) if head else states_N[piece]
            params = row_params(params_N[piece], logits_NV.shape[-1], device)
            kept = kept_NK[piece].to(device).long() if kept_NK.shape[-1] else None
            parts.append(token_scores(logits_NV, targets_N[piece], uniform_N[piece], params, kept))
        lengths = [len(row.places) for row in rows]
        columns = [torch.split(torch.cat(column).cpu(), lengths) for column in zip(*parts, strict=True)]
        by_row = [[tuple(scores.tolist()) for scores in own] for own in zip(*columns, strict=True)]
        return [self._result(row, scores) for row, scores in zip(rows, by_row, strict=True)]

    def _result(self, row: _Row, scores: Sequence[tuple[float, ...]]) -> Rescored:
        assert self.version is not None
        name, temperature = row.claim.trajectory.name, row.claim.sampling.temperature
        return Rescored(name, self.version, temperature, row.places, row.token_ids, row.behavior_logprobs, *scores)


def _row(claim: Claim, version: int) -> _Row:
    trajectory = claim.trajectory
    columns = zip(
        trajectory.token_ids,
        trajectory.behavior_logprobs,
        trajectory.policy_versions,
        trajectory.is_policy,
        trajectory.kept,
        strict=True,
    )
    own = [(place, i, p, k) for place, (i, p, v, is_policy, k) in enumerate(columns) if is_policy and v == version]
    places, token_ids, behavior, masks = (tuple(column) for column in zip(*own, strict=True)) if own else ((),) * 4
    ids = (*trajectory.prompt_ids, *trajectory.token_ids[: places[-1]]) if places else ()
    return _Row(claim, ids, places, token_ids, behavior, masks)


def _draws(row: _Row) -> np.ndarray[Any, np.dtype[np.float64]]:
    trajectory = row.claim.trajectory
    key = noise_key(row.claim.noise_seed, trajectory.group_id, trajectory.sample_index)
    return uniforms(np.full(len(row.places), key, dtype=np.uint64), np.array(row.places, dtype=np.int64))


def token_scores(
    logits_NV: Tensor, targets_N: Tensor, uniform_N: Tensor, params: RowParams, kept_NK: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the logprobs [N], draw gaps [N] and tail masses [N] of the tokens `targets_N`, as `Rescored` defines them.
    If `kept_NK` (the reported masks) is given, also return the mask gaps [N]. Temperature, top-k and top-p must be
    applied exactly as in `sample`."""
    logits_NV = logits_NV.float()
    if params.temperature_W1 is not None:
        logits_NV = logits_NV / params.temperature_W1
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    mass_NV = logprobs_NV.exp().double()
    odds_N = torch.logit(uniform_N.double().clamp(min=2.0**-54))
    gaps_N, tails_N = _distance(mass_NV, targets_N, odds_N)
    logprob_N, mask_gaps_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0].double(), torch.zeros_like(gaps_N)
    if params.filtered_F is not None:
        assert params.top_k_F1 is not None
        assert params.top_p_F1 is not None
        rows_F, filters = params.filtered_F, (params.top_k_F1, params.top_p_F1)
        gaps_N[rows_F], tails_N[rows_F] = _filtered_distance(
            mass_NV[rows_F], targets_N[rows_F], odds_N[rows_F], *filters
        )
        if kept_NK is not None and params.reports_F is not None:
            rows_R = rows_F[params.reports_F]
            given = (column[rows_R] for column in (logprobs_NV.double(), targets_N, odds_N, kept_NK))
            found = _masked_distance(*given, *(column[params.reports_F] for column in filters))
            logprob_N[rows_R], gaps_N[rows_R], tails_N[rows_R], mask_gaps_N[rows_R] = found
    if params.is_greedy_W is not None:
        below_N = logits_NV.amax(-1) - logits_NV.gather(1, targets_N[:, None])[:, 0]
        gaps_N = torch.where(params.is_greedy_W, below_N.double(), gaps_N)
        tails_N = torch.where(params.is_greedy_W, 1.0, tails_N)
    columns = logprob_N, gaps_N.clamp(max=_MAX_GAP), tails_N
    return columns if kept_NK is None else (*columns, mask_gaps_N)


def _masked_distance(
    logs_RV: Tensor, targets_R: Tensor, odds_R: Tensor, kept_RK: Tensor, top_k_R1: Tensor, top_p_R1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, draw gaps and tail masses over the reported masks, and `Rescored.mask_gaps`.

    The mask gap is the largest distance of a token that is in only one of the two masks. For a reported token outside
    top-p, the distance is the log-odds of the total probability of all more likely tokens, minus the log-odds of top-p.
    For a reported token outside top-k, the distance is the logprob of the least likely token inside top-k, minus the
    token's logprob. The distances of a missing token are defined correspondingly. Like the draw gap, both distances
    move by at most 2δ if no logit moves by more than δ.
    """
    last = logs_RV.shape[-1] - 1
    columns_RK = kept_RK.masked_fill(kept_RK < 0, last + 1)
    is_kept_RV = torch.zeros((len(logs_RV), last + 2), dtype=torch.bool, device=logs_RV.device)
    is_kept_RV = is_kept_RV.scatter(1, columns_RK, True)[:, :-1]
    own_RV = logs_RV.masked_fill(~is_kept_RV, -torch.inf).log_softmax(-1)
    gap_R, tail_R = _distance(own_RV.exp(), targets_R, odds_R)
    sorted_RV, order_RV = torch.sort(logs_RV, dim=-1, descending=True, stable=True)
    is_top_RV = torch.arange(last + 1, device=logs_RV.device) < top_k_R1
    mass_RV = sorted_RV.exp()
    before_RV = (mass_RV.cumsum(-1) - mass_RV) / mass_RV.mul(is_top_RV).sum(-1, keepdim=True)
    outside_RV = torch.logit(before_RV.clamp(0.0, 1 - 2.0**-53)) - torch.logit(top_p_R1)
    to_last_RV = sorted_RV.gather(1, (top_k_R1 - 1).clamp(max=last)) - sorted_RV
    from_next_RV = sorted_RV - sorted_RV.gather(1, top_k_R1.clamp(max=last)).masked_fill(top_k_R1 > last, -torch.inf)
    too_many_RV = torch.where(is_top_RV, outside_RV, torch.maximum(outside_RV, to_last_RV))
    # An engine does not keep a token whose probability it rounds to 0.
    too_few_RV = torch.minimum(-outside_RV, from_next_RV).masked_fill(~is_top_RV | (mass_RV < _LEAST), 0.0)
    mask_gap_R = torch.where(is_kept_RV.gather(1, order_RV), too_many_RV, too_few_RV).amax(-1).clamp(0.0, _MAX_GAP)
    return own_RV.gather(1, targets_R[:, None])[:, 0], gap_R, tail_R, mask_gap_R


def _distance(mass_NV: Tensor, targets_N: Tensor, odds_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each target, the distance in log-odds between the draw and the target's interval, and the tail mass
    (`Rescored`). The masses below and above the target are summed separately, so bounds near 1 are as exact as bounds
    near 0."""
    ids_V = torch.arange(mass_NV.shape[-1], device=mass_NV.device)
    own_N1 = mass_NV.gather(1, targets_N[:, None])
    own_N = own_N1[:, 0]
    below_N = mass_NV.mul(ids_V < targets_N[:, None]).sum(-1)
    above_N = mass_NV.mul(ids_V > targets_N[:, None]).sum(-1)
    total_N = (below_N + own_N + above_N).clamp(min=1e-300)
    tail_N = mass_NV.mul(mass_NV <= own_N1).sum(-1) / total_N
    low_N = below_N.log() - (own_N + above_N).log()
    high_N = (below_N + own_N).log() - above_N.log()
    return torch.maximum(low_N - odds_N, odds_N - high_N).clamp(min=0.0).nan_to_num(nan=_MAX_GAP), tail_N


def _filtered_distance(
    mass_FV: Tensor, targets_F: Tensor, odds_F: Tensor, top_k_F1: Tensor, top_p_F1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the smallest gap of `_distance` over five sets of tokens that top-k and top-p may have kept, and the tail
    mass over the set with this gap.

    Exact arithmetic keeps the n most likely tokens. Rounding may change the set near its border, so four other sets are
    possible. The first three are the n − 1 most likely tokens, the n + 1 most likely tokens, and, if the target is not
    among the n most likely tokens, the target with all more likely tokens. Each of the three is possible only under two
    conditions. The set has at most k tokens, where k is the limit of top-k. The mass of all tokens that are more likely
    than the last added or removed token is within `_BORDER` of top-p. In the fourth set, the target replaces token n,
    or token n + 1 does if the target is already among the n most likely tokens. The fourth set is possible only if the
    new token's probability is at least 1 − `_BORDER` times the probability of token n.
    """
    sorted_FV, order_FV = torch.sort(mass_FV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(mass_FV.shape[-1], device=mass_FV.device)
    top_FV = sorted_FV.masked_fill(rank_V >= top_k_F1, 0)
    total_F1 = top_FV.sum(-1, keepdim=True)
    share_FV = (sorted_FV.cumsum(-1) - sorted_FV) / total_F1
    """For each token: mass of the tokens sorted before it, divided by the mass of the top-k tokens."""
    rank_F1 = (order_FV == targets_F[:, None]).long().argmax(-1, keepdim=True)
    size_F1 = ((share_FV < top_p_F1) & (rank_V < top_k_F1)).sum(-1, keepdim=True).clamp(min=1)
    last = len(rank_V) - 1

    def reaches(size_F1: Tensor) -> Tensor:
        return (size_F1 <= top_k_F1) & (share_FV.gather(1, (size_F1 - 1).clamp(max=last)) < top_p_F1 * (1 + _BORDER))

    to_target_F1 = torch.maximum(size_F1, rank_F1 + 1)
    other_F1 = torch.maximum(size_F1, rank_F1).clamp(max=last)
    is_near_F1 = sorted_FV.gather(1, other_F1) >= sorted_FV.gather(1, size_F1 - 1) * (1 - _BORDER)
    is_enough_F1 = (size_F1 > 1) & (share_FV.gather(1, size_F1 - 1) >= top_p_F1 * (1 - _BORDER))
    likely_V = rank_V < size_F1
    variants = [
        (likely_V, torch.ones_like(is_enough_F1)),
        (rank_V < size_F1 - 1, is_enough_F1),
        (rank_V < size_F1 + 1, reaches(size_F1 + 1)),
        (rank_V < to_target_F1, reaches(to_target_F1)),
        (likely_V & (rank_V != size_F1 - 1) | (rank_V == other_F1), is_near_F1),
    ]
    gaps, tails = [], []
    for kept_FV, is_possible_F1 in variants:
        kept = torch.zeros_like(mass_FV).scatter(-1, order_FV, sorted_FV * kept_FV)
        gap_F, tail_F = _distance(kept, targets_F, odds_F)
        gaps.append(gap_F.masked_fill(~is_possible_F1[:, 0], _MAX_GAP))
        tails.append(tail_F)
    best = torch.stack(gaps).min(0)
    return best.values, torch.stack(tails).gather(0, best.indices[None])[0]
