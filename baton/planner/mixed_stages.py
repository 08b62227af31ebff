"""Searches mixed stages: one stage with ranks on two GPU types, which train trajectories in proportion to their speeds.

A mixed stage is defined by a pair of numbers: how many GPUs of the first type and how many of the second type it has.
There are too many pairs to compute the step time of each. The search for mixed stages therefore runs after the search
over other shapes, whose best step time is then known. The step time is computed only for pairs that pass two tests. The
first test checks whether the stage's GPUs can train a batch within the best step time; it neglects communication. The
second test checks whether the other GPUs can generate a batch within the best step time; it allows fractions of
replicas. Every pair with a step time below the best one passes these optimistic tests, so the bound stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from baton.planner.bounds import RolloutBound
from baton.planner.exact import Solution, solve_exact
from baton.planner.instance import mixed_pools, with_table
from baton.planner.problem import AssignmentProblem, Ints, TrainTable
from baton.planner.training_shapes import MAX_MIXED, mixed_rows


def with_mixed_stages(
    problem: AssignmentProblem, best: Solution | None, bound: RolloutBound, *, time_limit_s: float
) -> tuple[AssignmentProblem, Solution | None]:
    """Return the given solution or a better solution with a mixed stage. The returned bound covers all mixed stages.
    `Solution.row` is an index into the table of the returned problem. `bound`: the `RolloutBound` of the problem."""
    ceiling_s = np.inf if best is None else best.step_s
    pairs = list(_pairs(problem, bound, ceiling_s))
    count = sum(len(first) for _, first, _ in pairs)
    if not count:
        return problem, best
    every = -(-count // MAX_MIXED)
    tables = [
        table
        for order, first, second in pairs
        for table in mixed_rows(problem.inputs, problem.pools, order, first[::every], second[::every])
    ]
    is_complete = every == 1 and (best is not None or problem.table.is_complete)
    table = TrainTable.joined(tables, is_complete=is_complete)
    table = table.take(problem.sync_bound_s + table.time_s < ceiling_s)
    richer = with_table(problem, table)
    found, bound_s = solve_exact(richer, time_limit_s=time_limit_s, ceiling_s=ceiling_s, bound=bound)
    if best is None:
        return richer, found
    bound_s = min(bound_s, best.bound_s)
    if found is None:
        return problem, msgspec.structs.replace(best, bound_s=bound_s)
    return richer, msgspec.structs.replace(found, bound_s=bound_s)


def _pairs(problem: AssignmentProblem, bound: RolloutBound, ceiling_s: float) -> Iterator[tuple[list[int], Ints, Ints]]:
    """Yield (pools, first, second) for each pair of pools, in the order of a pipeline. `first` and `second` are arrays:
    with `first[i]` ranks on one pool and `second[i]` on the other, a step may be shorter than `ceiling_s`."""
    pools, step = problem.pools.pools, problem.step
    orders = mixed_pools(problem.inputs, problem.pools)
    if not orders:
        return
    overhead_s = max(pool.place.efficiency.train_overhead_s for pool in pools)
    capacity = np.array([pool.num_gpus for pool in pools], dtype=float)
    rate = problem.train_rate_bound
    left_s = ceiling_s - problem.sync_bound_s
    train_s, rollout_s = left_s - overhead_s, left_s - step.latency_s
    if not step.overlaps:
        train_s -= float(bound.times_s(capacity[None, :].astype(np.int64))[0]) + step.latency_s
        rollout_s -= overhead_s + 1 / float(rate @ capacity)
    if train_s <= 0 or rollout_s <= 0:
        return
    for order in orders:
        first, second = (np.arange(1, pools[k].num_gpus + 1) for k in order)
        first, second = first[:, None], second[None, :]
        keeps = (first * rate[order[0]] + second * rate[order[1]]) * train_s >= 1
        keeps &= first + second <= problem.inputs.work.num_trajectories
        for work, gated in bound.work(min(rollout_s, bound.times[-1])):
            room = work @ capacity + gated - bound.tokens
            keeps &= first * work[order[0]] + second * work[order[1]] <= room
        rows, columns = np.nonzero(keeps)
        if len(rows):
            yield order, rows + 1, columns + 1
