"""Phase 2, `exact`: best-first search over training shapes, each with its best rollout. The search proves that the plan
is optimal, or reports a gap.

A division is a training shape and a set of replicas for the remaining GPUs. For each training shape, the numbers of
remaining GPUs give a lower bound on the step time. Shapes are visited in ascending order of their lower bounds. An
integer program decides whether a shape gives a better plan than the best so far. The search ends when the next bound is
not below the best step time. With many GPUs of many types, not all shapes are enumerated; `division_bound_s` then gives
a bound for all shapes.
"""

from __future__ import annotations

import msgspec
import numpy as np

from baton.clock import time_left
from baton.planner.bounds import RolloutBound, division_bound_s
from baton.planner.problem import AssignmentProblem, Floats, Ints
from baton.planner.replicas import CLOSE, RolloutAllocation, RolloutProgram


class Solution(msgspec.Struct, frozen=True):
    """The best division found: a training shape (a row of the table) and replicas."""

    row: int
    rollout: RolloutAllocation
    sync_s: float
    step_s: float
    bound_s: float
    """Lower bound on the step time of all divisions."""


def solution(problem: AssignmentProblem, row: int, rollout: RolloutAllocation) -> Solution:
    """Return the solution with this training shape and rollout. `bound_s` is set to the solution's step time."""
    used = {column.pool for column, count in zip(problem.columns, rollout.counts, strict=True) if count}
    sync_s = max(float(problem.sync_s[row, pool]) for pool in used)
    step_s = float(problem.step.step_s(sync_s, rollout.time_s, problem.table.time_s[row]))
    return Solution(row, rollout, sync_s, step_s, step_s)


def solve_exact(
    problem: AssignmentProblem,
    *,
    time_limit_s: float = 60.0,
    ceiling_s: float = np.inf,
    bound: RolloutBound | None = None,
) -> tuple[Solution | None, float]:
    """Search divisions with a step time below `ceiling_s`. Return the fastest division found (None if there is none),
    and min(B, `ceiling_s`), where B is a lower bound on the step time of all divisions.

    `time_limit_s`: the search stops after this time. If it has not found a division by then and `ceiling_s` is
    infinite, it continues until it finds one. `bound`: the `RolloutBound` of this problem, or of a problem that differs
    only in its training shapes.
    """
    left_s = time_left(time_limit_s)
    bound = bound or RolloutBound(problem)
    rows, sync_s, bounds_s = _candidates(problem, bound)
    program = RolloutProgram(problem)
    best: Solution | None = None
    step_s, least_s = ceiling_s, np.inf
    for place in np.argsort(bounds_s, kind="stable"):
        lower = float(bounds_s[place])
        is_late = step_s < np.inf and left_s() < 0  # if `step_s` is finite, a plan with this step time exists
        if is_late or lower >= step_s * (1 - CLOSE):
            least_s = min(least_s, lower)
            break
        found, missed_s = _try(problem, program, int(rows[place]), float(sync_s[place]), lower, step_s)
        least_s = min(least_s, missed_s)
        if found is not None:
            best, step_s = found, found.step_s
    covered = min(least_s, step_s)
    if not problem.table.is_complete:
        covered = min(covered, division_bound_s(problem))
    return best and msgspec.structs.replace(best, bound_s=covered), covered


def _candidates(problem: AssignmentProblem, bound: RolloutBound) -> tuple[Ints, Floats, Floats]:
    """Return the candidates as three arrays with one element per candidate: the training shape (a row of the table),
    the maximum publication time, and a lower bound on the step time. In a candidate, a pool may have replicas only if
    publication to this pool takes at most the maximum publication time."""
    table, step = problem.table, problem.step
    capacity = np.array([pool.num_gpus for pool in problem.pools.pools])
    left = capacity - table.gpus
    everywhere = np.unique(left, axis=0, return_inverse=True)
    rows, syncs, bounds = [], [], []
    for pool in range(len(capacity)):
        sync = problem.sync_s[:, pool]
        reached = problem.sync_s <= sync[:, None] * (1 + CLOSE)
        repeated = np.any((problem.sync_s[:, :pool] == sync[:, None]), axis=1)
        if np.all(reached):
            rollout_s = bound.times_s(everywhere[0])[everywhere[1].ravel()]
        else:
            rollout_s = bound.times_s(left * reached)
        total = step.step_s(sync, rollout_s, table.time_s)
        keep = ~repeated & np.isfinite(total)
        rows.append(np.nonzero(keep)[0])
        syncs.append(sync[keep])
        bounds.append(total[keep])
    return np.concatenate(rows), np.concatenate(syncs), np.concatenate(bounds)


def _try(
    problem: AssignmentProblem, program: RolloutProgram, row: int, sync_s: float, lower: float, step_s: float
) -> tuple[Solution | None, float]:
    """Return the best solution of a candidate (None if it is not faster than `step_s`) and a lower bound on its step
    time. `sync_s`: maximum publication time of the candidate. `lower`: the lower bound from `_candidates`."""
    table, step = problem.table, problem.step
    train_s = float(table.time_s[row])
    left = program.left(row)
    allowed = tuple((problem.sync_s[row] <= sync_s * (1 + CLOSE)).tolist())
    if np.isfinite(step_s):
        budget = step.rollout_budget_s(step_s * (1 - CLOSE), sync_s, train_s)
        if budget < 0:
            return None, step_s
        answer = program.reaches(left, allowed, budget)
        if answer.bound < step.output_tokens * (1 - CLOSE):
            return None, step_s
    floor = max(step.scoring_s, train_s - step.latency_s if step.overlaps else 0.0)
    rollout = program.fastest(left, allowed, floor)
    if rollout is None:
        return None, np.inf
    missed = max(lower, float(step.step_s(sync_s, max(rollout.least_s, floor), train_s)))
    total = float(step.step_s(sync_s, max(rollout.time_s, floor), train_s))
    if total >= step_s * (1 - CLOSE):
        return None, min(missed, total)
    return Solution(row, rollout, sync_s, total, lower), missed
