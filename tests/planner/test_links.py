"""Clusters whose machines of one type have different links: which links a plan uses, and which it avoids."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from baton.cost.efficiency import Efficiencies
from baton.planner.assign import GpuAssignment
from baton.planner.certainty import step_s
from baton.planner.instance import make_problem
from baton.planner.links import faster_assignments, parts_of, used_pools
from baton.planner.pools import make_pools
from baton.planner.problem import Inputs
from baton.planner.replan import replan
from baton.planner.solve import solve
from baton.planner.training_shapes import Pipelines, Shapes, evaluated
from baton.specs.cluster import Cluster, ClusterSettings
from baton.specs.model import read_model
from baton.specs.workload import WorkloadSettings
from tests.planner.planner_cases import cluster, inputs, make_plan, model, work

GB = 1e9
QWEN = Path(__file__).parents[2] / "benchmarks/areal_hex/models/r1-distill-qwen-7b"


def linked(of: Cluster, rates: dict[tuple[int, int], float], other: float) -> Cluster:
    """The cluster with these bandwidths between machines, and `other` between all others."""
    rows = [[rates.get((min(a, b), max(a, b)), other) for b in range(len(of.nodes))] for a in range(len(of.nodes))]
    return msgspec.structs.replace(of, bytes_per_s=tuple(map(tuple, rows)))


def drawn(seed: int) -> Inputs:
    draw = random.Random(seed)
    of = cluster(*((draw.choice(["Fast", "Slow"]), draw.choice([1, 2, 4])) for _ in range(draw.randint(4, 7))))
    pairs = [(a, b) for b in range(len(of.nodes)) for a in range(b)]
    # links of which some limit a step of this small model, and some do not
    return Inputs(linked(of, {pair: draw.uniform(0.1, 1) * GB for pair in pairs}, GB), model(), work(), Efficiencies())


def test_the_links_of_a_ring_of_the_stage_boundary_and_of_publication_are_those_of_the_machines_used() -> None:
    of = cluster(("Slow", 1), ("Slow", 1), ("Slow", 1), ("Fast", 2), ("Fast", 1))
    rates = {(0, 1): 5.0, (1, 2): 6.0, (0, 2): 1.0, (0, 3): 7.0, (1, 3): 8.0, (2, 3): 0.5, (2, 4): 9.0, (3, 4): 3.0}
    pools = make_pools(linked(of, rates, 0.1), Efficiencies(), "pessimistic")
    slow, fast = (next(k for k, pool in enumerate(pools.pools) if pool.gpu == gpu) for gpu in ("Slow", "Fast"))

    def used(stages: list[tuple[int, tuple[str, ...]]], replicas: list[tuple[int, tuple[str, ...]]]) -> list[float]:
        found = used_pools(linked(of, rates, 0.1), pools, stages, replicas)
        within = [found.pools[k].place.inter_bytes_per_s for k in (slow, fast)]
        return [*within, found.bytes_per_s[slow][fast], found.bytes_per_s[fast][slow]]

    # the ring of three machines has all of their links; machines with engines receive from the faster of two links
    assert used([(slow, ("n0:0", "n1:0", "n2:0"))], [(fast, ("n3:0",)), (fast, ("n4:0",))]) == [1.0, 3.0, 8.0, 0.1]
    # ranks with the same index are connected: n0 with n3, n1 with n3, and n2 with n4 but not with n3
    stages = [(slow, ("n0:0", "n1:0", "n2:0")), (fast, ("n3:0", "n3:1", "n4:0"))]
    assert used(stages, []) == [1.0, 3.0, 7.0, 7.0]
    # a stage on one machine has no ring, so the pool keeps its slowest link
    assert used([(fast, ("n3:0", "n3:1"))], [(slow, ("n0:0",))]) == [1.0, 3.0, 0.1, 7.0]


def test_machines_are_exchanged_so_that_the_ring_of_a_stage_and_publication_use_fast_links() -> None:
    """Six machines that train and two with engines, in an order whose links are slow."""
    order = [0, 3, 1, 4, 2, 5]
    fast = {(min(a, b), max(a, b)): 10.0 for a, b in pairwise([*order, order[0]])}
    fast |= {(5, 6): 10.0, (2, 7): 10.0}
    of = linked(cluster(*[("Fast", 1)] * 8), fast, 1.0)
    pools = make_pools(of, Efficiencies(), "pessimistic")
    names = [node.name for node in of.nodes]
    stage = tuple(f"{name}:0" for name in names[:6])
    given = GpuAssignment(((0, stage),), ((0, (f"{names[6]}:0",)), (0, (f"{names[7]}:0",))), ())

    def slowest(assigned: GpuAssignment) -> tuple[float, float]:
        used = used_pools(of, pools, *parts_of(assigned, [0]))
        return used.pools[0].place.inter_bytes_per_s, used.bytes_per_s[0][0]

    assert slowest(given) == (1.0, 10.0)
    assert max(map(slowest, faster_assignments(of, pools, given, [0]))) == (10.0, 10.0)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_has_the_time_of_its_links_which_is_between_the_bound_and_that_of_the_slowest_links(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.planner.solve.MAX_POOLS", 0)
    monkeypatch.setattr("baton.planner.solve.MOST_GPUS_IN_PARTS", 0)
    asked = drawn(seed)
    plan = make_plan(asked)
    assert plan.breakdown.step_s == pytest.approx(step_s(asked, plan, asked.efficiencies))
    worst = solve(make_problem(asked, "pessimistic"), "exact", 60.0)[1].step_s
    assert plan.bound.step_s <= plan.breakdown.step_s * (1 + 1e-9)
    assert plan.breakdown.step_s <= worst * (1 + 1e-9)


@pytest.mark.parametrize(("between", "copies"), [(5.0, 8), (1e6, 0)])
def test_machines_keep_copies_of_the_model_where_the_links_between_them_are_slow(between: float, copies: int) -> None:
    nodes = [{"gpu": "H800", "count": 2}, {"gpu": "H20", "count": 4}]
    links = {"inter_node_gb_per_s": between, "cross_type_gb_per_s": 1.5}
    of = ClusterSettings.model_validate({"name": "slow", "links": links, "nodes": nodes}).build()
    answers = {"kind": "lognormal", "mean": 8000, "max": 27648}
    maths = {"groups": 512, "group_size": 16, "prompt_tokens": {"mean": 300}, "output_tokens": answers}
    asked = Inputs(of, read_model(QWEN), WorkloadSettings.model_validate(maths).build(), cross_types=False)
    plan = make_plan(asked)
    (stage,) = plan.training.stages
    assert (stage.gpu, stage.dp, plan.training.shard_size) == ("H800", 16, copies)
    assert [len({gpu.partition(":")[0] for gpu in stage.gpu_ids[first : first + 8]}) for first in (0, 8)] == [1, 1]
    pools = make_pools(of, asked.efficiencies)
    k = next(k for k, pool in enumerate(pools.pools) if pool.gpu == stage.gpu)
    shared = Pipelines(asked, pools, [k], [Shapes.of(1, 1, 16)], 0)
    shared_s = evaluated(shared).time_s[0]
    assert (plan.training.time_s < shared_s * (1 - 1e-6)) == bool(copies)


def test_a_stage_that_fits_on_one_machine_is_on_one_machine() -> None:
    plan = make_plan(inputs(cluster(("Fast", 4), ("Fast", 4), ("Fast", 4))))
    for stage in plan.training.stages:
        if len(stage.gpu_ids) <= 4:
            assert len({gpu.partition(":")[0] for gpu in stage.gpu_ids}) == 1
    assert min(len(stage.gpu_ids) for stage in plan.training.stages) <= 4


@pytest.mark.parametrize("seed", [0, 5])
def test_a_replan_without_losses_is_as_fast_as_a_new_plan_and_its_bound_holds(seed: int) -> None:
    asked = drawn(seed)
    plan = make_plan(asked)
    found = replan(asked, plan, slack=0.0, time_limit_s=math.inf)
    assert found.chosen.plan.breakdown.step_s <= plan.breakdown.step_s * (1 + 1e-9)
    assert all(each.plan.bound.step_s <= plan.breakdown.step_s * (1 + 1e-9) for each in found.options)


def test_the_bound_holds_for_a_plan_that_uses_only_the_links_within_a_machine() -> None:
    """The machines differ in their own links, so each is a pool; between them, links are slow."""
    of = cluster(("Fast", 3), ("Fast", 4))
    slow = msgspec.structs.replace(of.nodes[1], link_bytes_per_s=0.001 * GB)
    of = msgspec.structs.replace(of, nodes=(of.nodes[0], slow))
    plan = make_plan(inputs(linked(of, {}, 0.001 * GB)))
    assert {gpu.partition(":")[0] for gpu in plan.used_gpu_ids} == {"n0"}
    assert plan.bound.step_s <= plan.breakdown.step_s * (1 + 1e-9)
