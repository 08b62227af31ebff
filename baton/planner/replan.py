"""Replanning after machines were lost or added: a good new plan that moves few GPUs.

Up to three plans are made. The first plan ignores the running plan. If the training shape still fits, the second plan
keeps it, and the third plan also keeps the surviving replicas and places more replicas on the free GPUs. If the
training shape does not fit, the second plan keeps the surviving replicas and trains on the other GPUs. Plans that are
slower than the fastest by at most the fraction `slack` are acceptable, and the acceptable plan with the fewest moves is
chosen. A GPU moves if it was in the cluster before and now has another role, training shape or replica shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from baton.clock import time_left
from baton.errors import UserError
from baton.planner.bounds import RolloutBound
from baton.planner.exact import Solution, solution, solve_exact
from baton.planner.instance import make_problem, with_table
from baton.planner.plan_from_solution import describe
from baton.planner.problem import AssignmentProblem, Inputs, Ints, TrainTable
from baton.planner.replicas import RolloutAllocation, RolloutProgram
from baton.planner.reward_stage import stage_choices
from baton.planner.solve import make_plan, restricted
from baton.planner.training_shapes import Pipelines, Shapes, evaluated
from baton.specs.cluster import Cluster
from baton.specs.plan import Bound, Plan, RewardStage

SECTIONS = 50
"""Maximum number of bisection steps."""


class ReplanOption(msgspec.Struct, frozen=True):
    """One new plan and the GPUs that it moves."""

    name: str
    plan: Plan
    inputs: Inputs
    """The planner's inputs for the other roles: `inputs.cluster` is the cluster without the GPUs of the plan's reward
    stage."""
    moved: tuple[str, ...]


class Replanned(msgspec.Struct, frozen=True):
    """The chosen option, and all options."""

    chosen: ReplanOption
    options: tuple[ReplanOption, ...]
    lost: tuple[str, ...]
    """GPUs of the running plan that are not in the cluster any more."""
    added: tuple[str, ...]


def without_nodes(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """Return the cluster without the named machines. Raises UserError if a name is unknown or no machine is left."""
    known = [node.name for node in cluster.nodes]
    for name in names:
        if name not in known:
            raise UserError(f"--lost: got {name!r}; the cluster's machines are {', '.join(known)}")
    if len(set(names)) == len(known):
        raise UserError("--lost: no machine is left")
    return restricted(cluster, [place for place, name in enumerate(known) if name not in names])


def replan_with_reward(inputs: Inputs, running: Plan, *, slack: float = 0.02, time_limit_s: float = 30.0) -> Replanned:
    """Plan the current cluster as `replan` does, with a reward stage. The reward stage of the running plan either stays
    on its remaining GPUs, or moves to the GPUs that a plan from scratch would use."""
    found, refusals = list[Replanned](), list[UserError]()
    for stage, own in stage_choices(inputs, running.reward, time_limit_s=time_limit_s):
        try:
            found.append(replan(own, running, stage, slack=slack, time_limit_s=time_limit_s))
        except UserError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    price = inputs.cluster.price_per_h
    options = tuple(
        msgspec.structs.replace(option, plan=msgspec.structs.replace(option.plan, price_per_h=price))
        for each in found
        for option in each.options
    )
    return msgspec.structs.replace(found[0], chosen=least_moves(options, slack), options=options)


def replan(
    inputs: Inputs, running: Plan, stage: RewardStage | None = None, *, slack: float = 0.02, time_limit_s: float = 30.0
) -> Replanned:
    """Plan the current cluster, as the module describes. `stage`: the reward stage of the plans. `inputs`: the cluster
    without the GPUs of the reward stage, and a workload with the scoring time of this stage. The search may exceed
    `time_limit_s`, as that of `make_plan`."""
    problem = _with_mixed_stage(make_problem(inputs), running)
    there = {gpu for node in inputs.cluster.nodes for gpu in node.gpu_ids}
    before = jobs(running)
    prefer = {gpu: job.split()[0] for gpu, job in before.items()}
    program = RolloutProgram(problem)
    kept = _surviving(problem, running, there)
    row = _same_shape(problem, running, there)
    left_s = time_left(time_limit_s)
    is_mixed = inputs.mixed_stages or running.training.is_mixed
    new = make_plan(msgspec.structs.replace(inputs, mixed_stages=is_mixed), time_limit_s=time_limit_s, prefer=prefer)
    ways: list[tuple[str, AssignmentProblem, Solution | None]] = []
    if row is not None:
        narrowed = _only(problem, row)
        ways += [
            ("training kept", narrowed, solve_exact(narrowed, time_limit_s=max(5.0, left_s()))[0]),
            ("training and replicas kept", problem, _filled(problem, program, row, kept)),
        ]
    else:
        ways.append(("replicas kept", problem, _trained_beside(problem, program, kept)))
    plans = {"everything new": new} | {
        name: describe(of, found, "exact", prefer) for name, of, found in ways if found is not None
    }
    options, own = [], set(stage.gpu_ids) if stage is not None else set[str]()
    whole, is_kept = there | own, running.reward is not None and own <= set(running.reward.gpu_ids)
    suffix = "" if stage is None or is_kept else ", other GPUs for the reward model"
    for name, plan in plans.items():
        bound = Bound.of(plan.breakdown.step_s, new.bound.step_s, "over all plans of this cluster")
        plan = msgspec.structs.replace(plan, method=f"exact, {name}", bound=bound, reward=stage)
        after = jobs(plan)
        moved = tuple(sorted(gpu for gpu in whole & set(before) if before[gpu] != after[gpu]))
        options.append(ReplanOption(name + suffix, plan, inputs, moved))
    lost, added = tuple(sorted(set(before) - whole)), tuple(sorted(whole - set(before)))
    return Replanned(least_moves(options, slack), tuple(options), lost, added)


def least_moves(options: Sequence[ReplanOption], slack: float) -> ReplanOption:
    """Return the acceptable option with the fewest moves (see the module)."""
    fastest = min(option.plan.breakdown.step_s for option in options)
    near = [option for option in options if option.plan.breakdown.step_s <= fastest * (1 + slack)]
    return min(near, key=lambda option: (len(option.moved), option.plan.breakdown.step_s))


def jobs(plan: Plan) -> dict[str, str]:
    """Return a text for each GPU that describes its job. Two texts are equal if role and shape are equal."""
    found = {gpu: "idle" for idle in plan.idle for gpu in idle.gpu_ids}
    shape = " + ".join(f"{s.gpu} dp{s.dp} tp{s.tp} layers {s.layers[0]}-{s.layers[1]}" for s in plan.training.stages)
    if plan.reward is not None:
        found |= dict.fromkeys(plan.reward.gpu_ids, f"reward model {plan.reward.model}")
    for replica in plan.replicas:
        found |= dict.fromkeys(replica.gpu_ids, f"rollout tp{replica.tp} pp{replica.pp}")
    for stage in plan.training.stages:
        found |= dict.fromkeys(stage.gpu_ids, f"train layers {stage.layers[0]}-{stage.layers[1]} of {shape}")
    return found


def _pool_of(problem: AssignmentProblem, gpu: str) -> int | None:
    found = [k for k, pool in enumerate(problem.pools.pools) if pool.gpu == gpu]
    return found[0] if len(found) == 1 else None


def _surviving(problem: AssignmentProblem, running: Plan, there: set[str]) -> list[int]:
    """Return, for each replica shape (column), how many of the running plan's replicas still have all their GPUs."""
    counts = [0] * len(problem.columns)
    for replica in running.replicas:
        pool = _pool_of(problem, replica.gpu)
        for index, column in enumerate(problem.columns):
            shape = (column.pool, column.cost.tp, column.cost.pp, column.cost.batch)
            if shape == (pool, replica.tp, replica.pp, replica.batch) and set(replica.gpu_ids) <= there:
                counts[index] += 1
    return counts


