"""Compares the predictions of runs with their measurements, as every run with predictions does.

    python -m benchmarks.prediction.matrix lengths            # a run with seed 1, whose lengths the predictions use
    python -m benchmarks.prediction.matrix measure sync swarm # each case: its profile, directly before its run
    python -m benchmarks.prediction.matrix table              # the table of the README, from results/matrix

`--set` changes the recipes of lengths, profiles and runs: `--set trainer.lr=1e-6 rollout.batch_groups=4`.
`--longer 2` doubles the train steps of lengths, profiles and runs. This averages more changes of the machine's speed,
and more groups, of which only those whose rewards differ are trained on.

The predictions come from simulations with the calibrations of `baton profile`, whose runs have the seed after that of
the measured run. Unless `--set run.seed=…` says otherwise, measured runs have seed 0. `measure` appends predictions
and measurements to results/matrix/runs.jsonl, with commit, hardware, and, during profile and run, the processor time
that other processes and other virtual machines used, and the speed of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.machine import machine

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results" / "matrix"
QUICKSTART, SMOLLM2 = "recipes/quickstart.toml", "recipes/smollm2-sums.toml"
STEPS = {QUICKSTART: 20, SMOLLM2: 12}
PROFILE_STEPS = {QUICKSTART: 16, SMOLLM2: 8}
ALWAYS = {QUICKSTART: [], SMOLLM2: ["rollout.batch_groups=8"]}
"""Recipe → overrides of all its cases. With the 16 groups of the recipe, the steps would take twice as long."""

SAMPLE_EVERY_S = 10.0

CASES: dict[str, tuple[str, list[str]]] = {
    "sync": (QUICKSTART, ["engine.processes=0"]),
    "partial": (QUICKSTART, ["engine.processes=0", "rollout.mode=partial"]),
    "async": (QUICKSTART, ["engine.processes=1", "rollout.mode=async"]),
    "ranks": (QUICKSTART, ["trainer.ranks=2"]),
    "swarm": (QUICKSTART, ["engine.processes=0", "swarm.workers=2"]),
    "smollm2": (SMOLLM2, ["engine.processes=0"]),
    "smollm2-partial": (SMOLLM2, ["engine.processes=0", "rollout.mode=partial"]),
    "smollm2-async": (SMOLLM2, ["engine.processes=1", "rollout.mode=async"]),
    "smollm2-ranks": (SMOLLM2, ["trainer.ranks=2", "trainer.share_prompts=false"]),
    "smollm2-swarm": (SMOLLM2, ["engine.processes=0", "swarm.workers=2"]),
}
"""Case → recipe and overrides."""


def always(recipe: str) -> list[str]:
    """Return `ALWAYS`; for SmolLM2 also the faster data types on this processor. On a processor without instructions
    for bfloat16, float32 is faster."""
    if recipe != SMOLLM2:
        return ALWAYS[recipe]
    from benchmarks.smollm2.model import settings

    return [*ALWAYS[recipe], *settings()]


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


def run(recipe: str, steps: int, directory: Path, *overrides: str) -> dict[str, Any]:
    """Run a recipe without evaluations, and return its report."""
    given = [f"run.directory={directory}", f"run.steps={steps}", "eval.enabled=false", *overrides]
    return dict(json.loads(baton("train", recipe, "--overwrite", "--json", *given)))


def lengths(recipe: str) -> Path:
    """Return the directory of the run whose lengths the predictions for a recipe use."""
    return ROOT / "runs" / f"lengths-{Path(recipe).stem}"


def record_lengths(recipes: list[str], further: list[str], longer: int) -> None:
    """Make these runs. further: more overrides. longer: factor of the number of steps."""
    for recipe in recipes or STEPS:
        given = [*always(recipe), *further, f"run.name={lengths(recipe).name}", "run.seed=1"]
        run(recipe, longer * STEPS[recipe], lengths(recipe).parent, *given)


def used_s() -> tuple[float, float, float, float]:
    """Return the present time, and the processor seconds that all processes of the machine have used, that this process
    and its children have used, and that the host gave to other virtual machines. The first two include the third,
    because the time of a process includes the time in which the host stopped it."""
    counts = [int(count) for count in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    used, tick_s = sum(counts) - counts[3] - counts[4], 1 / os.sysconf("SC_CLK_TCK")  # not idle, no waits for disks
    own_s = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), used * tick_s, own_s, counts[7] * tick_s


def measure_speed(stopped: threading.Event, samples: list[tuple[float, float]]) -> None:
    """Measure the speed of one core until `stopped` is set, every `SAMPLE_EVERY_S` seconds for about 0.1 seconds.
    Append to `samples`: TFLOP/s of products of two matrices with 512 rows and columns in float32, and GB/s read and
    written by copies of 32 MiB. Both are per second of processor time of this thread, without waits for a core."""
    import torch

    torch.set_num_threads(1)
    matrix, long = torch.ones(512, 512), torch.ones(8 * 1024**2)
    while not stopped.wait(SAMPLE_EVERY_S):
        begin_s = time.thread_time()
        for _ in range(16):
            matrix @ matrix
        middle_s = time.thread_time()
        for _ in range(4):
            long.clone()
        product_s, copy_s = middle_s - begin_s, time.thread_time() - middle_s
        samples.append((round(16 * 2 * 512**3 / product_s / 1e12, 4), round(4 * 2 * long.nbytes / copy_s / 1e9, 2)))


@contextmanager
def watched(state: dict[str, dict[str, Any]], phase: str) -> Iterator[None]:
    """Watch the machine while the block runs, and add to `state`: name → phase → what the results record."""
    samples, stopped = list[tuple[float, float]](), threading.Event()
    thread = threading.Thread(target=measure_speed, args=(stopped, samples), daemon=True)
    begin = used_s()
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    seconds, all_s, own_s, stolen_s = (after - before for before, after in zip(begin, used_s(), strict=True))
    tflops, copy = ([each[i] for each in samples] for i in range(2))
    speed = {"tflops": statistics.median(tflops), "copy_gb_per_s": statistics.median(copy)} if samples else {}
    state.setdefault("cores_of_others", {})[phase] = max(0.0, all_s - own_s) / seconds
    state.setdefault("stolen_cores", {})[phase] = stolen_s / seconds
    state.setdefault("processor_speed", {})[phase] = speed
    state.setdefault("processor_samples", {})[phase] = samples


def with_own_lengths(directory: Path, calibration: Path) -> list[dict[str, Any]]:
    """Predict a run again, from the response lengths of the run itself, and return the comparison. The error that the
    lengths of another run cause is thus excluded."""
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.records.metrics import read_metrics
    from baton.records.predictions import compare
    from baton.simulator.predictions import simulated_predictions

    predictions = simulated_predictions(load_recipe(Recipe, directory / "recipe.toml"), calibration, directory, ())
    return list(map(msgspec.to_builtins, compare(predictions, read_metrics(directory))))


def train_steps(directory: Path) -> list[dict[str, float]]:
    """Return the time and the computed tokens of each train step of a run."""
    from baton.records.metrics import read_metrics
    from baton.records.run_directory import RunDirectory
    from baton.simulator.timing import computed_tokens, rewards_differ

    opened, found = RunDirectory.open(directory), []
    shares = bool(opened.recipe()["trainer"]["share_prompts"])
    for row in (each for each in read_metrics(directory) if "time/train" in each):
        groups = opened.groups(int(row["step"]))
        taught = list(filter(rewards_differ, groups))
        found.append(
            {
                "step": row["step"],
                "train_s": row["time/train"],
                "computed_tokens": sum(computed_tokens(group, shares_prompts=shares)[0] for group in groups),
                "groups_with_advantages": len(taught),
                "computed_tokens_with_advantages": sum(
                    computed_tokens(group, shares_prompts=shares)[0] for group in taught
                ),
            }
        )
    return found


def measure(case: str, note: str, further: list[str], longer: int) -> None:
    """Profile a case and run it once, and append its comparison. further: more overrides. longer: factor of the number
    of steps of profile and run."""
    recipe, overrides = CASES[case][0], [*always(CASES[case][0]), *CASES[case][1], *further]
    calibration, state = RESULTS / f"{case}.toml", dict[str, dict[str, Any]]()
    with watched(state, "profile"):
        baton("profile", recipe, *overrides, "--steps", longer * PROFILE_STEPS[recipe], "--out", calibration)
    files = [f"fleet.calibration={calibration}", f"fleet.workload={lengths(recipe)}"]
    with watched(state, "run"):
        report = run(recipe, longer * STEPS[recipe], ROOT / "runs", *overrides, *files, f"run.name=matrix-{case}")
    row = {
        "case": case,
        "note": note,
        "steps": longer * STEPS[recipe],
        "profile_steps": longer * PROFILE_STEPS[recipe],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine(),
        **state,
        "overrides": overrides,
        "predictions": report["predictions"],
        "with_own_lengths": with_own_lengths(ROOT / "runs" / f"matrix-{case}", calibration),
        "train_steps": train_steps(ROOT / "runs" / f"matrix-{case}"),
    }
    with (RESULTS / "runs.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    errors = {each["term"]: each["error"] and round(each["error"], 3) for each in report["predictions"]}
    machine_state = {name: each for name, each in state.items() if name != "processor_samples"}
    print(f"{case} {note}: {machine_state}; {errors}", flush=True)


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
    predicted = statistics.median(each["predicted"] for each in same)
    return f"{predicted:.3g} | {measured:.3g} | {shown} | {'yes' if abs(middle) <= 0.15 else '**no**'}"


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("lengths", "measure", "table"))
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; of lengths: {', '.join(STEPS)}")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides")
    parser.add_argument("--longer", type=int, default=1, metavar="N", help="N times as many train steps")
    parser.add_argument("--note", default="quiet", help="state of the machine, which the results record")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if arguments.command == "lengths":
        record_lengths(arguments.names, arguments.set, arguments.longer)
    elif arguments.command == "table":
        table(arguments.note)
    else:
        for case in arguments.names or CASES:
            measure(case, arguments.note, arguments.set, arguments.longer)


if __name__ == "__main__":
    main()
