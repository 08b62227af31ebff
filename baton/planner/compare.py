"""Plans alternatives to a plan: a cluster of one GPU type at the same price, fixed splits of the GPUs between trainer
and rollout, trainer and engines that alternate on all GPUs, and the division by the published method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np

from baton.errors import UserError
from baton.planner.colocated import make_colocated_plan
from baton.planner.instance import make_problem
from baton.planner.plan_from_solution import describe
from baton.planner.problem import Inputs
from baton.planner.published_method import evaluate_division
from baton.planner.replicas import RolloutProgram
from baton.planner.solve import make_plan
from baton.specs.cluster import Cluster
from baton.specs.plan import Plan


class Alternative(msgspec.Struct, frozen=True):
    """Another plan for the cluster, or a plan for another cluster of the same price."""

    name: str
    plan: Plan | None
    why_not: str = ""


def alternatives(inputs: Inputs, *, reward_per_h: float = 0.0, time_limit_s: float = 60.0) -> list[Alternative]:
    """Return alternatives to the plan of this cluster. `reward_per_h`: price of the reward stage, which is added to the
    price of each alternative."""
    ways: list[tuple[str, Callable[[], Plan]]] = [
        ("the published method (equation 3)", partial(make_plan, inputs, "paper", time_limit_s=time_limit_s)),
        ("75 % rollout, 25 % training", partial(split_plan, inputs, 0.25)),
        ("50 % rollout, 50 % training", partial(split_plan, inputs, 0.5)),
        ("training and generation alternate on all GPUs", partial(make_colocated_plan, inputs)),
    ]
    if len(inputs.cluster.gpu_types) > 1:
        ways += [
            (cluster.name, partial(make_plan, inputs.on(cluster), time_limit_s=time_limit_s))
            for cluster in homogeneous(inputs.cluster)
        ]
    found = []
    for name, way in ways:
        try:
            plan = way()
            plan = msgspec.structs.replace(plan, price_per_h=plan.price_per_h + reward_per_h)
            found.append(Alternative(name, plan))
        except UserError as error:
            found.append(Alternative(name, None, str(error)))
    return found


def homogeneous(cluster: Cluster) -> Iterator[Cluster]:
    """Yield one cluster for each GPU type, with as many GPUs as the price of `cluster` pays for."""
    for name, (first, *others) in cluster.places.items():
        node, rates = cluster.nodes[first], cluster.bytes_per_s[first]
        count = int(cluster.price_per_h / node.price_per_gpu_h + 1e-9)
        if not count:
            continue
        same = [rates[place] for place in others]
        rate = max(same or [*rates[:first], *rates[first + 1 :]] or [node.link_bytes_per_s])
        sizes = (min(node.num_gpus, count - taken) for taken in range(0, count, node.num_gpus))
        nodes = tuple(
            msgspec.structs.replace(node, name=f"{name.lower()}-{index}", num_gpus=size)
            for index, size in enumerate(sizes)
        )
        links = ((rate,) * len(nodes),) * len(nodes)
        yield Cluster(f"{count} {name}, same price", nodes, links, cluster.latency_s)


def split_plan(inputs: Inputs, train_share: float) -> Plan:
    """Return the best plan in which the share `train_share` of the GPUs of each type trains. Raises UserError if there
    is none."""
    problem = make_problem(inputs)
    train = np.array([round(pool.num_gpus * train_share) for pool in problem.pools.pools], dtype=np.int64)
    found = evaluate_division(problem, RolloutProgram(problem), train)
    if found is None:
        raise UserError("no training shape or no replica shape fits this split")
    return describe(problem, found, f"split {1 - train_share:.0%}/{train_share:.0%}")