def _with_mixed_stage(problem: AssignmentProblem, running: Plan) -> AssignmentProblem:
    """Add the mixed stage of the running plan to the problem, because problems are made without mixed stages."""
    parts = {_pool_of(problem, stage.gpu): stage for stage in running.training.stages}
    pools = problem.pools.pools
    if not running.training.is_mixed or not all(
        k is not None and stage.dp <= pools[k].num_gpus for k, stage in parts.items()
    ):
        return problem
    order = problem.pools.pipeline_order(k for k in parts if k is not None)
    shapes = [Shapes.of(1, 1, parts[k].dp) for k in order]
    size = running.training.shard_size
    mixed = Pipelines(problem.inputs, problem.pools, order, shapes, size, is_mixed=True)
    table = TrainTable.joined([problem.table, evaluated(mixed)], is_complete=problem.table.is_complete)
    return with_table(problem, table)


def _same_shape(problem: AssignmentProblem, running: Plan, there: set[str]) -> int | None:
    """Return the row of the running plan's training shape; None if the shape lost a GPU or is not in the table."""
    if not set(running.training.gpu_ids) <= there:
        return None
    wanted = np.zeros((3, len(problem.pools.pools)), dtype=np.int64)
    for stage in running.training.stages:
        pool = _pool_of(problem, stage.gpu)
        if pool is None:
            return None
        wanted[:, pool] = (wanted[0, pool] + 1, stage.tp, stage.dp)
    table = problem.table
    same = np.all((table.stages == wanted[0]) & (table.tp == wanted[1]) & (table.dp == wanted[2]), axis=1)
    same &= table.is_mixed == running.training.is_mixed
    return int(np.argmax(same)) if same.any() else None


