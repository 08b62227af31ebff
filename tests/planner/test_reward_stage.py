"""The reward stage of a plan: which GPUs it gets, at which speed, and that no other choice is better."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.control import event
from planner_cases import FAST, QUICK, SLOW, cluster, inputs, model, work

from baton.cost.efficiency import Efficiency
from baton.cost.generate import DeviceClass
from baton.cost.score import scoring_cost
from baton.errors import UserError
from baton.planner import rental
from baton.planner.colocated import make_colocated_plan
from baton.planner.problem import Inputs
from baton.planner.rental import OffersSettings, rent_for_budget, rent_for_target
from baton.planner.replan import replan_with_reward, without_nodes
from baton.planner.reward_stage import PlanRest, beside, plan_with_reward, reserve
from baton.planner.solve import make_plan
from baton.simulator.input_sources import PlanSource, SimulationOptions
from baton.specs.model import ModelSpec, model_spec
from baton.specs.plan import Bound, Plan
from baton.specs.workload import WorkloadSettings

pytest.importorskip("highspy")


def reward_model(layers: int) -> ModelSpec:
    """A classifier with layers as wide as those of the policy."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 512}
    return model_spec({"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 512, **config}, "judge")


def with_model(question: Inputs, layers: int, batch_tokens: int = 1024, reply_tokens: float = 0.0) -> Inputs:
    changes = {"reward_model": reward_model(layers), "reward_batch_tokens": batch_tokens}
    changes |= {"reward_reply_tokens": reply_tokens, "reward_calls": 4, "reward_context_tokens": 1024}
    return msgspec.structs.replace(question, work=msgspec.structs.replace(question.work, **changes))


def planned(question: Inputs, plan_rest: PlanRest = make_plan) -> tuple[Plan, Inputs]:
    return plan_with_reward(question, plan_rest, time_limit_s=math.inf)


def brute_step_s(question: Inputs, plan_rest: PlanRest = make_plan) -> float:
    """Least step time over all types and numbers of GPUs, with the scoring time as the workload's."""
    spec, best = question.work.reward_model, math.inf
    assert spec is not None
    for node in question.cluster.nodes:
        link = node.link_bytes_per_s
        place = DeviceClass(node.gpu, link, link, 0.0, question.efficiencies.of(node.gpu.name))
        cost = scoring_cost(spec, question.work, place)
        for count in range(1, min(question.cluster.count()[node.gpu.name], question.cluster.num_gpus - 1) + 1):
            if cost.memory_bytes > place.memory_limit_bytes:
                continue
            rest, _ = reserve(question.cluster, node.gpu.name, count)
            timed = {"reward_model": None, "reward_concurrency": count * cost.concurrency}
            timed["reward_latency_s"] = cost.latency_s or cost.trajectory_s
            own = msgspec.structs.replace(question.on(rest), work=msgspec.structs.replace(question.work, **timed))
            try:
                best = min(best, plan_rest(own, time_limit_s=math.inf).breakdown.step_s)
            except UserError:
                continue
    return best


@settings(max_examples=25)
@given(st.data())
def test_the_reward_stage_is_the_best_of_all_types_and_counts(data: st.DataObject) -> None:
    nodes = data.draw(
        st.lists(st.tuples(st.sampled_from(["Fast", "Slow"]), st.sampled_from([1, 2, 4])), min_size=1, max_size=3)
    )
    layers = data.draw(st.sampled_from([1, 8, 32]))
    staleness, reply = data.draw(st.sampled_from([0, 4])), data.draw(st.sampled_from([0.0, 64.0]))
    question = with_model(inputs(cluster(*nodes), max_staleness=staleness), layers, reply_tokens=reply)
    plan_rest = data.draw(st.sampled_from([make_plan, make_colocated_plan]))
    try:
        plan, rest = planned(question, plan_rest)
    except UserError as error:
        event(str(error).partition(":")[0])
        assert brute_step_s(question, plan_rest) == math.inf
        return
    assert plan.breakdown.step_s == pytest.approx(brute_step_s(question, plan_rest), rel=1e-6)
    assert plan.is_colocated == (plan_rest is make_colocated_plan)
    check_gpus(plan, question)
    stage = plan.reward
    assert stage is not None
    assert {node.gpu.name for node in question.cluster.nodes if set(stage.gpu_ids) & set(node.gpu_ids)} == {stage.gpu}
    assert stage.memory_bytes <= stage.memory_limit_bytes
    assert all(part.memory_bytes <= part.memory_limit_bytes for part in (*plan.training.stages, *plan.replicas))
    assert plan.price_per_h == question.cluster.price_per_h
    assert rest.cluster.num_gpus == question.cluster.num_gpus - len(stage.gpu_ids)
    event(f"{len(stage.gpu_ids)} {stage.gpu}{', colocated' if plan.is_colocated else ''}")


def check_gpus(plan: Plan, question: Inputs) -> None:
    """Every GPU of the cluster has one role; those of a colocated plan train and generate."""
    assert plan.reward is not None
    engines = {gpu for one in plan.replicas for gpu in one.gpu_ids}
    shared = engines & set(plan.training.gpu_ids)
    assert not shared or plan.is_colocated
    used = [*plan.training.gpu_ids, *(engines - shared), *plan.reward.gpu_ids]
    used += [gpu for idle in plan.idle for gpu in idle.gpu_ids]
    assert sorted(used) == sorted(gpu for node in question.cluster.nodes for gpu in node.gpu_ids)


@settings(max_examples=15)
@given(st.data())
def test_after_the_loss_of_a_machine_the_reward_model_stays_unless_another_stage_is_faster(data: st.DataObject) -> None:
    kinds = st.tuples(st.sampled_from(["Fast", "Slow"]), st.sampled_from([1, 2, 4]))
    nodes = data.draw(st.lists(kinds, min_size=2, max_size=4))
    question = with_model(inputs(cluster(*nodes)), data.draw(st.sampled_from([1, 8, 32])))
    try:
        running, _ = planned(question)
    except UserError:
        return
    lost = data.draw(st.sampled_from([node.name for node in question.cluster.nodes]))
    after = question.on(without_nodes(question.cluster, [lost]))
    try:
        best = planned(after)[0].breakdown.step_s
    except UserError:
        event("no plan is left")
        with pytest.raises(UserError):
            replan_with_reward(after, running)
        return
    fastest, lazy = (replan_with_reward(after, running, slack=slack) for slack in (0.0, 1e9))
    assert running.reward is not None
    assert fastest.chosen.plan.breakdown.step_s <= best * (1 + 1e-6)
    assert len(lazy.chosen.moved) == min(len(option.moved) for option in lazy.options)
    for option in lazy.options:
        check_gpus(option.plan, after)
        assert option.plan.price_per_h == after.cluster.price_per_h
    before = {gpu for gpu in running.reward.gpu_ids if gpu.rpartition(":")[0] != lost}
    event(f"{len(before)} GPUs of the reward model are left")
    try:
        rest, left = beside(after.cluster, running.reward, {node.name for node in after.cluster.nodes})
        work = msgspec.structs.replace(after.work, reward_model=None)
        make_plan(msgspec.structs.replace(after.on(rest), work=work), time_limit_s=math.inf)
    except UserError:
        return  # no GPU of the reward model is left, or the other GPUs are too few
    assert set(left.gpu_ids) == before
    assert before in [set(option.plan.reward.gpu_ids) for option in lazy.options if option.plan.reward]


def test_a_replan_for_the_workload_of_a_run_keeps_the_reward_model_and_its_time() -> None:
    question = with_model(inputs(cluster(("Fast", 4), ("Slow", 2), ("Slow", 4))), 8)
    running, rest = planned(question)
    assert running.reward is not None
    own = {gpu.rpartition(":")[0] for gpu in running.reward.gpu_ids}
    recorded = msgspec.structs.replace(question, work=msgspec.structs.replace(question.work, reward_model=None))
    same = replan_with_reward(recorded, running)
    assert (same.chosen.moved, same.lost, same.added) == ((), (), ())
    assert same.chosen.plan.reward == running.reward
    assert same.chosen.plan.breakdown.step_s == pytest.approx(running.breakdown.step_s)
    assert same.chosen.inputs.cluster == rest.cluster
    with pytest.raises(UserError, match="no GPU of the reward model is left"):
        replan_with_reward(recorded.on(without_nodes(question.cluster, list(own))), running)
    alone = msgspec.structs.replace(running.reward, gpu_ids=question.cluster.nodes[0].gpu_ids, gpu="Fast")
    names = [node.name for node in question.cluster.nodes[1:]]
    with pytest.raises(UserError, match="only GPUs of the reward model are left"):
        replan_with_reward(
            recorded.on(without_nodes(question.cluster, names)), msgspec.structs.replace(running, reward=alone)
        )


def offers(**most: int) -> OffersSettings:
    return OffersSettings.model_validate(
        {
            "links": {"inter_node_gb_per_s": 1e6, "latency_us": 0},
            "offers": [{"gpu": kind, "gpus": 2, "max_nodes": count} for kind, count in most.items()],
            "gpu": {"Fast": FAST, "Slow": SLOW},
        }
    )


@pytest.mark.parametrize("layers", [1, 8, 32])
def test_the_machines_to_rent_are_the_best_with_the_reward_model(layers: int) -> None:
    market, budget = offers(Fast=2, Slow=3), 14.0
    question = with_model(inputs(cluster(("Fast", 2))), layers)
    rates = {}
    for counts in product(range(3), range(4)):
        price = 8 * counts[0] + 2 * counts[1]
        if any(counts):
            with suppress(UserError):
                rates[counts] = price, planned(question.on(market.cluster_settings(counts).build()))[0].tokens_per_s
    best = max(rate for price, rate in rates.values() if price <= budget)
    found = rent_for_budget(question, market, budget)
    assert found.plan.tokens_per_s == pytest.approx(best, rel=1e-6)
    assert found.plan.price_per_h == found.inputs.cluster.price_per_h <= budget
    check_gpus(found.plan, found.inputs)
    assert found.inputs_of_the_rest.cluster.num_gpus < found.inputs.cluster.num_gpus
    target = 0.9 * best
    least_price = min(price for price, rate in rates.values() if rate >= target)
    assert rent_for_target(question, market, target).plan.price_per_h == least_price


def test_a_rental_search_reports_bounds_that_hold_and_time_limits_that_were_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search for each plan ends early, with a slow plan and a large gap: its machines may have a better plan."""

    def slow(asked: Inputs, **named: float) -> tuple[Plan, Inputs]:
        plan, rest = plan_with_reward(asked, **named)
        step_s = plan.breakdown.step_s
        parts = msgspec.structs.replace(plan.breakdown, step_s=1000 * step_s)
        return msgspec.structs.replace(plan, breakdown=parts, bound=Bound.of(1000 * step_s, step_s / 1000)), rest

    question, market = inputs(cluster(("Fast", 2))), offers(Fast=2, Slow=3)
    monkeypatch.setattr(rental, "plan_with_reward", slow)
    found = rent_for_budget(question, market, 10.0, time_limit_s=0)
    assert found.num_planned == 1 < found.num_choices
    assert found.bound == pytest.approx(1e6 * found.plan.tokens_per_s)
    with pytest.raises(UserError, match="reaches this throughput") as caught:
        rent_for_target(question, market, 500 * found.plan.tokens_per_s, time_limit_s=math.inf)
    assert "time limit" not in str(caught.value)
    with pytest.raises(UserError, match="the search reached its time limit"):
        rent_for_target(question, market, 500 * found.plan.tokens_per_s, time_limit_s=-1)
    with pytest.raises(UserError, match="got up to 3,000 machines, allowed are at most 2,000; set max_nodes"):
        rent_for_budget(question, offers(Slow=3000), 1e5)


def test_without_the_solver_a_rental_search_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.planner.integer.find_spec", lambda name: None)
    question, market = inputs(cluster(("Fast", 2))), offers(Fast=2, Slow=3)
    with pytest.raises(UserError, match="planning needs highspy"):
        rent_for_budget(question, market, 10.0)
    with pytest.raises(UserError, match="planning needs highspy"):
        rent_for_target(question, market, 1.0)


def test_the_time_and_memory_of_a_trajectory_by_hand() -> None:
    spec, load = reward_model(2), work(output_tokens={"mean": 436})
    load = msgspec.structs.replace(load, reward_batch_tokens=5000)  # 64 + 436 = 500 tokens, ten in a batch
    gpu = cluster(("Fast", 1)).nodes[0].gpu
    own = Efficiency(prefill=0.5, decode=0.8, prefill_overhead_s=1e-3)
    # attention 512 · (512 + 2 · 256) + 512 · 512, feed-forward 3 · 512 · 2048
    layer = 512 * 1024 + 512 * 512 + 3 * 512 * 2048
    flops = 2 * (2 * layer * 500 + 4 * 512 * 500**2 / 2)
    cost = scoring_cost(spec, load, DeviceClass(gpu, 1e9, 1e9, 0.0, own))
    assert cost.trajectory_s == pytest.approx(flops / (100e12 * 0.5) + 1e-3 / 10)
    params = 2 * layer + 512 * 512 + 5 * 512  # one table, and norms
    block = 2 * (2 * 512 + 3 * 2048) + 8 * 512
    assert cost.memory_bytes == 2 * params + 5000 * block
    # at a thousandth of the bandwidth, reading the weights for ten trajectories takes longer
    slow = msgspec.structs.replace(gpu, hbm_bytes_per_s=1e9)
    cost = scoring_cost(spec, load, DeviceClass(slow, 1e9, 1e9, 0.0, own))
    assert cost.trajectory_s == pytest.approx(2 * params / 0.8e9 / 10 + 1e-3 / 10)


def test_the_time_and_memory_of_a_reply_by_hand() -> None:
    spec, load = reward_model(2), work(output_tokens={"mean": 436})
    replies = {"reward_reply_tokens": 100.0, "reward_calls": 8, "reward_context_tokens": 1024}
    gpu, load = cluster(("Fast", 1)).nodes[0].gpu, msgspec.structs.replace(load, **replies)
    gpu = msgspec.structs.replace(gpu, hbm_bytes_per_s=1e9)  # decode steps wait for memory
    own = Efficiency(prefill=0.5, decode=0.8, prefill_overhead_s=1e-3, step_overhead_s=2e-3, rollout=1.0)
    layer = 512 * 1024 + 512 * 512 + 3 * 512 * 2048
    cost = scoring_cost(spec, load, DeviceClass(gpu, 1e9, 1e9, 0.0, own))
    prefill_s = 2 * (2 * layer * 500 + 4 * 512 * 500**2 / 2) / (100e12 * 0.5) + 1e-3
    # eight replies read the weights, the head, and 550 positions of keys and values of 2 x 256 values each, per layer
    read = 2 * (2 * layer + 512 * 512) + 8 * 2 * 550 * 512 * 2
    step_s = own.step_overhead_s + 8 * own.row_overhead_s + read / 0.8e9
    expected = 100 * step_s / 8 + prefill_s + own.trajectory_overhead_s
    assert cost.trajectory_s == pytest.approx(expected, rel=1e-3)
    assert cost.latency_s == pytest.approx(8 * cost.trajectory_s)
    params = 2 * layer + 2 * 512 * 512 + 5 * 512  # two tables, and norms
    cache = 8 * (1024 // 128 + 1) * 128 * 2 * 512 * 2 + 2**24
    assert cost.memory_bytes == 2 * params + cache


def test_gpus_are_taken_from_the_smallest_machines_and_from_their_end() -> None:
    whole = cluster(("Fast", 4), ("Slow", 4), ("Fast", 2))
    rest, taken = reserve(whole, "Fast", 3)
    assert taken == ("n2:0", "n2:1", "n0:3")
    assert [(node.name, node.num_gpus) for node in rest.nodes] == [("n0", 3), ("n1", 4)]
    assert len(rest.bytes_per_s) == 2


def test_a_reward_model_that_fits_on_no_gpu_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"reward.model: judge needs a GPU of its own with .* GB, but the cluster has 4"
    ):
        planned(with_model(inputs(cluster(("Fast", 4))), 600))


def test_the_simulator_scores_with_the_speed_and_the_gpus_of_the_stage() -> None:
    question = with_model(inputs(cluster(("Fast", 4), ("Slow", 4))), 8)
    plan, _ = planned(question)
    assert plan.reward is not None
    setting = PlanSource(plan, model(), question.work, QUICK, question.cluster).setting(SimulationOptions())
    assert (setting.judges.latency_s, setting.judges.concurrency) == (
        plan.reward.trajectory_s,
        len(plan.reward.gpu_ids),
    )
    turns, _ = planned(question, make_colocated_plan)
    assert turns.reward is not None
    setting = PlanSource(turns, model(), question.work, QUICK, question.cluster).setting(SimulationOptions())
    assert setting.rules.mode == "sync"
    assert setting.judges.latency_s == turns.reward.trajectory_s
    assert setting.judges.concurrency == len(turns.reward.gpu_ids)
    question = with_model(question, 8, reply_tokens=64.0)
    plan, _ = planned(question)
    assert plan.reward is not None
    setting = PlanSource(plan, model(), question.work, QUICK, question.cluster).setting(SimulationOptions())
    assert setting.judges.latency_s == pytest.approx(4 * plan.reward.trajectory_s)
    assert setting.judges.concurrency == 4 * len(plan.reward.gpu_ids)


def test_a_workload_file_states_a_reward_model_or_a_time(tmp_path: Path) -> None:
    base = {"groups": 1, "group_size": 1, "prompt_tokens": {"mean": 1}, "output_tokens": {"mean": 1}}
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9}'
    )
    found = WorkloadSettings.model_validate({**base, "reward": {"model": str(tmp_path), "batch_tokens": 7}}).build()
    assert found.reward_model is not None
    assert (found.reward_model.num_layers, found.reward_batch_tokens) == (3, 7)
    with pytest.raises(ValueError, match="remove latency_s and concurrency"):
        WorkloadSettings.model_validate({**base, "reward": {"model": "m", "latency_s": 1.0}})
