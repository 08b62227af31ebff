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
from baton.planner.instance import Inputs, with_table
from baton.planner.pools import GpuPool
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
    """All candidates that span one set of pools. Lists have one array [candidates] per pool, in pipeline order."""

    order: tuple[int, ...]
    stages: list[Ints]
    tp: list[Ints]
    layers: list[Floats]
    """Layers of the stage with the most layers, per pool. On the last pool, the output head counts as `head_layers`
    layers."""
    split: list[Ints]
    """Layers of each pool, over all its stages."""
    most: list[Ints]
    """Maximum number of tensor-parallel groups per stage of each pool."""
    one: list[StageTerms]
    """For each pool, the `StageTerms` of a stage with one tensor-parallel group (dp = 1)."""
    head_layers: Floats
    """Number of layers that take as long as the output head."""


def improve(
    inputs: Inputs, problem: AssignmentProblem, best: Solution, *, time_limit_s: float
) -> tuple[AssignmentProblem, Solution]:
    """Return the given solution or a better solution with a pipeline that spans GPU types. The returned bound covers
    all pipelines. `Solution.row` is an index into the table of the returned problem."""
    left_s = time_left(time_limit_s)
    bound = RolloutBound(problem)
    families = list(_families(inputs, problem))
    solved_s = best.step_s
    covered = _enumerated_bound_s(problem, bound)
    low, high = min(best.bound_s, best.step_s), best.step_s
    for _ in range(ROUNDS):
        if high / low - 1 < TARGET_GAP or left_s() < 0:
            break
        middle = low + (high - low) * 0.5
        passing = [_passing(inputs, problem, bound, family, middle) for family in families]
        if not any(len(rows) for rows, _ in passing):
            low = middle
            continue
        found = _realise(inputs, problem, families, passing, solved_s, time_limit_s / 4)
        if found is None:
            high = middle  # no plan was found and the bound does not exclude this time: try shorter times
            continue
        problem, best = found
        solved_s = best.step_s
        high = min(high, solved_s)
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


def _families(inputs: Inputs, problem: AssignmentProblem) -> Iterator[_Family]:
    model, work, pools = inputs.model, inputs.work, problem.pools
    for order in pipeline_orders(pools, MAX_CROSSED):
        if len(order) == 1:
            continue
        splits = _splits(model.num_layers, len(order))
        shapes = [
            [
                (stages, tp)
                for stages in CROSSING_STAGES
                for tp in tensor_widths(model, pools.pools[k])
                if stages * tp <= pools.pools[k].capacity(tp)
            ]
            for k in order
        ]
        chosen = np.array(list(product(*(range(len(s)) for s in shapes))))
        repeat, tile = len(splits), len(chosen)
        stages, tps, layers, parts, most, ones = [], [], [], [], [], []
        for place, k in enumerate(order):
            table = np.array(shapes[place])[chosen[:, place]]
            stage, tp = np.repeat(table[:, 0], repeat), np.repeat(table[:, 1], repeat)
            pool = pools.pools[k]
            one = stage_terms(model, work, pool.place, max(pool.sizes), tp, 1)
            own = np.tile(splits[:, place], tile).astype(float)
            is_last = place == len(order) - 1
            full = (own + one.head_s / one.per_layer_s) / stage if is_last else np.ceil(own / stage)
            stages.append(stage)
            tps.append(tp)
            parts.append(np.tile(splits[:, place], tile))
            most.append(_room(pool, stage, tp))
            layers.append(np.asarray(full, dtype=float))
            ones.append(one)
        head = np.asarray(ones[-1].head_s / ones[-1].per_layer_s, dtype=float)
        yield _Family(tuple(order), stages, tps, layers, parts, most, ones, head)


def _room(pool: GpuPool, stages: Ints, tp: Ints) -> Ints:
    """Return the maximum number of groups of `tp` GPUs per stage."""
    by_level = {level: pool.capacity(level) for level in pool.levels}
    room: Ints = np.array([by_level[int(width)] for width in np.unique(tp)])[np.searchsorted(np.unique(tp), tp)]
    return room // (stages * tp)


