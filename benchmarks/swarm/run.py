"""What the swarm costs on one machine: the same recipe with engine processes behind a pipe and with workers at a hub.

    python benchmarks/swarm/run.py [--steps 20] [--rounds 3]

Both have two processes of one torch thread and the same slots. The runs take turns, and each generates the same tokens
(sync). Medians of steps after the third; the first are cold.
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

from baton.records.metrics import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIDES = {
    "pipe": ["engine.processes=2"],
    "swarm": ["swarm.workers=2"],
    "swarm, nothing scored again": ["swarm.workers=2", "inspection.trusted_share=0", "inspection.first=0"],
}
STAGES = ("perf/step_time", "time/wait_for_batch", "time/train", "time/weight_sync")


def run(directory: str, name: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """Train once; return the median times of a step."""
    settings = [f"run.directory={directory}", f"run.name={name}", f"run.steps={steps}"]
    settings += ["eval.every=1000", "eval.num_prompts=32", *overrides]
    command = [sys.executable, "-m", "baton", "train", "recipes/quickstart.toml", *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
    rows = [row for row in read_metrics(Path(directory) / name) if "perf/step_time" in row][3:]
    return {key: statistics.median(row[key] for row in rows) for key in STAGES}


def main() -> None:
    """Take turns, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            for index, (side, overrides) in enumerate(SIDES.items()):
                found[side].append(run(directory, f"r{number}-{index}", arguments.steps, overrides))
    lines = [
        "| | " + " | ".join(f"{key}, s" for key in STAGES) + " | step ÷ pipe |",
        "|---|" + "---|" * (len(STAGES) + 1),
    ]
    for side, rounds in found.items():
        cells = [f"{statistics.median(r[key] for r in rounds):.3f}" for key in STAGES]
        ratios = [
            mine["perf/step_time"] / other["perf/step_time"] for mine, other in zip(rounds, found["pipe"], strict=True)
        ]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})")
        lines.append(f"| {side} | " + " | ".join(cells) + " |")
    print("\n".join(lines))
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    raw = {"commit": git.stdout.strip(), "cores": os.cpu_count(), "load_before": load, "sides": found}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    (HERE / "results" / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
