"""Builds the planner's problem from a user's inputs, with the cost model or with a table of measured rates."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np

from baton.cost.generate import ReplicaCost
from baton.cost.train import compute_s
from baton.errors import UserError
from baton.planner.infeasible import refuse_without_columns, refuse_without_shapes
from baton.planner.integer import check_solver
from baton.planner.pools import GpuPool, Pools, View, are_alike, make_pools
from baton.planner.problem import (
    AssignmentProblem,
    Floats,
    Inputs,
    ReplicaShape,
    TrainTable,
    make_step,
    replica_columns,
    sync_table,
)
from baton.planner.training_shapes import MAX_SHAPES, mixed_orders, train_table
from baton.specs.plan import RATED_SLOTS


def make_problem(inputs: Inputs, view: View | None = None) -> AssignmentProblem:
    """Return the planner's problem for the cluster.

    `view` determines how nodes form pools (`make_pools`). The default is `alike` if all nodes of each GPU type are
    alike, otherwise `pessimistic`. Raises UserError if HiGHS is not installed, or if no shape fits into memory. The
    error about memory states the bytes needed.
    """
    check_solver()
    view = view or ("alike" if are_alike(inputs.cluster) else "pessimistic")
    pools = make_pools(inputs.cluster, inputs.efficiencies, view)
    return make_rate_problem(inputs, pools) if inputs.rates is not None else make_cost_problem(inputs, pools)


def make_cost_problem(inputs: Inputs, pools: Pools) -> AssignmentProblem:
    """Return the problem under the cost model, without mixed stages. Its table of training shapes is empty if only a
    mixed stage may fit into memory."""
    model, work = inputs.model, inputs.work
    columns, table = replica_columns(inputs, pools), train_table(inputs, pools)
    if not columns:
        refuse_without_columns(inputs, pools)
    if not len(table) and not mixed_pools(inputs, pools):
        others = msgspec.structs.replace(inputs, mixed_stages=not inputs.mixed_stages)
        refuse_without_shapes(inputs, pools, may_mix=bool(mixed_pools(others, pools)))
    fastest = min(pool.place.efficiency.between_steps_s for pool in pools.pools)
    size = model.params * work.weight_bytes
    return AssignmentProblem(
        inputs=inputs,
        pools=pools,
        columns=columns,
        table=table,
        sync_s=sync_table(inputs, pools, table.shares),
        step=make_step(work),
        train_rate_bound=1 / np.array([compute_s(model, work, pool.place, 1) for pool in pools.pools]),
        sync_bound_s=fastest + size / float(pools.publish_bytes_per_s.max()),
    )


def mixed_pools(inputs: Inputs, pools: Pools) -> list[list[int]]:
    """Return the pairs of pools that a mixed stage may use, the slower GPU type first."""
    is_possible = inputs.work.trainer == "baton" and inputs.rates is None
    return mixed_orders(pools) if inputs.mixed_stages and is_possible else []


def with_table(problem: AssignmentProblem, table: TrainTable) -> AssignmentProblem:
    """Return the problem with the training shapes of `table`."""
    sync_s = sync_table(problem.inputs, problem.pools, table.shares)
    return msgspec.structs.replace(problem, table=table, sync_s=sync_s)


# ---- measured rates --------------------------------------------------------------------------------------------------


def make_rate_problem(inputs: Inputs, pools: Pools) -> AssignmentProblem:
    """Return the problem for measured rates of each GPU type. Each GPU is a replica, and the training rate is the sum
    of the rates of the GPUs that train. Memory and shapes are not modelled, because the rates were measured with shapes
    that fit."""
    rates, work = inputs.rates, inputs.work
    assert rates is not None, "the inputs have no table of rates"
    missing = sorted({pool.gpu for pool in pools.pools} - set(rates.rates))
    if missing:
        raise UserError(
            f"rates: {', '.join(missing)} is in the cluster but not in the table, which has {', '.join(rates.rates)}"
        )
    train = np.array([rates.rates[pool.gpu].train for pool in pools.pools])
    layers = (inputs.model.num_layers,)
    columns = tuple(
        ReplicaShape(index, ReplicaCost(1, 1, layers, RATED_SLOTS, rates.rates[pool.gpu].rollout, 0.0, 0.0))
        for index, pool in enumerate(pools.pools)
    )
    # this problem divides a pipeline's layers in proportion to rates; only the idealised trainer supports this
    crosses = inputs.cross_types and work.trainer == "idealised"
    table = _rate_table(pools, train, work.trained_tokens, crosses)
    cross = rates.sync_s if rates.cross_sync_s is None else rates.cross_sync_s
    between = np.full((len(pools.pools), len(pools.pools)), cross)
    np.fill_diagonal(between, rates.sync_s)
    sync = np.max(np.where(table.gpus[:, :, None] > 0, between[None], 0.0), axis=1)
    step = msgspec.structs.replace(make_step(work), max_running=np.inf)
    return AssignmentProblem(
        inputs=inputs,
        pools=pools,
        columns=columns,
        table=table,
        sync_s=sync,
        step=step,
        train_rate_bound=train / work.trained_tokens,
        sync_bound_s=float(between.min()),
    )


def _rate_table(pools: Pools, train: Floats, tokens: float, cross_types: bool) -> TrainTable:
    counts = [pool.num_gpus for pool in pools.pools]
    total = float(np.prod([count + 1.0 for count in counts]))
    if not cross_types:
        alone = np.eye(len(counts), dtype=np.int64)
        rows = [tuple(n * alone[k]) for k, count in enumerate(counts) for n in range(1, count + 1)]
    elif total <= MAX_SHAPES:
        rows = list(product(*(range(count + 1) for count in counts)))[1:]
    else:
        rows = _one_split(pools.pools)
    gpus = np.array(rows, dtype=np.int64)
    gpus = gpus[gpus.sum(axis=1) > 0]
    rate = gpus @ train
    shares = gpus * train / rate[:, None]
    ones = (gpus > 0).astype(np.int64)
    is_complete = not cross_types or total <= MAX_SHAPES
    nothing = np.zeros(len(gpus), dtype=np.int64)
    return TrainTable(ones, ones, gpus, tokens / rate, shares, is_complete, nothing, nothing > 0)


def _one_split(pools: tuple[GpuPool, ...]) -> list[tuple[int, ...]]:
    """Return the divisions in which at most one pool is split; in each other pool, all GPUs train or all generate. A
    linear program that allows fractions of GPUs has an optimum of this form."""
    rows = set[tuple[int, ...]]()
    for split in range(len(pools)):
        parts = [range(p.num_gpus + 1) if k == split else (0, p.num_gpus) for k, p in enumerate(pools)]
        rows |= set(product(*parts))
    return sorted(rows)
