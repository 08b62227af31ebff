"""Stages with ranks on two GPU types: chosen where they gain, found by a search that skips nothing, and described
so that launcher and simulator take rows and times from the plan."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.control import event
from planner_cases import QUICK, cluster, inputs, make_plan, model, work

from baton.cost.train import forward_passes, layer_flops
from baton.errors import UserError
from baton.planner.bounds import RolloutBound
from baton.planner.certainty import step_s
from baton.planner.colocated import make_colocated_plan
from baton.planner.exact import solve_exact
from baton.planner.instance import make_problem, with_table
from baton.planner.mixed_stages import with_mixed_stages
from baton.planner.pools import Pools
from baton.planner.problem import Inputs, TrainTable
from baton.planner.replan import replan, without_nodes
from baton.planner.training_shapes import mixed_orders, mixed_rows
from baton.simulator.input_sources import PlanSource, SimulationOptions
from baton.specs.cluster import GB, Cluster, ClusterSettings
from baton.specs.model import model_spec
from baton.specs.plan import Bound, Plan
from baton.specs.workload import WorkloadSettings

pytest.importorskip("highspy")
WIDE = {"microbatch_tokens": 2400}
"""Microbatches of more than four of the longest trajectories, so that a slow rank's may be that much smaller."""


def without_mixed(asked: Inputs) -> Plan:
    return make_plan(msgspec.structs.replace(asked, mixed_stages=False))


def test_one_fast_and_one_slow_rank_train_a_third_faster_than_the_fast_one() -> None:
    """24 trajectories on ranks of speeds 1 and 0.37. After the time of 17 on the fast rank the slow one has ended 6,
    one too few; after 18 both have ended 24. Alone, the fast rank takes the time of 24. The best plan without
    a mixed stage trains on it alone, so the step is as much shorter."""
    asked = inputs(cluster(("Fast", 1), ("Slow", 3)), mixed_stages=True, algorithm={"epochs": 2}, **WIDE)
    plan, other = make_plan(asked), without_mixed(asked)
    assert plan.training.is_mixed
    assert [(part.gpu, part.dp, part.speed, part.layers) for part in plan.training.stages] == [
        ("Slow", 1, 0.37, (0, 4)), ("Fast", 1, 1.0, (0, 4)),
    ]  # fmt: skip
    assert [part.gpu for part in other.training.stages] == ["Fast"]
    spec, load = asked.model, asked.work
    flops = spec.num_layers * layer_flops(spec, load) + load.trained_tokens * spec.head_flops_per_token
    passes = forward_passes(load, QUICK.default.backward)
    fast = asked.cluster.nodes[0].gpu.flops * QUICK.default.train
    assert plan.training.compute_s == pytest.approx(18 / 24 * passes * flops / fast)
    assert other.training.compute_s == pytest.approx(passes * flops / fast)
    assert plan.bound.is_proven
    assert other.breakdown.step_s / plan.breakdown.step_s == pytest.approx(4 / 3, rel=0.01)
    assert [plan.training.row_share(part) for part in plan.training.stages] == pytest.approx([0.37 / 1.37, 1 / 1.37])


def test_a_slow_rank_that_cannot_have_smaller_microbatches_holds_the_others_up() -> None:
    """With microbatches of one trajectory, both ranks run equally many passes, each as long as the slow rank's."""
    asked = inputs(cluster(("Fast", 1), ("Slow", 3)), mixed_stages=True, algorithm={"epochs": 2})
    plan = make_plan(asked)
    assert not plan.training.is_mixed
    assert plan.breakdown.step_s == pytest.approx(without_mixed(asked).breakdown.step_s)


def eights(cross: float) -> Inputs:
    """A machine of H100, one of A100, two of H20, and answers that are shorter than a microbatch."""
    nodes = [{"gpu": "H100", "gpus": 8}, {"gpu": "A100-80", "gpus": 8}, {"gpu": "H20", "gpus": 8, "count": 2}]
    of = ClusterSettings.model_validate(
        {"name": "e", "links": {"inter_node_gb_per_s": 25, "cross_type_gb_per_s": cross}, "nodes": nodes}
    ).build()
    config = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    spec = model_spec({"model_type": "qwen2", "intermediate_size": 18944, "vocab_size": 152064, **config}, "7B")
    lengths = {"kind": "lognormal", "mean": 800, "max": 2048}
    shown = {"groups": 64, "group_size": 16, "prompt_tokens": {"mean": 300}, "output_tokens": lengths}
    return Inputs(of, spec, WorkloadSettings.model_validate(shown).build(), mixed_stages=True)


