"""Batch → rows → minibatches → microbatches. Everything here is a pure function of the batch and the settings.

Shapes: B rows of a microbatch, S places of a padded row (prompt and response), K = S − first the places from the
first one that may hold a response token, L tokens of one trajectory after its prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from baton.errors import UserError
from baton.trainer.advantages import has_equal_rewards, is_comparable, is_trained
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
    """One trajectory, ready for training."""

    group_id: int
    token_ids: tuple[int, ...]
    """[prompt + L]"""
    prompt_length: int
    """Tokens."""
    is_trained: tuple[bool, ...]
    """[L] whether the policy wrote the token, under a version that is not too old."""
    behavior_logprobs: tuple[float, ...]
    """[L]"""
    policy_versions: tuple[int, ...]
    """[L]"""
    advantage: float

    @property
    def num_trained(self) -> int:
        """Tokens that get a gradient."""
        return sum(self.is_trained)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for one forward and backward pass, padded on the right."""

    group_ids: tuple[int, ...]
    """[B] each row's group, to name the rows when something is wrong with them."""
    input_ids: torch.Tensor
    """[B, S] int64"""
    first: int
    """First place whose logprob is wanted: the shortest prompt's length. K = S − first."""
    mask: torch.Tensor
    """[B, K] bool: the token is trained."""
    behavior_logprobs: torch.Tensor
    """[B, K] float32; 0 outside the mask."""
    policy_versions: torch.Tensor
    """[B, K] int64; 0 outside the mask."""
    advantages: torch.Tensor
    """[B, K] float32; 0 outside the mask."""
    num_tokens: int
    """Without padding: B × S less this is the waste."""
    has_gradient: bool
    """False where every advantage is 0: such rows give no gradient, and are run forward only, for the metrics."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimiser update consumes."""

    microbatches: tuple[MicroBatch, ...]
    """Rows without a trained token are in none of them, but are counted below."""
    num_trajectories: int
    num_trained_tokens: int


def rows(groups: Sequence[Group], advantages: Mapping[int, Sequence[float]], *, oldest: int = 0) -> list[Row]:
    """Return one row per member, in the order of the batch. Advantages are looked up by group id and sample index.

    A token of a version below `oldest` is context and part of what is rewarded, but gets no gradient. A row of nothing
    but such tokens keeps its place in the count of trajectories that a loss is divided by. A trajectory without a
    judgement, or without a judged one beside it, has no row: no gradient, and no share in those counts.
    """
    found = []
    for group in groups:
        for member in group.members:
            if not is_trained(group, member):
                continue
            trajectory = member.trajectory
            assert trajectory.prompt_ids, f"trajectory {trajectory.name} has no prompt, so its first token no logits"
            found.append(
                Row(
                    group_id=group.group_id,
                    token_ids=(*trajectory.prompt_ids, *trajectory.token_ids),
                    prompt_length=len(trajectory.prompt_ids),
                    is_trained=trained_tokens(trajectory, oldest),
                    behavior_logprobs=tuple(trajectory.behavior_logprobs),
                    policy_versions=tuple(trajectory.policy_versions),
                    advantage=advantages[group.group_id][trajectory.sample_index],
                )
            )
    return found


def trained_tokens(trajectory: Trajectory, oldest: int) -> tuple[bool, ...]:
    """[L] whether each token gets a gradient: the policy wrote it, and in version `oldest` or later."""
    found = zip(trajectory.is_policy, trajectory.policy_versions, strict=True)
    return tuple(is_policy and version >= oldest for is_policy, version in found)


def oldest_trained(batch: Batch, max_staleness: int | None) -> int:
    """Return the oldest policy version whose tokens are trained; None for no bound."""
    return 0 if max_staleness is None else max(0, batch.step - 1 - max_staleness)


def minibatches(
    groups: Sequence[Group],
    advantages: Mapping[int, Sequence[float]],
    *,
    num_minibatches: int,
    max_tokens_per_microbatch: int,
    device: torch.device,
    oldest: int = 0,
    multiples: tuple[int, int] = ANY_SHAPE,
) -> list[MiniBatch]:
    """Split a batch by whole groups, in order, as evenly as they go, and each part into microbatches.

    Tokens of versions below `oldest` are not trained. Rows and width of a microbatch are multiples of `multiples`; rows
    without an advantage are kept apart.
    """
    found = []
    for part in split_evenly(groups, num_minibatches):
        part_rows = rows(part, advantages, oldest=oldest)
        trained = [row for row in part_rows if row.num_trained]
        kinds = [row for row in trained if row.advantage], [row for row in trained if not row.advantage]
        chunks = [chunk for kind in kinds for chunk in under_budget(kind, max_tokens_per_microbatch, multiples)]
        found.append(
            MiniBatch(
                microbatches=tuple(pad(chunk, device, multiples) for chunk in chunks),
                num_trajectories=len(part_rows),
                num_trained_tokens=sum(row.num_trained for row in trained),
            )
        )
    return found


