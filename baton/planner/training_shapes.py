"""Phase 1, training side: all training shapes on given pools, and their times.

On each of its pools, a pipeline has `stages` stages. A stage has `dp` tensor-parallel groups of `tp` GPUs. All GPUs of
a stage have the same type, but the stages of a pipeline may have different types (AReaL-Hex 4.2.1, Metis). Baton's
trainer supports only the shapes of `specs/trainer_shapes.py`, with the same number of ranks on each stage. In a
pipeline, the fastest GPU type is last, because the last stage has the output head. Layers are distributed to make the
slowest stage as fast as possible, while all stages fit into memory.

A mixed stage is another shape of Baton's trainer: one stage, whose data-parallel ranks are on several GPU types and
train trajectories in proportion to their speeds (`mixed_stages.py` searches them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import msgspec
import numpy as np

from baton.cost.memory import most_layers, rank_phases
from baton.cost.train import (
    StageTerms,
    in_flight,
    microbatches,
    mixed_terms,
    rank_of,
    rank_speeds,
    row_shares,
    stage_terms,
    tail_s,
)
from baton.planner.pools import GpuPool, Pools
from baton.planner.problem import Bools, Floats, Inputs, Ints, TrainTable, tensor_widths
from baton.specs.model import ModelSpec
from baton.specs.trainer_shapes import can_split, can_train
from baton.specs.workload import Workload

STAGES = (1, 2, 4, 8)
"""Allowed numbers of pipeline stages if a single pool trains."""
CROSSING_STAGES = (1, 2)
"""Allowed numbers of pipeline stages on each pool if several pools train."""
MAX_CROSSED = 3
"""Maximum number of pools in one pipeline."""
MAX_SHAPES = 400_000
"""Maximum number of shapes that are evaluated for a set of pools."""
MAX_MIXED = 400_000
"""Maximum number of mixed stages whose times are computed. If there are more, an evenly spaced subset is taken."""
SATURATED_SHAPES = 3
"""If there are too many shapes to evaluate all of them, this number of shapes is tried for each pool whose GPUs all
train."""


class Shapes(msgspec.Struct, frozen=True):
    """The shape that each candidate pipeline has on one pool. Each array is [candidates]."""

    stages: Ints
    tp: Ints
    dp: Ints

    @classmethod
    def of(cls, stages: int, tp: int, dp: int) -> Shapes:
        return cls(*(np.array([value], dtype=np.int64) for value in (stages, tp, dp)))

    def take(self, rows: Ints | Bools) -> Shapes:
        return Shapes(self.stages[rows], self.tp[rows], self.dp[rows])

    def __len__(self) -> int:
        return len(self.tp)


class Pipelines(msgspec.Struct, frozen=True):
    """Candidate pipelines, or candidate mixed stages, on the same pools."""

    inputs: Inputs
    """Only model and workload are used; cluster and efficiencies are those of `pools`."""
    pools: Pools
    order: Sequence[int]
    """The pools that train, in the order of the pipeline."""
    shapes: Sequence[Shapes]
    """Shapes of the candidates on each of these pools."""
    shard_size: int | None = None
    """Number of ranks that share a copy of a stage; 0 for all ranks of the stage. By default, each machine has a copy
    if copies fit into memory and are faster."""
    is_mixed: bool = False
    """Whether `shapes` are the parts of one stage. Each part then has all layers, and `shard_size` is required."""

    @property
    def used(self) -> list[GpuPool]:
        return [self.pools.pools[k] for k in self.order]

    @property
    def depth(self) -> Ints:
        """[candidates] number of stages of the pipeline."""
        stages: Ints = np.sum([part.stages for part in self.shapes], axis=0)
        return stages

    @property
    def widest(self) -> Ints:
        """[candidates] largest data-parallel width of any stage."""
        widest: Ints = np.max([part.dp for part in self.shapes], axis=0)
        return widest

    def sharded(self, **changes: int) -> Pipelines:
        """Return the candidates with another `shard_size` or `shard_gradients` of the workload."""
        work = msgspec.structs.replace(self.inputs.work, **changes)
        return msgspec.structs.replace(self, inputs=msgspec.structs.replace(self.inputs, work=work))


class LayerBalance(msgspec.Struct, frozen=True):
    """How candidates divide the layers over pipeline stages, and the resulting times. Arrays are [candidates]."""

    stage_layers: tuple[tuple[Ints, Ints, Ints], ...]
    """For each pool: number of layers of the pipeline's first stage, of each middle stage and of the last stage; 0 if
    the pool has no such stage."""
    compute_s: Floats
    """Time of the slowest stage for the whole batch; infinite if the model does not fit into memory."""
    bubble_s: Floats
    gradients_s: Floats
    optimizer_s: Floats
    microbatches: Floats
    shard_gradients: Bools
    """Whether gradients are reduced after each microbatch and kept sharded, because whole gradients do not fit into
    memory."""
    shard_size: Ints
    """If several copies of a stage are faster than one, the number of ranks that share a copy. Otherwise 0: all ranks
    share one copy."""

    @property
    def time_s(self) -> Floats:
        return self.compute_s + self.bubble_s + self.gradients_s + self.optimizer_s


def train_table(inputs: Inputs, pools: Pools) -> TrainTable:
    """Return the training shapes that fit into memory. The table's `is_complete` states whether all shapes were
    evaluated."""
    model, work = inputs.model, inputs.work
    alone = [_pool_shapes(model, work, pool) for pool in pools.pools]
    tables, is_complete = [], True
    for order in pipeline_orders(pools, MAX_CROSSED if inputs.cross_types else 1):
        if len(order) > 1 and work.trainer == "baton":
            candidates = _equal_ranks(work, pools, order)
        else:
            parts = [alone[k] for k in order]
            if len(order) > 1:
                parts = [part.take(np.isin(part.stages, CROSSING_STAGES)) for part in parts]
            count = float(np.prod([float(len(part)) for part in parts]))
            is_complete &= count <= MAX_SHAPES
            candidates = [_combined(parts)] if count <= MAX_SHAPES else _saturated(parts)
        tables += [evaluated(Pipelines(inputs, pools, order, shapes)) for shapes in candidates]
    return TrainTable.joined(tables, is_complete=is_complete)


def pipeline_orders(pools: Pools, most: int) -> list[list[int]]:
    """Return the sets of pools that a pipeline may use, each in the order of the pipeline."""
    every = range(len(pools.pools))
    return [pools.pipeline_order(subset) for size in range(1, most + 1) for subset in combinations(every, size)]


def mixed_orders(pools: Pools) -> list[list[int]]:
    """Return the pairs of pools of different GPU types that a mixed stage may use."""
    kinds = [pool.gpu for pool in pools.pools]
    return [order for order in pipeline_orders(pools, 2) if len({kinds[k] for k in order} - {"CPU"}) == 2]


def mixed_rows(inputs: Inputs, pools: Pools, order: Sequence[int], first: Ints, second: Ints) -> Iterator[TrainTable]:
    """Yield the mixed stages with `first` and `second` ranks on two pools. In the first result, all ranks share one
    copy of the model; in the later results, each group of ranks on a machine has its own copy. The size of these groups
    is the largest power of two that divides both numbers of ranks and fits into a machine.
    """
    ones = np.ones_like(first)

    def table(rows: Ints, shard_size: int) -> TrainTable:
        shapes = [Shapes(ones[rows], ones[rows], count[rows]) for count in (first, second)]
        return evaluated(Pipelines(inputs, pools, order, shapes, shard_size, is_mixed=True))

    yield table(np.arange(len(first)), 0)
    used = [pools.pools[k] for k in order]
    widest = min(pool.levels[-1] for pool in used)
    size = np.minimum((first | second) & -(first | second), widest)
    for copy in used[0].levels[1:]:
        if copy > widest:
            break
        fits = [count <= pool.capacity(copy) for pool, count in zip(used, (first, second), strict=True)]
        rows = np.nonzero((size == copy) & np.all(fits, axis=0))[0]
        if len(rows):
            yield table(rows, copy)


def _pool_shapes(model: ModelSpec, work: Workload, pool: GpuPool) -> Shapes:
    """Return all shapes (stages, tp, dp) that fit into the nodes of a pool."""
    rows = [
        (stages, tp, dp)
        for stages, tp in trained_widths(model, work, pool)
        for dp in range(1, min(pool.capacity(tp) // (stages * tp), work.num_trajectories) + 1)
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Shapes(*columns.T)


def trained_widths(model: ModelSpec, work: Workload, pool: GpuPool) -> Iterator[tuple[int, int]]:
    """Yield each pair (number of stages, tensor-parallel width) that the trainer supports on one pool. On CPUs, a rank
    is a machine with many threads, so Baton's trainer uses one stage and no tensor parallelism."""
    columns = model.ffn_params / 3 / model.hidden if model.num_experts == 1 else 0.5  # experts are not divided by TP
    for stages, tp in product(STAGES, tensor_widths(model, pool)):
        is_split = tp > 1 and not can_split(tp, model.num_heads, model.num_kv_heads, columns)
        is_refused = is_split or not can_train(stages, tp, has_critic=work.has_critic)
        is_refused |= pool.gpu == "CPU" and stages * tp > 1
        if stages <= model.num_layers and not (is_refused and work.trainer == "baton"):
            yield stages, tp


