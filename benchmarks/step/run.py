"""One whole RL step: Baton against TRL's GRPOTrainer, taking turns in one run.

    python -m venv .venv-step && .venv-step/bin/pip install -e '.[gguf]' -r benchmarks/step/requirements.txt
    .venv-step/bin/python benchmarks/step/run.py
    .venv-step/bin/python benchmarks/step/run.py --workload smollm2 --rounds 3 --steps 1 --trl float32

Raw results go to results/raw.json, the table to results/table.md; those of SmolLM2 to benchmarks/smollm2/results/trl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from turns import ROOT, Side

HERE = Path(__file__).parent
SAME = ("run.seed=0", "trainer.warmup_steps=0", "trainer.decay=constant", "eval.num_prompts=8")
"""Overrides of the recipe, for all sides."""


@dataclass(frozen=True)
class Workload:
    """What all sides compute, and in which settings TRL does so."""

    recipe: str
    overrides: tuple[str, ...]
    """A learning rate so small that lengths do not change."""
    trajectories: int
    """Of a step."""
    trl: tuple[tuple[int, int, str], ...]
    """Threads, rows per pass and dtype of each TRL side. 0 threads: one per core."""
    out: Path
    warm_up: int = 2
    """Steps before the first round."""
    counts_every_row: bool = False
    """Whether Baton has a second side, which also computes the gradient of rows with advantage 0."""


WORKLOADS = {
    "quickstart": Workload(
        "recipes/quickstart.toml",
        ("trainer.lr=1e-6",),
        256,
        ((1, 64, "float32"), (0, 64, "float32")),
        HERE / "results",
    ),
    "smollm2": Workload(
        "recipes/smollm2-sums.toml",
        ("trainer.lr=1e-8", "eval.greedy=false"),
        128,
        ((0, 32, "float32"), (0, 32, "bfloat16")),
        HERE.parent / "smollm2" / "results" / "trl",
        warm_up=1,
        counts_every_row=True,
    ),
}
STAGES = ("time/generate", "time/judge", "time/train", "time/weight_sync")


def main() -> None:
    """Let the sides take turns, and write raw results and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="of each side in a round")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="quickstart")
    parser.add_argument("--trl", nargs="*", choices=("float32", "bfloat16"), help="dtypes of TRL's sides; default: all")
    parser.add_argument("--out", type=Path, help="default: the results of the workload")
    parser.add_argument("--table-only", action="store_true", help="make the table from the raw results that are there")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    if arguments.trl is not None:  # all sides of SmolLM2 together need more than 24 GB of memory
        trl = tuple(side for side in workload.trl if side[2] in arguments.trl)
        workload = replace(workload, trl=trl, counts_every_row=workload.counts_every_row and not trl)
    out = arguments.out or workload.out
    raw = out / "raw.json"
    if not arguments.table_only:
        found = measure(workload, arguments.rounds, arguments.steps, for_machine(arguments.workload))
        out.mkdir(parents=True, exist_ok=True)
        raw.write_text(json.dumps(found, indent=1) + "\n")
    table = make_table(json.loads(raw.read_text())["turns"], workload.trajectories)
    (out / "table.md").write_text(table)
    print(table)


def for_machine(name: str) -> list[str]:
    """Return overrides for this machine: SmolLM2's model, and the dtypes of Baton."""
    if name != "smollm2":
        return []
    sys.path.append(str(HERE.parent / "smollm2"))
    from model import settings

    return settings()


