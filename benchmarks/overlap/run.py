"""What generating beside training gains on this machine: whole runs of the quickstart, the ways taking turns.

    python benchmarks/overlap/run.py      # about three minutes of two cores

`sync` uses both cores in each stage (two engine processes, then two trainer threads); `async` one core for each side
at the same time. Steps 4 to the last count; evaluations are left out. Raw results: results/.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ROUNDS, STEPS, SKIPPED = 2, 16, 3
BESIDE = ("rollout.mode=async", "engine.processes=1", "run.threads=1")
WAYS: dict[str, tuple[str, ...]] = {
    "sync, both cores in each stage": (),
    "sync, one trainer thread": ("run.threads=1",),
    "partial, both cores in each stage": ("rollout.mode=partial",),
    "async, resume": BESIDE,
    "async, keep": (*BESIDE, "rollout.on_new_version=keep"),
}


def main() -> None:
    """Run the ways in turn, and write the table."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    load = os.getloadavg()
    for _ in range(ROUNDS):
        for way, overrides in WAYS.items():
            found[way].append(run(overrides))
            print(way, {k: round(v, 3) for k, v in found[way][-1].items()}, flush=True)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    raw: dict[str, Any] = {"commit": git.stdout.strip(), "load_average": load, "cores": os.cpu_count(), "runs": found}
    (results / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    (results / "table.md").write_text(make_table(found))
    print(make_table(found))


def run(overrides: tuple[str, ...]) -> dict[str, float]:
    """Train once; return medians over steps."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "baton", "train", "recipes/quickstart.toml", f"run.steps={STEPS}"]
        command += [f"run.directory={scratch}", f"eval.every={STEPS}", "eval.num_prompts=16", *overrides]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=900)
        rows = [json.loads(line) for line in (Path(scratch) / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/step_time" in row][SKIPPED:]

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in steps)

    trained = sum(row["tokens/trained"] for row in steps)
    seconds = sum(row["perf/step_time"] for row in steps)
    return {
        "step_s": median("perf/step_time"),
        "trained_tokens_per_s": trained / seconds,
        "train_s": median("time/train"),
        "generate_s": median("time/generate"),
        "hidden_s": median("time/generate_hidden"),
        "overlap": median("perf/overlap"),
        "staleness": median("staleness/mean"),
    }


def make_table(found: dict[str, list[dict[str, float]]]) -> str:
    """One row per way, with the median and range over rounds."""
    lines = [
        "| way | step s (range) | trained tokens/s | over sync | train s | generate, hidden s | overlap | staleness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    sync = statistics.median(r["trained_tokens_per_s"] for r in found["sync, both cores in each stage"])
    for way, runs in found.items():
        middle = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
        steps = sorted(r["step_s"] for r in runs)
        cells = [
            way,
            f"{middle['step_s']:.2f} ({steps[0]:.2f} – {steps[-1]:.2f})",
            f"{middle['trained_tokens_per_s']:,.0f}",
            f"{middle['trained_tokens_per_s'] / sync:.2f}",
            f"{middle['train_s']:.2f}",
            f"{middle['generate_s']:.2f}, {middle['hidden_s']:.2f}",
            f"{middle['overlap']:.0%}",
            f"{middle['staleness']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
