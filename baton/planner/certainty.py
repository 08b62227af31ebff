"""Estimates how certain a plan is. Two results show this: the plan's throughput for the best and the worst values of
the calibration's parameters, and the parameter that needs the smallest change to make other GPU types train.

In the cost model, a lower efficiency or a higher overhead makes times longer or leaves them equal. The throughput of
every plan is therefore lowest under the calibration in which each parameter has the worst value of its range. To find
the plan with the highest worst-case throughput, it is therefore sufficient to plan with this calibration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter

import msgspec
import numpy as np

from baton.clock import Clock
from baton.cost.calibration import GpuCalibration, Parameter
from baton.cost.efficiency import Efficiencies
from baton.cost.generate import replica_cost
from baton.errors import UserError
from baton.planner.links import used_pools
from baton.planner.plan_from_solution import filled_s
from baton.planner.pools import Pools, make_pools
from baton.planner.problem import Inputs, make_step, sync_table
from baton.planner.solve import make_plan, restricted
from baton.planner.training_shapes import Pipelines, Shapes, evaluated
from baton.specs.cluster import Cluster
from baton.specs.plan import Plan

Pick = Callable[[Parameter], float]
WORST: Pick = attrgetter("worst")
VALUE: Pick = attrgetter("value")
BEST: Pick = attrgetter("best")
HALVINGS = 5
"""Number of bisection steps that search for the value of a parameter at which other GPU types begin to train. Each step
makes a plan."""


class TrainerChange(msgspec.Struct, frozen=True):
    """A parameter that decides which GPU types train."""

    parameter: str
    origin: str
    """`measured`, `derived` or `assumed`."""
    value: str
    """The parameter's value in the calibration, with unit."""
    at: str
    """The nearest value of the parameter at which other GPU types train, with unit."""
    trains: tuple[str, ...]
    """The GPU types that train at the value `at`."""


class Certainty(msgspec.Struct, frozen=True):
    """How certain a plan is."""

    tokens_per_s: tuple[float, float, float]
    """Trained tokens per second of the unchanged plan under three calibrations: the worst values of all ranges, the
    calibrated values, the best values of all ranges."""
    trains: tuple[str, ...]
    change: TrainerChange | None
    """The parameter whose value must be changed by the smallest factor until other GPU types train. None if no single
    parameter, within its range, changes the GPU types that train."""
    tried: int
    """Number of parameters that the search has tried. It is less than `num_parameters` if the time limit ended the
    search."""
    num_parameters: int


def certainty(
    inputs: Inputs,
    plan: Plan,
    calibration: GpuCalibration,
    *,
    is_robust: bool,
    time_limit_s: float,
    clock: Clock = time.monotonic,
) -> Certainty:
    """Return how certain a plan is. `is_robust`: whether the efficiencies in `inputs` are the worst values of the
    ranges."""
    end_s = clock() + time_limit_s
    unchanged_s = step_s(inputs, plan, inputs.efficiencies)
    worst, value, best = (
        plan.tokens_per_s * unchanged_s / step_s(inputs, plan, calibration.at(pick)) for pick in (WORST, VALUE, BEST)
    )
    parameters = _used(inputs, calibration)
    base = WORST if is_robust else VALUE
    change, tried = _nearest(inputs, calibration, parameters, base, lambda: clock() >= end_s)
    return Certainty((worst, value, best), trains(plan), change, tried, len(parameters))


def trains(plan: Plan) -> tuple[str, ...]:
    """Return the GPU types that train."""
    return tuple(sorted({stage.gpu for stage in plan.training.stages}))


