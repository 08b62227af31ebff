"""Training samples → microbatches: the rows of each forward and backward pass, their tensors and fixed values.

Shapes: B rows of a microbatch; S positions of a padded row (prompt and response); K = S − `inputs.first`, the number of
positions from the first possible response token on; L tokens of one trajectory after its prompt, P of which the policy
wrote. A row is one path of an episode. The paths of an episode may be in different microbatches and on different ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from baton.policy.memory import sent
from baton.policy.packing import concatenated, pieces
from baton.trainer.advantages import FloatArray, normalized
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.forward import FixedValues, ModelInputs, Passes
from baton.trainer.losses import LossInputs, kl
from baton.trainer.parallel.balance import ALONE, BatchShare, balanced
from baton.trainer.parallel.group import SingleRank
from baton.trainer.samples import TrainingSample, estimate

PASS_TOKENS = 64
"""Each forward and backward pass has a fixed cost. It equals the cost of this number of tokens."""

ROW_TOKENS = 4
"""In a pass over shared prompts, each row has a fixed cost, because it has kernel calls of its own. The cost equals the
cost of this number of tokens. It was measured with a model of 0.83 M parameters; the number is smaller for larger
models."""

COPIED_TOKEN = 0.125
"""When rows share a prompt, each row after the first copies the prompt's keys and values. This number is the cost of a
copied token, relative to a computed token. It is estimated as the ratio of the memory of a token's keys and values to
the memory of all its activations: in a Llama block, about 2 and about 18 hidden widths."""

MAX_MASK = 2**26
"""Maximum number of entries of an attention mask [response, prompt + response]: 256 MiB in float32. Responses that need
a larger mask do not share their prompt."""

ANY_SHAPE = (1, 1)
"""A microbatch's row count and width are rounded up to multiples of these two numbers, but the row count only as far as
the maximum number of tokens allows (`filled`). (1, 1) adds no padding."""
FEW_SHAPES = (8, 16)
"""Like `ANY_SHAPE`, for devices on which each new shape is expensive."""

PAD_ID = 0
"""Token id of padding. Any id works, because no token attends to padding and padding is not trained."""

IDLE_ROW = TrainingSample(-1, "", (PAD_ID, PAD_ID), 1, (True,), (False,), (0.0,), (0,), 0.0)
"""The only row of an idle microbatch: the shortest possible row. No token is trained, so loss and gradients are exactly
0."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for one forward and backward pass, padded on the right."""

    inputs: ModelInputs
    mask: torch.Tensor
    """[B, K] bool: True at trained tokens."""
    episode_tokens: torch.Tensor
    """[B] int64: number of trained tokens of each row's episode, over all paths of the episode; 0 for empty rows."""
    behavior_logprobs: torch.Tensor
    """[B, K] float32; 0 where `mask` is False."""
    policy_versions: torch.Tensor
    """[B, K] int64; 0 where `mask` is False."""
    advantages: torch.Tensor
    """[B, K] float32; 0 at tokens that the policy did not write."""
    has_gradient: bool
    """False if the loss has no gradient in these rows. They then get only a forward pass, for the metrics."""

    @property
    def rows(self) -> tuple[TrainingSample, ...]:
        return self.inputs.rows

    @property
    def is_idle(self) -> bool:
        """Return whether a rank runs this microbatch only because other ranks have more microbatches."""
        return self.rows == (IDLE_ROW,)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding; 0 for an idle microbatch."""
        return 0 if self.is_idle else sum(len(row.token_ids) for row in self.rows)

    def loss_inputs(
        self,
        logprobs: torch.Tensor,
        proximal_logprobs: torch.Tensor | None = None,
        elsewhere: Mapping[str, torch.Tensor] | None = None,
    ) -> LossInputs:
        """Return the inputs of an objective for logprobs [B, K]. The default of `proximal_logprobs` is `logprobs`
        without gradient. `elsewhere`: `LossInputs.elsewhere`."""
        return LossInputs(
            logprobs=logprobs,
            proximal_logprobs=logprobs.detach() if proximal_logprobs is None else proximal_logprobs,
            behavior_logprobs=self.behavior_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            episode_tokens=self.episode_tokens,
            elsewhere=elsewhere or {},
        )

    def spread(self, by_row: Sequence[FloatArray]) -> torch.Tensor:
        """Return a [B, K] float32 tensor with each row's [P] values at the policy's tokens and 0 elsewhere."""
        mask = self.inputs.policy_mask
        values = np.zeros(mask.shape, dtype=np.float32)
        for laid, row, own in zip(values, self.rows, by_row, strict=False):
            begin = row.prompt_length - self.inputs.first
            laid[begin : begin + len(row.is_policy)][np.array(list(row.is_policy), dtype=bool)] = own
        return sent(torch.from_numpy(values), mask.device)

    def gather(self, values: torch.Tensor) -> list[FloatArray]:
        """Return each row's [P] values of a [B, K] tensor at the policy's tokens. The inverse of `spread`."""
        flat = values.flatten()[self.inputs.policy_places].double().cpu().numpy()
        ends = np.cumsum([row.num_policy for row in self.rows])
        return [np.asarray(part) for part in np.split(flat, ends[:-1])]


@dataclass(frozen=True, slots=True)
class PreparedMicroBatch:
    """A microbatch with everything that stays fixed during the step's updates."""

    micro: MicroBatch
    fixed: FixedValues
    returns: torch.Tensor | None = None
    """[B, K] targets of the critic: values plus unnormalised advantages; None without a critic."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The data of one optimiser update."""

    microbatches: tuple[MicroBatch, ...]
    """Microbatches of this rank; microbatches with gradient come first."""
    num_episodes: int
    """Number of episodes over all ranks. An episode without a trained token counts too, even if it is in no
    microbatch."""
    num_trained_tokens: int
    """Number of trained tokens over all ranks."""
    rows: tuple[TrainingSample, ...]
    """The rows of all ranks that `cut` kept, in the order of the batch, including rows that are in no microbatch."""


