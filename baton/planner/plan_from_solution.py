"""Turns a solution into a complete plan: the role of each GPU, layers, memory, times, and the limits of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from baton.cost.memory import rank_phases, stage_bytes
from baton.cost.train import in_flight, rank_of, rank_speeds, stage_terms
from baton.planner.assign import GpuAssignment, assign
from baton.planner.exact import Solution
from baton.planner.exact import solution as selected
from baton.planner.links import faster_assignments, parts_of, used_pools
from baton.planner.pools import Pools
from baton.planner.problem import AssignmentProblem, Floats, replica_columns, sync_table
from baton.planner.replicas import rounded_shares
from baton.planner.training_shapes import LayerBalance, Pipelines, Shapes, balanced, evaluated
from baton.specs.cluster import Cluster
from baton.specs.plan import Bound, Breakdown, Idle, Plan, PlannedWork, Replica, Stage, Training
from baton.specs.workload import Workload


def describe(problem: AssignmentProblem, solution: Solution, method: str, prefer: Mapping[str, str] = {}) -> Plan:
    """Return the plan of a solution. `prefer`: current role of each GPU; a GPU keeps its role if possible.

    If machines of one GPU type have different links, the plan's times are computed with the links that the plan uses.
    Without `prefer`, machines of one GPU type are also swapped so that the plan uses faster links."""
    assigned = assign(problem, solution.row, solution.rollout.counts, prefer)
    if problem.pools.view == "alike" or problem.inputs.rates is not None:
        return describe_assigned(problem, solution, method, assigned)
    cluster, columns = problem.inputs.cluster, [column.pool for column in problem.columns]
    tried = [assigned] if prefer else [assigned, *faster_assignments(cluster, problem.pools, assigned, columns)]
    plans = []
    for each in tried:
        pools = used_pools(cluster, problem.pools, *parts_of(each, columns), is_mixed=each.is_mixed)
        own, found = _on_pools(problem, solution, pools)
        plans.append(describe_assigned(own, found, method, each))
    return min(plans, key=lambda plan: plan.breakdown.step_s)


def _on_pools(problem: AssignmentProblem, solution: Solution, pools: Pools) -> tuple[AssignmentProblem, Solution]:
    """Return the problem with the link bandwidths of `pools`, and with the solution's training shape as the only
    candidate. Also return the solution of the changed problem: the same shapes, with the times of these links."""
    inputs, only = problem.inputs, evaluated(_pipeline(problem, solution.row, pools))
    own = msgspec.structs.replace(
        problem,
        pools=pools,
        columns=replica_columns(inputs, pools),
        table=only,
        sync_s=sync_table(inputs, pools, only.shares),
    )
    time_s = needed_s(own, solution.rollout.counts)
    found = selected(own, 0, msgspec.structs.replace(solution.rollout, time_s=time_s))
    return own, msgspec.structs.replace(found, bound_s=solution.bound_s)


def _pipeline(problem: AssignmentProblem, row: int, pools: Pools) -> Pipelines:
    """Return the training shape in this table row as the only candidate, on `pools`."""
    table = problem.table
    order = pools.pipeline_order(np.flatnonzero(table.stages[row]).tolist())
    parts = [Shapes(table.stages[[row], k], table.tp[[row], k], table.dp[[row], k]) for k in order]
    size, is_mixed = int(table.shard_size[row]), bool(table.is_mixed[row])
    return Pipelines(problem.inputs, pools, order, parts, size, is_mixed)


def describe_assigned(problem: AssignmentProblem, solution: Solution, method: str, assigned: GpuAssignment) -> Plan:
    """Return the plan of a solution with given GPUs for trainer and replicas."""
    inputs, step = problem.inputs, problem.step
    training = describe_training(problem, solution.row, assigned)
    # the rollout time in the solution may be longer than these replicas need
    rollout_s = needed_s(problem, solution.rollout.counts)
    total = float(step.step_s(solution.sync_s, rollout_s, training.time_s))
    breakdown = Breakdown(
        step_s=total,
        sync_s=solution.sync_s,
        rollout_s=rollout_s,
        reward_s=step.reward_s(rollout_s),
        train_s=training.time_s,
        overlaps=step.overlaps,
        cycle_overhead_s=_cycle_overhead_s(problem, solution.row),
    )
    replicas = describe_replicas(problem, assigned, max(rollout_s, step.scoring_s))
    plan = Plan(
        cluster=inputs.cluster.name,
        model=inputs.model.name,
        workload=inputs.work.name,
        method=method,
        training=training,
        replicas=replicas,
        idle=_idle(problem, assigned, breakdown),
        breakdown=breakdown,
        tokens_per_step=inputs.work.trained_tokens,
        max_staleness=inputs.work.max_staleness,
        mean_staleness=mean_staleness(inputs.work, replicas, breakdown),
        price_per_h=inputs.cluster.price_per_h,
        currency=inputs.cluster.currency,
        bound=Bound.of(total, solution.bound_s),
        trainer=inputs.work.trainer,
        work=PlannedWork.of(inputs.model, inputs.work),
    )
    return msgspec.structs.replace(plan, limits=tuple(limits(problem, plan)))


def with_others_idle(plan: Plan, cluster: Cluster, why: str) -> Plan:
    """Return the plan with the cluster's GPUs that it does not name as idle, for the reason `why`. The price is that of
    the whole cluster."""
    named = {*plan.used_gpu_ids, *(gpu for idle in plan.idle for gpu in idle.gpu_ids)}
    others = tuple(gpu for node in cluster.nodes for gpu in node.gpu_ids if gpu not in named)
    idle = (*plan.idle, Idle(others, why)) if others else plan.idle
    return msgspec.structs.replace(plan, idle=idle, price_per_h=cluster.price_per_h)


def _cycle_overhead_s(problem: AssignmentProblem, row: int) -> float:
    if problem.inputs.rates is not None:
        return 0.0
    trained = zip(problem.pools.pools, problem.table.stages[row].tolist(), strict=True)
    return max(pool.place.efficiency.cycle_overhead_s for pool, stages in trained if stages)


def needed_s(problem: AssignmentProblem, chosen: Sequence[int]) -> float:
    """Return the time in which the chosen replicas generate a batch. This time can be shorter than the solution's
    rollout time, because the solver stops as soon as a shorter rollout would not shorten the step."""
    counts = np.array(chosen)
    speed = np.array([column.cost.tokens_per_s for column in problem.columns]) * counts
    pause = np.array([column.cost.pause_s for column in problem.columns])
    return filled_s(problem.step.output_tokens, speed[counts > 0], pause[counts > 0])


def filled_s(tokens: float, speed: Floats, pause: Floats) -> float:
    """Return the time in which replicas of these speeds generate `tokens`. Each replica pauses first."""
    works = np.ones(len(speed), dtype=bool)
    while True:
        time_s = (tokens + float((speed * pause)[works].sum())) / float(speed[works].sum())
        late = works & (pause >= time_s)
        if not late.any():
            return time_s
        works &= ~late


def describe_training(problem: AssignmentProblem, row: int, assigned: GpuAssignment) -> Training:
    """Return the training side of a plan."""
    if problem.inputs.rates is not None:
        return _rated_training(problem, row, assigned)
    num_layers, table, pools = problem.inputs.model.num_layers, problem.table, problem.pools
    pipeline = _pipeline(problem, row, pools)
    parts, is_mixed, balance = pipeline.shapes, pipeline.is_mixed, balanced(pipeline)
    shard_gradients, shard_size = bool(balance.shard_gradients[0]), int(balance.shard_size[0])
    work = msgspec.structs.replace(problem.inputs.work, shard_gradients=shard_gradients, shard_size=shard_size)
    speeds = rank_speeds(work, [pool.place for pool in pipeline.used]) if is_mixed else [1.0] * len(assigned.stages)
    whole = [num_layers] * len(parts)
    layers = whole if is_mixed else stage_layers(num_layers, balance, [int(part.stages[0]) for part in parts])
    stages, first = [], 0
    for place, ((k, gpus), count) in enumerate(zip(assigned.stages, layers, strict=True)):
        tp, dp = int(table.tp[row, k]), int(table.dp[row, k])
        stages.append(
            Stage(
                gpu=pools.pools[k].gpu,
                gpu_ids=gpus,
                dp=dp,
                tp=tp,
                layers=(first, first + count),
                memory_bytes=_stage_memory(problem, work, row, k, count, place, len(layers)),
                memory_limit_bytes=pools.pools[k].place.memory_limit_bytes,
                speed=round(speeds[place], 4),
            )
        )
        first += 0 if is_mixed else count
    overhead = float(table.time_s[row]) - float(balance.time_s[0])
    return Training(
        stages=tuple(stages),
        microbatches=int(balance.microbatches[0]),
        time_s=float(table.time_s[row]),
        compute_s=float(balance.compute_s[0]) + overhead,
        bubble_s=float(balance.bubble_s[0]),
        comm_s=float(balance.gradients_s[0]),
        optimizer_s=float(balance.optimizer_s[0]),
        shard_gradients=shard_gradients,
        shard_size=shard_size,
        is_mixed=is_mixed,
    )


def stage_layers(num_layers: int, balance: LayerBalance, stages: Sequence[int]) -> list[int]:
    """Return the number of layers of each stage, in the order of the pipeline. If `balance` has more layers in total
    than the model (`num_layers`), the surplus is taken from the stages with the most layers."""
    found: list[int] = []
    for place, count in enumerate(stages):
        first, between, last = (int(each[0]) for each in balance.stage_layers[place])
        own = [between] * count
        if place == 0 and not (len(stages) == 1 and count == 1):
            own[0] = first
        if place == len(stages) - 1:
            own[-1] = last
        found += own
    for _ in range(sum(found) - num_layers):
        fullest = max(range(len(found)), key=lambda k: (found[k], k))
        found[fullest] -= 1
    return found


def _stage_memory(
    problem: AssignmentProblem, work: Workload, row: int, k: int, layers: int, place: int, depth: int
) -> float:
    model, pool, table = problem.inputs.model, problem.pools.pools[k], problem.table
    tp, dp = int(table.tp[row, k]), int(table.dp[row, k])
    if table.is_mixed[row]:  # one stage, with the ranks of all its pools
        place, depth, dp = 0, 1, int(table.dp[row].sum())
    widest = int(table.dp[row].max())
    terms = stage_terms(model, work, pool.place, max(pool.sizes), tp, dp)
    rank = rank_of(work, terms.rank, depth, tp * dp)
    kept = in_flight(work, depth, widest)
    phases = rank_phases(model, rank, place == 0, place == depth - 1, kept)
    return float(stage_bytes(phases, layers))


def _rated_training(problem: AssignmentProblem, row: int, assigned: GpuAssignment) -> Training:
    table, time_s = problem.table, float(problem.table.time_s[row])
    counts = rounded_shares([float(table.shares[row, k]) for k, _ in assigned.stages], problem.inputs.model.num_layers)
    stages, first = [], 0
    for (k, gpus), count in zip(assigned.stages, counts, strict=True):
        limit = problem.pools.pools[k].place.memory_limit_bytes
        stages.append(Stage(problem.pools.pools[k].gpu, gpus, len(gpus), 1, (first, first + count), 0.0, limit))
        first += count
    return Training(tuple(stages), 1, time_s, time_s, 0.0, 0.0, 0.0)


def describe_replicas(problem: AssignmentProblem, assigned: GpuAssignment, time_s: float) -> tuple[Replica, ...]:
    """Return the rollout side of a plan."""
    works = [problem.columns[index].work(time_s) for index, _ in assigned.replicas]
    total = sum(works)
    shares = [work / total for work in works]
    trajectories = rounded_shares(shares, problem.inputs.work.num_trajectories)
    found = []
    for (index, gpus), share, count in zip(assigned.replicas, shares, trajectories, strict=True):
        column = problem.columns[index]
        edges = np.cumsum([0, *column.cost.layers]).tolist()
        pool = problem.pools.pools[column.pool]
        found.append(
            Replica(
                gpu=pool.gpu,
                gpu_ids=gpus,
                tp=column.cost.tp,
                pp=column.cost.pp,
                layers=tuple(pairwise(edges)),
                batch=column.cost.batch,
                tokens_per_s=column.cost.tokens_per_s,
                pause_s=column.cost.pause_s,
                share=share,
                trajectories=count,
                memory_bytes=column.cost.memory_bytes,
                memory_limit_bytes=pool.place.memory_limit_bytes,
            )
        )
    return tuple(found)


def _idle(problem: AssignmentProblem, assigned: GpuAssignment, breakdown: Breakdown) -> tuple[Idle, ...]:
    found: dict[str, list[str]] = {}
    for k, gpu in assigned.idle:
        pool = problem.pools.pools[k]
        own = [column for column in problem.columns if column.pool == k]
        if not own:
            why = f"no replica of the model fits on {pool.gpu}, and the GPU would not make training faster"
        elif breakdown.overlaps and breakdown.train_s >= breakdown.rollout_s + breakdown.reward_s:
            why = "training is the bottleneck: more generation would not make a step faster"
        else:
            why = "no replica shape fits beside the others, max_staleness limits them, or weights would arrive too late"
        found.setdefault(why, []).append(gpu)
    return tuple(Idle(tuple(gpus), why) for why, gpus in found.items())


def mean_staleness(work: Workload, replicas: Sequence[Replica], breakdown: Breakdown) -> float:
    """Estimate how many versions the trainer publishes from the sampling of a trajectory's first token until the
    trajectory is trained (Little's law).

    If training is slower than rollout, the staleness bound limits the rollout and the estimate is `max_staleness`.
    Otherwise the estimate is the number of running trajectories divided by the number of trajectories in a batch, plus
    half a step for the time in the buffer.
    """
    if not breakdown.overlaps:
        return 0.0
    if breakdown.train_s >= breakdown.rollout_s + breakdown.reward_s:
        return float(work.max_staleness)
    running = sum(replica.batch for replica in replicas)
    return min(float(work.max_staleness), running / work.num_trajectories + 0.5)


def limits(problem: AssignmentProblem, plan: Plan) -> list[str]:
    """Return one sentence for each limit of the plan's throughput."""
    b = plan.breakdown
    filled = b.rollout_s + b.reward_s
    found = []
    if not b.overlaps:
        trains = {gpu for stage in plan.training.stages for gpu in stage.gpu_ids}
        shares = any(not trains.isdisjoint(replica.gpu_ids) for replica in plan.replicas)
        why = "both use the same GPUs" if shares else "max_staleness is 0"
        found.append(f"generation ({seconds(filled)}) and training ({seconds(b.train_s)}) alternate, because {why}")
    elif b.train_s >= filled:
        found.append(f"training is the bottleneck: {seconds(b.train_s)}; rollout and scoring take {seconds(filled)}")
    else:
        found.append(f"rollout is the bottleneck: {seconds(filled)} with scoring; training takes {seconds(b.train_s)}")
    if b.sync_s > 0.1 * b.step_s:
        found.append(f"weight publication takes {b.sync_s / b.step_s:.0%} of a step, because of its slowest link")
    if problem.step.scoring_s > b.rollout_s:
        found.append(f"scoring a batch takes {seconds(problem.step.scoring_s)}, longer than generating it")
    running = sum(replica.batch for replica in plan.replicas)
    if np.isfinite(problem.step.max_running) and running > 0.9 * problem.step.max_running:
        allows = "max_staleness allows" if b.overlaps else "a batch has"
        found.append(f"{allows} {problem.step.max_running:.0f} running trajectories, and {running} run")
    paused = [replica.pause_s for replica in plan.replicas]
    if paused and max(paused) > 0.1 * b.rollout_s:
        what = "prefilling running trajectories again after each version" if b.overlaps else "the tail of each batch"
        found.append(f"{what} takes up to {max(paused) / b.rollout_s:.0%} of the rollout time")
    if plan.training.bubble_s > 0.1 * plan.training.time_s:
        found.append(f"pipeline bubbles take {plan.training.bubble_s / plan.training.time_s:.0%} of the training time")
    if plan.training.comm_s > 0.1 * plan.training.time_s:
        found.append(f"gradient exchange takes {plan.training.comm_s / plan.training.time_s:.0%} of the training time")
    found.append(
        "only shapes that `baton train --plan` can execute were considered (--trainer idealised considers others)"
        if plan.trainer == "baton"
        else "the plan is for comparison: `baton train --plan` refuses it, because Baton has no idealised trainer"
    )
    return found


def seconds(value: float) -> str:
    """Format a time with three significant digits, without an exponent."""
    return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"