def step_s(inputs: Inputs, plan: Plan, efficiencies: Efficiencies) -> float:
    """Return the step time of a plan under these efficiencies. The distribution of the layers over the stages is
    computed again with these efficiencies. The replicas and their batches stay the same."""
    training = plan.training
    used = plan.used_gpu_ids
    nodes = [k for k, node in enumerate(inputs.cluster.nodes) if used & set(node.gpu_ids)]
    cluster = restricted(inputs.cluster, nodes)
    pools = make_pools(cluster, efficiencies, "alike")
    owner = _owners(cluster, pools)
    if any(len({owner[gpu] for gpu in stage.gpu_ids}) > 1 for stage in training.stages):
        pools = make_pools(cluster, efficiencies, "pessimistic")
        owner = _owners(cluster, pools)
        parts = ([(owner[each.gpu_ids[0]], each.gpu_ids) for each in of] for of in (training.stages, plan.replicas))
        pools = used_pools(cluster, pools, *parts, is_mixed=training.is_mixed)
    placed = [owner[stage.gpu_ids[0]] for stage in training.stages]
    on_pool = dict(zip(placed, training.stages, strict=True))  # all stages on a pool have the same shape
    shapes = [Shapes.of(placed.count(k), stage.tp, stage.dp) for k, stage in on_pool.items()]
    table = evaluated(Pipelines(inputs, pools, list(on_pool), shapes, training.shard_size, training.is_mixed))
    engines = [owner[replica.gpu_ids[0]] for replica in plan.replicas]
    costs = [
        replica_cost(inputs.model, inputs.work, pools.pools[k].place, replica.tp, replica.pp, replica.batch)
        for k, replica in zip(engines, plan.replicas, strict=True)
    ]
    speeds, pauses = np.array([(cost.tokens_per_s, cost.pause_s) for cost in costs]).T
    rollout_s = filled_s(inputs.work.output_tokens, speeds, pauses)
    sync_s = sync_table(inputs, pools, table.shares)[0, engines].max()
    return float(make_step(inputs.work).step_s(sync_s, rollout_s, table.time_s[0]))


def _owners(cluster: Cluster, pools: Pools) -> dict[str, int]:
    return {gpu: k for k, pool in enumerate(pools.pools) for n in pool.nodes for gpu in cluster.nodes[n].gpu_ids}


def _used(inputs: Inputs, calibration: GpuCalibration) -> list[Parameter]:
    """Return the parameters that have a range and apply to GPU types of this cluster."""
    types = [name for name in inputs.cluster.gpu_types if name in calibration.gpus]
    own = {(each.gpu, each.key) for each in calibration.parameters}
    return [
        each
        for each in calibration.parameters
        if each.low < each.high
        and (each.gpu in types or (not each.gpu and any((name, each.key) not in own for name in types)))
    ]


def _nearest(
    inputs: Inputs, calibration: GpuCalibration, parameters: list[Parameter], base: Pick, is_late: Callable[[], bool]
) -> tuple[TrainerChange | None, int]:
    """Return the parameter whose value must be changed by the smallest factor until other GPU types train in the best
    plan. Also return the number of parameters that were tried."""
    if len(inputs.cluster.gpu_types) == 1:
        return None, len(parameters)
    best: tuple[float, TrainerChange] | None = None

    def at(parameter: Parameter, value: float) -> tuple[str, ...]:
        changed = calibration.at(lambda each: value if each is parameter else base(each))
        return trains(make_plan(msgspec.structs.replace(inputs, efficiencies=changed), time_limit_s=5.0))

    # the given plan may train on other GPU types than this search finds, because a longer search or `replan` made it
    now = trains(make_plan(inputs, time_limit_s=5.0))
    for tried, parameter in enumerate(parameters):
        if is_late():
            return best[1] if best else None, tried
        for end in (parameter.low, parameter.high):
            try:
                if end == base(parameter) or (other := at(parameter, end)) == now:
                    continue
                same, changed = base(parameter), end
                for _ in range(0 if is_late() else HALVINGS):
                    middle = (same * changed) ** 0.5 if same * changed > 0 else (same + changed) / 2
                    if (found := at(parameter, middle)) == now:
                        same = middle
                    else:
                        changed, other = middle, found
            except UserError:
                continue
            start, words = base(parameter), parameter.words
            factor = max(changed / start, start / changed)
            if best is None or factor < best[0]:
                best = factor, TrainerChange(parameter.name, parameter.origin, words(start), words(changed), other)
    return best[1] if best else None, len(parameters)
