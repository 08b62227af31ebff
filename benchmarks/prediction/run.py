"""Does the cost model predict the quickstart on this machine? Measure the device, run it, compare step by step.

    python -m benchmarks.prediction.run [--runs 3] [--steps 40] [--out benchmarks/prediction/results]

The device is measured (`baton profile`) before the runs, medians of several. Then every train step is predicted from
its own lengths, with two cores as GPUs that take turns, and compared with what it took. All runs have one seed, so they
generate the same tokens: what differs between them is the machine. Where it is shared, a step takes what it takes alone
or longer, so beside the mean the tenth of steps that were least disturbed is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from baton.cost.efficiency import CalibrationSettings
from baton.planner.colocated import make_colocated_plan
from baton.planner.problem import Inputs
from baton.recipe.load import load_recipe
from baton.recipe.workload import read_cluster, workload_of_run
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.specs.model import read_model
from baton.specs.workload import measured as lengths

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STAGES = {"rollout_s": "time/generate", "train_s": "time/train", "sync_s": "time/weight_sync", "reward_s": "time/judge"}


def baton(*arguments: object) -> str:
    """Run a command of Baton and return what it prints."""
    command = [sys.executable, "-m", "baton", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def predicted(run: Path, calibration: Path) -> list[dict[str, float]]:
    """Return the predicted times of each train step, from the lengths of its own trajectories."""
    efficiencies = load_recipe(CalibrationSettings, calibration).build()
    cluster = read_cluster(ROOT / "recipes" / "planner" / "this-cpu.toml")
    whole, opened = workload_of_run(run), RunDirectory.open(run)
    rows = {row["step"]: row for row in read_metrics(run) if "reward/zero_std_frac" in row}
    found = []
    for step in opened.recorded_steps():
        members = [member.trajectory for group in opened.groups(step) for member in group.members]
        load = msgspec.structs.replace(
            whole,
            prompt=lengths([len(t.prompt_ids) for t in members]),
            output=lengths([max(1, t.num_tokens) for t in members]),
            trained_share=max(1e-3, 1 - rows[step]["reward/zero_std_frac"]),
        )
        times = make_colocated_plan(Inputs(cluster, read_model(ROOT / "models" / "quickstart"), load, efficiencies))
        found.append({name: getattr(times.breakdown, name) for name in ("step_s", *STAGES)})
    return found


def measured(run: Path) -> list[dict[str, float]]:
    """Return the times of each train step of a run."""
    rows = [row for row in read_metrics(run) if "perf/step_time" in row]
    return [{"step_s": row["perf/step_time"], **{name: row[key] for name, key in STAGES.items()}} for row in rows]


def compared(told: list[dict[str, float]], took: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return, of the step and each stage: mean predicted and measured, errors of the mean and of the calmest tenth."""
    found = {}
    for name in ("step_s", *STAGES):
        ratios = sorted((p[name] / m[name] for p, m in zip(told, took, strict=True)), reverse=True)
        mean_told, mean_took = (statistics.fmean(row[name] for row in rows) for rows in (told, took))
        found[name] = {
            "predicted_s": mean_told,
            "measured_s": mean_took,
            "error": mean_told / mean_took - 1,
            "error_of_calmest": ratios[len(ratios) // 10] - 1,
        }
    return found


def main() -> None:
    """Measure, run, predict, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    calibration = (arguments.out / "calibration.toml").absolute()
    baton("profile", "recipes/quickstart.toml", "--out", calibration)
    runs, loads = [], []
    with tempfile.TemporaryDirectory() as directory:
        for index in range(arguments.runs):
            overrides = (f"run.directory={directory}", f"run.name=run{index}", f"run.steps={arguments.steps}")
            baton("train", "recipes/quickstart.toml", *overrides, "eval.every=1000", "eval.num_prompts=32")
            run = Path(directory) / f"run{index}"
            runs.append(compared(predicted(run, calibration), measured(run)))
            loads.append(os.getloadavg()[0])
            step = runs[-1]["step_s"]
            print(
                f"run {index}: step predicted {step['predicted_s']:.3f} s, measured {step['measured_s']:.3f} s, "
                f"error {step['error']:+.1%}, calmest tenth {step['error_of_calmest']:+.1%}; load {loads[-1]:.1f}",
                flush=True,
            )
    steps = [run["step_s"]["measured_s"] for run in runs]
    noise = (max(steps) - min(steps)) / statistics.fmean(steps)
    print(f"run-to-run: {min(steps):.3f} to {max(steps):.3f} s, a span of {noise:.1%}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {"commit": commit, "cores": os.cpu_count(), "load": loads, "runs": runs, "noise": noise}
    (arguments.out / "prediction.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