def test_machines_of_two_types_train_as_copies_that_add_their_gradients() -> None:
    """Each machine has a copy, so only gradients cross the link between the types. With a slow link it is not
    worth it."""
    asked = eights(25)
    plan, other = make_plan(asked), without_mixed(asked)
    assert (plan.training.is_mixed, plan.training.shard_size, plan.training.shard_gradients) == (True, 8, False)
    assert {part.gpu for part in plan.training.stages} == {"H100", "A100-80"}
    assert other.breakdown.step_s / plan.breakdown.step_s > 1.03
    # two copies: each machine sends 4 bytes per gradient
    link = 25e9 * asked.efficiencies.of("H100").link
    assert plan.training.comm_s == pytest.approx(4 * asked.model.params / link, rel=0.1)
    assert not make_plan(eights(1.0)).training.is_mixed


def test_a_replan_of_a_mixed_stage_is_as_fast_as_the_plan_and_its_bound_holds() -> None:
    """The machines of the slow type have different links. Ray replans without the option for mixed stages."""
    of = cluster(("Fast", 1), ("Slow", 1), ("Slow", 1), ("Slow", 1))
    rates = [[GB * (10 + 10 * ((a + b) % 3)) for b in range(4)] for a in range(4)]
    asked = inputs(msgspec.structs.replace(of, bytes_per_s=rates), mixed_stages=True, algorithm={"epochs": 2}, **WIDE)
    plan = make_plan(asked)
    assert plan.training.is_mixed
    found = replan(msgspec.structs.replace(asked, mixed_stages=False), plan, slack=0.0, time_limit_s=math.inf)
    assert found.chosen.plan.breakdown.step_s <= plan.breakdown.step_s * (1 + 1e-9)
    assert all(each.plan.bound.step_s <= plan.breakdown.step_s * (1 + 1e-9) for each in found.options)


def test_a_plan_with_a_mixed_stage_has_the_same_times_in_simulator_certainty_and_replan() -> None:
    asked = inputs(
        cluster(("Fast", 1), ("Slow", 1), ("Slow", 1), ("Slow", 1)), mixed_stages=True, algorithm={"epochs": 2}, **WIDE
    )
    plan = make_plan(asked)
    assert plan.training.is_mixed
    assert step_s(asked, plan, asked.efficiencies) == pytest.approx(plan.breakdown.step_s)
    setting = PlanSource(plan, asked.model, asked.work, cluster=asked.cluster).setting(SimulationOptions())
    tokens, squared = asked.work.trained_tokens, asked.work.num_trajectories * asked.work.trajectory_squared
    speed = setting.train
    assert speed.fixed_s + tokens * speed.token_s + squared * speed.squared_s == pytest.approx(plan.breakdown.train_s)
    trained = {gpu.rpartition(":")[0] for gpu in plan.training.gpu_ids}
    spare = next(node.name for node in asked.cluster.nodes if node.name not in trained)
    again = replan(asked.on(without_nodes(asked.cluster, [spare])), plan, slack=10.0)
    kept = next(option.plan for option in again.options if option.name == "training kept")
    assert kept.training.is_mixed
    assert kept.training.gpu_ids == plan.training.gpu_ids


@st.composite
def questions(draw: st.DrawFn) -> Inputs:
    """Two or three machines of own types or of the catalogue's; also machines whose links differ."""
    sizes = st.sampled_from([1, 2, 3, 4, 8])
    nodes = draw(st.lists(st.tuples(st.sampled_from(["Fast", "Slow"]), sizes), min_size=2, max_size=4))
    of = cluster(*nodes, slow_gb=draw(st.sampled_from([0.25, 0.6])), cross=draw(st.sampled_from([5e5, 50.0, 1.0])))
    return inputs(
        of,
        mixed_stages=True,
        max_staleness=draw(st.sampled_from([0, 1, 4])),
        groups=draw(st.sampled_from([3, 12, 40])),
        algorithm={"epochs": draw(st.sampled_from([1, 4])), "critic": draw(st.booleans())},
        microbatch_tokens=draw(st.sampled_from([0, 1200, 4800])),
    )


def mixed_table(asked: Inputs, pools: Pools) -> TrainTable:
    """Return all mixed stages of all pairs of pools."""
    tables = []
    for order in mixed_orders(pools):
        counts = np.meshgrid(*(np.arange(1, pools.pools[k].num_gpus + 1) for k in order))
        first, second = (count.ravel() for count in counts)
        keeps = first + second <= asked.work.num_trajectories
        tables += list(mixed_rows(asked, pools, order, first[keeps], second[keeps]))
    return TrainTable.joined(tables, is_complete=True)


