"""Batch → rows → minibatches → microbatches. Everything here is a pure function of the batch and the settings.

Shapes: B rows of a microbatch, S places of a padded row (prompt and response), K = S − first the places from the
first one that may hold a response token, L tokens of one trajectory after its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from baton.errors import EngineFault, UserError
from baton.trainer.advantages import (
    ESTIMATORS,
    AdvantageShape,
    FloatArray,
    Outcome,
    is_trained,
    normalized,
    overlong_penalty,
)
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.parallel.balance import ALONE, Share, balanced
from baton.types import Batch, FinishReason, Group, Trajectory

PASS_TOKENS = 64
"""One more forward and backward pass is taken to cost as much as this many tokens more in another."""

ANY_SHAPE = (1, 1)
"""Multiples of which rows and width of a microbatch must be: none."""
FEW_SHAPES = (8, 16)
"""The same where each new shape is dear: rows × width is then one of a few numbers."""

PAD_ID = 0
"""Fills a row after its end; no place is trained on it and no token sees it, so any id of the vocabulary serves."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory, ready for training. P of its L tokens are the policy's."""

    group_id: int
    name: str
    """group/sample"""
    token_ids: tuple[int, ...]
    """[prompt + L]"""
    prompt_length: int
    """Tokens."""
    is_policy: tuple[bool, ...]
    """[L] whether the policy wrote the token."""
    is_trained: tuple[bool, ...]
    """[L] whether it gets a gradient: the policy wrote it, under a version that is not too old."""
    behavior_logprobs: tuple[float, ...]
    """[L]"""
    policy_versions: tuple[int, ...]
    """[L]"""
    reward: float
    routing: tuple[bytes, ...] = ()
    """[L] experts behind each token, as the engine reported them; empty bytes, or none at all, where it did not."""
    advantages: FloatArray | None = None
    """[P]; None until they are known."""

    @property
    def num_policy(self) -> int:
        """P"""
        return sum(self.is_policy)

    @property
    def num_trained(self) -> int:
        """Tokens that get a gradient."""
        return sum(self.is_trained)

    @property
    def has_advantage(self) -> bool:
        """Whether an objective that is flat at advantage 0 has a gradient here. Unknown ones may be anything."""
        return self.advantages is None or bool(self.advantages.any())


