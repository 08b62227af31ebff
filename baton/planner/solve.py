"""The planner: returns the best plan of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import msgspec
import numpy as np

from baton.clock import time_left
from baton.errors import UserError
from baton.planner.bounds import RolloutBound, division_bound_s
from baton.planner.decompose import improve
from baton.planner.exact import Solution, solve_exact
from baton.planner.infeasible import refuse_division
from baton.planner.instance import make_problem
from baton.planner.mixed_stages import with_mixed_stages
from baton.planner.plan_from_solution import describe, with_others_idle
from baton.planner.pools import MAX_POOLS, View, are_alike, make_pools
from baton.planner.problem import AssignmentProblem, Inputs
from baton.planner.published_method import solve_paper
from baton.specs.cluster import Cluster
from baton.specs.plan import Bound, Method, Plan

MOST_GPUS_IN_PARTS = 128
"""If a cluster has at most this number of GPUs, the planner also tries plans that use only one machine of a GPU type.
In larger clusters, such plans would leave most GPUs of that type idle."""
LEFT_OUT = "over the links of its machine, exchanging weights or gradients would take more time than the GPU would save"


def make_plan(
    inputs: Inputs, method: Method = "exact", *, time_limit_s: float = 60.0, prefer: Mapping[str, str] = {}
) -> Plan:
    """Return the best plan of a cluster. Raises UserError with the binding constraint if no plan is feasible. `prefer`:
    as in `describe`, unless machines that are not preferred give a faster plan. The search may exceed `time_limit_s`:
    each part of a cluster gets at least 5 s.

    A pool of several nodes communicates over the links between these nodes, so a plan that uses only one node of a pool
    can be faster. In clusters of at most `MOST_GPUS_IN_PARTS` GPUs, each pool is therefore also tried with a single
    node. An attempt is skipped if a bound shows that its plan cannot be better.
    """
    assert inputs.work.reward_model is None, "plan_with_reward plans the reward stage"
    left_s = time_left(time_limit_s)
    best: Plan | None = None
    least_s, refusal = float("inf"), None
    for part in _parts(inputs.cluster):
        # all parts are planned, even after the time limit, because the plan of the whole cluster may not be the fastest
        ceiling_s = best.breakdown.step_s if best is not None else float("inf")
        try:
            plan = _plan(inputs.on(part), method, max(5.0, left_s()), ceiling_s, prefer)
        except UserError as error:
            refusal = refusal or error
            continue
        if plan is not None:
            least_s = min(least_s, plan.bound.step_s)
            if best is None or plan.breakdown.step_s < best.breakdown.step_s * (1 - 1e-9):
                best = plan
    if best is None:
        assert refusal is not None, "no plan was found and no error was raised"
        raise refusal
    bound = Bound.of(best.breakdown.step_s, least_s, best.bound.note)
    return msgspec.structs.replace(with_others_idle(best, inputs.cluster, LEFT_OUT), bound=bound)


def _parts(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster and, if it is small, the parts in which some GPU types have only their largest node."""
    yield cluster
    if cluster.num_gpus > MOST_GPUS_IN_PARTS:
        return
    choices: list[list[list[int]]] = []
    for nodes in cluster.places.values():
        between = [cluster.bytes_per_s[a][b] for a in nodes for b in nodes if a != b]
        largest = max(nodes, key=lambda place: (cluster.nodes[place].num_gpus, -place))
        is_slower = bool(between) and min(between) < cluster.nodes[largest].link_bytes_per_s
        choices.append([nodes, [largest]] if is_slower else [nodes])
    for chosen in list(product(*choices))[1:]:
        yield restricted(cluster, sorted(place for nodes in chosen for place in nodes))


def restricted(cluster: Cluster, places: list[int]) -> Cluster:
    """Return the cluster with only the nodes at these indices."""
    return msgspec.structs.replace(
        cluster,
        nodes=tuple(cluster.nodes[place] for place in places),
        bytes_per_s=tuple(tuple(cluster.bytes_per_s[a][b] for b in places) for a in places),
    )


def _plan(
    inputs: Inputs, method: Method, time_limit_s: float, ceiling_s: float, prefer: Mapping[str, str]
) -> Plan | None:
    """Return the best plan that may use all nodes of a cluster, or None if no plan can be faster than `ceiling_s`.

    If the nodes of a GPU type have different links, the search runs with up to three kinds of pools (`make_pools`):
    a GPU type with its slowest links, a GPU type with its fastest links, and nodes that are alike. Each solution is
    placed on nodes with fast links, and its step time is computed with the links that it uses. The plan with the
    shortest step is returned, with a bound that assumes the fastest links.
    """
    has_equal_links = are_alike(inputs.cluster)
    problem = make_problem(inputs, "alike" if has_equal_links else "optimistic")
    if ceiling_s < np.inf and division_bound_s(problem) >= ceiling_s:
        return None
    if has_equal_links:
        of, solution = solve(problem, method, time_limit_s)
        return describe(of, solution, method, prefer)
    optimistic = solve(problem, "exact", time_limit_s / 3)
    views: list[View] = ["pessimistic"]
    if len(make_pools(inputs.cluster, inputs.efficiencies).pools) <= MAX_POOLS:
        views.append("alike")
    others = [solve(make_problem(inputs, view), method, time_limit_s / 3) for view in views]
    # a pool of a single node may use the links within this node, which the view `optimistic` does not consider
    least_s = min(solution.bound_s for _, solution in (optimistic, *others[1:]))
    found = [optimistic, *others] if method == "exact" else others
    plans = [
        describe(of, solution, method, each) for of, solution in found for each in ([prefer, {}] if prefer else [{}])
    ]
    best = min(plans, key=lambda plan: plan.breakdown.step_s)
    note = "nodes of one GPU type have different links: the bound uses the fastest link for all of them"
    return msgspec.structs.replace(best, bound=Bound.of(best.breakdown.step_s, least_s, note))


def solve(problem: AssignmentProblem, method: Method, time_limit_s: float) -> tuple[AssignmentProblem, Solution]:
    """Return (problem, solution by `method`). The search may add training shapes to the given problem. The solution's
    row is an index into the table of the returned problem, and its bound is the bound that `exact` finds."""
    bound = RolloutBound(problem)
    richer, (best, _) = problem, solve_exact(problem, time_limit_s=time_limit_s / 2, bound=bound)
    if best is not None and not problem.table.is_complete and problem.inputs.rates is None and problem.step.overlaps:
        richer, best = improve(problem, best, bound, time_limit_s=time_limit_s / 2)
    richer, best = with_mixed_stages(richer, best, bound, time_limit_s=time_limit_s / 2)
    if best is None:
        refuse_division(problem if len(problem.table) else richer)
    if method == "exact":
        return richer, best
    paper = solve_paper(problem)
    if paper is None:
        refuse_division(problem)
    return problem, msgspec.structs.replace(paper, bound_s=best.bound_s)
