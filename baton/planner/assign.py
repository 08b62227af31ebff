"""Assigns named GPUs of named nodes to the counts of a solution."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.planner.pools import Pools
from baton.planner.problem import AssignmentProblem
from baton.specs.cluster import Cluster


class GpuAssignment(msgspec.Struct, frozen=True):
    """Roles of GPUs by name."""

    stages: tuple[tuple[int, tuple[tuple[str, ...], ...]], ...]
    """Stages of the training pipeline in order: pool, and its tensor-parallel groups."""
    replicas: tuple[tuple[int, tuple[str, ...]], ...]
    """Column and GPUs of each replica, stage by stage."""
    idle: tuple[tuple[int, str], ...]
    """Pool and GPU."""


class _Request(msgspec.Struct, frozen=True):
    group: int
    count: int
    is_training: bool
    index: int
    """Stage of the pool, or column of the replica."""


def pipeline_order(pools: Pools, stages: Sequence[int]) -> list[int]:
    """Return the pools that train in the order of the pipeline: the fastest GPU type last."""
    used = [k for k, count in enumerate(stages) if count]
    return sorted(used, key=lambda k: (pools.pools[k].place.gpu.flops, pools.pools[k].name))


def seat(
    problem: AssignmentProblem,
    cluster: Cluster,
    row: int | None,
    counts: Sequence[int],
    prefer: dict[str, str] | None = None,
) -> GpuAssignment:
    """Assign GPUs to every training group and replica; without a row, to replicas only.

    Large groups are placed first, so that all fit. Training uses the emptiest nodes, replicas the fullest. `prefer`
    maps GPUs to the role (`train` or `rollout`) they have now; where possible they keep it.
    """
    table, pools = problem.table, problem.pools
    staged: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    seated: list[tuple[int, tuple[str, ...]]] = []
    idle: list[tuple[int, str]] = []
    for k, pool in enumerate(pools.pools):
        names = [cluster.nodes[place].name for place in pool.nodes]
        free = [list(range(size)) for size in pool.sizes]
        requests = []
        if row is not None:
            width, ranks = int(table.tp[row, k]), int(table.dp[row, k])
            requests += [_Request(width, ranks, True, stage) for stage in range(int(table.stages[row, k]))]
        for index, (column, count) in enumerate(zip(problem.columns, counts, strict=True)):
            if column.pool == k:
                requests += [_Request(column.cost.tp, column.cost.pp, False, index) for _ in range(count)]
        requests.sort(key=lambda r: (-r.group, not r.is_training))
        links = _mutual(cluster, pool.nodes) if pools.view != "alike" else None
        for request in requests:
            found: list[tuple[str, ...]] = []
            while len(found) < request.count:
                node = _choose(free, names, request, prefer, links)
                chosen = _pick(free[node], names[node], request, prefer)
                free[node] = [gpu for gpu in free[node] if gpu not in chosen]
                found.append(tuple(f"{names[node]}:{gpu}" for gpu in chosen))
            if request.is_training:
                staged[k, request.index] = found
            else:
                seated.append((request.index, tuple(gpu for group in found for gpu in group)))
        idle += [(k, f"{name}:{gpu}") for name, left in zip(names, free, strict=True) for gpu in left]
    used = [0] * len(pools.pools) if row is None else table.stages[row].tolist()
    order = [(k, s) for k in pipeline_order(pools, used) for s in range(used[k])]
    stages = tuple((k, tuple(staged[k, s])) for k, s in order)
    return GpuAssignment(stages, tuple(sorted(seated, key=lambda s: s[0])), tuple(idle))


def _choose(
    free: Sequence[list[int]],
    names: Sequence[str],
    request: _Request,
    prefer: dict[str, str] | None,
    links: Sequence[float] | None,
) -> int:
    role = "train" if request.is_training else "rollout"

    def rank(node: int) -> tuple[float, ...]:
        kept = sum((prefer or {}).get(f"{names[node]}:{gpu}") == role for gpu in free[node])
        fill = -len(free[node]) if request.is_training else len(free[node])
        link = -links[node] if links is not None and request.is_training else 0.0
        return (-min(kept, request.group), link, fill, node)

    fitting = [node for node, left in enumerate(free) if len(left) >= request.group]
    assert fitting, f"a group of {request.group} GPUs has no place among {[len(left) for left in free]}"
    return min(fitting, key=rank)


def _pick(free: Sequence[int], name: str, request: _Request, prefer: dict[str, str] | None) -> list[int]:
    role = "train" if request.is_training else "rollout"
    ranked = sorted(free, key=lambda gpu: ((prefer or {}).get(f"{name}:{gpu}") != role, gpu))
    return sorted(ranked[: request.group])


def _mutual(cluster: Cluster, nodes: Sequence[int]) -> list[float]:
    """Return, for each node, its slowest link into the best-connected half of the pool. Training prefers high
    values."""
    found = []
    for a in nodes:
        rates = sorted((cluster.bytes_per_s[a][b] for b in nodes if b != a), reverse=True)
        found.append(rates[(len(rates) - 1) // 2] if rates else cluster.nodes[a].link_bytes_per_s)
    return found
