"""Chooses the GPUs, by node and index, for the training shape and the replicas of a solution."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec

from baton.planner.problem import AssignmentProblem
from baton.specs.cluster import Cluster


class GpuAssignment(msgspec.Struct, frozen=True):
    """The GPUs of each stage and replica, by name."""

    stages: tuple[tuple[int, tuple[tuple[str, ...], ...]], ...]
    """For each stage, in the order of the training pipeline: its pool, and the GPU names of each of its tensor-parallel
    groups."""
    replicas: tuple[tuple[int, tuple[str, ...]], ...]
    """For each replica: index of its shape in `AssignmentProblem.columns`, and its GPUs in the order of its stages."""
    idle: tuple[tuple[int, str], ...]
    """(pool, GPU) of each GPU without a role."""
    is_mixed: bool = False
    """Whether the ranks of all `stages` form one mixed stage, instead of a pipeline of stages."""


class _Request(msgspec.Struct, frozen=True):
    group: int
    count: int
    role: str
    """`train` or `rollout`."""
    index: int
    """For a stage, its index within its pool. For a replica, the index of its shape in `AssignmentProblem.columns`."""


def assign(
    problem: AssignmentProblem,
    cluster: Cluster,
    row: int | None,
    counts: Sequence[int],
    prefer: Mapping[str, str] = {},
) -> GpuAssignment:
    """Assign GPUs to every replica and to every group of the training shape. `row`: the training shape's row in the
    table; if it is None, GPUs are assigned only to replicas.

    Large groups are placed first, so that all groups fit. Each stage is placed on as few nodes as possible, and
    replicas on nodes with few free GPUs. `prefer`: current role (`train` or `rollout`) of GPUs, which is kept if
    possible.
    """
    table, pools = problem.table, problem.pools
    staged: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    replicas: list[tuple[int, tuple[str, ...]]] = []
    idle: list[tuple[int, str]] = []
    for k, pool in enumerate(pools.pools):
        names = [cluster.nodes[place].name for place in pool.nodes]
        free = [list(range(size)) for size in pool.sizes]
        requests = []
        if row is not None:
            width = int(table.groups[row, k])
            count = int(table.tp[row, k] * table.dp[row, k]) // max(1, width)
            requests += [_Request(width, count, "train", stage) for stage in range(int(table.stages[row, k]))]
        for index, (column, count) in enumerate(zip(problem.columns, counts, strict=True)):
            if column.pool == k:
                requests += [_Request(column.num_gpus, 1, "rollout", index) for _ in range(count)]
        requests.sort(key=lambda r: (-r.group, r.role != "train"))
        for request in requests:
            by_node: dict[int, list[tuple[str, ...]]] = {}
            for placed in range(request.count):
                node = _choose(free, names, request, prefer, by_node, request.group * (request.count - placed))
                chosen = _pick(free[node], names[node], request, prefer)
                free[node] = [gpu for gpu in free[node] if gpu not in chosen]
                by_node.setdefault(node, []).append(tuple(f"{names[node]}:{gpu}" for gpu in chosen))
            found = [group for groups in by_node.values() for group in groups]
            if request.role == "train":
                staged[k, request.index] = found
            else:
                replicas.append((request.index, tuple(gpu for group in found for gpu in group)))
        idle += [(k, f"{name}:{gpu}") for name, left in zip(names, free, strict=True) for gpu in left]
    used = [0] * len(pools.pools) if row is None else table.stages[row].tolist()
    order = [(k, s) for k in pools.pipeline_order(range(len(used))) for s in range(used[k])]
    stages = tuple((k, tuple(staged[k, s])) for k, s in order)
    is_mixed = row is not None and bool(table.is_mixed[row])
    return GpuAssignment(stages, tuple(sorted(replicas, key=lambda s: s[0])), tuple(idle), is_mixed)


def _choose(
    free: Sequence[list[int]],
    names: Sequence[str],
    request: _Request,
    prefer: Mapping[str, str],
    used: Container[int],
    wanted: int,
) -> int:
    """Choose a node for the next group of a request, and return the index of the node. `used`: nodes of the request's
    other groups. `wanted`: number of GPUs that the request still needs."""

    def rank(node: int) -> tuple[float, ...]:
        room = len(free[node])
        kept = sum(prefer.get(f"{names[node]}:{gpu}") == request.role for gpu in free[node])
        return -min(kept, request.group), node not in used, room < wanted, room if room >= wanted else -room, node

    fitting = [node for node, left in enumerate(free) if len(left) >= request.group]
    assert fitting, f"no node has {request.group} free GPUs: {[len(left) for left in free]}"
    return min(fitting, key=rank)


def _pick(free: Sequence[int], name: str, request: _Request, prefer: Mapping[str, str]) -> list[int]:
    ranked = sorted(free, key=lambda gpu: (prefer.get(f"{name}:{gpu}") != request.role, gpu))
    return sorted(ranked[: request.group])
