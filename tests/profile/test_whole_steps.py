"""Whole train steps: the efficiencies are fitted so that a simulation of a run has the times of this run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.cost.efficiency import Efficiencies, Efficiency
from baton.errors import UserError
from baton.profile.whole_steps import fit_run, measured_directly, with_whole_steps
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import workload_of_run
from baton.records.metrics import read_metrics
from baton.records.predictions import Predictions, compare, num_warm
from baton.simulator.input_sources import RecipeSource, SimulationOptions, recorded_groups
from baton.simulator.inputs import Setting
from baton.simulator.result import Result, summarise
from baton.simulator.run import simulate
from baton.simulator.simulation import RunOptions

KNOWN = Efficiency(step_overhead_s=1e-3, train_overhead_s=0.1, publish_latency_s=0.01, train=1e-3)


def setting_of(recipe: Recipe, efficiency: Efficiency, run: Path) -> Setting:
    source = RecipeSource(recipe, Efficiencies(by_gpu={"CPU": efficiency}), workload_of_run(run))
    return source.setting(SimulationOptions(recorded=recorded_groups(run)))


def simulated(recipe: Recipe, efficiency: Efficiency, run: Path) -> Result:
    """The figures are means over the steps that `compare` includes."""
    setting = setting_of(recipe, efficiency, run)
    record = simulate(setting, RunOptions(recipe.run.seed))
    return summarise(setting, record, (num_warm(len(record.steps)), len(record.steps)))


def test_in_sync_a_simulation_has_the_times_of_the_run_that_it_was_fitted_to(small: Any) -> None:
    recipe, rows = load_recipe(Recipe, small.recipe), read_metrics(small.run)
    measured = {each.term: each.measured for each in compare(Predictions("", ()), rows)}
    found, points = fit_run(recipe, "CPU", KNOWN, small.run, rows)
    result = simulated(recipe, found, small.run)
    assert result.train_s == pytest.approx(measured["training"], rel=0.01)
    assert result.generate_s == pytest.approx(measured["generation"], rel=0.02)
    assert [point.phase for point in points] == ["step_in_a_run", "generation_in_a_run", "training_in_a_run"]
    assert [point.seconds for point in points] == [measured[term] for term in ("step", "generation", "training")]


def test_by_default_an_engine_on_a_cpu_is_simulated_in_float32(small: Any) -> None:
    times = [
        simulated(load_recipe(Recipe, small.recipe, {"engine.dtype": dtype}), KNOWN, small.run).generate_s
        for dtype in ("auto", "float32", "bfloat16")
    ]
    assert times[0] == times[1] > times[2]


def test_in_async_the_slowdowns_beside_each_other_are_found_again(small: Any, tmp_path: Path) -> None:
    """The rows are those of a simulated run: its trainer is 1.3 times as slow as known, and 1.6 times as slow again
    while trajectories run; its engines are 1.4 times as slow as known. The time of its train steps hardly depends on
    the batch, because the groups of its batches are not those of the recorded steps."""
    run, steps = tmp_path / "run", 24
    shutil.copytree(small.run, run)
    for step in range(4, steps + 1):
        source = run / "trajectories" / f"step_{1 + step % 3:06}.jsonl.gz"
        shutil.copy(source, run / "trajectories" / f"step_{step:06}.jsonl.gz")
    changes = {"run.steps": steps, "rollout.mode": "async", "engine.processes": 1, "run.threads": 1}
    recipe = load_recipe(Recipe, small.recipe, changes)
    known = KNOWN.model_copy(update={"step_overhead_s": 0.02, "train": 0.05})
    slower = {"train": known.train / 1.3, "train_overhead_s": KNOWN.train_overhead_s * 1.3}
    true = known.model_copy(update=slower | {"train_beside": 1.6, "engine_beside": 1.4})
    setting = setting_of(recipe, true, run)
    simulated_steps = simulate(setting, RunOptions(recipe.run.seed)).steps
    counts, begin_s, rows = [step.counts for step in simulated_steps], 0.0, []
    for index, step in enumerate(simulated_steps):
        after = counts[index + 1] if index + 1 < steps else None
        rows.append(
            {
                "step": index + 1,
                "perf/step_time": step.end_s - begin_s,
                "time/train": step.train_s,
                "time/generate": 0.0,
                "time/generate_hidden": after.slot_s / setting.slots if after is not None else 0.0,
                "perf/slot_seconds": step.counts.busy_slot_s,
                "tokens/generated": step.counts.generated_tokens,
            }
        )
        begin_s = step.end_s
    assert any(row["time/generate_hidden"] == 0 for row in rows)
    found, _ = fit_run(recipe, "CPU", known, run, rows)
    assert found.train_overhead_s == pytest.approx(true.train_overhead_s, rel=0.1)
    assert found.train_beside == pytest.approx(1.6, rel=0.1)
    assert found.engine_beside == pytest.approx(1.4, rel=0.1)


def test_times_and_memory_that_a_run_measures_directly(small: Any) -> None:
    """A step of 10 s: 3 s of generation, 1 s of scoring, 4 s of training, 0.5 s of publication; 1.5 s are left. The
    trainer needs 1.1 GB, of which 0.9 − 0.7 GB are tensors."""
    row = {
        "step": 1,
        "perf/step_time": 10.0,
        "time/wait_for_batch": 5.0,
        "time/generate": 3.0,
        "time/judge": 1.0,
        "time/train": 4.0,
        "time/weight_sync": 0.5,
        "perf/trainer_peak_bytes": 1.1e9,
        "perf/trainer_peak_tokens": 100.0,
    }
    memory = ((50, 0.8e9), (100, 0.9e9), (200, 1.0e9))
    recipe = load_recipe(Recipe, small.recipe)
    found = measured_directly(recipe, [row], memory)
    assert found["publish_latency_s"] == 0.5
    assert found["cycle_overhead_s"] == pytest.approx(1.5)
    assert found["runtime_gb"] == pytest.approx(0.9)
    overlapping = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"mode": "async"})})
    assert measured_directly(overlapping, [row], ())["cycle_overhead_s"] == pytest.approx(0.5)  # 10 − 5 − 4 − 0.5
    assert "runtime_gb" not in measured_directly(overlapping, [row], ())
    assert "reward_model_s" not in found
    busy = [row | {"time/reward_model_busy": seconds} for seconds in (1.0, 2.0, 4.0)]  # the first step does not count
    num = recipe.rollout.batch_groups * recipe.rollout.group_size
    assert measured_directly(recipe, busy, ())["reward_model_s"] == pytest.approx(3.0 / num)


def test_a_run_that_fails_is_reported_with_its_output(small: Any) -> None:
    recipe = load_recipe(Recipe, small.recipe)
    task = recipe.task[0].model_copy(update={"params": {"min_terms": -1}})
    with pytest.raises(UserError, match=r"the run that `baton profile` measures failed:\n(.|\n)*min_terms"):
        with_whole_steps(recipe.model_copy(update={"task": (task,)}), "CPU", KNOWN, 1, lambda text: None)
