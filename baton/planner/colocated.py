"""Plans in which trainer and engines use the same GPUs alternately, without overlap.

In each step, all GPUs first generate; then the GPUs of the training shape train. On a GPU, the trainer's state (weights
and optimiser moments) is in host memory while engines generate, so each step moves the state out and back. On a CPU,
the trainer's state stays in memory, which leaves less memory for the KV cache. A sleeping process keeps a part of the
GPU's memory (`_with_sleepers`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from baton.cost.memory import SLEEPING_VLLM_BYTES, state_bytes_per_param
from baton.cost.train import stage_terms
from baton.errors import UserError
from baton.planner.assign import assign
from baton.planner.bounds import division_bound_s
from baton.planner.exact import Solution, solution
from baton.planner.infeasible import refuse_without_shapes
from baton.planner.instance import make_problem
from baton.planner.plan_from_solution import describe_assigned, with_others_idle
from baton.planner.problem import AssignmentProblem, Floats, Inputs
from baton.planner.replicas import RolloutProgram
from baton.specs.cluster import Cluster
from baton.specs.plan import Bound, Plan

MOST_ROWS = 20
"""Number of training shapes to try, fastest first. A slower shape may leave more memory for engines."""


def make_colocated_plan(inputs: Inputs, *, time_limit_s: float = 0.0) -> Plan:
    """Return the best plan that trains and generates alternately. Raises UserError if there is none. `time_limit_s` is
    ignored: the search has a fixed number of steps."""
    work = msgspec.structs.replace(inputs.work, max_staleness=0)
    serial = msgspec.structs.replace(inputs, work=work, cluster=_with_sleepers(inputs))
    problem = make_problem(serial)
    if not len(problem.table):
        refuse_without_shapes(serial, problem.pools)
    pools = problem.pools.pools
    on_cpu = np.array([pool.place.gpu.name == "CPU" for pool in pools])
    host_bytes_per_s = np.array([pool.place.efficiency.host_gb_per_s * 1e9 for pool in pools])
    best: tuple[float, Solution, float] | None = None
    for row in np.argsort(problem.table.time_s, kind="stable")[:MOST_ROWS].tolist():
        state = _state_bytes(problem, row)
        found = _generate(problem, row, np.where(on_cpu, state, 0.0))
        if found is None:
            continue
        swap_s = 2 * float(np.max(np.where(on_cpu, 0.0, state) / host_bytes_per_s))
        total = problem.step.step_s(found.sync_s + swap_s, found.rollout.time_s, float(problem.table.time_s[row]))
        if best is None or total < best[0] * (1 - 1e-9):
            best = (total, found, swap_s)
    if best is None:
        raise UserError(
            "infeasible: memory. No replica fits beside the memory that a sleeping trainer keeps. More memory per GPU "
            "would help"
        )
    return _described(problem, *best[1:])


def _with_sleepers(inputs: Inputs) -> Cluster:
    """Return the cluster after subtracting, from each GPU's memory, the bytes that a sleeping vLLM is assumed to keep.
    A sleeping trainer keeps fewer bytes than a sleeping vLLM (only its CUDA context), so engines also fit beside a
    sleeping trainer."""
    nodes = []
    for node in inputs.cluster.nodes:
        kept = 0.0 if node.gpu.name == "CPU" else SLEEPING_VLLM_BYTES
        left = node.gpu.hbm_bytes - kept / inputs.efficiencies.of(node.gpu.name).memory
        nodes.append(msgspec.structs.replace(node, gpu=msgspec.structs.replace(node.gpu, hbm_bytes=max(0.0, left))))
    return msgspec.structs.replace(inputs.cluster, nodes=tuple(nodes))


def _state_bytes(problem: AssignmentProblem, row: int) -> Floats:
    """Return the bytes of weights and moments that the trainer keeps on each GPU between steps, [pools]."""
    table, inputs, model = problem.table, problem.inputs, problem.inputs.model
    found = np.zeros(len(problem.pools.pools))
    if inputs.rates is not None:
        return found
    work = msgspec.structs.replace(inputs.work, shard_size=int(table.shard_size[row]))
    for k, pool in enumerate(problem.pools.pools):
        if table.stages[row, k]:
            tp, dp = int(table.tp[row, k]), int(table.dp[row, k])
            terms = stage_terms(model, work, pool.place, max(pool.sizes), tp, dp)
            share = float(table.shares[row, k]) / int(table.stages[row, k])
            found[k] = model.params * share * float(state_bytes_per_param(model, terms.rank))
    return found


def _generate(problem: AssignmentProblem, row: int, kept: Floats) -> Solution | None:
    """Return the solution with this training shape and the fastest replicas that fit into memory beside the trainer's
    state (`kept` bytes on each GPU)."""
    pools = problem.pools.pools
    fitting = [
        index
        for index, column in enumerate(problem.columns)
        if column.cost.memory_bytes + kept[column.pool] <= pools[column.pool].place.memory_limit_bytes
    ]
    if not fitting:
        return None
    columns = tuple(problem.columns[index] for index in fitting)
    program = RolloutProgram(msgspec.structs.replace(problem, columns=columns))
    rollout = program.fastest(program.left(None), (True,) * len(pools), problem.step.scoring_s)
    if rollout is None:
        return None
    counts = [0] * len(problem.columns)
    for index, count in zip(fitting, rollout.counts, strict=True):
        counts[index] = count
    return solution(problem, row, msgspec.structs.replace(rollout, counts=tuple(counts)))


def _described(problem: AssignmentProblem, found: Solution, swap_s: float) -> Plan:
    # trainer and engines use the same GPUs, one after the other
    training = assign(problem, found.row, [0] * len(problem.columns))
    assigned = msgspec.structs.replace(training, replicas=assign(problem, None, found.rollout.counts).replicas, idle=())
    least_s = division_bound_s(problem)
    swapped = msgspec.structs.replace(found, sync_s=found.sync_s + swap_s, bound_s=least_s)
    plan = describe_assigned(problem, swapped, "exact", assigned)
    why = "more GPUs would make neither training nor generation faster"
    plan = with_others_idle(plan, problem.inputs.cluster, why)
    total = plan.breakdown.step_s
    note = "the trainer's state stays in memory while engines generate"
    if swap_s:
        note = f"the trainer's state is moved to host memory and back in each step: {swap_s:.3g} s of the sync time"
    bound = Bound.of(total, min(total, least_s), note)
    return msgspec.structs.replace(plan, bound=bound, is_colocated=True)
