"""The entry point of the planner: returns one plan for one request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product

import msgspec

from baton.errors import UserError
from baton.planner.bounds import RolloutBound, division_bound_s
from baton.planner.decompose import improve
from baton.planner.describe import describe
from baton.planner.exact import Solution, solve_exact
from baton.planner.infeasible import refuse_division
from baton.planner.instance import Inputs, make_problem
from baton.planner.integer import check_solver
from baton.planner.paper import solve_paper
from baton.planner.pools import MAX_POOLS, View, are_alike, make_pools
from baton.planner.problem import AssignmentProblem
from baton.specs.cluster import Cluster
from baton.specs.plan import Bound, Idle, Method, Plan

MOST_GPUS_IN_PARTS = 128
"""In larger clusters, plans that use one machine of a GPU type are not tried: most GPUs of that type would be idle."""
LEFT_OUT = "its machine's links would slow weights or gradients down by more than it would bring"


def make_plan(inputs: Inputs, method: Method = "exact", *, time_limit_s: float = 60.0) -> Plan:
    """Return the best plan of a cluster. If there is none, raises UserError with the binding constraint.

    A pool of several nodes communicates at the speed of the links between them, so a plan that uses only one of its
    nodes can be faster. In clusters of up to MOST_GPUS_IN_PARTS, each pool is therefore also tried with a single
    node, unless a bound shows that this cannot be better.
    """
    check_solver()
    started = time.monotonic()
    best: Plan | None = None
    least_s, refusal = float("inf"), None
    for part in _parts(inputs.cluster):
        left_s = max(5.0, time_limit_s - (time.monotonic() - started))
        ceiling_s = best.breakdown.step_s if best is not None else float("inf")
        try:
            plan = _plan(inputs.on(part), method, left_s, ceiling_s)
        except UserError as error:
            refusal = refusal or error
            continue
        if plan is not None:
            least_s = min(least_s, plan.bound.step_s)
            if best is None or plan.breakdown.step_s < best.breakdown.step_s * (1 - 1e-9):
                best = plan
    if best is None:
        assert refusal is not None, "no plan, and no reason"
        raise refusal
    bound = Bound.of(best.breakdown.step_s, least_s, best.bound.note)
    return msgspec.structs.replace(_on_whole(best, inputs.cluster), bound=bound)


def _parts(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster and, if it is not too large, parts of it in which some GPU types keep only their largest
    node."""
    yield cluster
    if cluster.num_gpus > MOST_GPUS_IN_PARTS:
        return
    choices: list[list[list[int]]] = []
    for name in cluster.gpu_types:
        nodes = [place for place, node in enumerate(cluster.nodes) if node.gpu.name == name]
        between = [cluster.bytes_per_s[a][b] for a in nodes for b in nodes if a != b]
        largest = max(nodes, key=lambda place: (cluster.nodes[place].num_gpus, -place))
        is_slower = bool(between) and min(between) < cluster.nodes[largest].link_bytes_per_s
        choices.append([nodes, [largest]] if is_slower else [nodes])
    for chosen in list(product(*choices))[1:]:
        yield restricted(cluster, sorted(place for nodes in chosen for place in nodes))


def restricted(cluster: Cluster, places: list[int]) -> Cluster:
    """Return the cluster with only these nodes."""
    return msgspec.structs.replace(
        cluster,
        nodes=tuple(cluster.nodes[place] for place in places),
        bytes_per_s=tuple(tuple(cluster.bytes_per_s[a][b] for b in places) for a in places),
    )


def _on_whole(plan: Plan, cluster: Cluster) -> Plan:
    """Return a plan of a part of the cluster as one of the whole cluster; the other GPUs are idle, but paid for."""
    seated = {*plan.training.gpu_ids, *(gpu for replica in plan.replicas for gpu in replica.gpu_ids)}
    seated |= {gpu for idle in plan.idle for gpu in idle.gpu_ids}
    outside = tuple(gpu for node in cluster.nodes for gpu in node.gpu_ids if gpu not in seated)
    idle = (*plan.idle, Idle(outside, LEFT_OUT)) if outside else plan.idle
    return msgspec.structs.replace(plan, idle=idle, price_per_h=cluster.price_per_h)


def _plan(inputs: Inputs, method: Method, time_limit_s: float, ceiling_s: float) -> Plan | None:
    """Return the plan of a cluster in which all nodes take part, or None if no plan can beat `ceiling_s`.

    If nodes of one GPU type differ in their links, plans are made for pools of nodes that are alike and for whole
    types at their slowest links. The better plan is returned with the bound of whole types at their fastest links.
    """
    if are_alike(inputs.cluster):
        problem = make_problem(inputs)
        if lower_bound_s(problem) >= ceiling_s:
            return None
        problem, solution = solve(inputs, problem, method, time_limit_s)
        return describe(inputs, problem, solution, method)
    optimistic = make_problem(inputs, "optimistic")
    if lower_bound_s(optimistic) >= ceiling_s:
        return None
    views: list[View] = ["pessimistic"]
    if len(make_pools(inputs.cluster, inputs.efficiencies).pools) <= MAX_POOLS:
        views.insert(0, "alike")
    plans = []
    for view in views:
        problem, solution = solve(inputs, make_problem(inputs, view), method, time_limit_s / 3)
        plans.append(describe(inputs, problem, solution, method))
    best = min(plans, key=lambda plan: plan.breakdown.step_s)
    least_s = solve(inputs, optimistic, "exact", time_limit_s / 3)[1].bound_s
    note = "nodes of one GPU type differ: the bound takes the fastest link of each type for all"
    return msgspec.structs.replace(best, bound=Bound.of(best.breakdown.step_s, least_s, note))


def lower_bound_s(problem: AssignmentProblem) -> float:
    """Return a step time that no division of the problem's GPUs undercuts. Takes milliseconds."""
    return division_bound_s(problem, RolloutBound(problem), [pool.num_gpus for pool in problem.pools.pools])


def solve(
    inputs: Inputs, problem: AssignmentProblem, method: Method, time_limit_s: float
) -> tuple[AssignmentProblem, Solution]:
    """Return the solution of a problem by a method, and the problem whose table the solution refers to.

    The solution of `paper` has the bound of `exact`.
    """
    best = solve_exact(problem, time_limit_s=time_limit_s / 2)
    if best is None:
        refuse_division(problem, inputs.model)
    richer = problem
    if not problem.table.is_complete and inputs.rates is None and problem.step.overlaps:
        richer, best = improve(inputs, problem, best, time_limit_s=time_limit_s / 2)
    if method == "exact":
        return richer, best
    found = solve_paper(problem)
    if found is None:
        refuse_division(problem, inputs.model)
    return problem, msgspec.structs.replace(found, bound_s=best.bound_s)
