"""Chooses the GPUs, by node and index, for the training shape and the replicas of a solution."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import chain

import msgspec

from baton.planner.problem import AssignmentProblem

Part = tuple[int, tuple[str, ...]]
"""Pool and GPU names of one part of a plan. A part is a stage, the ranks of a mixed stage on one pool, or a replica.
The GPUs of a stage are in the order of its ranks."""


class GpuAssignment(msgspec.Struct, frozen=True):
    """The GPUs of each stage and replica, by name."""

    stages: tuple[Part, ...]
    """For each stage, in the order of the training pipeline: its pool, and its GPUs. The GPUs of one tensor-parallel
    group are adjacent."""
    replicas: tuple[tuple[int, tuple[str, ...]], ...]
    """For each replica: index of its shape in `AssignmentProblem.columns`, and its GPUs in the order of its stages."""
    idle: tuple[tuple[int, str], ...]
    """(pool, GPU) of each GPU without a role."""
    is_mixed: bool = False
    """Whether the ranks of all `stages` form one mixed stage, instead of a pipeline of stages."""


class _Request(msgspec.Struct, frozen=True):
    """`count` groups of `group` GPUs for a stage or a replica."""

    role: str
    """`train` or `rollout`."""
    group: int
    count: int = 1
    column: int = 0
    """For a replica, the index of its shape in `AssignmentProblem.columns`."""


def assign(
    problem: AssignmentProblem, row: int | None, counts: Sequence[int], prefer: Mapping[str, str] = {}
) -> GpuAssignment:
    """Assign GPUs to every replica and to every group of the training shape. `row`: the training shape's row in the
    table; if it is None, GPUs are assigned only to replicas.

    Large groups are placed first, so that all groups fit. Each stage is placed on as few nodes as possible, and
    replicas on nodes with few free GPUs. `prefer`: current role (`train` or `rollout`) of GPUs, which is kept if
    possible.
    """
    table, pools = problem.table, problem.pools
    staged: dict[int, list[tuple[str, ...]]] = {}
    replicas: list[tuple[int, tuple[str, ...]]] = []
    idle: list[tuple[int, str]] = []
    for k, pool in enumerate(pools.pools):
        free = [list(problem.inputs.cluster.nodes[place].gpu_ids) for place in pool.nodes]
        requests = []
        if row is not None:
            width = int(table.groups[row, k])
            count = int(table.tp[row, k] * table.dp[row, k]) // max(1, width)
            requests += [_Request("train", width, count)] * int(table.stages[row, k])
        for index, (column, count) in enumerate(zip(problem.columns, counts, strict=True)):
            if column.pool == k:
                requests += [_Request("rollout", column.num_gpus, column=index)] * count
        requests.sort(key=lambda r: (-r.group, r.role != "train"))
        for request in requests:
            by_node: dict[int, list[str]] = {}
            for placed in range(request.count):
                node = _choose(free, request, prefer, by_node, request.group * (request.count - placed))
                # GPUs that have this role already come first; both orders are by index
                chosen = sorted(free[node], key=lambda gpu: prefer.get(gpu) != request.role)[: request.group]
                by_node.setdefault(node, []).extend(gpu for gpu in free[node] if gpu in chosen)
                free[node] = [gpu for gpu in free[node] if gpu not in chosen]
            gpus = tuple(chain.from_iterable(by_node.values()))
            if request.role == "train":
                staged.setdefault(k, []).append(gpus)
            else:
                replicas.append((request.column, gpus))
        idle += [(k, gpu) for gpu in chain.from_iterable(free)]
    stages = tuple((k, gpus) for k in pools.pipeline_order(staged) for gpus in staged[k])
    is_mixed = row is not None and bool(table.is_mixed[row])
    return GpuAssignment(stages, tuple(sorted(replicas, key=lambda s: s[0])), tuple(idle), is_mixed)


def _choose(
    free: Sequence[list[str]], request: _Request, prefer: Mapping[str, str], used: Container[int], wanted: int
) -> int:
    """Choose a node for the next group of a request, and return the index of the node. `used`: nodes of the request's
    other groups. `wanted`: number of GPUs that the request still needs."""

    def rank(node: int) -> tuple[float, ...]:
        room = len(free[node])
        kept = sum(prefer.get(gpu) == request.role for gpu in free[node])
        return -min(kept, request.group), node not in used, room < wanted, room if room >= wanted else -room, node

    fitting = [node for node, left in enumerate(free) if len(left) >= request.group]
    assert fitting, f"no node has {request.group} free GPUs: {[len(left) for left in free]}"
    return min(fitting, key=rank)
