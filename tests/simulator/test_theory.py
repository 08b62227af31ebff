"""Simulated runs against what can be worked out: bounds of any schedule, the staleness gate, LlamaRL's closed form."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from simulator_cases import rules

from baton.cost.efficiency import RatesSettings
from baton.planner.problem import Inputs
from baton.planner.solve import make_plan
from baton.simulator.input_sources import PlanSource, SimulationOptions
from baton.simulator.inputs import EngineSpec, Setting
from baton.simulator.result import summarise
from baton.simulator.run import simulate
from baton.simulator.scripted_trajectories import Script, ScriptedGroup, TrajectoryWork
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.cluster import ClusterSettings
from baton.specs.model import model_spec
from baton.specs.workload import WorkloadSettings, constant, lognormal


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_a_batch_takes_no_longer_than_any_schedule_that_leaves_no_slot_idle(seed: int, engines: int) -> None:
    """Graham: work / slots ≤ time ≤ work / slots + the longest; a step takes as long whatever its width."""
    of = Setting(
        rules(batch_groups=16, group_size=4),
        tuple(EngineSpec(f"e{index}", 4, FlatSpeed(0.01)) for index in range(engines)),
        TrajectoryWork(constant(8), lognormal(60, 1.0, 400), 0.5),
        TrainSpeed(1.0, 0.0, 0.0),
        num_steps=1,
    )
    script = Script(of.work, seed, 16, 4)
    lengths = [script.length(group, index) for group in range(16) for index in range(4)]
    work_s = sum(lengths) * 0.01 / (4 * engines)
    waited_s = simulate(of, RunOptions(seed)).steps[0].begin_s
    assert work_s <= waited_s + 1e-9
    assert waited_s <= work_s + max(lengths) * 0.01 + 1e-9


@pytest.mark.parametrize(("train_s", "step_s"), [(2.0, 5.0), (4.0, 6.5), (9.0, 11.5)])
def test_a_train_step_is_slower_only_while_engines_generate(train_s: float, step_s: float) -> None:
    """η = 1: the engine generates the next batch, in 5 s, while the trainer trains at half its speed. In this time the
    trainer does 2.5 s of its work alone, and then it does the rest at its full speed."""
    of = Setting(
        rules("async", max_staleness=1, on_new_version="keep"),
        (EngineSpec("e", 8, FlatSpeed(0.1)),),
        TrajectoryWork(constant(8), constant(50)),
        TrainSpeed(train_s, 0.0, 0.0),
        num_steps=24,
        train_slowdown=2.0,
    )
    found = summarise(of, simulate(of))
    assert found.step_s == pytest.approx(step_s, rel=0.03)


def test_the_time_between_two_train_steps_is_added_to_each() -> None:
    of = Setting(
        rules(),
        (EngineSpec("e", 8, FlatSpeed(0.1)),),
        TrajectoryWork(constant(8), constant(50)),
        TrainSpeed(1.0, 0.0, 0.0),
        num_steps=6,
        cycle_overhead_s=0.25,
    )
    assert summarise(of, simulate(of)).step_s == pytest.approx(6.25)


@pytest.mark.parametrize("train_s", [1.0, 4.0, 9.0])
def test_the_staleness_gate_adds_at_0_and_overlaps_from_1_on(train_s: float) -> None:
    """Equal lengths and room for a batch: generating takes 50 steps of 0.1 s. η = 0 pays the sum, η ≥ 1 the larger."""
    of = Setting(
        rules("async", max_staleness=0),
        (EngineSpec("e", 8, FlatSpeed(0.1)),),
        TrajectoryWork(constant(8), constant(50)),
        TrainSpeed(train_s, 0.0, 0.0),
        num_steps=24,
    )
    assert summarise(of, simulate(of)).step_s == pytest.approx(5.0 + train_s, rel=1e-6)
    for bound in (1, 2, 4):
        freer = replace(of, rules=rules("async", max_staleness=bound, on_new_version="keep"))
        result = summarise(freer, simulate(freer))
        assert result.step_s == pytest.approx(max(5.0, train_s), rel=0.03)
        assert max(result.staleness) <= bound


def test_many_equal_gpus_come_to_the_closed_form() -> None:
    """LlamaRL: B tokens on N GPUs of rates t and g take at least B·(1/t + 1/g)/N; the more GPUs, the nearer."""
    train, rollout, model = 3700.0, 1000.0, model_spec(_MODEL, "small")
    rates = RatesSettings.model_validate({"rates": {"H800-paper": {"train": train, "rollout": rollout}}})
    links = {"inter_node_gb_per_s": 5, "cross_type_gb_per_s": 5}
    planned, simulated = [], []
    for number in (8, 32):
        nodes = [{"gpu": "H800-paper", "gpus": 8, "count": number // 8}]
        load = WorkloadSettings.model_validate(
            {
                "groups": 8 * number,
                "group_size": 8,
                "max_staleness": 4,
                "prompt_tokens": {"mean": 1e-6},
                "output_tokens": {"mean": 100},
            }
        ).build()
        of = ClusterSettings.model_validate({"name": "equal", "links": links, "nodes": nodes}).build()
        plan = make_plan(Inputs(of, model, load, rates=rates))
        best_s = load.output_tokens * (1 / train + 1 / rollout) / number
        planned.append(plan.breakdown.step_s / best_s)
        load = msgspec.structs.replace(load, prompt=constant(1e-6))
        setting = PlanSource(plan, model, load, cluster=of).setting(SimulationOptions(steps=14))
        result = summarise(setting, simulate(setting))
        simulated.append(result.step_s / best_s)
        assert result.seconds >= result.steps * best_s * (1 - 1e-9)
        share = len(plan.training.gpu_ids) / number
        assert share == pytest.approx(rollout / (train + rollout), abs=1 / number)
        assert 1 - 1e-6 <= planned[-1] <= 1 + 1 / len(plan.training.gpu_ids), "GPUs are whole"
    assert simulated[-1] == pytest.approx(1.0, abs=0.03)
    assert abs(simulated[-1] - 1) < abs(simulated[0] - 1)


def test_a_run_s_own_groups_come_again_in_their_order() -> None:
    groups = (ScriptedGroup(5, (10, 20), True), ScriptedGroup(6, (30, 40), False))
    script = Script(TrajectoryWork(constant(1), constant(1), recorded=groups), 3, 4, 3)
    assert [script.prompt(group) for group in range(3)] == [5, 6, 5]
    assert [script.length(3, index) for index in range(3)] == [30, 40, 30]
    assert [script.reward(0, index) for index in range(2)] == [0.0, 1.0]
    assert script.reward(1, 0) == script.reward(1, 1)


def test_a_slot_stays_empty_for_the_step_that_begins_before_its_next_trajectory_is_there() -> None:
    """One slot, four trajectories of 10 steps: three times a step goes by without any, because engine processes hear
    of the next one only after they have reported; while it is empty nothing is decoded, and it begins at once."""
    of = Setting(
        rules(batch_groups=2, group_size=2),
        (EngineSpec("e", 2, FlatSpeed(0.1)),),
        TrajectoryWork(
            constant(1), constant(10), recorded=(ScriptedGroup(1, (10, 20), True), ScriptedGroup(1, (10, 5), True))
        ),
        TrainSpeed(1.0, 0.0, 0.0),
        num_steps=1,
    )
    assert simulate(of).steps[0].begin_s == pytest.approx(2.5)
    late = replace(of, handover_s=0.01)
    # the first two are handed over at 0 and begin at 0.01; the third, handed over at 1.01, waits for the step that has
    # begun and runs from 1.11 to 2.11; the other slot ends at 2.01, its next one would begin at 2.11 and takes 0.5 s
    assert simulate(late).steps[0].begin_s == pytest.approx(2.61)


_MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 32000,
}