def cut(
    all_rows: Sequence[TrainingSample],
    *,
    max_tokens_per_microbatch: int,
    device: torch.device,
    multiples: tuple[int, int] = ANY_SHAPE,
    is_flat: bool = True,
    skips_flat: bool = False,
    keeps_masked: bool = False,
    is_packed: bool = False,
    shares_prompts: bool = False,
    share: BatchShare = ALONE,
) -> MiniBatch:
    """Cut the rows of one update into this rank's microbatches.

    All ranks run their passes together, so they need equal numbers of microbatches with gradient, and equal numbers
    without. Ranks with fewer rows get idle microbatches.

    `is_flat`: the loss has no gradient at advantage 0, so rows whose advantages are all 0 get only a forward pass. A
    loss with a KL term, an entropy bonus or a value loss is not flat. With `skips_flat`, episodes whose advantages are
    all 0 get no microbatch. Rows without a backward pass and rows without a microbatch still count in the divisor of
    the loss. `keeps_masked`: keep rows without a trained token, because their logprobs or values affect the advantages
    of other rows. `multiples`: the row count and the width of a microbatch are rounded up to multiples of these two
    numbers. `is_packed`: padding does not count towards `max_tokens_per_microbatch`. `shares_prompts` requires a single
    rank: rows with the same prompt share the prompt's computation if this is estimated to cost less. Tokens then count
    towards the maximum as in `first_fit`.
    """
    assert share.size == 1 or not shares_prompts
    trained = [row for row in all_rows if row.num_trained or (keeps_masked and row.is_policy)]
    kinds: list[tuple[list[TrainingSample], bool]] = [(trained, True)]
    if is_flat:
        moved = {row.name for row in trained if row.has_advantage or not skips_flat}
        others = [row for row in trained if not row.has_advantage and row.name in moved]
        kinds = [([row for row in trained if row.has_advantage], True), (others, False)]
    found = []
    limits = share.limits(max_tokens_per_microbatch)
    own_most = limits[share.rank]
    for kind, has_gradient in kinds:
        dealt = balanced([share.cost(len(row.token_ids)) for row in kind], share.size, share.speeds)
        by_rank = []
        for places, most in zip(dealt, limits, strict=True):
            own = [kind[place] for place in places]
            by_rank.append(first_fit(own, most) if is_packed else under_budget(own, most, multiples))
        chunks = by_rank[share.rank]
        chunks += [[IDLE_ROW]] * (max(map(len, by_rank)) - len(chunks))
        if shares_prompts:
            shared = first_fit(kind, max_tokens_per_microbatch, shares_prompts=True)
            separate = sum(cost(c, share, multiples, own_most, is_packed=is_packed) for c in chunks)
            if sum(cost(c, share, shares_prompts=True) for c in shared) < separate:
                found += [pad(c, device, multiples, has_gradient=has_gradient, shares_prompts=True) for c in shared]
                continue
        found += [
            pad(chunk, device, multiples, own_most, has_gradient=has_gradient, is_packed=is_packed) for chunk in chunks
        ]
    num_trained = sum(row.num_trained for row in trained)
    return MiniBatch(tuple(found), sum(row.path == 0 for row in all_rows), num_trained, tuple(trained))


