"""Does SmolLM2-135M learn arithmetic on two cores? Three seeds, 512 held-out prompts.

    python benchmarks/smollm2/run.py                       # 3 seeds; needs pip install '.[gguf,report]'
    python benchmarks/smollm2/run.py --recipe recipes/smollm2-calculator.toml --seeds 0

Each run is what `make demo-llm` runs, with another seed. Criterion, set before the runs: in each run, the lower end of
the 95 % interval of the final accuracy (temperature 1) is above the upper end of the initial one, and the whole command
takes at most 45 minutes. Raw results go to results/RECIPE, with the table, the curves and responses before and after
the training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model import ROOT, settings

HERE = Path(__file__).parent
RECIPE = ROOT / "recipes" / "smollm2-sums.toml"
MINUTES = 45
TIMEOUT_S = 3 * 3600
SHOWN = 12
"""Prompts whose responses are shown."""


def main() -> None:
    """Run the seeds that are missing, and write table, curves and responses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="overrides, such as run.steps=4")
    parser.add_argument("--out", type=Path, help="default: results/RECIPE")
    parser.add_argument("--table-only", action="store_true", help="make the table from the results that are there")
    arguments = parser.parse_args()
    out = arguments.out or HERE / "results" / arguments.recipe.stem.removeprefix("smollm2-")
    out.mkdir(parents=True, exist_ok=True)
    for seed in [] if arguments.table_only else arguments.seeds:
        file = out / f"seed{seed}.json"
        if not file.exists():
            recipe = arguments.recipe.resolve().relative_to(ROOT)
            file.write_text(json.dumps(run(recipe, [f"run.seed={seed}", *settings(), *arguments.set]), indent=1) + "\n")
    found = [json.loads(file.read_text()) for file in sorted(out.glob("seed*.json"))]
    if not found:
        sys.exit(f"error: there are no results in {out}; run without --table-only")
    table = make_table(found)
    (out / "table.md").write_text(table)
    (out / "responses.md").write_text(show_responses(found[0]["responses"]))
    draw_curves(found, out / "curves.png")
    print(table)


def run(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """Train once in a temporary directory; return the report, the curves and responses of both models."""
    baton = [sys.executable, "-m", "baton"]
    with tempfile.TemporaryDirectory() as scratch:
        command = [*baton, "train", str(recipe), *overrides, f"run.directory={scratch}", "--json"]
        begin = time.perf_counter()
        report = json.loads(_output(command))
        wall_s = time.perf_counter() - begin
        path = Path(report["directory"])
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((path / "run.json").read_text())
        preview = [*baton, "preview", str(recipe), *overrides, "-n", str(SHOWN), "--json"]
        before, after = (json.loads(_output([*preview, *more]))["samples"] for more in ([], [f"model.path={path}"]))
    trained = [row for row in rows if "reward/mean" in row]
    report["directory"] = "runs"
    return {
        "command": " ".join(["baton", "train", str(recipe), *overrides]),
        "wall_s": wall_s,
        "report": report,
        "run": {key: facts[key] for key in ("commit", "seed", "threads", "processor", "cores", "packages")},
        "accuracy_by_step": {
            row["step"]: value
            for row in rows
            for name, value in row.items()
            if name.startswith("eval/") and name.endswith("/avg@1")
        },
        **{
            name: [round(row[key], 4) if key in row else None for row in trained]
            for name, key in (
                ("reward", "reward/mean"),
                ("response_length", "response_length/mean"),
                ("equal_rewards", "reward/zero_std_frac"),
                ("entropy", "policy/entropy"),
                ("step_s", "perf/step_time"),
                ("generate_s", "time/generate"),
                ("train_s", "time/train"),
            )
        },
        "responses": [_pair(*pair) for pair in zip(before, after, strict=True) if pair[0]["sample_index"] == 0],
    }


def make_table(found: list[dict[str, Any]]) -> str:
    """One row per seed, then whether the criterion holds."""
    lines = [
        "| seed | before [95 %] | after [95 %] | disjoint | greedy: before | after | step s, mean | command, min |",
        "|---|---|---|---|---|---|---|---|",
    ]
    meets = 0
    for one in found:
        sampled, greedy = _accuracy(one, 1.0), _accuracy(one, 0.0)
        is_disjoint, minutes = sampled[1]["low"] > sampled[0]["high"], one["wall_s"] / 60
        meets += is_disjoint and minutes <= MINUTES
        cells = [str(one["run"]["seed"]), *map(_interval, sampled), "yes" if is_disjoint else "no"]
        cells += [f"{100 * each['value']:.1f} %" for each in greedy]
        cells += [f"{sum(one['step_s']) / len(one['step_s']):.1f}", f"{minutes:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\nDisjoint intervals within {MINUTES} minutes: {meets} of {len(found)} seeds.")
    return "\n".join(lines) + "\n"


def show_responses(pairs: list[dict[str, Any]]) -> str:
    """Markdown with the response to each prompt before and after the training."""
    lines = ["# Responses before and after the training", ""]
    lines += ["The first training prompts of the run's seed, the first sampled response to each, temperature 1.", ""]
    for pair in pairs:
        lines += ["```", pair["prompt"].rstrip(), "```", ""]
        for when in ("before", "after"):
            one = pair[when]
            lines += [f"{when}, reward {one['reward']:g}, reference {pair['reference']}:", ""]
            lines += ["```", one["response"].rstrip(), "```", ""]
    return "\n".join(lines)


def draw_curves(found: list[dict[str, Any]], path: Path) -> None:
    """Training reward, held-out accuracy and response length by step, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for place, one in enumerate(found):
        steps, seed = range(1, len(one["reward"]) + 1), one["run"]["seed"]
        left.plot(steps, one["reward"], linewidth=1, alpha=0.6, color=f"C{place}")
        evaluated = [int(step) for step in one["accuracy_by_step"]]
        left.plot(evaluated, [*one["accuracy_by_step"].values()], "o-", color=f"C{place}", label=f"seed {seed}")
        right.plot(steps, one["response_length"], linewidth=1.2, alpha=0.85, color=f"C{place}")
    left.set_title("training reward; points: held-out accuracy", fontsize=10, loc="left")
    right.set_title("response length, tokens", fontsize=10, loc="left")
    for axes in (left, right):
        axes.set_xlabel("train step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S, text=True)
    return done.stdout


def _pair(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    kept = [{key: one[key] for key in ("response", "reward", "num_tokens")} for one in (before, after)]
    return {"prompt": before["prompt"], "reference": before["reference"], "before": kept[0], "after": kept[1]}


def _accuracy(one: dict[str, Any], temperature: float) -> list[dict[str, float]]:
    change = next(c for c in one["report"]["changes"] if c["before"]["temperature"] == temperature)
    return [change["before"]["accuracy"], change["after"]["accuracy"]]


def _interval(accuracy: dict[str, float]) -> str:
    return f"{100 * accuracy['value']:.1f} [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]"


if __name__ == "__main__":
    main()