@settings(max_examples=60, deadline=None)
@given(questions())
def test_no_mixed_stage_that_the_search_skips_is_better(asked: Inputs) -> None:
    """The search looks only at stages that two bounds allow. Here, all mixed stages are in the table."""
    try:
        problem = make_problem(asked)
    except UserError:
        return
    table = problem.table
    if mixed_orders(problem.pools):
        tables = [table, mixed_table(asked, problem.pools)]
        table = TrainTable.joined(tables, is_complete=table.is_complete)
    best, _ = solve_exact(with_table(problem, table), time_limit_s=math.inf)
    bound = RolloutBound(problem)
    without, _ = solve_exact(problem, time_limit_s=math.inf)
    _, found = with_mixed_stages(problem, without, bound, time_limit_s=math.inf)
    assert (best is None) == (found is None)
    if best is not None and found is not None:
        assert found.step_s == pytest.approx(best.step_s, rel=1e-6)
        assert found.bound_s <= best.step_s * (1 + 1e-9)
        event("mixed" if table.is_mixed[best.row] else "not mixed")


def test_a_search_that_has_no_time_returns_the_plan_in_hand_and_does_not_call_it_proven() -> None:
    """A mixed stage would be a third faster, but the time limit ends before the search tries it."""
    asked = inputs(cluster(("Fast", 1), ("Slow", 3)), mixed_stages=True, algorithm={"epochs": 2}, **WIDE)
    problem = make_problem(asked)
    bound = RolloutBound(problem)
    best, _ = solve_exact(problem, time_limit_s=math.inf)
    assert best is not None
    assert best.bound_s == pytest.approx(best.step_s)
    _, faster = with_mixed_stages(problem, best, bound, time_limit_s=math.inf)
    kept, found = with_mixed_stages(problem, best, bound, time_limit_s=0)
    assert faster is not None
    assert found is not None
    assert kept is problem
    assert (found.row, found.step_s) == (best.row, best.step_s)
    assert found.bound_s <= faster.step_s * (1 + 1e-9) < best.step_s
    assert not Bound.of(found.step_s, found.bound_s).is_proven
    assert Bound.of(faster.step_s, faster.bound_s).is_proven


@settings(max_examples=30, deadline=None)
@given(questions(), st.randoms(use_true_random=False))
def test_with_different_links_the_bound_covers_mixed_stages(asked: Inputs, draw: object) -> None:
    """Links of half to all of their bandwidth: the plan's times are those of its own links, and the bound is below."""
    rows = [list(row) for row in asked.cluster.bytes_per_s]
    for a in range(len(rows)):
        for b in range(a):
            rows[a][b] = rows[b][a] = rows[a][b] * draw.uniform(0.5, 1.0)  # type: ignore[attr-defined]
    varied: Cluster = msgspec.structs.replace(asked.cluster, bytes_per_s=tuple(map(tuple, rows)))
    try:
        plan, nominal = make_plan(asked.on(varied)), make_plan(asked)
    except UserError:
        return
    assert nominal.breakdown.step_s <= plan.breakdown.step_s * (1 + 1e-6), "no link is faster"
    assert plan.bound.step_s <= plan.breakdown.step_s * (1 + 1e-9)
    if plan.training.is_mixed:
        assert step_s(asked.on(varied), plan, asked.efficiencies) == pytest.approx(plan.breakdown.step_s, rel=1e-3)


def test_a_model_that_fits_only_into_both_types_together_is_planned() -> None:
    """It has one layer, so no stages; machines of one GPU have no tensor parallelism. No GPU holds a half of the model,
    but each holds a third, and the fourth generates."""
    machines = [("Fast", 1), ("Fast", 1), ("Slow", 1), ("Slow", 1)]
    for gb in np.arange(0.06, 0.2, 0.002):
        asked = Inputs(cluster(*machines, fast_gb=gb, slow_gb=gb), model(1), work(), QUICK, mixed_stages=True)
        try:
            plan = make_plan(asked)
        except UserError:
            continue
        if plan.training.is_mixed:
            break
    else:
        pytest.fail("no memory size at which only a mixed stage fits")
    assert all(part.memory_bytes <= part.memory_limit_bytes for part in plan.training.stages)
    again = replan(asked, plan).chosen
    assert again.moved == ()
    assert again.plan.training.shard_size == plan.training.shard_size
    with pytest.raises(UserError, match=r"training memory.* would help$"):
        make_colocated_plan(asked)
    with pytest.raises(UserError, match=r"training memory.* would help$"):
        make_plan(asked.on(cluster(("Fast", 1), ("Slow", 1), fast_gb=gb, slow_gb=gb)))
    with pytest.raises(UserError, match=r"training memory.* --mixed-stages also tries stages on two GPU types$"):
        make_plan(msgspec.structs.replace(asked, mixed_stages=False))
