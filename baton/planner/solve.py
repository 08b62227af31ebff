"""The planner's front: one question, one plan."""

from __future__ import annotations

import msgspec

from baton.plan import Bound, Method, Plan
from baton.planner.decompose import improve
from baton.planner.describe import describe
from baton.planner.exact import PROVEN, Solution, solve_exact
from baton.planner.infeasible import refuse_division
from baton.planner.instance import Inputs, make_problem
from baton.planner.integer import check_solver
from baton.planner.paper import solve_paper
from baton.planner.pools import MAX_POOLS, View, are_alike, make_pools
from baton.planner.problem import Problem


def make_plan(inputs: Inputs, method: Method = "exact", *, time_limit_s: float = 60.0) -> Plan:
    """Return the best plan of a cluster. Raises UserError naming what binds where there is none.

    Where nodes of one GPU type differ (in links), plans are made for pools of nodes that are alike and for whole types
    at their slowest links; the better one is taken, and the bound is that of whole types at their fastest links.
    """
    check_solver()
    if are_alike(inputs.cluster):
        problem = make_problem(inputs)
        problem, solution = solve(inputs, problem, method, time_limit_s)
        return describe(inputs, problem, solution, method)
    views: list[View] = ["pessimistic"]
    if len(make_pools(inputs.cluster, inputs.efficiencies).pools) <= MAX_POOLS:
        views.insert(0, "alike")
    plans = []
    for view in views:
        problem = make_problem(inputs, view)
        problem, solution = solve(inputs, problem, method, time_limit_s / 3)
        plans.append(describe(inputs, problem, solution, method))
    best = min(plans, key=lambda plan: plan.breakdown.step_s)
    optimistic = make_problem(inputs, "optimistic")
    least_s = solve(inputs, optimistic, "exact", time_limit_s / 3)[1].bound_s
    gap = max(0.0, best.breakdown.step_s / least_s - 1)
    note = "nodes of one GPU type differ: the bound takes the fastest link of each type for all"
    return msgspec.structs.replace(best, bound=Bound(least_s, gap, gap < PROVEN, note))


def solve(inputs: Inputs, problem: Problem, method: Method, time_limit_s: float) -> tuple[Problem, Solution]:
    """Return the solution of a problem by a method, and the problem whose table it points into.

    The solution of `paper` carries the bound of `exact`.
    """
    best = solve_exact(problem, time_limit_s=time_limit_s / 2)
    if best is None:
        refuse_division(problem, inputs.model)
    richer = problem
    if not problem.table.is_complete and inputs.rates is None:
        richer, best = improve(inputs, problem, best, time_limit_s=time_limit_s / 2)
    if method == "exact":
        return richer, best
    found = solve_paper(problem, inputs.cluster)
    if found is None:
        refuse_division(problem, inputs.model)
    return problem, msgspec.structs.replace(found, bound_s=best.bound_s)