def measure(workload: Workload, rounds: int, steps: int, more: list[str]) -> dict[str, Any]:
    """Start all sides, then go round. `more`: further overrides."""
    cores = len(os.sched_getaffinity(0))
    before = machine()
    work = [workload.recipe, *SAME, *workload.overrides, *more]
    with tempfile.TemporaryDirectory() as logs:
        sides = [Side("Baton", [str(HERE / "baton_side.py"), *work], cores, Path(logs) / "baton")]
        if workload.counts_every_row:
            command = [str(HERE / "baton_side.py"), "--every-row", *work]
            sides.append(Side("Baton, gradient of every row", command, cores, Path(logs) / "baton-every-row"))
        for threads, rows, dtype in workload.trl:
            threads = threads or cores
            name = f"TRL, {threads} thread{'s' if threads > 1 else ''}, {rows} rows per pass"
            name += f", {dtype}" if len({each for *_, each in workload.trl}) > 1 else ""
            command = [str(HERE / "trl_side.py"), str(threads), str(rows), dtype, *work]
            sides.append(Side(name, command, threads, Path(logs) / f"trl-{threads}-{rows}-{dtype}"))
        turns: dict[str, list[Any]] = {side.name: [] for side in sides}
        for side in sides:
            side.turn(workload.warm_up)
        for _ in range(rounds):
            for side in sides:
                turn = side.turn(steps)
                turns[side.name].append(turn)
                print(f"{side.name}: {turn['wall_s'] / steps:.2f} s per step", flush=True)
        for side in sides:
            side.close()
    return {"machine": before, "overrides": work, "turns": turns}


def make_table(turns: dict[str, list[dict[str, Any]]], trajectories: int) -> str:
    """Markdown: a row per side; medians over steps, ratio by rounds against the better TRL."""
    lines = [
        "| side | step s, median (range of rounds) | generate | judge | train | new weights | processor s per step | "
        "mean response, tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    per_step = {name: [t["wall_s"] / len(t["steps"]) for t in found] for name, found in turns.items()}
    for name, found in turns.items():
        steps = [step for turn in found for step in turn["steps"]]
        stages = [statistics.median(s.get(stage, 0.0) for s in steps) for stage in STAGES]
        cpu = statistics.median(t["cpu_s"] / len(t["steps"]) for t in found)
        times = per_step[name]
        cells = [name, f"{statistics.median(times):.2f} ({min(times):.2f} – {max(times):.2f})"]
        length = statistics.fmean(s["response_length/mean"] for s in steps)
        cells += [*[f"{s:.2f}" for s in stages], f"{cpu:.2f}", f"{length:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    peers = [name for name in turns if name.startswith("TRL")]
    if not peers:
        return "\n".join(lines) + "\n"
    best = min(peers, key=lambda name: statistics.median(per_step[name]))
    ratios = sorted(b / a for a, b in zip(per_step["Baton"], per_step[best], strict=True))
    load = statistics.median(t["load_average"] for found in turns.values() for t in found)
    lines.append(
        f"\nSteps per second, Baton ÷ the better TRL ({best}): **{statistics.median(ratios):.2f}** "
        f"({ratios[0]:.2f} – {ratios[-1]:.2f}); load average {load:.1f}."
    )
    lines += [trained_tokens_per_s(turns, own, trajectories) for own in turns if own not in peers]
    return "\n".join(lines) + "\n"


def trained_tokens_per_s(turns: dict[str, list[dict[str, Any]]], own: str, trajectories: int) -> str:
    """The train stage alone, as tokens of the batch per second: each side's median, and the ratio by rounds."""
    by_side = {
        name: [
            sum(s["response_length/mean"] for s in turn["steps"])
            * trajectories
            / sum(s["time/train"] for s in turn["steps"])
            for turn in found
        ]
        for name, found in turns.items()
    }
    peers = [name for name in turns if name.startswith("TRL")]
    best = max(peers, key=lambda name: statistics.median(by_side[name]))
    ratios = sorted(a / b for a, b in zip(by_side[own], by_side[best], strict=True))
    return (
        f"\nTrained tokens per second of the train stage alone: {own} {statistics.median(by_side[own]):,.0f}, "
        f"{best} {statistics.median(by_side[best]):,.0f}; ratio **{statistics.median(ratios):.2f}** "
        f"({ratios[0]:.2f} – {ratios[-1]:.2f})."
    )


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "commit": git.stdout.strip(),
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "trl", "numpy")},
        "python": platform.python_version(),
        "load_average_before": os.getloadavg(),
    }


if __name__ == "__main__":
    main()
