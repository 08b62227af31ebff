"""Tests whether one value of `engine_beside` describes the engine of a run in mode `async` while it resumes
trajectories and while it does not.

    baton profile recipes/quickstart.toml rollout.mode=async engine.processes=1 --out calibration.toml
    baton train recipes/quickstart.toml rollout.mode=async engine.processes=1 run.steps=24 eval.enabled=false …
    python benchmarks/simulator/regimes.py calibration.toml RUN [RUN …]

Each run is simulated with its own lengths and with speeds that are fitted to the run itself, as `baton profile` fits
the speeds to its own run. Prints tokens per second and occupied slot, live and simulated, over the steps with at least
`MANY` resumed trajectories and over the steps with fewer, and stores all steps in results/regimes.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from baton.cost.efficiency import CalibrationSettings, Efficiencies, Efficiency
from baton.profile.whole_steps import fit_run, measured_directly
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import workload_of_run
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.simulator.input_sources import RecipeSource, SimulationOptions, recorded_groups
from baton.simulator.run import RunOptions, simulate
from benchmarks.machine import machine

RAW = Path(__file__).parent / "results" / "regimes.json"
MANY = 20
Steps = list[dict[str, float]]


def compare(run: Path, known: Efficiency) -> tuple[Efficiency, Steps]:
    """Return the speeds fitted to the run, and tokens, slot seconds and resumed trajectories of each step."""
    recipe = Recipe.model_validate(RunDirectory.open(run).recipe())
    rows = [row for row in read_metrics(run) if "perf/step_time" in row]
    direct = known.model_copy(update=measured_directly(recipe, rows, ()))
    fitted, _ = fit_run(recipe, "CPU", direct, run, rows)
    source = RecipeSource(recipe, Efficiencies(by_gpu={"CPU": fitted}), workload_of_run(run), "CPU")
    setting = source.setting(SimulationOptions(recorded=recorded_groups(run)))
    simulated = simulate(setting, RunOptions(recipe.run.seed)).steps
    return fitted, [
        {
            "step": row["step"],
            "step_s": row["perf/step_time"],
            "resumed": row["rollout/resumed"],
            "carried": row["rollout/carried_groups"],
            "tokens": row["tokens/generated"],
            "slot_s": row.get("perf/slot_seconds", 0.0),
            "simulated_tokens": step.counts.generated_tokens,
            "simulated_slot_s": step.counts.busy_slot_s,
        }
        for row, step in zip(rows, simulated, strict=True)
    ]


def rates(steps: Steps) -> str:
    """Return the live and the simulated tokens per second and occupied slot, and their ratio."""
    live_s, simulated_s = (sum(each[key] for each in steps) for key in ("slot_s", "simulated_slot_s"))
    if not live_s or not simulated_s:
        return "no such steps"
    live = sum(each["tokens"] for each in steps) / live_s
    simulated = sum(each["simulated_tokens"] for each in steps) / simulated_s
    return f"{len(steps)} steps, live {live:.0f}, simulated {simulated:.0f} ({simulated / live - 1:+.0%})"


def main() -> None:
    """Compare the given runs."""
    calibration, runs = Path(sys.argv[1]), [Path(text) for text in sys.argv[2:]]
    known = load_recipe(CalibrationSettings, calibration).build().of("CPU")
    raw: dict[str, Any] = {**machine(), "runs": {}}
    for run in runs:
        fitted, steps = compare(run, known)
        counted = steps[1:]  # the first step includes the start of the engine
        busy = [each for each in counted if each["slot_s"] > 1]
        print(f"{run.name}: engine_beside {fitted.engine_beside:.2f}, train_beside {fitted.train_beside:.2f}")
        print(f"  resuming: {rates([each for each in busy if each['resumed'] >= MANY])}")
        print(f"  others:   {rates([each for each in busy if each['resumed'] < MANY])}")
        raw["runs"][run.name] = {"fitted": fitted.model_dump(), "steps": steps}
    RAW.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