def _equal_ranks(work: Workload, pools: Pools, order: Sequence[int]) -> list[list[Shapes]]:
    used = [pools.pools[k] for k in order]
    if not can_train(len(order), 1, has_critic=work.has_critic) or any(pool.gpu == "CPU" for pool in used):
        return []
    rows = [
        (*chosen, dp)
        for chosen in product(CROSSING_STAGES, repeat=len(order))
        for dp in range(1, min(pool.num_gpus // count for pool, count in zip(used, chosen, strict=True)) + 1)
        if dp <= work.num_trajectories
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(order) + 1).T
    return [[Shapes(stages, np.ones_like(stages), columns[-1]) for stages in columns[:-1]]]


def _combined(alone: Sequence[Shapes]) -> list[Shapes]:
    """Return all combinations of the pools' shapes."""
    grids = np.meshgrid(*(np.arange(len(part)) for part in alone), indexing="ij")
    return [part.take(grid.ravel()) for part, grid in zip(alone, grids, strict=True)]


def _saturated(alone: Sequence[Shapes]) -> list[list[Shapes]]:
    """Return the combinations in which all pools, or all except one, train with all their GPUs."""
    fullest = [np.lexsort((part.tp, part.stages, -part.stages * part.tp * part.dp)) for part in alone]
    whole = [part.take(rows[:SATURATED_SHAPES]) for part, rows in zip(alone, fullest, strict=True)]
    return [_combined([*whole[:split], alone[split], *whole[split + 1 :]]) for split in range(len(alone))]


def evaluated(of: Pipelines) -> TrainTable:
    """Return the pipelines or mixed stages that fit into memory, with their times and shares of the layers."""
    pools = of.pools.pools
    is_possible = np.asarray((of.depth <= of.inputs.model.num_layers) | of.is_mixed)
    of = msgspec.structs.replace(of, shapes=[part.take(is_possible) for part in of.shapes])
    balance = balanced(of)
    fits = np.isfinite(balance.compute_s)
    rows = int(fits.sum())
    stages, tp, dp = (np.zeros((rows, len(pools)), dtype=np.int64) for _ in range(3))
    layers = np.zeros((rows, len(pools)))
    for place, (index, part) in enumerate(zip(of.order, of.shapes, strict=True)):
        stages[:, index], tp[:, index], dp[:, index] = part.stages[fits], part.tp[fits], part.dp[fits]
        first, between, last = (each[fits] for each in balance.stage_layers[place])
        num_between = (part.stages[fits] - (place == 0) - (place == len(of.order) - 1)).clip(0)
        layers[:, index] = first + last + between * num_between
    held = dp if of.is_mixed else layers  # FSDP divides the weights equally among the ranks of a stage
    return TrainTable(
        stages=stages,
        tp=tp,
        dp=dp,
        time_s=balance.time_s[fits] + max(pool.place.efficiency.train_overhead_s for pool in pools),
        shares=held / held.sum(axis=1, keepdims=True),
        is_complete=True,
        shard_size=balance.shard_size[fits],
        is_mixed=np.full(rows, of.is_mixed),
    )


class _Kind(msgspec.Struct, frozen=True):
    """`count` equal stages of a pipeline. Each stage takes the time `base_s + layers · per_layer_s`."""

    count: Ints
    base_s: Floats
    per_layer_s: Floats
    most: Floats
    """Maximum number of layers of a stage."""
    terms: StageTerms
    is_first: Bools
    is_last: bool


def balanced(of: Pipelines) -> LayerBalance:
    """Distribute the layers so that the slowest stage is as fast as possible, and return the resulting times. Baton's
    trainer shards gradients if unsharded gradients do not fit into memory."""
    if of.shard_size is not None:
        return _fitting(of.sharded(shard_size=of.shard_size))
    assert not of.is_mixed, "a mixed stage needs shard_size"
    found = _fitting(of)
    size = min(pool.levels[-1] for pool in of.used)
    if of.inputs.work.trainer == "idealised" or size == 1 or any(pool.gpu == "CPU" for pool in of.used):
        return found
    is_whole = [
        (part.tp == 1) & (part.dp > size) & (part.dp % size == 0) & (part.stages * part.dp <= pool.capacity(size))
        for pool, part in zip(of.used, of.shapes, strict=True)
    ]
    can_copy = np.all(is_whole, axis=0)
    if not can_copy.any():
        return found
    copies = _fitting(of.sharded(shard_size=size))
    return _chosen(can_copy & (copies.time_s < found.time_s * (1 - 1e-9)), copies, found)


def _fitting(of: Pipelines) -> LayerBalance:
    """Implement `balanced` for the `shard_size` that the workload specifies; shard gradients only if necessary."""
    balance = _mixed if of.is_mixed else _balanced
    found = balance(of)
    fits = np.isfinite(found.compute_s)
    if of.inputs.work.trainer == "idealised" or of.inputs.work.shard_gradients or fits.all():
        return found
    return _chosen(fits, found, balance(of.sharded(shard_gradients=True)))


def _mixed(of: Pipelines) -> LayerBalance:
    """Return the times of mixed stages for the sharding that the workload specifies. All ranks hold equally large
    shards, so the GPU type with the least memory determines whether a stage fits."""
    model, work, places = of.inputs.model, of.inputs.work, [pool.place for pool in of.used]
    counts = [part.dp for part in of.shapes]
    terms = mixed_terms(model, work, places, counts, _mixed_link(of.pools, of.order, counts))
    ranks = np.sum(counts, axis=0)
    limit = min(place.memory_limit_bytes for place in places)
    fits = most_layers(rank_phases(model, terms[0].rank), limit) >= model.num_layers
    compute = np.max([term.head_s + model.num_layers * term.per_layer_s for term in terms], axis=0)
    tails = [
        np.max([tail_s(model, getattr(term, key), model.num_layers, True, True) for term in terms], axis=0)
        for key in ("gradients_per_layer_s", "optimizer_per_layer_s")
    ]
    most = row_shares(work, rank_speeds(work, places), counts)[0].largest
    nothing, layers = np.zeros(len(ranks), dtype=np.int64), np.full(len(ranks), model.num_layers, dtype=np.int64)
    return LayerBalance(
        stage_layers=((nothing, nothing, layers),) * len(places),
        compute_s=np.where(fits, compute, np.inf),
        bubble_s=np.zeros(len(ranks)),
        gradients_s=tails[0] + nothing,
        optimizer_s=tails[1] + nothing,
        microbatches=microbatches(work, 1 / most),
        shard_gradients=np.full(len(ranks), work.shard_gradients),
        shard_size=np.full(len(ranks), work.shard_size, dtype=np.int64),
    )


def _mixed_link(pools: Pools, order: Sequence[int], counts: Sequence[Ints]) -> Floats:
    """Return the bandwidth of the slowest link between two machines of a mixed stage, [candidates]."""
    across = min(pools.bytes_per_s[a][b] for a, b in combinations(order, 2))
    slowest: Floats = np.full(len(counts[0]), across)
    for k, count in zip(order, counts, strict=True):
        pool = pools.pools[k]
        slowest = np.where(count > max(pool.sizes), np.minimum(slowest, pool.place.inter_bytes_per_s), slowest)
    return slowest


def _chosen(is_one: Bools, one: LayerBalance, other: LayerBalance) -> LayerBalance:
    """Return the candidates of `one` where `is_one` is true, and the candidates of `other` elsewhere."""

    def merged(first: Any, second: Any) -> Any:
        is_array = isinstance(first, np.ndarray)
        return np.where(is_one, first, second) if is_array else tuple(map(merged, first, second))

    keys = LayerBalance.__struct_fields__
    return LayerBalance(**{key: merged(getattr(one, key), getattr(other, key)) for key in keys})


def _balanced(of: Pipelines) -> LayerBalance:
    """Implement `balanced` for the sharding that the workload specifies. The pace is the time of the slowest stage. The
    search starts at the pace that would be possible with fractional layers, and raises the pace to the next possible
    value until all layers are placed."""
    kinds, num_layers = _kinds(of), of.inputs.model.num_layers
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.sum([kind.count / kind.per_layer_s for kind in kinds], axis=0)
        delay = np.sum([kind.count * kind.base_s / kind.per_layer_s for kind in kinds], axis=0)
        least = np.max([(kind.count > 0) * (kind.base_s + kind.per_layer_s) for kind in kinds], axis=0)
        pace = np.maximum((num_layers + delay) / speed, least)
    for kind in kinds:
        pace[(kind.count > 0) & (kind.most < 1)] = np.inf
    while True:
        layers = [_held(kind, pace) for kind in kinds]
        held = np.sum([kind.count * own for kind, own in zip(kinds, layers, strict=True)], axis=0)
        short = (held < num_layers) & np.isfinite(pace)
        if not short.any():
            break
        following = np.full(len(pace), np.inf)
        for kind, own in zip(kinds, layers, strict=True):
            can = (kind.count > 0) & (own < kind.most)
            following = np.where(can, np.minimum(following, kind.base_s + (own + 1) * kind.per_layer_s), following)
        pace = np.where(short, following, pace)
    return _finish(of, kinds, layers, pace)


def _held(kind: _Kind, pace: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        own = np.floor((pace - kind.base_s) / kind.per_layer_s * (1 + 1e-12) + 1e-9)  # absorbs rounding errors
    return np.where(kind.count > 0, np.minimum(np.nan_to_num(own, posinf=0), kind.most), 0)


def _kinds(of: Pipelines) -> list[_Kind]:
    """Return three objects of `_Kind` for each pool: one for stages at the start of the pipeline, one for the middle,
    one for the end. The stage of a one-stage pipeline counts as the end."""
    found, depth = [], of.depth
    kept = in_flight(of.inputs.work, depth, of.widest)
    for place, (pool, part) in enumerate(zip(of.used, of.shapes, strict=True)):
        is_first, is_last = place == 0, place == len(of.order) - 1
        terms = stage_terms(of.inputs.model, of.inputs.work, pool.place, max(pool.sizes), part.tp, part.dp)
        terms = msgspec.structs.replace(terms, rank=rank_of(of.inputs.work, terms.rank, depth, part.tp * part.dp))
        link = stage_link(of.pools, of.order, place, part.stages)
        boundary = np.where(depth > 1, terms.boundary_tokens_bytes / link, 0.0)
        both = is_first & is_last & (part.stages == 1)
        counts = (
            np.where(both, 0, int(is_first)),
            part.stages - np.where(both, 1, int(is_first) + int(is_last)),
            np.full(len(part), int(is_last)),
        )
        per_layer_s = np.asarray(terms.per_layer_s, dtype=float)
        for which, count in enumerate(counts):
            ends = (which == 0) | both, which == 2
            base_s = boundary + (terms.head_s if which == 2 else 0.0)
            most = most_layers(rank_phases(of.inputs.model, terms.rank, *ends, kept), pool.place.memory_limit_bytes)
            found.append(_Kind(count, base_s, per_layer_s, most, terms, *ends))
    return found


def stage_link(pools: Pools, order: Sequence[int], place: int, stages: Ints) -> Floats:
    """Return the bandwidth [candidates] of the slowest link that connects a pool's stages with each other or with the
    stages of the neighbouring pools."""
    index = order[place]
    pool = pools.pools[index].place
    slowest = np.where(stages > 1, pool.inter_bytes_per_s, np.inf)
    for other in order[max(0, place - 1) : place + 2]:
        if other != index:
            slowest = np.minimum(slowest, pools.bytes_per_s[index][other])
    return slowest * pool.efficiency.link


def _finish(of: Pipelines, kinds: Sequence[_Kind], layers: Sequence[Floats], pace: Floats) -> LayerBalance:
    """Return the balance of pipelines with these numbers of layers on each kind of stage, and with this pace."""
    work, depth, count = of.inputs.work, of.depth, microbatches(of.inputs.work, of.widest)
    gradients, optimizer = np.zeros(len(pace)), np.zeros(len(pace))
    for kind, own in zip(kinds, layers, strict=True):
        for total, per_layer in (
            (gradients, kind.terms.gradients_per_layer_s),
            (optimizer, kind.terms.optimizer_per_layer_s),
        ):
            tail = tail_s(of.inputs.model, per_layer, own, kind.is_first, kind.is_last)
            np.maximum(total, (kind.count > 0) * tail, out=total)
    whole = [np.nan_to_num(own).astype(np.int64) for own in layers]
    return LayerBalance(
        stage_layers=tuple(zip(whole[::3], whole[1::3], whole[2::3], strict=True)),
        compute_s=pace,
        bubble_s=np.where(depth > 1, pace, 0.0) * (depth - 1) / count,
        gradients_s=gradients,
        optimizer_s=optimizer,
        microbatches=count,
        shard_gradients=np.full(len(pace), work.shard_gradients),
        shard_size=np.full(len(pace), work.shard_size, dtype=np.int64),
    )
