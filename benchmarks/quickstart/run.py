"""The quickstart over several seeds: held-out accuracy before and after, and how long it took.

    python benchmarks/quickstart/run.py --seeds 0 1 2 3 4      (the curves need matplotlib: pip install '.[report]')

Each seed is one `baton train recipes/quickstart.toml run.seed=S`, nothing else running. Raw reports go to results/,
the table to results/table.md and the curves to
results/curves.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def main() -> None:
    """Run the seeds in turn and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--table-only", action="store_true", help="make the table from the reports that are there")
    arguments = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for seed in [] if arguments.table_only else arguments.seeds:
        (results / f"seed{seed}.json").write_text(json.dumps(run_seed(seed), indent=1) + "\n")
    reports = [json.loads(file.read_text()) for file in sorted(results.glob("seed*.json"))]
    table = make_table(reports)
    (results / "table.md").write_text(table)
    draw_curves(reports, results / "curves.png")
    print(table)


def run_seed(seed: int) -> dict[str, Any]:
    """Train once in a temporary directory; return its report with commit, hardware and wall time."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "baton", "train", "recipes/quickstart.toml", f"run.seed={seed}"]
        command += [f"run.directory={scratch}", "--json"]
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=3600)
        wall_s = time.perf_counter() - begin
        run = Path(scratch) / "quickstart"
        curve = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((run / "run.json").read_text())
        shutil.rmtree(run)
    kept = ("commit", "seed", "threads", "processor", "cores", "packages")
    return {
        "command": " ".join(["baton", *command[3:]]).replace(scratch, "runs"),
        "wall_s": wall_s,
        "report": json.loads(done.stdout),
        "run": {key: facts[key] for key in kept},
        "reward_by_step": [round(row["reward/mean"], 4) for row in curve if "reward/mean" in row],
        "response_length_by_step": [
            round(row["response_length/mean"], 2) for row in curve if "response_length/mean" in row
        ],
        "largest_logprob_diff": max(row.get("policy/logprob_diff_max", 0.0) for row in curve),
    }


def make_table(reports: list[dict[str, Any]]) -> str:
    """Markdown: one row per seed, then the mean gain with its standard deviation."""
    lines = [
        "| seed | temperature 1: before | after | gain | greedy: before | after | gain | whole command, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    gains: dict[float, list[float]] = {1.0: [], 0.0: []}
    for report in reports:
        overall = {c["before"]["temperature"]: c for c in report["report"]["changes"] if c["before"]["task"] == "all"}
        cells = [str(report["report"]["seed"])]
        for temperature in (1.0, 0.0):
            before, after = (100 * overall[temperature][when]["accuracy"]["value"] for when in ("before", "after"))
            gains[temperature].append(after - before)
            cells += [f"{before:.1f} %", f"{after:.1f} %", f"{after - before:+.1f}"]
        cells.append(f"{report['wall_s']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    for temperature, name in ((1.0, "temperature 1"), (0.0, "greedy")):
        values = gains[temperature]
        mean = sum(values) / len(values)
        deviation = (sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)) ** 0.5
        lines.append(
            f"\nGain {name}: mean {mean:+.1f} points, standard deviation {deviation:.1f}, "
            f"at least 20 points in {sum(v >= 20 for v in values)} of {len(values)} seeds."
        )
    return "\n".join(lines) + "\n"


def draw_curves(reports: list[dict[str, Any]], path: Path) -> None:
    """Reward and response length by step, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes, key, title in (
        (left, "reward_by_step", "training reward (share correct)"),
        (right, "response_length_by_step", "response length, tokens"),
    ):
        for report in reports:
            values = report[key]
            seed = report["report"]["seed"]
            axes.plot(range(1, len(values) + 1), values, linewidth=1.2, alpha=0.85, label=f"seed {seed}")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("train step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(0, 1)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