def _only(problem: AssignmentProblem, row: int) -> AssignmentProblem:
    rows: Ints = np.array([row], dtype=np.int64)
    table = msgspec.structs.replace(problem.table.take(rows), is_complete=True)
    return msgspec.structs.replace(problem, table=table, sync_s=problem.sync_s[rows])


def _filled(problem: AssignmentProblem, program: RolloutProgram, row: int, kept: list[int]) -> Solution | None:
    """Return the solution that keeps a training shape and replicas, and places more replicas on the free GPUs."""
    rollout = _beside(problem, program, program.left(row), kept)
    return None if rollout is None else solution(problem, row, rollout)


def _beside(
    problem: AssignmentProblem, program: RolloutProgram, left: tuple[int, ...], kept: list[int]
) -> RolloutAllocation | None:
    """Return the fastest rollout that includes the kept replicas, found by bisection on the rollout time."""
    rest = program.less(left, kept)
    running = sum(count * column.cost.batch for count, column in zip(kept, problem.columns, strict=True))
    if min(rest, default=0) < 0 or running > problem.step.max_running:
        return None
    narrowed = msgspec.structs.replace(problem.step, max_running=problem.step.max_running - running)
    filler = RolloutProgram(msgspec.structs.replace(problem, step=narrowed))
    everywhere = (True,) * len(problem.pools.pools)
    tokens = problem.step.output_tokens

    def reached(time_s: float) -> tuple[bool, list[int]]:
        answer = filler.reaches(rest, everywhere, time_s)
        counts = [a + b for a, b in zip(answer.counts, kept, strict=True)]
        work = sum(count * column.work(time_s) for count, column in zip(counts, problem.columns, strict=True))
        return work >= tokens, counts

    low, high = 0.0, float(RolloutBound(problem).times[-1])
    can, counts = reached(high)
    if not can:
        return None
    for _ in range(SECTIONS):
        middle = (low + high) / 2
        can, tried = reached(middle)
        low, high, counts = (low, middle, tried) if can else (middle, high, counts)
        if high <= low * (1 + 1e-7):
            break
    return RolloutAllocation(tuple(counts), high, high)


def _trained_beside(problem: AssignmentProblem, program: RolloutProgram, kept: list[int]) -> Solution | None:
    """Return the best solution that keeps the replicas. Only the 8 fastest training shapes that fit are tried."""
    table = problem.table
    rows = np.nonzero([min(program.less(program.left(row), kept)) >= 0 for row in range(len(table))])[0]
    best: Solution | None = None
    for row in rows[np.argsort(table.time_s[rows], kind="stable")][:8].tolist():
        found = _filled(problem, program, row, kept)
        if found is not None and (best is None or found.step_s < best.step_s):
            best = found
    return best