IDLE_ROW = Row(-1, "", (PAD_ID, PAD_ID), 1, (True,), (False,), (0.0,), (0,), 0.0)
"""The shortest row there is, without a trained token: its loss and gradients are exactly 0."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for one forward and backward pass, padded on the right."""

    rows: tuple[Row, ...]
    """At most B: what `multiples` add has no row. `IDLE_ROW` alone in a pass made for company only."""
    input_ids: torch.Tensor
    """[B, S] int64"""
    first: int
    """First place whose logprob is wanted: the shortest prompt's length. K = S − first."""
    mask: torch.Tensor
    """[B, K] bool: the token is trained."""
    policy_mask: torch.Tensor
    """[B, K] bool: the policy wrote the token, trained or not."""
    behavior_logprobs: torch.Tensor
    """[B, K] float32; 0 outside the mask."""
    policy_versions: torch.Tensor
    """[B, K] int64; 0 outside the mask."""
    advantages: torch.Tensor
    """[B, K] float32; 0 where the policy did not write."""
    has_gradient: bool
    """False where the loss is flat: such rows give no gradient, and are run forward only, for the metrics."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing in it that counts."""
        return self.rows == (IDLE_ROW,)

    @property
    def num_tokens(self) -> int:
        """Without padding: B × S less this is the waste."""
        return 0 if self.is_idle else sum(len(row.token_ids) for row in self.rows)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Return ids and positions [T] of the rows one behind the other, places [N] of the policy's tokens, lengths."""
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for row in self.rows:
            start = len(ids) + row.prompt_length
            ids += row.token_ids
            positions += range(len(row.token_ids))
            places += [start + place for place, is_policy in enumerate(row.is_policy) if is_policy]
        device = self.input_ids.device
        found = [torch.tensor(values, dtype=torch.int64, device=device) for values in (ids, positions, places)]
        return found[0], found[1], found[2], [len(row.token_ids) for row in self.rows]

    def routing(self, *, is_packed: bool) -> tuple[list[bytes], list[int], int]:
        """Return what the engine reported of the experts, where each stands in a pass, and the places of a pass.

        The experts behind a token are those of the place before it. A padded pass is fed all columns but the last.
        """
        found: list[bytes] = []
        places: list[int] = []
        start = 0
        for row in self.rows:
            found += row.routing
            places += range(start + row.prompt_length - 1, start + row.prompt_length - 1 + len(row.routing))
            start += len(row.token_ids) if is_packed else self.input_ids.shape[1] - 1
        return found, places, start if is_packed else self.input_ids[:, 1:].numel()

    def spread(self, by_row: Sequence[FloatArray]) -> torch.Tensor:
        """[B, K] float32 from [P] values of each row, laid at the policy's tokens; 0 elsewhere."""
        found = torch.zeros(self.policy_mask.shape, dtype=torch.float32, device=self.policy_mask.device)
        values = np.concatenate([np.zeros(0), *by_row])
        found[self.policy_mask] = torch.tensor(values, dtype=torch.float32, device=found.device)
        return found

    def gather(self, values: torch.Tensor) -> list[FloatArray]:
        """[P] of each row from [B, K]: what lies at the policy's tokens. The inverse of `spread`."""
        flat = values[self.policy_mask].double().cpu().numpy()
        ends = np.cumsum([row.num_policy for row in self.rows])
        return [np.asarray(part) for part in np.split(flat, ends[:-1])]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimiser update consumes."""

    microbatches: tuple[MicroBatch, ...]
    """Of this rank, those with gradient first; rows without a trained token are in none, but are counted below."""
    num_trajectories: int
    """Over all ranks, as are the next two."""
    num_trained_tokens: int
    rows: tuple[Row, ...]
    """Those in microbatches, in the order of the batch."""


def rows(groups: Sequence[Group], algorithm: AlgorithmSettings, *, oldest: int = 0, longest: int = 0) -> list[Row]:
    """Return one row per trajectory with a share in the loss, in the order of the batch.

    A token of a version below `oldest` is context and part of what is rewarded, but gets no gradient; neither does
    a trajectory that `overlong_filter` leaves out. A row of nothing but such tokens keeps its place in the count of
    trajectories that a loss is divided by. A trajectory without a judgement, or without the judged ones beside it
    that its algorithm compares it with, has no row: no gradient, and no share in those counts. `longest` is the
    length at which a response is cut, tokens. Raises EngineFault for a logprob that is no number.
    """
    found = []
    for group in groups:
        for member in group.members:
            if not is_trained(group, member, algorithm.fewest_judged):
                continue
            trajectory = member.trajectory
            assert trajectory.prompt_ids, f"trajectory {trajectory.name} has no prompt, so its first token no logits"
            _check_logprobs(trajectory)
            length = trajectory.num_tokens
            found.append(
                Row(
                    group_id=group.group_id,
                    name=trajectory.name,
                    token_ids=(*trajectory.prompt_ids, *trajectory.token_ids),
                    prompt_length=len(trajectory.prompt_ids),
                    is_policy=tuple(trajectory.is_policy),
                    is_trained=trained_tokens(trajectory, oldest, algorithm.overlong_filter),
                    behavior_logprobs=tuple(trajectory.behavior_logprobs),
                    policy_versions=tuple(trajectory.policy_versions),
                    reward=member.judgement.reward
                    + overlong_penalty(length, longest, algorithm.overlong_frac, algorithm.overlong_penalty),
                    routing=tuple(trajectory.routing) if any(s.routing for s in trajectory.segments) else (),
                )
            )
    return found


def trained_tokens(trajectory: Trajectory, oldest: int, leaves_out_cut: bool = False) -> tuple[bool, ...]:
    """[L] whether each token gets a gradient: the policy wrote it, and in version `oldest` or later."""
    if leaves_out_cut and trajectory.finish_reason is FinishReason.LENGTH:
        return (False,) * trajectory.num_tokens
    found = zip(trajectory.is_policy, trajectory.policy_versions, strict=True)
    return tuple(is_policy and version >= oldest for is_policy, version in found)


def oldest_trained(batch: Batch, max_staleness: int | None) -> int:
    """Return the oldest policy version whose tokens are trained; None for no bound."""
    return 0 if max_staleness is None else max(0, batch.step - 1 - max_staleness)


def estimate(
    all_rows: Sequence[Row],
    algorithm: AlgorithmSettings,
    *,
    token_rewards: Sequence[FloatArray] | None = None,
    values: Sequence[FloatArray] | None = None,
) -> list[FloatArray]:
    """Return the [P] advantages of each row, estimated over all rows of a batch; the last two are [P] of each row."""
    outcomes = [
        Outcome(
            group_id=row.group_id,
            name=row.name,
            reward=row.reward,
            num_tokens=row.num_policy,
            token_rewards=None if token_rewards is None else token_rewards[place],
            values=None if values is None else values[place],
        )
        for place, row in enumerate(all_rows)
    ]
    return ESTIMATORS[algorithm.advantage](outcomes, AdvantageShape(algorithm.gamma, algorithm.gae_lambda))


def with_advantages(parts: Sequence[Sequence[Row]], algorithm: AlgorithmSettings) -> list[list[Row]]:
    """Return the rows of a batch, part by part, with advantages that no model is needed for."""
    raw = estimate([row for part in parts for row in part], algorithm)
    found = iter(normalized(raw) if algorithm.normalize_advantages else raw)
    return [[replace(row, advantages=next(found)) for row in part] for part in parts]


def cut(
    all_rows: Sequence[Row],
    *,
    max_tokens_per_microbatch: int,
    device: torch.device,
    multiples: tuple[int, int] = ANY_SHAPE,
    is_flat: bool = True,
    keeps_masked: bool = False,
    is_packed: bool = False,
    share: Share = ALONE,
) -> MiniBatch:
    """Cut the rows of one update into microbatches: those of one rank's share, by tokens, of each kind of rows.

    All ranks get as many microbatches of each kind, since they make their passes together: idle ones fill up.

    Where the loss `is_flat` at advantage 0, rows without an advantage are kept apart, to be run forward only; a KL
    term, an entropy bonus or a value loss is not flat there. Rows without a trained token cost no pass, unless it
    `keeps_masked` ones, whose log-probabilities or values are part of what others are compared with. Rows and width of
    a microbatch are multiples of `multiples`; where it `is_packed` only tokens count.
    """
    trained = [row for row in all_rows if row.num_trained or (keeps_masked and row.is_policy)]
    kinds: list[tuple[list[Row], bool]] = [(trained, True)]
    if is_flat:
        kinds = [([r for r in trained if r.has_advantage], True), ([r for r in trained if not r.has_advantage], False)]
    found = []
    for kind, has_gradient in kinds:
        dealt = balanced([share.cost(len(row.token_ids)) for row in kind], share.size)
        by_rank = [
            first_fit(own, max_tokens_per_microbatch)
            if is_packed
            else under_budget(own, max_tokens_per_microbatch, multiples)
            for own in ([kind[place] for place in places] for places in dealt)
        ]
        chunks = by_rank[share.rank]
        chunks += [[IDLE_ROW]] * (max(map(len, by_rank)) - len(chunks))
        found += [pad(chunk, device, multiples, has_gradient=has_gradient) for chunk in chunks]
    return MiniBatch(tuple(found), len(all_rows), sum(row.num_trained for row in trained), tuple(trained))


def split_evenly(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Cut into `num_parts` runs whose sizes differ by at most one. Raises UserError when there are fewer groups."""
    if num_parts > len(groups):
        raise UserError(
            f"algorithm.num_minibatches: got {num_parts}, but each needs a group and the batch has {len(groups)}"
        )
    cuts = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    return [groups[start:end] for start, end in pairwise(cuts)]


