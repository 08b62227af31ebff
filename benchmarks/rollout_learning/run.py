"""Do carried and stale rollouts learn as well as synchronous ones? Paired seeds on the quickstart, equal batches.

    python benchmarks/rollout_learning/run.py                     # 5 seeds x 5 arms of 40 steps: half an hour
    python benchmarks/rollout_learning/run.py --seeds 0 1 --arms sync async

Each arm trains the same number of trajectories from the same model. The margin of equivalence, stated before the runs:
3 points of held-out accuracy at temperature 1 (its own standard error on 512 problems is about 2), of the mean paired
difference to `sync` over seeds with its 90 % interval (two one-sided tests at 5 %). Raw results go to results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MARGIN = 0.03
ASYNC = ("rollout.mode=async", "engine.processes=1")
ARMS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "partial": ("rollout.mode=partial", "rollout.overprovision=2.0", "rollout.max_staleness=4"),
    "async": (*ASYNC, "rollout.max_staleness=4"),
    "async-16": (*ASYNC, "rollout.max_staleness=16", "rollout.consume=submission"),
    "async-16-uncorrected": (
        *ASYNC,
        "rollout.max_staleness=16",
        "rollout.consume=submission",
        "algorithm.correction=none",
    ),
}
T_90 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 8: 1.895, 10: 1.833}
"""Student's t, one-sided 5 %, by the number of pairs."""


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--table-only", action="store_true")
    arguments = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for seed in [] if arguments.table_only else arguments.seeds:
        for arm in arguments.arms:
            file = results / f"{arm}-seed{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(run(arm, seed, arguments.steps)) + "\n")
    table = make_table([json.loads(file.read_text()) for file in sorted(results.glob("*-seed*.json"))])
    (results / "table.md").write_text(table)
    print(table)


def run(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once; return accuracy, and what the metrics say of staleness."""
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"run.seed={seed}", f"run.steps={steps}", f"eval.every={steps}", *ARMS[arm]]
        command = [sys.executable, "-m", "baton", "train", "recipes/quickstart.toml", *overrides]
        subprocess.run(
            [*command, f"run.directory={scratch}"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=3600
        )
        path = Path(scratch) / "quickstart"
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((path / "run.json").read_text())
    trained = [row for row in rows if "reward/mean" in row]
    last = next(row for row in reversed(rows) if "eval/all/greedy" in row)
    return {
        "arm": arm,
        "seed": seed,
        "command": " ".join(["baton", *command[3:]]),
        "sampled": last["eval/all/avg@1"],
        "greedy": last["eval/all/greedy"],
        "reward": [row["reward/mean"] for row in trained],
        "staleness": [row["staleness/mean"] for row in trained],
        "masked": [row["staleness/masked_frac"] for row in trained],
        "ess": [row["policy/ess"] for row in trained],
        "trained_tokens": sum(row["tokens/trained"] for row in trained),
        "commit": facts["commit"],
        "processor": facts["processor"],
        "cores": facts["cores"],
    }


def make_table(found: list[dict[str, Any]]) -> str:
    """One row per arm: means and deviations over seeds, and the paired difference to sync."""
    lines = [
        "| arm | seeds | held-out, temperature 1 | greedy | difference to sync, paired [90 %] | within 3 points "
        "| mean reward of all steps | staleness of trained tokens | masked | effective sample size |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    sync = {r["seed"]: r["sampled"] for r in found if r["arm"] == "sync"}
    for arm in ARMS:
        rows = [r for r in found if r["arm"] == arm]
        if not rows:
            continue
        differences = [r["sampled"] - sync[r["seed"]] for r in rows if r["seed"] in sync]
        paired, verdict = "", ""
        if arm != "sync" and len(differences) in T_90:
            middle = statistics.fmean(differences)
            half = T_90[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
            paired = f"{100 * middle:+.1f} [{100 * (middle - half):+.1f}, {100 * (middle + half):+.1f}]"
            verdict = "yes" if middle - half > -MARGIN and middle + half < MARGIN else "not shown"
        cells = [
            arm,
            str(len(rows)),
            _spread([100 * r["sampled"] for r in rows], " %"),
            _spread([100 * r["greedy"] for r in rows], " %"),
            paired,
            verdict,
            _spread([statistics.fmean(r["reward"]) for r in rows], "", 3),
            f"{statistics.fmean(v for r in rows for v in r['staleness']):.2f}",
            f"{statistics.fmean(v for r in rows for v in r['masked']):.1%}",
            f"{statistics.fmean(v for r in rows for v in r['ess']):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float], unit: str, digits: int = 1) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}{unit}"


if __name__ == "__main__":
    main()
