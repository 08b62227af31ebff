"""What every plan keeps: each GPU has one role, groups stay in their node, memory holds, layers are whole."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cost.efficiency import Efficiencies
from baton.errors import UserError
from baton.planner.colocated import make_colocated_plan
from baton.planner.problem import Inputs
from baton.specs.cluster import Cluster
from baton.specs.plan import Plan, read_plan, write_plan
from tests.planner.planner_cases import QUICK, cluster, inputs, make_plan, model, work

NODES = st.lists(
    st.tuples(st.sampled_from(["Fast", "Slow"]), st.sampled_from([1, 2, 3, 4, 6, 8])), min_size=1, max_size=4
)
MEMORY = st.sampled_from([0.2, 0.3, 1.0])
SMALL_NODES = st.lists(st.tuples(st.sampled_from(["Fast", "Slow"]), st.integers(1, 2)), min_size=4, max_size=8)
SMALL_MEMORY = st.sampled_from([0.08, 0.1, 0.12])
"""Machines so small that a third of the plans are pipelines of three or four stages."""


def check(plan: Plan, of: Cluster, asked: Inputs) -> None:
    roles = [plan.training.gpu_ids, *(r.gpu_ids for r in plan.replicas), *(i.gpu_ids for i in plan.idle)]
    named = [gpu for gpus in roles for gpu in gpus]
    assert sorted(named) == sorted(gpu for node in of.nodes for gpu in node.gpu_ids)
    kinds = {gpu: node.gpu.name for node in of.nodes for gpu in node.gpu_ids}
    for stage in plan.training.stages:
        assert len(stage.gpu_ids) == stage.tp * stage.dp
        assert {kinds[gpu] for gpu in stage.gpu_ids} == {stage.gpu}
        assert_grouped(stage.gpu_ids, stage.tp)
        assert stage.memory_bytes <= stage.memory_limit_bytes * (1 + 1e-9)
    layers = [stage.layers for stage in plan.training.stages]
    assert (layers[0][0], layers[-1][1]) == (0, asked.model.num_layers)
    if plan.training.is_mixed:
        assert set(layers) == {(0, asked.model.num_layers)}, "each part of a mixed stage has all layers"
        assert len({kinds[gpu] for gpu in plan.training.gpu_ids}) == len(layers) == 2
    else:
        assert all(one[1] == following[0] for one, following in pairwise(layers))
    assert all(first < end for first, end in layers)
    for replica in plan.replicas:
        assert len(replica.gpu_ids) == replica.tp * replica.pp
        assert {kinds[gpu] for gpu in replica.gpu_ids} == {replica.gpu}
        assert_grouped(replica.gpu_ids, len(replica.gpu_ids))
        assert replica.memory_bytes <= replica.memory_limit_bytes * (1 + 1e-9)
        assert replica.layers[-1][1] == asked.model.num_layers
    assert sum(replica.share for replica in plan.replicas) == pytest.approx(1)
    assert sum(replica.trajectories for replica in plan.replicas) == asked.work.num_trajectories
    b = plan.breakdown
    assert b.step_s == pytest.approx(b.sync_s + max(b.rollout_s + b.reward_s, b.train_s))
    parts = plan.training
    assert parts.time_s == pytest.approx(parts.compute_s + parts.bubble_s + parts.comm_s + parts.optimizer_s)
    assert sum(replica.batch for replica in plan.replicas) <= asked.work.max_running
    assert all(idle.why for idle in plan.idle)
    assert plan.limits


def assert_grouped(gpu_ids: tuple[str, ...], tp: int) -> None:
    for start in range(0, len(gpu_ids), tp):
        assert len({gpu.split(":")[0] for gpu in gpu_ids[start : start + tp]}) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.tuples(NODES, MEMORY, MEMORY), st.tuples(SMALL_NODES, SMALL_MEMORY, SMALL_MEMORY)),
    st.sampled_from([1, 4]),
    st.sampled_from([("baton", False), ("baton", True), ("idealised", False)]),
)
def test_a_plan_is_complete_and_keeps_every_limit(
    machines: tuple[list[tuple[str, int]], float, float], max_staleness: int, trainer: tuple[str, bool]
) -> None:
    nodes, fast_gb, slow_gb = machines
    of = cluster(*nodes, fast_gb=fast_gb, slow_gb=slow_gb)
    asked = inputs(of, max_staleness=max_staleness, trainer=trainer[0], mixed_stages=trainer[1])
    try:
        plan = make_plan(asked)
    except UserError as error:
        refusal = str(error)
    else:
        check(plan, of, asked)
        assert plan.bound.is_proven
        return
    assert refusal.startswith("infeasible:")


@pytest.mark.parametrize(
    ("nodes", "fast_gb", "slow_gb", "stages"),
    [
        ([("Slow", 1), ("Fast", 1), ("Slow", 1), ("Fast", 2)], 0.13, 0.14, 3),
        ([("Slow", 2), ("Slow", 1), ("Slow", 1), ("Slow", 1)], 0.12, 0.12, 4),
    ],
)
def test_a_pipeline_of_several_stages_is_planned_where_memory_asks_for_it(
    nodes: list[tuple[str, int]], fast_gb: float, slow_gb: float, stages: int
) -> None:
    of = cluster(*nodes, fast_gb=fast_gb, slow_gb=slow_gb)
    asked = inputs(of, trainer="idealised")
    plan = make_plan(asked)
    assert len(plan.training.stages) == stages
    check(plan, of, asked)


@settings(max_examples=25, deadline=None)
@given(NODES, st.tuples(st.sampled_from(["Fast", "Slow"]), st.integers(1, 8)), st.booleans())
def test_another_machine_never_hurts(nodes: list[tuple[str, int]], another: tuple[str, int], mixed: bool) -> None:
    few, many = (inputs(cluster(*there), mixed_stages=mixed) for there in (nodes, [*nodes, another]))
    try:
        before = make_plan(few).breakdown.step_s
    except UserError:
        return
    assert make_plan(many).breakdown.step_s <= before * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(NODES, st.randoms(use_true_random=False))
def test_names_and_order_of_machines_change_nothing(nodes: list[tuple[str, int]], draw: object) -> None:
    shuffled = list(nodes)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    steps = []
    for order in (nodes, shuffled):
        try:
            steps.append(make_plan(inputs(cluster(*order))).breakdown.step_s)
        except UserError:
            steps.append(0.0)
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_everything_faster_by_a_factor_is_throughput_by_that_factor(factor: float) -> None:
    of = cluster(("Fast", 4), ("Slow", 4))
    base = make_plan(inputs(of))
    gpus = {
        node.gpu.name: msgspec.structs.replace(
            node.gpu, flops=node.gpu.flops * factor, hbm_bytes_per_s=node.gpu.hbm_bytes_per_s * factor
        )
        for node in of.nodes
    }
    nodes = tuple(
        msgspec.structs.replace(node, gpu=gpus[node.gpu.name], link_bytes_per_s=node.link_bytes_per_s * factor)
        for node in of.nodes
    )
    links = tuple(tuple(rate * factor for rate in row) for row in of.bytes_per_s)
    faster = msgspec.structs.replace(of, nodes=nodes, bytes_per_s=links)
    default = QUICK.default
    quick = default.model_copy(
        update={
            "step_overhead_s": default.step_overhead_s / factor,
            "publish_latency_s": default.publish_latency_s / factor,
        }
    )
    scaled = make_plan(Inputs(faster, model(), work(), Efficiencies(quick)))
    assert scaled.tokens_per_s == pytest.approx(base.tokens_per_s * factor, rel=1e-9)


def test_a_plan_goes_through_json(tmp_path: Path) -> None:
    plan = make_plan(inputs(cluster(("Fast", 3), ("Slow", 2))))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match=r"other.json is not a plan: .*cluster"):
        read_plan(tmp_path / "other.json")
    (tmp_path / "other.json").write_bytes((tmp_path / "plan.json").read_bytes().replace(b"Fast", b"F\xe4st"))
    with pytest.raises(UserError, match=r"other.json is not a plan: (?i:.*utf-8)"):
        read_plan(tmp_path / "other.json")
    for part in ("stages", "replicas"):
        for is_missing in (True, False):
            tree = json.loads((tmp_path / "plan.json").read_text())
            place = tree["training"] if part == "stages" else tree
            place[part] = [] if is_missing else [{**place[part][0], "gpu_ids": []}]
            (tmp_path / "other.json").write_text(json.dumps(tree))
            with pytest.raises(UserError, match=rf"is not a plan: .*length >= 1.*{part}"):
                read_plan(tmp_path / "other.json")
    for key, value in (("batch", 0), ("tp", 0), ("tokens_per_s", -1.0), ("layers", [])):
        tree = json.loads((tmp_path / "plan.json").read_text())
        tree["replicas"][0][key] = value
        (tmp_path / "other.json").write_text(json.dumps(tree))
        with pytest.raises(UserError, match=rf"is not a plan: Expected .*{key}"):
            read_plan(tmp_path / "other.json")
    for tree, sentence in (
        (
            {"format": 2, "stages": "elsewhere"},
            r"a newer Baton wrote this plan, in format 2; .* reads format 1\. Update",
        ),
        ({**json.loads((tmp_path / "plan.json").read_text()), "format": 3}, "in format 3"),
        ({**json.loads((tmp_path / "plan.json").read_text()), "format": 0}, "format: got 0, this Baton reads 1"),
        ({"format": "new"}, r"other.json is not a plan: .*format"),
    ):
        (tmp_path / "other.json").write_text(json.dumps(tree))
        with pytest.raises(UserError, match=sentence):
            read_plan(tmp_path / "other.json")
    with pytest.raises(UserError, match="there is no plan"):
        read_plan(tmp_path / "none.json")


def test_staleness_of_a_plan_that_waits_for_its_trainer_is_the_bound() -> None:
    slow_trainer = inputs(cluster(("Slow", 1), ("Fast", 8)), algorithm={"epochs": 20})
    plan = make_plan(slow_trainer)
    if plan.breakdown.train_s >= plan.breakdown.rollout_s + plan.breakdown.reward_s:
        assert plan.mean_staleness == 4
    assert "bottleneck" in plan.limits[0]


def test_judging_that_takes_longer_than_generating_sets_the_pace() -> None:
    """24 trajectories, 2 at a time, 1 s each: 12 s, and the last one's second."""
    plan = make_plan(inputs(cluster(("Fast", 4)), reward={"latency_s": 1.0, "concurrency": 2}))
    assert plan.breakdown.rollout_s + plan.breakdown.reward_s == pytest.approx(13.0)
    assert any("scoring a batch takes 12 s" in sentence for sentence in plan.limits)


