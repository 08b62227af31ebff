"""Predictions for a run: a simulation of its recipe with a calibration of this machine."""

from __future__ import annotations

from pathlib import Path

from baton.cost.efficiency import CalibrationSettings
from baton.cost.memory import RUNTIME_BYTES
from baton.planner.problem import make_step
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_settings, read_workload
from baton.records.predictions import MemoryByTokens, Predictions, num_warm
from baton.run.predictions import predictions, reward_stage_s
from baton.simulator.input_sources import RecipeSource, SimulationOptions, recorded_groups
from baton.simulator.result import first_full
from baton.simulator.run import run_request
from baton.simulator.simulation import RunOptions

STEPS = 50
"""Maximum number of train steps from which a longer run is predicted. The simulation has further steps before and after
them: at the start the pipeline fills, and in `async` the last steps train batches that already exist."""


def simulated_predictions(recipe: Recipe, calibration: Path, workload: Path, memory: MemoryByTokens) -> Predictions:
    """Return the predictions for a run on this machine. `memory`: as in `predictions_of_plan`."""
    measured, work = read_settings(CalibrationSettings, calibration).build(), read_workload(workload)
    source = RecipeSource(recipe, measured, work)
    recorded = recorded_groups(workload) if workload.is_dir() else ()
    first, num_steps = first_full(recipe.rollout.rules()), recipe.run.steps
    window = num_warm(num_steps), num_steps  # the steps whose measured values are compared with the predictions
    if num_steps > STEPS + 2 * first:
        window, num_steps = (max(num_warm(STEPS), first), STEPS + first), STEPS + 2 * first
    setting = source.setting(SimulationOptions(steps=num_steps, recorded=recorded))
    result, _ = run_request(setting, RunOptions(recipe.run.seed), None, is_traced=False, window=window)
    efficiency, has_model = measured.of(source.gpu), any(each.kind == "model" for each in recipe.reward)
    more_bytes = efficiency.runtime_gb * 1e9 - RUNTIME_BYTES
    busy_s = efficiency.reward_model_s * recipe.rollout.batch_groups * recipe.rollout.group_size
    stage = make_step(work)
    transfer_s = setting.publish_s if setting.swarm is None else setting.swarm.fetch_s
    return predictions(
        f"simulation with {calibration} and lengths of {workload}",
        {
            "step": result.step_s,
            "generation": result.generate_s,
            "rewards": reward_stage_s(stage.reward_s(result.generate_s), result.step_s, overlaps=stage.overlaps),
            "training": result.train_s,
            "transfer": transfer_s,
            "staleness": result.mean_staleness,
            "trainer idle": 1 - result.trainer_busy,
            "engine slots idle": 1 - result.rollout_occupancy * result.generate_s / result.step_s,
            "reward model idle": 1 - busy_s / result.step_s if busy_s and has_model else None,
            "response length": setting.work.output.mean,
        },
        tuple((tokens, num_bytes + more_bytes) for tokens, num_bytes in memory),
    )
