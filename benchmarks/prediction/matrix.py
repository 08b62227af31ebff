"""Compares the predictions of the quickstart with its measurements, as every run with predictions does.

    python -m benchmarks.prediction.matrix profile            # three calibrations, and the lengths of another run
    python -m benchmarks.prediction.matrix measure sync swarm # each case once, in this order
    python -m benchmarks.prediction.matrix table              # the table of the README, from results/matrix

The predictions come from simulations with the calibrations of `baton profile`. The lengths come from a run of 20 steps
with seed 1; the measured runs have seed 0. `measure` appends predictions and measurements to results/matrix/runs.jsonl,
with commit, hardware and load average.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results" / "matrix"
ONE = ["engine.processes=0"]
CASES: dict[str, tuple[str, list[str]]] = {
    "sync": ("one", ONE),
    "partial": ("one", [*ONE, "rollout.mode=partial"]),
    "async": ("async", ["engine.processes=1", "rollout.mode=async"]),
    "ranks": ("two", ["trainer.ranks=2"]),
    "swarm": ("two", ["engine.processes=0", "swarm.workers=2"]),
}
"""Case → calibration, and overrides of recipes/quickstart.toml."""
PROFILES = {"one": ONE, "async": CASES["async"][1], "two": []}
LENGTHS = ROOT / "runs" / "lengths"
STEPS = 20


def baton(*arguments: object) -> str:
    """Run a command of Baton and return what it prints."""
    command = [sys.executable, "-m", "baton", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def profile(names: list[str]) -> None:
    """Write a calibration of each kind, and record a run whose lengths the predictions use."""
    for name in names or [*PROFILES, "lengths"]:
        if name != "lengths":
            baton("profile", "recipes/quickstart.toml", *PROFILES[name], "--out", RESULTS / f"{name}.toml")
            continue
        given = [
            f"run.directory={LENGTHS.parent}",
            "run.name=lengths",
            "run.seed=1",
            f"run.steps={STEPS}",
            "eval.enabled=false",
        ]
        baton("train", "recipes/quickstart.toml", "--overwrite", *given)


def measure(case: str, note: str) -> None:
    """Run a case once, and append its comparison."""
    calibration, overrides = CASES[case]
    files = [f"fleet.calibration={RESULTS / calibration}.toml", f"fleet.workload={LENGTHS}"]
    with tempfile.TemporaryDirectory() as directory:
        place = [f"run.directory={directory}", "run.name=run", f"run.steps={STEPS}", "eval.enabled=false"]
        report = json.loads(baton("train", "recipes/quickstart.toml", *overrides, *files, *place, "--json"))
    row = {
        "case": case,
        "note": note,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine(),
        "overrides": overrides,
        "predictions": report["predictions"],
    }
    with (RESULTS / "runs.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(case, note, {each["term"]: each["error"] and round(each["error"], 3) for each in report["predictions"]})


def table(note: str) -> None:
    """Print a table for the README: median over the runs of a case with this note."""
    rows = [json.loads(line) for line in (RESULTS / "runs.jsonl").read_text().splitlines()]
    for case in CASES:
        runs = [row["predictions"] for row in rows if row["case"] == case and row["note"] == note]
        for same in zip(*runs, strict=True):
            print(f"| {case} ({len(runs)}) | {same[0]['term']} | {cells(same)} |")


def cells(same: tuple[dict[str, Any], ...]) -> str:
    """Return the cells of one term: predicted, measured, error, and whether it is within the limit."""
    first = same[0]
    if first["predicted"] is None or first["measured"] is None:
        return (
            " | ".join(["–" if first[key] is None else f"{first[key]:.3g}" for key in ("predicted", "measured")])
            + " | – | –"
        )
    errors = [each["error"] for each in same]
    middle, unit = statistics.median(errors), " points" if first["unit"] == "share" else " %"
    shown = f"{100 * middle:+.0f}{unit} ({100 * min(errors):+.0f} to {100 * max(errors):+.0f})"
    measured = statistics.median(each["measured"] for each in same)
    return f"{first['predicted']:.3g} | {measured:.3g} | {shown} | {'yes' if abs(middle) <= 0.15 else '**no**'}"


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("profile", "measure", "table"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; of profile: {', '.join(PROFILES)}, lengths")
    parser.add_argument("--note", default="quiet", help="state of the machine, which the results record")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if arguments.command == "profile":
        profile(arguments.names)
    elif arguments.command == "table":
        table(arguments.note)
    else:
        for case in arguments.names or CASES:
            measure(case, arguments.note)


if __name__ == "__main__":
    main()
