"""Does the cost model predict the quickstart on this machine? Measure the device, run it, compare.

    python -m benchmarks.prediction.run [--runs 3] [--steps 60] [--out benchmarks/prediction/results]

The device is measured (`baton profile`) before the runs. A prediction is `baton plan --colocated` with that
calibration, two cores as GPUs, and the lengths of the first run; it is compared with the mean step of every run. All
runs have one seed, so they generate the same tokens, and what differs between them is the machine.
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
from typing import Any

from baton.metrics import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STAGES = {"rollout_s": "time/generate", "train_s": "time/train", "sync_s": "time/weight_sync", "reward_s": "time/judge"}


def baton(*arguments: object) -> str:
    """Run a command of Baton and return what it prints."""
    command = [sys.executable, "-m", "baton", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def measured(run: Path) -> dict[str, float]:
    """Return mean times of the train steps of a run."""
    rows = [row for row in read_metrics(run) if "perf/step_time" in row]
    found = {name: statistics.fmean(row[key] for row in rows) for name, key in STAGES.items()}
    return {"step_s": statistics.fmean(row["perf/step_time"] for row in rows), **found}


def main() -> None:
    """Measure, run, predict, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    calibration = arguments.out / "calibration.toml"
    baton("profile", "recipes/quickstart.toml", "--out", calibration.absolute())
    with tempfile.TemporaryDirectory() as directory:
        runs = []
        for index in range(arguments.runs):
            overrides = (f"run.directory={directory}", f"run.name=run{index}", f"run.steps={arguments.steps}")
            baton("train", "recipes/quickstart.toml", *overrides, "eval.every=1000", "eval.num_prompts=32")
            runs.append(measured(Path(directory) / f"run{index}"))
            print(f"run {index}: {json.dumps({k: round(v, 4) for k, v in runs[-1].items()})}", flush=True)
        question = ("--cluster", "recipes/planner/this-cpu.toml", "--model", "models/quickstart", "--colocated")
        files = ("--workload", f"{directory}/run0", "--calibration", calibration.absolute())
        plan: dict[str, Any] = json.loads(baton("plan", *question, *files, "--json"))["plan"]
    predicted = {name: plan["breakdown"][name] for name in ("step_s", *STAGES)}
    steps = [run["step_s"] for run in runs]
    mean, fastest = statistics.fmean(steps), min(steps)
    noise = (max(steps) - fastest) / mean
    error, error_of_fastest = predicted["step_s"] / mean - 1, predicted["step_s"] / fastest - 1
    print(f"predicted: {json.dumps({k: round(v, 4) for k, v in predicted.items()})}")
    print(f"step: predicted {predicted['step_s']:.3f} s, measured {mean:.3f} s on average, error {error:+.1%}")
    print(f"against the fastest run, {fastest:.3f} s: {error_of_fastest:+.1%}")
    print(f"run-to-run: {fastest:.3f} to {max(steps):.3f} s, a span of {noise:.1%}; load {os.getloadavg()}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "commit": commit,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "predicted": predicted,
        "runs": runs,
        "error": error,
        "error_of_fastest_run": error_of_fastest,
        "noise": noise,
    }
    (arguments.out / "prediction.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
