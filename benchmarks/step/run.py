"""One whole RL step: Baton against TRL's GRPOTrainer, taking turns in one run.

    python -m venv .venv-step && .venv-step/bin/pip install -e . -r benchmarks/step/requirements.txt
    .venv-step/bin/pip install --no-deps reasoning-gym==0.1.25
    .venv-step/bin/python benchmarks/step/run.py

Raw results go to results/raw.json, the table to results/table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from turns import ROOT, SAME, Side

HERE = Path(__file__).parent
TRAJECTORIES = 256
"""Of a step: 32 groups of 8."""
STAGES = ("time/generate", "time/judge", "time/train", "time/weight_sync")


def main() -> None:
    """Let the sides take turns, and write raw results and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="of each side in a round")
    parser.add_argument("--trl-rows", type=int, nargs="+", default=[64], help="rows per pass of TRL's trainer")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--table-only", action="store_true", help="make the table from the raw results that are there")
    arguments = parser.parse_args()
    raw = arguments.out / "raw.json"
    if not arguments.table_only:
        found = measure(arguments.rounds, arguments.steps, arguments.trl_rows)
        arguments.out.mkdir(exist_ok=True)
        raw.write_text(json.dumps(found, indent=1) + "\n")
    table = make_table(json.loads(raw.read_text())["turns"])
    (arguments.out / "table.md").write_text(table)
    print(table)


def measure(rounds: int, steps: int, trl_rows: list[int]) -> dict[str, Any]:
    """Start all sides, then go round."""
    cores = len(os.sched_getaffinity(0))
    before = machine()
    with tempfile.TemporaryDirectory() as logs:
        sides = [Side("Baton", [str(HERE / "baton_side.py")], cores, Path(logs) / "baton")]
        for threads in sorted({1, cores}):
            for rows in trl_rows:
                name = f"TRL, {threads} thread{'s' if threads > 1 else ''}, {rows} rows per pass"
                command = [str(HERE / "trl_side.py"), str(threads), str(rows)]
                sides.append(Side(name, command, threads, Path(logs) / f"trl-{threads}-{rows}"))
        turns: dict[str, list[Any]] = {side.name: [] for side in sides}
        for side in sides:
            side.turn(2)  # warm up
        for _ in range(rounds):
            for side in sides:
                turn = side.turn(steps)
                turns[side.name].append(turn)
                print(f"{side.name}: {turn['wall_s'] / steps:.2f} s per step", flush=True)
        for side in sides:
            side.close()
    return {"machine": before, "overrides": SAME, "turns": turns}


def make_table(turns: dict[str, list[dict[str, Any]]]) -> str:
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
    best = min((name for name in turns if name != "Baton"), key=lambda name: statistics.median(per_step[name]))
    ratios = sorted(b / a for a, b in zip(per_step["Baton"], per_step[best], strict=True))
    load = statistics.median(t["load_average"] for found in turns.values() for t in found)
    lines.append(
        f"\nSteps per second, Baton ÷ the better TRL ({best}): **{statistics.median(ratios):.2f}** "
        f"({ratios[0]:.2f} – {ratios[-1]:.2f}); load average {load:.1f}."
    )
    lines.append(trained_tokens_per_s(turns))
    return "\n".join(lines) + "\n"


def trained_tokens_per_s(turns: dict[str, list[dict[str, Any]]]) -> str:
    """The train stage alone, as tokens of the batch per second: each side's median, and the ratio by rounds."""
    by_side = {
        name: [
            sum(s["response_length/mean"] for s in turn["steps"])
            * TRAJECTORIES
            / sum(s["time/train"] for s in turn["steps"])
            for turn in found
        ]
        for name, found in turns.items()
    }
    best = max((name for name in turns if name != "Baton"), key=lambda name: statistics.median(by_side[name]))
    ratios = sorted(a / b for a, b in zip(by_side["Baton"], by_side[best], strict=True))
    return (
        f"\nTrained tokens per second of the train stage alone: Baton {statistics.median(by_side['Baton']):,.0f}, "
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
