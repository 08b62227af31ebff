"""Plans for changed clusters, with throughput and price: one more GPU of a type, or fewer machines."""

from __future__ import annotations

from itertools import product

import msgspec

from baton.clock import time_left
from baton.errors import UserError
from baton.planner.problem import Inputs
from baton.planner.solve import make_plan, restricted
from baton.specs.cluster import Cluster

NOTHING = 1e-6
"""A relative gain below this value counts as 0."""
MOST_CLUSTERS = 60
"""Approximate maximum number of clusters on the price curve."""
CURVE_LIMIT_S = 20.0
"""After this number of seconds, no further cluster is planned for the price curve."""


class Marginal(msgspec.Struct, frozen=True):
    """Throughput and price of one more GPU."""

    gpu: str
    tokens_per_s: float
    """Throughput of the cluster with the added GPU."""
    gain: float
    """Relative increase of the throughput."""
    price_per_h: float


class PricePoint(msgspec.Struct, frozen=True):
    """Price and throughput of one cluster."""

    counts: dict[str, int]
    """GPUs by type."""
    price_per_h: float
    tokens_per_s: float
    is_efficient: bool = False
    """Whether this cluster is faster than every other cluster of the same or a lower price."""


def marginals(inputs: Inputs, tokens_per_s: float, *, time_limit_s: float = 60.0) -> list[Marginal]:
    """Return, for each GPU type, the throughput with one more GPU of this type. The added GPU is in a machine of its
    own, which has the same links as the other machines of this GPU type."""
    found = []
    for name, (place, *_) in inputs.cluster.places.items():
        plan = make_plan(inputs.on(with_one_more(inputs.cluster, place)), time_limit_s=time_limit_s)
        price = inputs.cluster.nodes[place].price_per_gpu_h
        gain = plan.tokens_per_s / tokens_per_s - 1
        found.append(Marginal(name, plan.tokens_per_s, gain if gain > NOTHING else 0.0, price))
    return found


def with_one_more(cluster: Cluster, place: int) -> Cluster:
    """Return the cluster with an additional machine that has one GPU, and the same links as the machine at index
    `place`."""
    like = cluster.nodes[place]
    same = [k for k, node in enumerate(cluster.nodes) if node.gpu.name == like.gpu.name and k != place]
    others = [rate for k, rate in enumerate(cluster.bytes_per_s[place]) if k != place]
    to_like = cluster.bytes_per_s[place][same[0]] if same else min(others, default=like.link_bytes_per_s)
    new = [to_like if k == place else rate for k, rate in enumerate(cluster.bytes_per_s[place])]
    rows = ((*row, rate) for row, rate in zip(cluster.bytes_per_s, new, strict=True))
    node = msgspec.structs.replace(like, name=f"{like.name}-more", num_gpus=1)
    return msgspec.structs.replace(cluster, nodes=(*cluster.nodes, node), bytes_per_s=(*rows, (*new, 0.0)))


def price_curve(inputs: Inputs, *, reward_per_h: float) -> list[PricePoint]:
    """Return throughput and price of parts of this cluster. `reward_per_h`: price of the reward stage, which is added
    to the price of each part."""
    left_s = time_left(CURVE_LIMIT_S)
    cluster = inputs.cluster
    by_type = list(cluster.places.values())
    levels = max(2, int(MOST_CLUSTERS ** (1 / len(by_type)) + 1e-9))
    steps = [
        range(len(nodes) + 1)
        if len(nodes) < levels
        else sorted({round(part * len(nodes) / (levels - 1)) for part in range(levels)})
        for nodes in by_type
    ]
    choices = sorted(list(product(*steps))[1:], key=sum)
    found = []
    for counts in choices:
        if left_s() < 0:
            break
        places = sorted(place for nodes, count in zip(by_type, counts, strict=True) for place in nodes[:count])
        part = restricted(cluster, places)
        try:
            plan = make_plan(inputs.on(part), time_limit_s=5.0)
        except UserError:
            continue
        found.append(PricePoint(part.count(), part.price_per_h + reward_per_h, plan.tokens_per_s))
    return found


def marked(spots: list[PricePoint]) -> list[PricePoint]:
    """Return the points sorted by price, with the efficient points marked."""
    best, result = 0.0, []
    for spot in sorted(spots, key=lambda s: (s.price_per_h, -s.tokens_per_s)):
        is_efficient = spot.tokens_per_s > best * (1 + 1e-9)
        best = max(best, spot.tokens_per_s)
        result.append(msgspec.structs.replace(spot, is_efficient=is_efficient))
    return result