def test_without_overlap_the_sides_take_turns() -> None:
    plan = make_plan(inputs(cluster(("Fast", 4)), max_staleness=0))
    b = plan.breakdown
    assert b.step_s == pytest.approx(b.sync_s + b.rollout_s + b.reward_s + b.train_s)
    assert plan.mean_staleness == 0


def test_a_colocated_plan_does_not_name_the_staleness_bound_as_its_only_limit() -> None:
    """The bound is 4 here; all trajectories of a batch run at once."""
    plan = make_colocated_plan(inputs(cluster(("Fast", 2), fast_gb=8.0), max_staleness=4, engine={"max_batch": 24}))
    assert any("alternate, because both use the same GPUs" in sentence for sentence in plan.limits)
    assert not any("max_staleness allows" in sentence for sentence in plan.limits)
    assert any("a batch has 24 running trajectories, and 24 run" in sentence for sentence in plan.limits)


@pytest.mark.parametrize("max_staleness", [0, 4])
def test_the_overhead_of_a_cycle_lengthens_every_step_and_changes_no_choice(max_staleness: int) -> None:
    of = cluster(("Fast", 4), ("Slow", 2))
    slower = Efficiencies(QUICK.default.model_copy(update={"cycle_overhead_s": 0.5}))
    asked = work(max_staleness=max_staleness)
    base, plan = (make_plan(Inputs(of, model(), asked, known)) for known in (QUICK, slower))
    assert plan.breakdown.step_s == pytest.approx(base.breakdown.step_s + 0.5)
    assert plan.breakdown.sync_s - plan.breakdown.cycle_overhead_s == pytest.approx(base.breakdown.sync_s)
    assert plan.bound.gap <= base.bound.gap + 1e-9
    assert [r.gpu_ids for r in plan.replicas] == [r.gpu_ids for r in base.replicas]
    assert plan.training.gpu_ids == base.training.gpu_ids


# ---- what cannot be
# ---------------------------------------------------------------------------------------------------


def test_what_binds_is_named_with_bytes() -> None:
    with pytest.raises(UserError, match=r"rollout memory.*Fast: 0.0\d+ GB needed .* 0.018 GB available"):
        make_plan(inputs(cluster(("Fast", 1), fast_gb=0.02)))
    with pytest.raises(UserError, match=r"training memory.*Slow: 0.\d+ GB per GPU needed"):
        make_plan(inputs(cluster(("Slow", 1), slow_gb=0.1)))
    with pytest.raises(UserError, match=r"number of GPUs.*1 Fast.*More GPUs would help"):
        make_plan(inputs(cluster(("Fast", 1))))
    with pytest.raises(UserError, match=r"staleness bound.*0\.\d running trajectories"):
        make_plan(inputs(cluster(("Fast", 4)), groups=1, group_size=1, max_staleness=1))
