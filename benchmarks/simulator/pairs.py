"""Predictions of runs in mode `async`, from profiles that alternate with the runs.

    python -m benchmarks.simulator.pairs measure near fast slow --pairs 4   # 12 minutes and 2 for each calibration
    python -m benchmarks.simulator.pairs compare near fast slow             # simulates: minutes for each case
    python -m benchmarks.simulator.pairs table near fast slow               # prints the table of the README

`measure` makes one calibration of each case with `baton profile`, then pairs of runs: one with the seed and the number
of steps of the run in `baton profile`, and one that is predicted. `compare` fits the calibration to each run of the
first kind, as `baton profile` does, and simulates each run of the second kind with the calibration, with each of the
fits, and with the run's own lengths. Measured terms are those that a run with predictions reports, except `generation`:
it is the time of the occupied slots divided by their occupancy and number, as in the simulation, because the stored
runs omit a part of it in `time/generate_hidden`. Raw results: results/pairs.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from baton.cost.efficiency import CalibrationSettings, Efficiencies, Efficiency
from baton.profile.whole_steps import fit_run, measured_directly
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import workload_of_run
from baton.records.metrics import read_metrics
from baton.records.predictions import MEMORY, Prediction, Predictions, compare, steady_rows
from baton.records.run_directory import RunDirectory
from baton.run.dry_run import trainer_bytes
from baton.simulator.input_sources import RecipeSource, SimulationOptions, recorded_groups
from baton.simulator.result import summarise
from baton.simulator.run import simulate
from baton.simulator.simulation import RunOptions
from benchmarks.machine import machine

RAW = Path(__file__).parent / "results" / "pairs.json"
RUNS = Path("runs/pairs")
RECIPE = "recipes/quickstart.toml"
ASYNC = ("engine.processes=1", "rollout.mode=async")
CASES: dict[str, tuple[str, ...]] = {
    "near": (),
    "fast": ("algorithm.num_epochs=2",),
    "slow": ("engine.slots=16",),
    "fast2": ("algorithm.num_epochs=3", "rollout.max_staleness=2"),
    "slow2": ("engine.slots=24", "rollout.group_size=16", "rollout.batch_groups=16"),
}
"""Case → overrides. The engine is about as fast as the trainer (near), clearly faster, or clearly slower."""
PROFILED = ("run.seed=1", "run.steps=16", "checkpoint.every=16", "trainer.warmup_steps=0", "trainer.decay=constant")
"""Overrides of the run in `baton profile`."""
STEPS = 24
SENSITIVITY = 0.9, 1.1
"""Factors of `engine_beside` with which each prediction is repeated."""
Terms = dict[str, float]


def baton(*arguments: object) -> None:
    """Run a command of Baton. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "baton", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def measure(case: str, pairs: int) -> None:
    """Make the calibration of a case, if it does not exist, and its pairs of runs."""
    overrides = *ASYNC, *CASES[case]
    RUNS.mkdir(parents=True, exist_ok=True)
    if not calibration(case).exists():
        baton("profile", RECIPE, *overrides, "--out", calibration(case))
    for index in range(pairs):
        for name, own in ((f"p{case}", PROFILED), (case, (f"run.steps={STEPS}",))):
            names = f"run.directory={RUNS}", f"run.name={name}-{index}", "eval.enabled=false"
            baton("train", RECIPE, *overrides, *own, *names, "--overwrite")


def calibration(case: str) -> Path:
    return RUNS / f"{case}.toml"


def runs(name: str) -> list[Path]:
    """Return the directories of the runs with this name."""
    return sorted(path for path in RUNS.glob(f"{name}-*") if path.is_dir())


def recipe_of(run: Path) -> Recipe:
    return Recipe.model_validate(RunDirectory.open(run).recipe())


def measured(run: Path) -> Terms:
    """Return the measured terms of a run, and the carried groups."""
    rows = [row for row in read_metrics(run) if "perf/step_time" in row]
    terms = {each.term: each.measured or 0.0 for each in compare(Predictions("", ()), rows)}
    slots, steady = recipe_of(run).engine.slots, steady_rows(rows)
    slot_s = [row["perf/slot_seconds"] / row["perf/slot_occupancy"] for row in steady if row.get("perf/slot_seconds")]
    return {
        "step": terms["step"],
        "generation": sum(slot_s) / slots / len(steady),
        "training": terms["training"],
        MEMORY: terms[MEMORY],
        "staleness": terms["staleness"],
        "carried groups": statistics.fmean(row["rollout/carried_groups"] for row in steady),
    }


