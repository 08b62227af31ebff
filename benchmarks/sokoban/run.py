"""Does a model learn multi-turn Sokoban on two cores? Five seeds in each mode, 512 held-out rooms.

    baton sft recipes/sokoban-warmstart.toml
    python benchmarks/sokoban/run.py                          # 5 seeds x 3 modes
    python benchmarks/sokoban/run.py --seeds 0 1 --modes sync
    baton sft recipes/sokoban-warmstart.toml task.0.params.size=5 output=models/sokoban-5x5-warmstart
    python benchmarks/sokoban/run.py --seeds 0 --modes 5x5

Each run is one `baton train recipes/sokoban.toml`: equal numbers of episodes, and the same initial model. Criterion,
set before the runs: in each run, the lower end of the 95 % interval of the final success is above the upper end of the
initial one, after at most ten minutes of train steps. Raw results go to results/, with the table and the curves.
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
RANDOM_MOVES = (0.168, 0.27)
"""Success of ten uniformly random moves in rooms of 6×6 and of 5×5: benchmarks/environments."""
MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "partial": ("rollout.mode=partial", "rollout.overprovision=1.5", "rollout.max_staleness=4"),
    "async": ("rollout.mode=async", "engine.processes=1", "rollout.max_staleness=4"),
    "5x5": (
        "task.0.params.size=5",
        "model.path=models/sokoban-5x5-warmstart",
        "run.steps=200",
        "eval.every=50",
        "eval.samples=50",
    ),
}
"""Three modes in rooms of 6×6. Then rooms of 5×5 in `sync`: about ten are held out, so each is played 50 times."""


def main() -> None:
    """Run what is missing, and write the table and the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["sync", "partial", "async"])
    parser.add_argument("--table-only", action="store_true", help="make the table from the results that are there")
    arguments = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for seed in [] if arguments.table_only else arguments.seeds:
        for mode in arguments.modes:
            file = results / f"{mode}-seed{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(run(mode, seed)) + "\n")
    found = [json.loads(file.read_text()) for file in sorted(results.glob("*-seed*.json"))]
    table = make_table(found)
    (results / "table.md").write_text(table)
    draw_curves(found, results / "curves.png")
    print(table)


def run(mode: str, seed: int) -> dict[str, Any]:
    """Train once in a temporary directory; return its curve."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "baton", "train", "recipes/sokoban.toml", f"run.seed={seed}", *MODES[mode]]
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, f"run.directory={scratch}", "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
            timeout=3600,
        )
        wall_s = time.perf_counter() - begin
        path = Path(scratch) / "sokoban"
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((path / "run.json").read_text())
    trained = [row for row in rows if "reward/mean" in row]
    success = next(name for row in rows for name in row if name.startswith("eval/sokoban/avg@"))
    changes = [c for c in json.loads(done.stdout)["changes"] if c["before"]["task"] == "sokoban"]
    return {
        "mode": mode,
        "seed": seed,
        "command": " ".join(["baton", *command[3:]]),
        "wall_s": wall_s,
        "train_s": sum(row["perf/step_time"] for row in trained),
        "changes": changes,
        "success_by_step": {row["step"]: row[success] for row in rows if success in row},
        "reward": [row["reward/mean"] for row in trained],
        "step_s": [row["perf/step_time"] for row in trained],
        "trained_tokens": sum(row["tokens/trained"] for row in trained),
        "staleness": statistics.fmean(row["staleness/mean"] for row in trained),
        **{key: facts[key] for key in ("commit", "threads", "processor", "cores", "packages")},
    }


def make_table(found: list[dict[str, Any]]) -> str:
    """One row per run, then the mean of each mode."""
    lines = [
        "| mode | seed | before [95 %] | after [95 %] | disjoint | greedy: before | after | train steps, min |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        rows = sorted((r for r in found if r["mode"] == mode), key=lambda r: r["seed"])
        for row in rows:
            sampled, greedy = _accuracy(row, 1.0), _accuracy(row, 0.0)
            cells = [mode, str(row["seed"]), *map(_interval, sampled)]
            cells += ["yes" if sampled[1]["low"] > sampled[0]["high"] else "no"]
            cells += [f"{100 * a['value']:.1f} %" for a in greedy] + [f"{row['train_s'] / 60:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    for mode in MODES:
        after = [100 * _accuracy(r, 1.0)[1]["value"] for r in found if r["mode"] == mode]
        if len(after) > 1:
            lines.append(
                f"\n`{mode}`: {statistics.fmean(after):.1f} % after training, standard deviation over {len(after)} "
                f"seeds {statistics.stdev(after):.1f}."
            )
    return "\n".join(lines) + "\n"


def draw_curves(found: list[dict[str, Any]], path: Path) -> None:
    """Held-out success by minutes of train steps, one line per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for number, mode in enumerate(MODES):
        axes = panels[int(mode == "5x5")]
        for place, row in enumerate(r for r in found if r["mode"] == mode):
            steps = [int(step) for step in row["success_by_step"]]
            minutes = [sum(row["step_s"][:step]) / 60 for step in steps]
            success = [100 * value for value in row["success_by_step"].values()]
            axes.plot(minutes, success, color=f"C{number}", alpha=0.8, linewidth=1.2, label=None if place else mode)
    for axes, rooms, by_chance in zip(panels, ("6×6", "5×5"), RANDOM_MOVES, strict=True):
        axes.axhline(100 * by_chance, color="grey", linestyle="--", linewidth=1, label="random moves")
        axes.set_title(f"held-out rooms of {rooms} solved, %, temperature 1", fontsize=10, loc="left")
        axes.set_xlabel("minutes of train steps")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _accuracy(row: dict[str, Any], temperature: float) -> tuple[dict[str, float], dict[str, float]]:
    change = next(c for c in row["changes"] if c["before"]["temperature"] == temperature)
    return change["before"]["accuracy"], change["after"]["accuracy"]


def _interval(accuracy: dict[str, float]) -> str:
    return f"{100 * accuracy['value']:.1f} [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]"


if __name__ == "__main__":
    main()