def split_evenly(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Cut into `num_parts` runs whose sizes differ by at most one. Raises UserError when there are fewer groups."""
    if num_parts > len(groups):
        raise UserError(
            f"trainer.num_minibatches: got {num_parts}, but each needs a group and the batch has {len(groups)}"
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


def round_up(count: Any, multiple: int) -> Any:
    """Return the next multiple at or above a count, or each of an array of counts."""
    return -(-count // multiple) * multiple


def pad(chunk: Sequence[Row], device: torch.device, multiples: tuple[int, int] = ANY_SHAPE) -> MicroBatch:
    """Lay rows side by side, padded on the right to the longest; fill up to `multiples` with columns and empty rows."""
    width = round_up(max(len(row.token_ids) for row in chunk), multiples[1])
    first = min(row.prompt_length for row in chunk)
    empty = Row(chunk[0].group_id, (PAD_ID,) * width, width, (), (), (), 0.0)
    filled = [*chunk, *[empty] * (round_up(len(chunk), multiples[0]) - len(chunk))]

    def kept(values: Callable[[Row], Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        """[B, K] from [L] values per row; what is not a trained token gets 0."""
        padded = []
        for row in filled:
            trained = [v if t else 0 for v, t in zip(values(row), row.is_trained, strict=True)]
            padded.append([0] * (row.prompt_length - first) + trained + [0] * (width - len(row.token_ids)))
        return torch.tensor(padded, dtype=dtype, device=device)

    input_ids = [[*row.token_ids, *[PAD_ID] * (width - len(row.token_ids))] for row in filled]
    return MicroBatch(
        group_ids=tuple(row.group_id for row in chunk),
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        first=first,
        mask=kept(lambda row: row.is_trained, torch.bool),
        behavior_logprobs=kept(lambda row: row.behavior_logprobs, torch.float32),
        policy_versions=kept(lambda row: row.policy_versions, torch.int64),
        advantages=kept(lambda row: [row.advantage] * len(row.is_trained), torch.float32),
        num_tokens=sum(len(row.token_ids) for row in chunk),
        has_gradient=any(row.advantage for row in chunk),
    )


def batch_metrics(batch: Batch, *, oldest: int = 0) -> dict[str, float]:
    """Return what can be said of a batch without a model: rewards, lengths and staleness.

    Rewards and accuracy are over judged trajectories, and absent where there is none; `reward/std` has divisor N;
    `reward/zero_std_frac` is the share of groups whose rewards are all equal, of those with two or more judged
    members; `judge/groups_lost` counts the others. Lengths count all tokens after the prompt.
    """
    members = [member for group in batch.groups for member in group.members]
    judged = [member for member in members if member.judgement.is_judged]
    comparable = [group for group in batch.groups if is_comparable(group)]
    lengths = [member.trajectory.num_tokens for member in members]
    by_part: dict[str, list[float]] = {}
    for member in judged:
        for name, value in member.judgement.parts.items():
            by_part.setdefault(name, []).append(value)
    num_cut = sum(member.trajectory.finish_reason is FinishReason.LENGTH for member in members)
    found: dict[str, float] = {"judge/groups_lost": float(len(batch.groups) - len(comparable))}
    if judged:
        values = [member.judgement.reward for member in judged]
        found["reward/mean"] = statistics.fmean(values)
        found["reward/std"] = statistics.pstdev(values)
        found["accuracy/mean"] = statistics.fmean(member.judgement.is_correct for member in judged)
    if comparable:
        found["reward/zero_std_frac"] = statistics.fmean(has_equal_rewards(group) for group in comparable)
    return {
        **found,
        **{f"reward/{name}/mean": statistics.fmean(part) for name, part in sorted(by_part.items())},
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": num_cut / len(members),
        **staleness_metrics(batch, oldest),
    }


def staleness_metrics(batch: Batch, oldest: int) -> dict[str, float]:
    """Return how old the tokens are, against version step − 1, and how many are too old to be trained.

    Over policy tokens of trajectories that have a share in the loss: `staleness/mean` and `/max` of those that are
    trained; of all, the share that is trained though not of the trainer's own version (`stale_frac`) and the share
    that is too old (`masked_frac`).
    """
    ages: list[int] = []
    num_masked = 0
    for group in batch.groups:
        for trajectory in (member.trajectory for member in group.members if is_trained(group, member)):
            trained = trained_tokens(trajectory, oldest)
            versions = [v for v, kept in zip(trajectory.policy_versions, trained, strict=True) if kept]
            ages += [batch.step - 1 - version for version in versions]
            num_masked += sum(trajectory.is_policy) - len(versions)
    num_tokens = max(1, len(ages) + num_masked)
    return {
        "staleness/mean": statistics.fmean(ages) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        "staleness/stale_frac": sum(age > 0 for age in ages) / num_tokens,
        "staleness/masked_frac": num_masked / num_tokens,
        "tokens/trained": float(len(ages)),
        "tokens/masked": float(num_masked),
    }