def under_budget(
    all_rows: Sequence[TrainingSample], max_tokens: int, multiples: tuple[int, int] = ANY_SHAPE
) -> list[list[TrainingSample]]:
    """Cut rows, longest first, into chunks of at most `max_tokens` padded tokens (number of rows × longest row).

    Dynamic programming over the sorted rows minimises the number of padded tokens (with row count and width rounded up
    to `multiples`) plus `PASS_TOKENS` per chunk. A row longer than `max_tokens` forms a chunk alone. Rows of equal
    length keep their order.
    """
    # Longest first, so that a run that lacks memory fails in its first pass.
    ordered = sorted(all_rows, key=lambda row: -len(row.token_ids))
    widths = [round_up(len(row.token_ids), multiples[1]) for row in ordered]
    padded_rows = round_up(np.arange(1, len(ordered) + 1), multiples[0])
    cost = np.zeros(len(ordered) + 1)
    """cost[i] is the minimal cost of the rows from i on."""
    sizes = [0] * len(ordered)
    for first in reversed(range(len(ordered))):
        most = max(1, min(len(ordered) - first, max_tokens // widths[first]))
        num_rows = np.minimum(padded_rows[:most], max(1, max_tokens // widths[first]))  # as `filled` gives them
        costs = PASS_TOKENS + widths[first] * num_rows + cost[first + 1 : first + 1 + most]
        sizes[first] = int(costs.argmin()) + 1
        cost[first] = costs[sizes[first] - 1]
    chunks: list[list[TrainingSample]] = []
    first = 0
    while first < len(ordered):
        chunks.append(ordered[first : first + sizes[first]])
        first += sizes[first]
    return chunks


def first_fit(
    all_rows: Sequence[TrainingSample], max_tokens: int, *, shares_prompts: bool = False
) -> list[list[TrainingSample]]:
    """Cut rows into chunks of at most `max_tokens` unpadded tokens by first-fit decreasing bin packing.

    The number of chunks is at most 11/9 of the optimum plus one. A row longer than `max_tokens` forms a chunk alone.
    `shares_prompts`: rows with the same prompt stay together, longest first. A prompt token counts as 1 token for the
    first row, and as the fraction `COPIED_TOKEN` for each other row of the prompt. If the rows of a prompt exceed
    `max_tokens`, they are divided into parts, and the prompt is computed once per part.
    """
    ordered = sorted(all_rows, key=lambda row: -len(row.token_ids))
    if not shares_prompts:
        return _fitted([([row], len(row.token_ids)) for row in ordered], max_tokens)
    by_prompt: dict[tuple[int, ...], list[TrainingSample]] = {}
    for row in ordered:
        by_prompt.setdefault(prompt_of(row), []).append(row)
    blocks: list[tuple[list[TrainingSample], int]] = []
    for prompt, members in by_prompt.items():
        once = len(prompt) - math.ceil(COPIED_TOKEN * len(prompt))
        parts = _fitted([([row], len(row.token_ids) - once) for row in members], max_tokens - once)
        blocks += [(part, once + sum(len(row.token_ids) - once for row in part)) for part in parts]
    return _fitted(sorted(blocks, key=lambda block: -block[1]), max_tokens)


def _fitted(blocks: Sequence[tuple[list[TrainingSample], int]], max_tokens: int) -> list[list[TrainingSample]]:
    """Put each block of rows into the first chunk that has room for it. A block is a tuple of rows and their size in
    tokens. A binary tree finds this chunk in logarithmic time: each node stores the largest free room of all chunks
    below it."""
    chunks: list[list[TrainingSample]] = [[] for _ in blocks]
    leaves = 1 << max(0, len(blocks) - 1).bit_length()
    most_room = [max_tokens] * (2 * leaves)
    """The children of node i are 2i and 2i + 1; node 1 is the root, and chunk i is node leaves + i."""
    for block, size in blocks:
        needed, node = min(size, max_tokens), 1  # a block above the budget needs an empty chunk
        while node < leaves:
            node *= 2
            node += most_room[node] < needed
        chunks[node - leaves] += block
        most_room[node] -= size
        while node := node // 2:
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return [chunk for chunk in chunks if chunk]


def prompt_of(row: TrainingSample) -> tuple[int, ...]:
    """Return the prompt's token ids."""
    return tuple(row.token_ids[: row.prompt_length])


def cost(
    chunk: Sequence[TrainingSample],
    share: BatchShare = ALONE,
    multiples: tuple[int, int] = ANY_SHAPE,
    max_tokens: int = sys.maxsize,
    *,
    is_packed: bool = False,
    shares_prompts: bool = False,
) -> float:
    """Return the cost of a pass. The unit is the cost of one token without attention. The cost has three parts: the
    tokens including padding, their attention, and the fixed costs (`PASS_TOKENS` and, with shared prompts, `ROW_TOKENS`
    for each row).

    Attention over a whole row skips the query-key pairs above the diagonal. Attention of responses to a shared prompt
    computes all pairs. `share.even_tokens` determines the cost of attention.
    """
    if not shares_prompts:
        sizes = [len(row.token_ids) for row in chunk]
        if not is_packed:
            width = round_up(max(sizes), multiples[1])
            sizes = [width] * filled(len(sizes), width, multiples[0], max_tokens)
        return PASS_TOKENS + sum(map(share.cost, sizes))
    total = float(PASS_TOKENS + ROW_TOKENS * len(chunk))
    for prompt, group in groupby(chunk, key=prompt_of):
        lengths = [len(row.token_ids) - len(prompt) for row in group]
        if len(lengths) == 1:
            total += share.cost(len(prompt) + lengths[0])
            continue
        total += share.cost(len(prompt)) + sum(lengths)
        for piece in pieces(lengths):
            longest = max(lengths[piece])
            mask = longest * (len(prompt) + longest)
            total += math.inf if mask > MAX_MASK else 2.0 * len(lengths[piece]) * mask / share.even_tokens
    return total


def round_up(count: Any, multiple: int) -> Any:
    """Round a count, or each element of an array of counts, up to a multiple."""
    return -(-count // multiple) * multiple


def filled(num_rows: int, width: int, multiple: int, max_tokens: int) -> int:
    """Round a number of rows up to a multiple, or only to the most rows of `width` tokens within `max_tokens`."""
    return max(num_rows, min(int(round_up(num_rows, multiple)), max_tokens // width))


def pad(
    chunk: Sequence[TrainingSample],
    device: torch.device,
    multiples: tuple[int, int] = ANY_SHAPE,
    max_tokens: int = sys.maxsize,
    *,
    has_gradient: bool = True,
    is_packed: bool = False,
    shares_prompts: bool = False,
) -> MicroBatch:
    """Return a microbatch of rows padded on the right.

    Columns are added until the width is a multiple of `multiples[1]`. Empty rows are added as `filled` states, so they
    do not exceed `max_tokens`. `is_packed`: forward passes concatenate the rows. `shares_prompts`: forward passes
    concatenate the rows, and consecutive rows with the same prompt share the prompt.
    """
    width = round_up(max(len(row.token_ids) for row in chunk), multiples[1])
    first = min(row.prompt_length for row in chunk)
    num_rows = filled(len(chunk), width, multiples[0], max_tokens)

    def laid(values: Callable[[TrainingSample], Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        """Return a [B, K] tensor on the host with the [L] values of each row, and 0 at other positions."""
        padded = [
            [0] * (row.prompt_length - first) + list(values(row)) + [0] * (width - len(row.token_ids)) for row in chunk
        ]
        padded += [[0] * (width - first)] * (num_rows - len(chunk))
        return torch.tensor(padded, dtype=dtype)

    lists = [[*row.token_ids, *[PAD_ID] * (width - len(row.token_ids))] for row in chunk]
    lists += [[PAD_ID] * width] * (num_rows - len(chunk))
    ids_BS, policy_mask = torch.tensor(lists, dtype=torch.int64), laid(lambda row: row.is_policy, torch.bool)
    is_trained = laid(lambda row: row.is_trained, torch.bool)
    logprobs = laid(lambda row: row.behavior_logprobs, torch.float32).masked_fill(~is_trained, 0)
    versions = laid(lambda row: row.policy_versions, torch.int64).masked_fill(~is_trained, 0)
    num_trained = torch.tensor([row.episode_tokens for row in chunk] + [0] * (num_rows - len(chunk)), dtype=torch.int64)
    shares = tuple(len(list(rows)) for _, rows in groupby(chunk, key=prompt_of)) if shares_prompts else ()
    packed = None
    if is_packed or shares_prompts:
        scored = torch.nn.functional.pad(policy_mask, (first, 0))[: len(chunk)]
        prompt_lengths, lengths = [row.prompt_length for row in chunk], [len(row.token_ids) for row in chunk]
        tokens = concatenated(ids_BS[: len(chunk)], scored, prompt_lengths, lengths, shares, math.prod(multiples))
        packed = tokens.to(device)
    found = MicroBatch(
        inputs=ModelInputs(
            tuple(chunk),
            sent(ids_BS, device),
            first,
            sent(policy_mask, device),
            sent(policy_mask.flatten().nonzero().flatten(), device),
            shares,
            packed,
        ),
        mask=sent(is_trained, device),
        episode_tokens=sent(num_trained, device),
        behavior_logprobs=sent(logprobs, device),
        policy_versions=sent(versions, device),
        advantages=torch.zeros((num_rows, width - first), dtype=torch.float32, device=device),
        has_gradient=has_gradient,
    )
    known = [row.advantages for row in chunk if row.advantages is not None]
    return replace(found, advantages=found.spread(known)) if len(known) == len(chunk) else found


@torch.no_grad()
def prepare(parts: Sequence[MiniBatch], passes: Passes) -> list[list[PreparedMicroBatch]]:
    """Run the passes that precede the first update, and estimate advantages that depend on these passes."""
    found = [[PreparedMicroBatch(micro, passes.fixed_values(micro.inputs)) for micro in p.microbatches] for p in parts]
    if not passes.algorithm.needs_model_for_advantages or not passes.parallel.pipeline.is_last:
        return found
    everything = [prepared for part in found for prepared in part]
    filled = iter(_with_advantages(everything, [row for part in parts for row in part.rows], passes))
    return [[next(filled) for _ in part] for part in found]


def _with_advantages(
    everything: Sequence[PreparedMicroBatch], rows: Sequence[TrainingSample], passes: Passes
) -> list[PreparedMicroBatch]:
    """Return the microbatches with advantages, which are estimated from the models' outputs for the rows of all
    ranks."""
    algorithm = passes.algorithm

    def of_all(read: Callable[[PreparedMicroBatch], torch.Tensor]) -> list[FloatArray]:
        """Return, for each of `rows`, the [P] values that `read` gives at the policy's tokens. Each rank reads its own
        rows, and a sum over ranks combines the results."""
        own = {
            row.key: found
            for prepared in everything
            if not prepared.micro.is_idle
            for row, found in zip(prepared.micro.rows, prepared.micro.gather(read(prepared)), strict=True)
        }
        flat = np.concatenate([np.zeros(0), *(own.get(row.key, np.zeros(row.num_policy)) for row in rows)])
        ends = np.cumsum([row.num_policy for row in rows])
        return [np.asarray(part) for part in np.split(passes.parallel.sums(flat), ends[:-1])] if rows else []

    raw = estimate(
        rows,
        algorithm,
        token_rewards=of_all(lambda prepared: _penalties(prepared, algorithm)) if algorithm.has_reward_kl else None,
        values=of_all(_values) if passes.critic is not None else None,
    )
    keys = [row.key for row in rows]
    unchanged = dict(zip(keys, raw, strict=True))
    final = dict(zip(keys, normalized(raw), strict=True)) if algorithm.normalize_advantages else unchanged
    filled = []
    for prepared in everything:
        micro, values = prepared.micro, prepared.fixed.values
        if micro.is_idle:
            filled.append(replace(prepared, returns=values))
            continue
        advantages = micro.spread([final[row.key] for row in micro.rows])
        expected = micro.spread([unchanged[row.key] for row in micro.rows])
        returns = None if values is None else expected + values
        filled.append(replace(prepared, micro=replace(micro, advantages=advantages), returns=returns))
    return filled


def _penalties(prepared: PreparedMicroBatch, algorithm: AlgorithmSettings) -> torch.Tensor:
    """Return −kl_coef × KL(proximal ‖ reference) at each policy token: [B, K]."""
    proximal, reference = prepared.fixed.proximal_logprobs, prepared.fixed.reference_logprobs
    assert proximal is not None
    assert reference is not None
    apart = kl(proximal, reference, prepared.micro.inputs.policy_mask, algorithm.kl_estimator)
    return -algorithm.kl_coef * apart.nats


def _values(prepared: PreparedMicroBatch) -> torch.Tensor:
    assert prepared.fixed.values is not None
    return prepared.fixed.values


def sums_elsewhere(
    rows: Sequence[TrainingSample],
    micros: Sequence[MicroBatch],
    own: Sequence[Mapping[str, torch.Tensor]],
    parallel: SingleRank,
) -> list[dict[str, torch.Tensor]]:
    """Return `LossInputs.elsewhere` of each microbatch: for each row, the sums over the other paths of its episode,
    which may be on other ranks. `rows`: the rows of all ranks. `own`: the sums over each row alone. It has one mapping
    per microbatch of this rank, from the name of a sum to a tensor [B, 1].
    """
    names = sorted(own[0])
    column = {row.key: place for place, row in enumerate(rows)}
    table = np.zeros((len(names), len(rows)))
    for micro, sums in zip(micros, own, strict=True):
        places = [] if micro.is_idle else [column[row.key] for row in micro.rows]
        for line, name in enumerate(names):
            table[line, places] = sums[name][: len(places), 0].double().cpu().numpy()
    table = parallel.sums(table.ravel()).reshape(table.shape)
    totals: dict[str, FloatArray] = {}
    for row in rows:
        totals[row.name] = totals.get(row.name, np.zeros(len(names))) + table[:, column[row.key]]
    found = []
    for micro in micros:
        values = np.zeros((len(names), len(micro.mask)))
        for place, row in enumerate(() if micro.is_idle else micro.rows):
            values[:, place] = totals[row.name] - table[:, column[row.key]]
        laid = torch.tensor(values, dtype=torch.float32, device=micro.mask.device).unsqueeze(-1)
        found.append(dict(zip(names, laid, strict=True)))
    return found
