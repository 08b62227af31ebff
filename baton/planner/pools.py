"""Pools of interchangeable GPUs of one type. A search over pools needs only the number of GPUs that each role uses in
each pool.

Two nodes are alike if they have the same GPU type, the same bandwidth between their own GPUs, and the same bandwidth to
every other node. A pool may also contain all nodes of a GPU type, even if their links differ. The pool then has one
assumed bandwidth. In a pessimistic pool, this is the bandwidth of the slowest link, so no plan takes longer than
computed. In an optimistic pool, it is the bandwidth of the fastest link, so the best plan's step time is a lower bound.

Tensor-parallel groups have 2^i GPUs of one node. Groups of such sizes fit into the nodes if and only if, for every size
g, the groups of size g or larger have at most g · Σ_nodes ⌊GPUs / g⌋ GPUs in total. (Proof: place large groups first;
each uses a multiple of g GPUs of a node.) The search can therefore check numbers of GPUs before it chooses nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.efficiency import Efficiencies
from baton.cost.generate import DeviceClass
from baton.specs.cluster import Cluster

View = Literal["alike", "pessimistic", "optimistic"]
MAX_POOLS = 6
"""Maximum number of pools of alike nodes. With more such pools, the search would take too long, so each pool then has
all nodes of a GPU type."""


class GpuPool(msgspec.Struct, frozen=True):
    """Interchangeable GPUs."""

    name: str
    nodes: tuple[int, ...]
    """Indices into the cluster's nodes."""
    sizes: tuple[int, ...]
    """GPUs of each node."""
    place: DeviceClass

    @property
    def gpu(self) -> str:
        return self.place.gpu.name

    @property
    def num_gpus(self) -> int:
        return sum(self.sizes)

    @property
    def levels(self) -> tuple[int, ...]:
        """Sizes of the groups that fit into a node: 1, 2, 4, …"""
        return tuple(2**i for i in range(max(self.sizes).bit_length()))

    def capacity(self, level: int) -> int:
        """Return the number of GPUs that are usable in groups of `level` GPUs."""
        return level * sum(size // level for size in self.sizes)


class Pools(msgspec.Struct, frozen=True):
    """All pools of a cluster and the links between them."""

    pools: tuple[GpuPool, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]
    """[pools, pools] bandwidth between nodes of two pools; on the diagonal, between two nodes of the pool."""
    view: View

    def pipeline_order(self, used: Iterable[int]) -> list[int]:
        """Return these pools in the order of a pipeline: the fastest GPU type is last."""
        return sorted(used, key=lambda k: (self.pools[k].place.gpu.flops, self.pools[k].name))

    @property
    def publish_bytes_per_s(self) -> NDArray[np.float64]:
        """[pools, pools] bandwidth of weight publication from one pool to another."""
        rates = np.array(self.bytes_per_s)
        reached: NDArray[np.float64] = rates * np.array([[pool.place.efficiency.publish] for pool in self.pools])
        return reached


def are_alike(cluster: Cluster) -> bool:
    """Return whether all nodes of each GPU type are alike."""
    return len(_alike(cluster)) == len(cluster.gpu_types)


def make_pools(cluster: Cluster, efficiencies: Efficiencies, view: View = "alike") -> Pools:
    """Return the pools of a cluster. With `view = "alike"`, a pool contains only nodes that are alike (see the module).
    With other views, a pool contains all nodes of a GPU type, with the slowest links (`pessimistic`) or the fastest
    links (`optimistic`)."""
    groups = _alike(cluster) if view == "alike" else list(cluster.places.values())
    worst: Callable[..., float] = max if view == "optimistic" else min

    def rate(mine: list[int], theirs: list[int]) -> float:
        between = [cluster.bytes_per_s[a][b] for a in mine for b in theirs if a != b]
        return worst(between or [cluster.nodes[a].link_bytes_per_s for a in mine])

    rows = tuple(tuple(rate(mine, theirs) for theirs in groups) for mine in groups)
    pools = []
    for index, group in enumerate(groups):
        nodes = [cluster.nodes[place] for place in group]
        place = DeviceClass(
            gpu=nodes[0].gpu,
            link_bytes_per_s=worst(node.link_bytes_per_s for node in nodes),
            inter_bytes_per_s=rows[index][index],
            latency_s=cluster.latency_s,
            efficiency=efficiencies.of(nodes[0].gpu.name),
        )
        name = place.gpu.name if len(groups) == len(cluster.gpu_types) else f"{place.gpu.name}/{nodes[0].name}"
        pools.append(GpuPool(name, tuple(group), tuple(node.num_gpus for node in nodes), place))
    return Pools(tuple(pools), rows, view)


def _alike(cluster: Cluster) -> list[list[int]]:
    groups: list[list[int]] = []
    for place in range(len(cluster.nodes)):
        for group in groups:
            if _is_twin(cluster, group[0], place):
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def _is_twin(cluster: Cluster, a: int, b: int) -> bool:
    one, other = cluster.nodes[a], cluster.nodes[b]
    if (one.gpu.name, one.link_bytes_per_s) != (other.gpu.name, other.link_bytes_per_s):
        return False
    rates = enumerate(zip(cluster.bytes_per_s[a], cluster.bytes_per_s[b], strict=True))
    return all(first == second for place, (first, second) in rates if place not in (a, b))
