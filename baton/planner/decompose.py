"""Searches the pipelines that span GPU types when there are too many of them to enumerate.

A candidate has a structure (stages and tp on each pool of a pipeline) and a split of the layers among the pools. For a
fixed step time T, the pools of a candidate are independent: each pool needs a minimum number of GPUs for its stages to
be fast enough. The remaining GPUs must generate a step's tokens in T. A bound excludes candidates whose remaining GPUs
cannot generate a step's tokens in T. If the bound excludes all candidates, T is a lower bound on the step time of
pipelines that span GPU types. If T is below the best step time so far, the remaining candidates may contain a better
plan. The required numbers of GPUs are never overestimated, so the bound is valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import msgspec
import numpy as np

from baton.clock import time_left
from baton.cost.memory import most_layers, rank_phases
from baton.cost.train import StageTerms, microbatches, stage_terms
from baton.planner.bounds import RolloutBound
from baton.planner.exact import Solution, solve_exact
from baton.planner.instance import with_table
from baton.planner.problem import AssignmentProblem, Bools, Floats, Ints, TrainTable, sync_table, tensor_widths
from baton.planner.training_shapes import (
    CROSSING_STAGES,
    MAX_CROSSED,
    Pipelines,
    Shapes,
    evaluated,
    pipeline_orders,
    stage_link,
)

ROUNDS = 12
"""Maximum number of bisection steps on the step time."""
TARGET_GAP = 0.002
"""The search ends when the relative gap between the best plan and the bound is below this value."""
MOST_CANDIDATES = 40_000
"""Maximum number of candidates to turn into training shapes in one bisection step."""
MOST_SPLITS = 4000
"""Maximum number of splits of the layers per set of pools. If there are more splits, similar splits are merged."""
SPARE = (0, 1, 2)
"""A candidate that the bound does not exclude is solved several times: with the minimum number of groups per pool plus
each of these numbers."""
PASSES = 4
"""Number of passes that compute how many tensor-parallel groups each pool requires. One pass is not enough, because the
number of groups of a pool depends on those of the other pools. Fewer passes give a valid but weaker bound."""


class _Family(msgspec.Struct, frozen=True):
    """Candidate pipelines that span one set of pools. Arrays are [pools of the pipeline, candidates]."""

    order: list[int]
    """The pools, in the order of the pipeline."""
    stages: Ints
    tp: Ints
    most: Ints
    """Maximum number of tensor-parallel groups per stage."""
    split: Ints
    """Number of layers of all stages of the pool together."""
    layers: Floats
    """Layers of the stage with the most layers. On the last pool, the output head counts as `head_layers` layers."""
    head_layers: Floats
    """Number of layers that take as long as the output head; 0 if the pool is not the last one."""
    work_s: Floats
    """Time of `layers` with one tensor-parallel group."""
    boundary_bytes: Floats
    """Bytes that a stage on one node sends to the next stage per train step."""

    def take(self, rows: Ints) -> _Family:
        arrays = {key: getattr(self, key)[:, rows] for key in self.__struct_fields__ if key != "order"}
        return _Family(self.order, **arrays)


def improve(
    problem: AssignmentProblem, best: Solution, bound: RolloutBound, *, time_limit_s: float
) -> tuple[AssignmentProblem, Solution]:
    """Return the given solution or a better solution with a pipeline that spans GPU types. The returned bound covers
    all pipelines. `Solution.row` is an index into the table of the returned problem. `bound`: the `RolloutBound` of the
    problem."""
    left_s = time_left(time_limit_s)
    families = list(_families(problem))
    covered = _enumerated_bound_s(problem, bound)
    low, high = min(best.bound_s, best.step_s), best.step_s
    for _ in range(ROUNDS):
        if high / low - 1 < TARGET_GAP or left_s() < 0:
            break
        middle = low + (high - low) * 0.5
        passing = [_passing(problem, bound, family, middle) for family in families]
        if not any(len(rows) for rows, _ in passing):
            low = middle
            continue
        found = _realise(problem, bound, families, passing, best.step_s, time_limit_s / 4)
        if found is None:
            high = middle  # no plan was found and the bound does not exclude this time: try shorter times
            continue
        problem, best = found
        high = min(high, best.step_s)
    return problem, msgspec.structs.replace(best, bound_s=min(low, covered, best.step_s))


def _enumerated_bound_s(problem: AssignmentProblem, bound: RolloutBound) -> float:
    """Return a lower bound on the step time of pipelines on a single pool. The table has all of these pipelines."""
    alone = (problem.table.stages > 0).sum(axis=1) == 1
    if not alone.any():
        return np.inf
    table = problem.table.take(alone)
    capacity = np.array([pool.num_gpus for pool in problem.pools.pools])
    rollout_s, sync_s = bound.times_s(capacity - table.gpus), problem.sync_s[alone].min(axis=1)
    return float(problem.step.step_s(sync_s, rollout_s, table.time_s).min())


def _families(problem: AssignmentProblem) -> Iterator[_Family]:
    model, work, pools = problem.inputs.model, problem.inputs.work, problem.pools.pools
    for order in pipeline_orders(problem.pools, MAX_CROSSED):
        if len(order) == 1:
            continue
        shapes = [
            [
                (stages, tp, most)
                for stages, tp in product(CROSSING_STAGES, tensor_widths(model, pools[k]))
                if (most := pools[k].capacity(tp) // (stages * tp))
            ]
            for k in order
        ]
        chosen, splits = np.array(list(product(*shapes))), _splits(model.num_layers, len(order))
        parts: list[tuple[Ints | Floats, ...]] = []
        for place, k in enumerate(order):
            stages, tp, most = np.repeat(chosen[:, place], len(splits), axis=0).T
            split = np.tile(splits[:, place], len(chosen))
            one = stage_terms(model, work, pools[k].place, max(pools[k].sizes), tp, 1)
            is_last = place == len(order) - 1
            head_layers = is_last * np.asarray(one.head_s / one.per_layer_s)
            layers = (split + head_layers) / stages if is_last else np.ceil(split / stages)
            work_s = layers * one.per_layer_s
            parts.append((stages, tp, most, split, layers, head_layers, work_s, one.boundary_tokens_bytes))
        yield _Family(order, *map(np.stack, zip(*parts, strict=True)))


def _splits(num_layers: int, parts: int) -> Ints:
    """Return all splits of the layers into parts of at least one layer, [splits, parts]. If there are more than
    `MOST_SPLITS`, every part is rounded down to a multiple of a cell size, and equal splits are merged. A pool with
    fewer layers never needs more GPUs, so the rounded splits do not overestimate the required GPUs, and the bound of
    `_passing` stays valid."""
    edges = combinations(range(1, num_layers), parts - 1)
    rows: Ints = np.array([np.diff([0, *cut, num_layers]) for cut in edges], dtype=np.int64)
    merged, cell = rows, 1
    while len(merged) > MOST_SPLITS:
        cell += 1
        merged = np.unique(np.maximum(1, rows // cell * cell), axis=0)
    return merged


def _passing(problem: AssignmentProblem, bound: RolloutBound, family: _Family, step_s: float) -> tuple[Ints, Ints]:
    """Return the candidates whose step may take at most `step_s`: their rows, and the number of tensor-parallel groups
    (dp) that each pool needs for such a step, [pools of the pipeline, rows].

    The first pass uses the shortest publication time of each row. The remaining rows are then tested once for each
    pool. The test for a pool uses the publication time to this pool, and assumes that only pools with at most this
    publication time generate.
    """
    sync_s = _sync_s(problem, family)
    rows, groups = np.arange(len(sync_s)), np.ones(family.split.shape)
    left_s = step_s - sync_s.min(axis=1)
    rows, groups = _keeping_pace(problem, family, rows, groups, left_s)
    rows, groups = _generating(problem, bound, family, rows, groups, left_s, np.ones_like(sync_s, dtype=bool))
    kept = []
    for pool in range(len(problem.pools.pools)):
        left_s, reached = step_s - sync_s[:, pool], sync_s <= sync_s[:, [pool]] * (1 + 1e-9)
        kept_rows, own = _keeping_pace(problem, family, rows, groups, left_s)
        kept.append(_generating(problem, bound, family, kept_rows, own, left_s, reached))
    all_rows, all_groups = zip(*kept, strict=True)
    return np.concatenate(all_rows), np.concatenate(all_groups, axis=1).astype(np.int64)


def _sync_s(problem: AssignmentProblem, family: _Family) -> Floats:
    """Return publication times [candidates, pools]. A pool's share of the layers approximates its share of the
    weights."""
    shares = np.zeros((family.split.shape[1], len(problem.pools.pools)))
    shares[:, family.order] = family.split.T / problem.inputs.model.num_layers
    return sync_table(problem.inputs, problem.pools, shares)


def _keeping_pace(
    problem: AssignmentProblem, family: _Family, rows: Ints, groups: Floats, left_s: Floats
) -> tuple[Ints, Floats]:
    """Return the rows whose pools can train within `left_s` [candidates], and the number of groups (dp) that each pool
    then needs."""
    work = problem.inputs.work
    overhead = max(pool.place.efficiency.train_overhead_s for pool in problem.pools.pools)
    per_rank = work.computed_tokens / work.minibatches / work.longest_tokens
    for _ in range(PASSES):
        kept_rows = family.take(rows)
        count = np.maximum(1.0, np.floor(per_rank / groups.max(axis=0)))
        tail_s = _tail_s(problem, kept_rows, groups)
        pace = (left_s[rows] - overhead - tail_s) * count / (count + kept_rows.stages.sum(axis=0) - 1)
        needs = np.stack([_least_groups(problem, kept_rows, place, pace, own) for place, own in enumerate(groups)])
        fits = (pace > 0) & np.all(needs <= kept_rows.most, axis=0)
        rows, groups = rows[fits], needs[:, fits]
    holds = _holds(problem, family.take(rows))
    return rows[holds], groups[:, holds]


def _generating(
    problem: AssignmentProblem,
    bound: RolloutBound,
    family: _Family,
    rows: Ints,
    groups: Floats,
    left_s: Floats,
    reached: Bools,
) -> tuple[Ints, Floats]:
    """Return the rows in which the GPUs that do not train can generate a step's tokens within `left_s` [candidates].
    `reached` [candidates, pools]: the pools that generate."""
    pools, step = problem.pools.pools, problem.step
    left = np.tile(np.array([float(pool.num_gpus) for pool in pools]), (len(rows), 1))
    left[:, family.order] -= (family.stages[:, rows] * family.tp[:, rows] * groups).T
    left *= reached[rows]
    rollout_s = left_s[rows] - step.latency_s
    enough = rollout_s >= step.scoring_s
    for table, gated in bound.tables:
        work = sum(left[:, k] * np.interp(rollout_s, bound.times, table[k]) for k in range(len(pools)))
        enough &= work + gated >= bound.tokens
    return rows[enough], groups[:, enough]


def _least_groups(problem: AssignmentProblem, kept_rows: _Family, place: int, pace: Floats, groups: Floats) -> Floats:
    """Return the smallest dp with which each stage of a pool takes at most `pace` seconds. `groups`: a lower bound of
    the result."""
    sizes, tp, work_s = problem.pools.pools[kept_rows.order[place]].sizes, kept_rows.tp[place], kept_rows.work_s[place]
    boundary_bytes, rate = (
        kept_rows.boundary_bytes[place],
        stage_link(problem.pools, kept_rows.order, place, kept_rows.stages[place]),
    )

    def needed(nodes: Floats | float) -> Floats:
        """Return the number of groups needed if a stage spans `nodes` nodes. A stage on more nodes sends its
        activations faster to the next stage."""
        left = pace - boundary_bytes / nodes / rate
        return np.where(left > 0, np.ceil(work_s / np.maximum(left, 1e-300) * (1 - 1e-9)), np.inf)

    need = np.maximum(groups, needed(len(sizes)))
    for _ in range(PASSES):  # each pass adds either groups on the same nodes or one node
        nodes = np.maximum(1.0, np.ceil(tp * np.minimum(need, 1e9) / max(sizes)))
        need = np.maximum(need, np.minimum(needed(nodes), nodes * max(sizes) // tp + 1))
    return need


def _tail_s(problem: AssignmentProblem, kept_rows: _Family, groups: Floats) -> Floats:
    """Return a lower bound on the gradient time of the slowest stage: the time of its layers, without embedding and
    output head."""
    per_layer_s = [
        _terms(problem, k, tp, dp).gradients_per_layer_s
        for k, tp, dp in zip(kept_rows.order, kept_rows.tp, np.minimum(groups, 1e9), strict=True)
    ]
    longest: Floats = np.max(np.maximum(kept_rows.layers - kept_rows.head_layers, 0.0) * np.stack(per_layer_s), axis=0)
    return longest


def _holds(problem: AssignmentProblem, kept_rows: _Family) -> Bools:
    """Return whether the layers fit into memory at the largest dp. The embedding counts only if the first pool has one
    stage, and the output head only if the last pool has one stage. If such a pool has several stages, the stage with
    the most layers may be another one."""
    inputs, last = problem.inputs, len(kept_rows.order) - 1
    fits = np.ones(kept_rows.stages.shape[1], dtype=bool)
    in_flight = np.minimum(kept_rows.stages.sum(axis=0), microbatches(inputs.work, kept_rows.most.max(axis=0)))
    for place, k in enumerate(kept_rows.order):
        stages, rank = kept_rows.stages[place], _terms(problem, k, kept_rows.tp[place], kept_rows.most[place]).rank
        ends = (stages == 1) & (place == 0), (stages == 1) & (place == last)
        limit = problem.pools.pools[k].place.memory_limit_bytes
        most = most_layers(rank_phases(inputs.model, rank, *ends, in_flight), limit)
        fits &= kept_rows.layers[place] - kept_rows.head_layers[place] / stages <= most + 1e-6
    return fits


def _terms(problem: AssignmentProblem, k: int, tp: Ints, dp: Ints | Floats) -> StageTerms:
    inputs, pool = problem.inputs, problem.pools.pools[k]
    return stage_terms(inputs.model, inputs.work, pool.place, max(pool.sizes), tp, dp)


def _realise(
    problem: AssignmentProblem,
    bound: RolloutBound,
    families: Sequence[_Family],
    passing: Sequence[tuple[Ints, Ints]],
    ceiling_s: float,
    time_limit_s: float,
) -> tuple[AssignmentProblem, Solution] | None:
    """Turn the remaining rows into training shapes, with `SPARE` additional groups, and search the plans with these
    shapes. Return the problem with these shapes and its best solution; None if no plan is below `ceiling_s`."""
    share = MOST_CANDIDATES // sum(1 for rows, _ in passing if len(rows))
    tables = []
    for family, (rows, groups) in zip(families, passing, strict=True):
        if not len(rows):
            continue
        every = max(1, len(rows) * len(SPARE) ** len(groups) // share)
        kept_rows, least = family.take(rows[::every]), groups[:, ::every]
        for spare in product(SPARE, repeat=len(groups)):
            dp = np.minimum(least + np.array(spare)[:, None], kept_rows.most)
            shapes = [Shapes(*each) for each in zip(kept_rows.stages, kept_rows.tp, dp, strict=True)]
            tables.append(evaluated(Pipelines(problem.inputs, problem.pools, kept_rows.order, shapes)))
    richer = with_table(problem, TrainTable.joined(tables, is_complete=True))
    found, _ = solve_exact(richer, time_limit_s=time_limit_s, ceiling_s=ceiling_s, bound=bound)
    return None if found is None else (richer, found)
