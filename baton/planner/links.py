"""Plans for clusters in which machines of the same GPU type have different links.

The search over pools assumes a single bandwidth for all links within a pool, and for all links between two pools. After
the search, this module swaps machines of a pool in the plan, so that the plan uses faster links. The plan's times are
then computed with the slowest link that the plan uses. A plan uses these links between machines:

    ring        between neighbouring machines of the ring in which the ranks of a stage gather layers and reduce
                gradients; NCCL and gloo order the ring by rank
    boundary    between the machines of the ranks with the same index in neighbouring stages
    publish     from each pool that trains to each machine with an engine; of the pool's machines that train, the one
                with the fastest link to this machine sends
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from baton.planner.assign import GpuAssignment, Part
from baton.planner.pools import Pools
from baton.planner.problem import Floats, Ints
from baton.specs.cluster import Cluster

POWER = 16
"""Exponent in the cost of a link (`_slowness`). Swaps of machines reduce the sum of the costs. With a high exponent,
the slowest link dominates this sum."""
EMPHASES = ((1.0, 1.0), (1.0, 1e-4), (1e-4, 1.0))
"""Pairs of factors for the costs of links: the first factor is for links in a ring, the second for links between
stages. The search runs with every pair, because it is not known which kind of link limits the step."""
SLOWEST = 8
"""Number of machines that each step of the search tries to swap: those whose links have the highest costs."""
MOST_SWAPS = 20_000
"""For each pair of `EMPHASES`, the search stops after it has evaluated this number of swaps."""


class _UsedLinks(msgspec.Struct, frozen=True):
    """The links that a plan uses, as indices of machines in the cluster."""

    ring: Ints
    """[links, 2]"""
    boundary: Ints
    """[links, 2]"""
    training: dict[int, Ints]
    """Pool → machines that train."""
    engines: dict[int, Ints]
    """Pool → machines with engines."""


def parts_of(assigned: GpuAssignment, pools_of_columns: Sequence[int]) -> tuple[Sequence[Part], Sequence[Part]]:
    """Return the stages and the replicas of an assignment, each with the index of its pool."""
    return assigned.stages, [(pools_of_columns[column], gpus) for column, gpus in assigned.replicas]


def used_pools(
    cluster: Cluster, pools: Pools, stages: Sequence[Part], replicas: Sequence[Part], *, is_mixed: bool = False
) -> Pools:
    """Return all pools, with the bandwidths of the slowest links that `stages` and `replicas` use. The number in each
    `Part` is the index of its pool. `is_mixed`: whether the stages are the parts of one mixed stage."""
    used = _used(cluster, stages, replicas, is_mixed=is_mixed)
    rates = _rates(cluster)
    owner = {node: k for k, pool in enumerate(pools.pools) for node in pool.nodes}
    within = [np.inf] * len(pools.pools)
    between = np.full((len(pools.pools), len(pools.pools)), np.inf)
    for a, b in np.concatenate([used.ring, used.boundary]).tolist():
        k, other, rate = owner[a], owner[b], float(rates[a, b])
        if k == other:
            within[k] = min(within[k], rate)
        else:
            between[k, other] = between[other, k] = min(between[k, other], rate)
    for k, training in used.training.items():
        for other, engines in used.engines.items():
            between[k, other] = min(between[k, other], rates[np.ix_(training, engines)].max(axis=0).min())
    between = np.where(np.isfinite(between), between, pools.bytes_per_s)
    named = {gpu.rpartition(":")[0] for _, gpus in [*stages, *replicas] for gpu in gpus}
    found = []
    for k, pool in enumerate(pools.pools):
        own = [cluster.nodes[n].link_bytes_per_s for n in pool.nodes if cluster.nodes[n].name in named]
        link = min(own, default=pool.place.link_bytes_per_s)
        inter = within[k] if np.isfinite(within[k]) else pool.place.inter_bytes_per_s
        place = msgspec.structs.replace(pool.place, inter_bytes_per_s=inter, link_bytes_per_s=link)
        found.append(msgspec.structs.replace(pool, place=place))
    return Pools(tuple(found), tuple(map(tuple, between.tolist())), pools.view)


def faster_assignments(
    cluster: Cluster, pools: Pools, assigned: GpuAssignment, columns: Sequence[int]
) -> list[GpuAssignment]:
    """Return one assignment for each pair of `EMPHASES`, after swaps of machines that make the plan use faster links.
    Swapped machines have the same pool and number of GPUs. `columns`: the pool of each replica shape of the problem."""
    used = _used(cluster, *parts_of(assigned, columns), is_mixed=assigned.is_mixed)
    names = [node.name for node in cluster.nodes]
    found = []
    for emphasis in EMPHASES:
        now = dict(zip(names, (names[n] for n in _exchanged(cluster, pools, used, emphasis)), strict=True))

        def moved(gpu: str, now: dict[str, str] = now) -> str:
            name, _, index = gpu.rpartition(":")
            return f"{now[name]}:{index}"

        stages, replicas = (
            tuple((number, tuple(map(moved, gpus))) for number, gpus in parts)
            for parts in (assigned.stages, assigned.replicas)
        )
        idle = tuple((k, moved(gpu)) for k, gpu in assigned.idle)
        found.append(GpuAssignment(stages, replicas, idle, assigned.is_mixed))
    return found


def _rates(cluster: Cluster) -> Floats:
    rates = np.array(cluster.bytes_per_s, dtype=float)
    np.fill_diagonal(rates, np.inf)
    return rates


def _used(cluster: Cluster, stages: Sequence[Part], replicas: Sequence[Part], *, is_mixed: bool) -> _UsedLinks:
    index = {node.name: place for place, node in enumerate(cluster.nodes)}

    def machines(gpus: Sequence[str]) -> list[int]:
        return [index[gpu.rpartition(":")[0]] for gpu in gpus]

    ring: set[tuple[int, int]] = set()
    boundary: set[tuple[int, int]] = set()
    groups = [gpus for _, gpus in stages]
    if is_mixed:
        groups = [tuple(gpu for gpus in groups for gpu in gpus)]
    for place, gpus in enumerate(groups):
        ranks = machines(gpus)
        ring |= set(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        if place + 1 < len(groups):
            following = machines(groups[place + 1])
            # the idealised trainer's stages may have different widths; any of their ranks may then be connected
            equal = len(ranks) == len(following)
            boundary |= set(zip(ranks, following, strict=True) if equal else ((a, b) for a in ranks for b in following))

    def pairs(links: set[tuple[int, int]]) -> Ints:
        return np.array(sorted((a, b) for a, b in links if a != b), dtype=np.int64).reshape(-1, 2)

    def by_pool(parts: Sequence[Part]) -> dict[int, Ints]:
        found: dict[int, set[int]] = {}
        for k, gpus in parts:
            found.setdefault(k, set()).update(machines(gpus))
        return {k: np.array(sorted(own), dtype=np.int64) for k, own in found.items()}

    return _UsedLinks(pairs(ring), pairs(boundary), by_pool(stages), by_pool(replicas))


def _exchanged(cluster: Cluster, pools: Pools, used: _UsedLinks, emphasis: tuple[float, float]) -> list[int]:
    """Return the machine that replaces each machine of the assignment.

    Each step tries to swap one of the `SLOWEST` machines, beginning with the machine whose links cost most. It computes
    the total cost after a swap with each other machine of the same pool and size. If the best of these swaps reduces
    the total cost, the step makes this swap. Otherwise it continues with the next machine. The search ends when no swap
    reduces the total cost.
    """
    slowness = _slowness(cluster, pools)
    links = np.concatenate([used.ring, used.boundary])
    weights = np.repeat(emphasis, [len(used.ring), len(used.boundary)])
    routes = [(training, engines) for training in used.training.values() for engines in used.engines.values()]

    def cost(order: Ints) -> tuple[Floats, Floats]:
        """Return the cost of each link, and the cost of publication to each machine with an engine."""
        arrivals = [slowness[np.ix_(order[training], order[engines])].min(axis=0) for training, engines in routes]
        return weights * slowness[order[links[:, 0]], order[links[:, 1]]], np.concatenate([np.zeros(0), *arrivals])

    peers: dict[int, list[int]] = {}
    for pool in pools.pools:
        by_size: dict[int, list[int]] = {}
        for node, size in zip(pool.nodes, pool.sizes, strict=True):
            by_size.setdefault(size, []).append(node)
        peers |= {node: own for own in by_size.values() for node in own}
    ends = np.concatenate([links[:, 0], links[:, 1], *(engines for _, engines in routes)])
    order: Ints = np.arange(len(cluster.nodes), dtype=np.int64)
    tried, improved = 0, True
    while improved and tried < MOST_SWAPS:
        own, arrivals = cost(order)
        total = float(own.sum() + arrivals.sum())
        by_machine = np.bincount(ends, np.concatenate([own, own, arrivals]), len(order))
        improved = False
        for slot in np.argsort(-by_machine, kind="stable")[:SLOWEST].tolist():
            best: tuple[float, int] | None = None
            for other in peers[slot]:
                order[[slot, other]] = order[[other, slot]]
                found = float(sum(part.sum() for part in cost(order)))
                order[[slot, other]] = order[[other, slot]]
                best = min(best or (found, other), (found, other))
            tried += len(peers[slot])
            if best is not None and best[0] < total * (1 - 1e-9):
                order[[slot, best[1]]] = order[[best[1], slot]]
                improved = True
                break
    return [int(machine) for machine in order]


def _slowness(cluster: Cluster, pools: Pools) -> Floats:
    """Return the cost of the link between each pair of machines, shape [machines, machines]. The cost is
    (f / bandwidth) ** `POWER`, where f is the bandwidth of the fastest link between the pools of the two machines."""
    rates = _rates(cluster)
    fastest = np.ones_like(rates)
    for mine in pools.pools:
        for theirs in pools.pools:
            block = np.ix_(mine.nodes, theirs.nodes)
            finite = rates[block][np.isfinite(rates[block])]
            fastest[block] = finite.max(initial=1.0)
    return (fastest / rates) ** POWER