def under_budget(all_rows: Sequence[Row], max_tokens: int, multiples: tuple[int, int] = ANY_SHAPE) -> list[list[Row]]:
    """Cut rows, longest first, into chunks of at most `max_tokens` padded tokens (rows × the longest).

    Of all such cuts the one with the fewest padded tokens, where each chunk counts `PASS_TOKENS` more. A row longer
    than the budget stands alone. Rows of one length keep their order. What `multiples` add counts as padding too.
    """
    ordered = sorted(all_rows, key=lambda row: -len(row.token_ids))  # what does not fit in memory fails at once
    widths = [round_up(len(row.token_ids), multiples[1]) for row in ordered]
    padded_rows = round_up(np.arange(1, len(ordered) + 1), multiples[0])
    cost = np.zeros(len(ordered) + 1)
    """Of the rows from each one on, cut as well as they can be."""
    sizes = [0] * len(ordered)
    for first in reversed(range(len(ordered))):
        most = max(1, min(len(ordered) - first, max_tokens // widths[first]))
        costs = PASS_TOKENS + widths[first] * padded_rows[:most] + cost[first + 1 : first + 1 + most]
        sizes[first] = int(costs.argmin()) + 1
        cost[first] = costs[sizes[first] - 1]
    chunks: list[list[Row]] = []
    first = 0
    while first < len(ordered):
        chunks.append(ordered[first : first + sizes[first]])
        first += sizes[first]
    return chunks


def first_fit(all_rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows into chunks of at most `max_tokens` tokens without padding, each row into the first chunk with room.

    Longest first: never more than 11/9 of the fewest possible chunks, and one. A longer row stands alone.
    """
    chunks: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(all_rows, key=lambda row: -len(row.token_ids)):
        size = len(row.token_ids)
        place = next((place for place, left in enumerate(room) if left >= size), None)
        if place is None:
            chunks.append([row])
            room.append(max_tokens - size)
        else:
            chunks[place].append(row)
            room[place] -= size
    return chunks


def round_up(count: Any, multiple: int) -> Any:
    """Return the next multiple at or above a count, or each of an array of counts."""
    return -(-count // multiple) * multiple


def pad(
    chunk: Sequence[Row], device: torch.device, multiples: tuple[int, int] = ANY_SHAPE, *, has_gradient: bool = True
) -> MicroBatch:
    """Lay rows side by side, padded on the right to the longest; fill up to `multiples` with columns and empty rows."""
    width = round_up(max(len(row.token_ids) for row in chunk), multiples[1])
    first = min(row.prompt_length for row in chunk)
    num_rows = round_up(len(chunk), multiples[0])

    def laid(values: Callable[[Row], Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        """[B, K] from [L] values per row, 0 elsewhere."""
        padded = [
            [0] * (row.prompt_length - first) + list(values(row)) + [0] * (width - len(row.token_ids)) for row in chunk
        ]
        padded += [[0] * (width - first)] * (num_rows - len(chunk))
        return torch.tensor(padded, dtype=dtype, device=device)

    def trained(values: Sequence[float], row: Row) -> list[float]:
        return [v if t else 0 for v, t in zip(values, row.is_trained, strict=True)]

    input_ids = [[*row.token_ids, *[PAD_ID] * (width - len(row.token_ids))] for row in chunk]
    input_ids += [[PAD_ID] * width] * (num_rows - len(chunk))
    found = MicroBatch(
        rows=tuple(chunk),
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        first=first,
        mask=laid(lambda row: row.is_trained, torch.bool),
        policy_mask=laid(lambda row: row.is_policy, torch.bool),
        behavior_logprobs=laid(lambda row: trained(row.behavior_logprobs, row), torch.float32),
        policy_versions=laid(lambda row: trained(row.policy_versions, row), torch.int64),
        advantages=torch.zeros((num_rows, width - first), dtype=torch.float32, device=device),
        has_gradient=has_gradient,
    )
    known = [row.advantages for row in chunk if row.advantages is not None]
    return replace(found, advantages=found.spread(known)) if len(known) == len(chunk) else found


def _check_logprobs(trajectory: Trajectory) -> None:
    if not all(map(math.isfinite, trajectory.behavior_logprobs)):
        place = [math.isfinite(value) for value in trajectory.behavior_logprobs].index(False)
        raise EngineFault(
            f"trajectory {trajectory.name}: the engine reported log-probability "
            f"{trajectory.behavior_logprobs[place]} for token {place} of its response, which cannot be trained on"
        )