def fitted(known: Efficiency, run: Path) -> Efficiency:
    """Fit a calibration to a run, as `baton profile` does."""
    recipe, rows = recipe_of(run), [row for row in read_metrics(run) if "perf/step_time" in row]
    memory = trainer_bytes(recipe, is_here=True)
    direct = known.model_copy(update=measured_directly(recipe, rows, memory))
    return fit_run(recipe, "CPU", direct, run, rows)[0]


def predicted(efficiency: Efficiency, run: Path) -> Terms:
    """Simulate a run with its own lengths. Return the terms as `measured` does."""
    recipe, rows = recipe_of(run), read_metrics(run)
    source = RecipeSource(recipe, Efficiencies(by_gpu={"CPU": efficiency}), workload_of_run(run))
    setting = source.setting(SimulationOptions(recorded=recorded_groups(run)))
    record = simulate(setting, RunOptions(recipe.run.seed))
    result, steps = summarise(setting, record), record.steps
    more = efficiency.runtime_gb * 1e9 - Efficiency().runtime_gb * 1e9
    memory = tuple((tokens, size + more) for tokens, size in trainer_bytes(recipe, is_here=True))
    peak = max(row["perf/trainer_peak_tokens"] for row in steady_rows(rows))
    return {
        "step": result.step_s,
        "generation": result.generate_s,
        "training": result.train_s,
        MEMORY: Prediction(MEMORY, memory[-1][1], memory).at(peak),
        "staleness": result.mean_staleness,
        "carried groups": statistics.fmean(each.counts.carried_groups for each in steps[len(steps) // 5 :]),
    }


def compared(case: str) -> dict[str, Any]:
    """Return the fits of a case, and of each of its runs the measured and the predicted terms."""
    known = load_recipe(CalibrationSettings, calibration(case)).build().of("CPU")
    fits = {"profile": known} | {run.name: fitted(known, run) for run in runs(f"p{case}")}
    found = {}
    for run in runs(case):
        found[run.name] = {
            "measured": measured(run),
            "predicted": {name: predicted(each, run) for name, each in fits.items()},
            "predicted_by_own_fit": predicted(fitted(known, run), run),
            "changed": {
                f"engine_beside × {factor}": {
                    name: predicted(each.model_copy(update={"engine_beside": each.engine_beside * factor}), run)
                    for name, each in fits.items()
                }
                for factor in SENSITIVITY
            },
        }
    return {
        "overrides": [*ASYNC, *CASES[case]],
        "calibration": calibration(case).read_text(),
        "fits": {name: each.model_dump() for name, each in fits.items()},
        "runs": found,
    }


def row(case: str, term: str, found: dict[str, Any], without: str | None = None) -> str:
    """Return a row of the table: mean of the measured values and their span, and measured ÷ predicted − 1. without:
    name of a calibration to leave out."""
    every = list(found["runs"].values())
    values = [each["measured"][term] for each in every]
    mean = statistics.fmean(values)
    errors = [
        each["measured"][term] / told[term] - 1
        for each in every
        for name, told in each["predicted"].items()
        if name != without
    ]
    own = [each["measured"][term] / each["predicted_by_own_fit"][term] - 1 for each in every]
    changed = [
        told[term] / each["predicted"][name][term] - 1
        for each in every
        for predictions in each["changed"].values()
        for name, told in predictions.items()
        if name != without
    ]
    within = sum(abs(error) <= 0.15 for error in errors)
    middle = statistics.median(errors)
    return (
        f"| {case} | {term} | {mean:.3g} | {(max(values) - min(values)) / mean:.0%} | {middle:+.0%} "
        f"({min(errors):+.0%} to {max(errors):+.0%}) | {within} of {len(errors)} | {statistics.median(own):+.0%} "
        f"| {min(changed):+.0%} to {max(changed):+.0%} |"
    )


def main() -> None:
    """Measure or compare the given cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "compare", "table"))
    parser.add_argument("cases", nargs="+", choices=tuple(CASES))
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--without-profile", action="store_true", help="table: leave out the calibrations of `measure`")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        for case in arguments.cases:
            measure(case, arguments.pairs)
        return
    raw = json.loads(RAW.read_text()) if RAW.exists() else {}
    if arguments.command == "compare":
        raw |= machine() | {case: compared(case) for case in arguments.cases}
        RAW.write_text(json.dumps(raw, indent=1) + "\n")
    for case in arguments.cases:
        for term in ("step", "generation", "training", MEMORY, "staleness", "carried groups"):
            print(row(case, term, raw[case], "profile" if arguments.without_profile else None))


if __name__ == "__main__":
    main()