def _splits(num_layers: int, parts: int) -> Ints:
    """Return all splits of the layers into parts of at least one layer, [splits, parts]. If there are more than
    `MOST_SPLITS`, every part is rounded down to a multiple of a cell size, and equal splits are merged. Rounding down
    never overestimates the required number of GPUs, so the bound stays valid."""
    edges = combinations(range(1, num_layers), parts - 1)
    rows = np.array([np.diff([0, *cut, num_layers]) for cut in edges], dtype=np.int64)
    if len(rows) <= MOST_SPLITS:
        return rows
    cell = 2
    while True:
        merged: Ints = np.unique(np.maximum(1, rows // cell * cell), axis=0)
        if len(merged) <= MOST_SPLITS:
            return merged
        cell += 1


def _passing(
    inputs: Inputs, problem: AssignmentProblem, bound: RolloutBound, family: _Family, step_s: float
) -> tuple[Ints, list[Ints]]:
    """Return the candidates whose step may take at most `step_s`: their rows, and for each pool the number of groups
    (dp) that such a step requires.

    The first pass uses the shortest publication time of each row. The remaining rows are then tested once for each
    pool. The test for a pool uses the publication time to this pool, and assumes that only pools with at most this
    publication time generate.
    """
    sync_s = _sync_s(inputs, problem, family)
    rows: Ints = np.arange(len(sync_s), dtype=np.int64)
    groups = [np.ones(len(sync_s)) for _ in family.order]
    rows, groups = _keeping_pace(inputs, problem, family, rows, groups, step_s - sync_s.min(axis=1))
    rows, groups = _generating(problem, bound, family, rows, groups, step_s - sync_s.min(axis=1), None)
    kept_rows, kept_groups = [], []
    for pool in range(len(problem.pools.pools)):
        if not len(rows):
            break
        some, own = _keeping_pace(inputs, problem, family, rows, groups, step_s - sync_s[:, pool])
        reached = sync_s <= sync_s[:, [pool]] * (1 + 1e-9)
        some, own = _generating(problem, bound, family, some, own, step_s - sync_s[:, pool], reached)
        kept_rows.append(some)
        kept_groups.append(own)
    if not kept_rows:
        return np.zeros(0, dtype=np.int64), []
    return np.concatenate(kept_rows), [
        np.concatenate([own[place] for own in kept_groups]).astype(np.int64) for place in range(len(family.order))
    ]


def _sync_s(inputs: Inputs, problem: AssignmentProblem, family: _Family) -> Floats:
    """Return publication times [candidates, pools]. A pool's share of the layers approximates its share of the
    weights."""
    pools = problem.pools
    shares = np.zeros((len(family.split[0]), len(pools.pools)))
    for place, k in enumerate(family.order):
        shares[:, k] = family.split[place] / inputs.model.num_layers
    return sync_table(inputs.model, inputs.work, pools, shares)


def _keeping_pace(
    inputs: Inputs, problem: AssignmentProblem, family: _Family, rows: Ints, groups: list[Floats], left_s: Floats
) -> tuple[Ints, list[Floats]]:
    """Return the rows whose pools can train within `left_s` [candidates], and the number of groups of each pool."""
    work, pools = inputs.work, problem.pools.pools
    overhead = max(pool.place.efficiency.train_overhead_s for pool in pools)
    per_rank = work.computed_tokens / work.minibatches / work.longest_tokens
    for _ in range(PASSES):
        if not len(rows):
            break
        depth = np.sum([stage[rows] for stage in family.stages], axis=0)
        count = np.maximum(1.0, np.floor(per_rank / np.max(groups, axis=0)))
        tail = _tail_s(inputs, problem, family, rows, groups)
        pace = (left_s[rows] - overhead - tail) * count / (count + depth - 1)
        fits = pace > 0
        needs = []
        for place in range(len(family.order)):
            need = _least_groups(problem, family, place, rows, pace, groups[place])
            fits &= need <= family.most[place][rows]
            needs.append(need)
        rows, groups = rows[fits], [need[fits] for need in needs]
    if len(rows):
        holds = _holds(inputs, problem, family, rows)
        rows, groups = rows[holds], [own[holds] for own in groups]
    return rows, groups


def _generating(
    problem: AssignmentProblem,
    bound: RolloutBound,
    family: _Family,
    rows: Ints,
    groups: list[Floats],
    left_s: Floats,
    reached: Bools | None,
) -> tuple[Ints, list[Floats]]:
    """Return the rows in which the GPUs that do not train can generate a step's tokens within `left_s` [candidates].
    `reached`: the pools that generate; None for all pools."""
    if not len(rows):
        return rows, groups
    pools, step = problem.pools.pools, problem.step
    left = np.tile(np.array([float(pool.num_gpus) for pool in pools]), (len(rows), 1))
    for place, k in enumerate(family.order):
        left[:, k] -= family.stages[place][rows] * family.tp[place][rows] * groups[place]
    if reached is not None:
        left *= reached[rows]
    rollout_s = left_s[rows] - step.latency_s
    enough = rollout_s >= step.judge_s
    for table, gated in bound.tables:
        work = sum(left[:, k] * np.interp(rollout_s, bound.times, table[k]) for k in range(len(pools)))
        enough &= work + gated >= bound.tokens
    return rows[enough], [own[enough] for own in groups]


def _least_groups(
    problem: AssignmentProblem, family: _Family, place: int, alive: Ints, pace: Floats, groups: Floats
) -> Floats:
    """Return the smallest dp with which each stage of a pool takes at most `pace` seconds. `groups`: a lower bound of
    the result."""
    pool = problem.pools.pools[family.order[place]]
    rate = stage_link(problem.pools, family.order, place, family.stages[place][alive])
    node, tp = max(pool.sizes), family.tp[place][alive]
    crossing = np.asarray(family.one[place].boundary_tokens_bytes)
    crossing = (crossing if crossing.ndim == 0 else crossing[alive]) * 1.0
    work_s = family.layers[place][alive] * np.asarray(family.one[place].per_layer_s)[alive]

    def asked(nodes: Floats) -> Floats:
        """Return the number of groups needed if a stage spans `nodes` nodes. A stage on more nodes sends its
        activations faster to the next stage."""
        left = pace - crossing / nodes / rate
        with np.errstate(divide="ignore"):
            return np.where(left > 0, np.ceil(work_s / np.maximum(left, 1e-300) * (1 - 1e-9)), np.inf)

    need = np.maximum(groups, asked(np.full(len(alive), float(len(pool.sizes)))))
    for _ in range(PASSES):  # each pass adds either groups on the same nodes or one node
        nodes = np.maximum(1.0, np.ceil(tp * np.minimum(need, 1e9) / node))
        need = np.maximum(need, np.minimum(asked(nodes), nodes * node // tp + 1))
    return need


def _tail_s(
    inputs: Inputs, problem: AssignmentProblem, family: _Family, alive: Ints, groups: Sequence[Floats]
) -> Floats:
    """Return a lower bound on the gradient time of the slowest stage: the time of its layers, without embedding and
    output head."""
    longest = np.zeros(len(alive))
    for place, k in enumerate(family.order):
        pool = problem.pools.pools[k]
        dp = np.minimum(groups[place], 1e9)
        terms = stage_terms(inputs.model, inputs.work, pool.place, max(pool.sizes), family.tp[place][alive], dp)
        last = place == len(family.order) - 1
        own = (
            np.floor(family.layers[place][alive])
            if not last
            else np.maximum(family.layers[place][alive] - family.head_layers[alive], 0)
        )
        longest = np.maximum(longest, own * terms.gradients_per_layer_s)
    return longest


def _holds(inputs: Inputs, problem: AssignmentProblem, family: _Family, alive: Ints) -> Bools:
    """Return whether the layers fit into memory at the largest dp. The memory of the embedding counts only if the first
    pool has one stage, and that of the output head only if the last pool has one stage."""
    fits = np.ones(len(alive), dtype=bool)
    depth = np.sum([stage[alive] for stage in family.stages], axis=0)
    widest = np.max([most[alive] for most in family.most], axis=0)
    in_flight = np.minimum(depth, microbatches(inputs.work, np.maximum(widest, 1)))
    for place, k in enumerate(family.order):
        pool = problem.pools.pools[k]
        tp, alone = family.tp[place][alive], family.stages[place][alive] == 1
        dp = np.maximum(family.most[place][alive], 1)
        terms = stage_terms(inputs.model, inputs.work, pool.place, max(pool.sizes), tp, dp)
        is_last = place == len(family.order) - 1
        first, last = alone & (place == 0), alone & is_last
        phases = rank_phases(inputs.model, terms.rank, first, last, in_flight)
        most = most_layers(phases, pool.place.memory_limit_bytes)
        own = family.layers[place][alive] - (
            family.head_layers[alive] / family.stages[place][alive] if is_last else 0.0
        )
        fits &= own <= most + 1e-6
    return fits


def _realise(
    inputs: Inputs,
    problem: AssignmentProblem,
    families: Sequence[_Family],
    passing: Sequence[tuple[Ints, list[Ints]]],
    ceiling_s: float,
    time_limit_s: float,
) -> tuple[AssignmentProblem, Solution] | None:
    """Turn the remaining rows into training shapes, with `SPARE` additional groups, and solve with these shapes."""
    share = MOST_CANDIDATES // max(1, sum(1 for rows, _ in passing if len(rows)))
    tables = []
    for family, (rows, groups) in zip(families, passing, strict=True):
        if not len(rows):
            continue
        every = max(1, len(rows) * len(SPARE) ** len(family.order) // share)
        rows, groups = rows[::every], [own[::every] for own in groups]
        for spare in product(SPARE, repeat=len(family.order)):
            shapes = []
            for place in range(len(family.order)):
                stage, tp = family.stages[place][rows], family.tp[place][rows]
                shapes.append(Shapes(stage, tp, np.minimum(groups[place] + spare[place], family.most[place][rows])))
            tables.append(evaluated(Pipelines(inputs.model, inputs.work, problem.pools, family.order, shapes)))
    richer = with_table(inputs, problem, TrainTable.joined(tables, is_complete=True))
    found, _ = solve_exact(richer, time_limit_s=time_limit_s, ceiling_s=ceiling_s)
    return None if found is None else (richer, found)
