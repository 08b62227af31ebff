"""Every preset trains the quickstart above its starting reward: the table of README.md.

    python benchmarks/algorithms/run.py --seeds 0 1 --steps 30

Each row is `baton train recipes/quickstart.toml algorithm=NAME run.steps=30 run.seed=S` and nothing else: learning
rate, batch and task are the quickstart's. Raw results go to results/, the table to results/table.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENDS = 3
"""Steps at either end of a run whose mean reward is compared."""


def main() -> None:
    """Run presets and seeds in turn and write the table."""
    from baton.trainer.algorithm import PRESETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--table-only", action="store_true", help="make the table from the results that are there")
    parser.add_argument("overrides", nargs="*", help="more KEY=VALUE for every run, such as engine.processes=1")
    arguments = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for name in [] if arguments.table_only else arguments.algorithms:
        for seed in arguments.seeds:
            found = run_one(name, seed, arguments.steps, arguments.overrides)
            (results / f"{name}-seed{seed}.json").write_text(json.dumps(found, indent=1) + "\n")
            print(line([found]), flush=True)
    found = [json.loads(file.read_text()) for file in sorted(results.glob("*-seed*.json"))]
    table = make_table(found, list(PRESETS))
    (results / "table.md").write_text(table)
    print(table)


def run_one(name: str, seed: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train once in a temporary directory; return the curves and what they were made with."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "baton", "train", "recipes/quickstart.toml", f"algorithm={name}"]
        command += [f"run.steps={steps}", f"run.seed={seed}", "eval.every=0", "eval.num_prompts=256", *overrides]
        begin = time.perf_counter()
        subprocess.run(
            [*command, f"run.directory={scratch}", "--json"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=3600,
        )
        wall_s = time.perf_counter() - begin
        run = Path(scratch) / "quickstart"
        rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((run / "run.json").read_text())
    steps_rows = [row for row in rows if "reward/mean" in row]
    accuracy = [row["eval/all/avg@1"] for row in rows if "eval/all/avg@1" in row]
    keys = ("policy/clip_frac", "policy/ess", "policy/grad_norm", "policy/entropy", "value/explained_var")
    return {
        "command": " ".join(["baton", *command[3:]]),
        "algorithm": name,
        "seed": seed,
        "wall_s": round(wall_s, 1),
        "reward_by_step": [round(row["reward/mean"], 4) for row in steps_rows],
        "held_out_accuracy": {"before": accuracy[0], "after": accuracy[-1]},
        "means": {k: statistics.fmean(found) for k in keys if (found := [r[k] for r in steps_rows if k in r])},
        "run": {key: facts[key] for key in ("commit", "threads", "processor", "cores", "packages")},
    }


def make_table(found: list[dict[str, Any]], order: list[str]) -> str:
    """Markdown: one row per preset, means over its seeds."""
    lines = [
        f"| algorithm | seeds | reward, first {ENDS} steps | last {ENDS} | least gain | held-out before | after | "
        "clipped tokens | s per run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in order:
        runs = [run for run in found if run["algorithm"] == name]
        if runs:
            lines.append(line(runs))
    return "\n".join(lines) + "\n"


def line(runs: list[dict[str, Any]]) -> str:
    """One row of the table."""
    ends = [
        (statistics.fmean(run["reward_by_step"][:ENDS]), statistics.fmean(run["reward_by_step"][-ENDS:]))
        for run in runs
    ]
    held_out = [[run["held_out_accuracy"][when] for run in runs] for when in ("before", "after")]
    cells = [
        runs[0]["algorithm"],
        ", ".join(str(run["seed"]) for run in runs),
        *(f"{statistics.fmean(values):.3f}" for values in zip(*ends, strict=True)),
        f"{min(last - first for first, last in ends):+.3f}",
        *(f"{100 * statistics.fmean(values):.1f} %" for values in held_out),
        f"{100 * statistics.fmean(run['means']['policy/clip_frac'] for run in runs):.2f} %",
        f"{statistics.fmean(run['wall_s'] for run in runs):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
