"""Seconds of a `sync` train step for which the workers on the run's machine wait for the publication of a version.

    python benchmarks/publication/critical_path.py --before COMMIT

A live run of the quickstart's recipe with one worker process on this machine, on this commit and, with --before, on
another one in a temporary worktree, in turn. The quickstart's model is made larger: its MLPs get neurons with random
inputs whose outputs have the weight 0, so it answers as before, and its rewards and weights change in training. Times
are those of the run's trace. Raw results: results/critical_path.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NEURONS = 13_312
RECIPE = (
    "run.name=run", "rollout.batch_groups=8", "rollout.max_new_tokens=64", "trainer.lr=2e-5", "trainer.warmup_steps=0",
    "weights.keyframe_every=4", "eval.enabled=false", "checkpoint.every=1000",
)  # fmt: skip
ROWS = {
    "step": "a step",
    "train": "training",
    "write": "the trainer writes the version",
    "wait": "from the end of training until a worker generates",
    "published": "from the end of training until the version is stored",
}


def main() -> None:
    """Run each commit in turn, write the results, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--before", action="append", default=[], help="another commit to measure")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "critical_path.json")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    from machine import machine

    raw: dict[str, Any] = {**machine(), "recipe": RECIPE, "steps": given.steps, "runs": []}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        raw["params"] = make_model(scratch / "model")
        trees = {"now": ROOT}
        for commit in given.before:
            trees[commit] = tree = scratch / commit
            subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
            stack.callback(subprocess.run, ["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        for _ in range(given.turns):
            for name, tree in trees.items():
                raw["runs"].append({"commit": name, **trained(tree, scratch, given.steps)})
    given.out.write_text(json.dumps(raw, indent=1) + "\n")
    print(table(raw))


def make_model(directory: Path) -> int:
    """Write the quickstart's model with more neurons; return its number of parameters."""
    import torch
    from safetensors.torch import load_file, save_file

    source = ROOT / "models" / "quickstart"
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": NEURONS}))
    random, tensors = torch.Generator().manual_seed(0), load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp." in name:
            of_output = name.endswith("down_proj.weight")
            more = list(tensor.shape)
            more[1 if of_output else 0] = NEURONS - config["intermediate_size"]
            new = torch.zeros(more) if of_output else torch.randn(more, generator=random) * tensor.float().std()
            tensors[name] = torch.cat([tensor, new.to(tensor.dtype)], dim=1 if of_output else 0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def trained(tree: Path, scratch: Path, steps: int) -> dict[str, list[float]]:
    """Run the recipe with the code in `tree`; return the seconds of each row of `ROWS` in each step but the first and
    the last, and the mean reward of each step."""
    own = [f"run.directory={scratch}", f"run.steps={steps}", f"model.path={scratch / 'model'}"]
    command = [sys.executable, "-m", "baton", "train", "recipes/quickstart.toml", "--overwrite", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([*command, *RECIPE, *own], check=True, cwd=tree, env=environment, timeout=600)
    spans = [json.loads(line) for line in (scratch / "run" / "trace.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    by = {(s["name"], s["actor"], s["facts"].get("step", s["facts"].get("version"))): s for s in spans if "facts" in s}
    starts = sorted(span["begin_s"] for span in spans if span["name"] == "generate")
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    for step in range(2, steps):
        write, train = by["publish", "trainer", step], by["train", "trainer", step]
        begin_s = write["begin_s"]
        found["step"].append(begin_s - by["publish", "trainer", step - 1]["begin_s"])
        found["train"].append(train["end_s"] - train["begin_s"])
        found["write"].append(write["end_s"] - begin_s)
        found["wait"].append(next(s for s in starts if s > begin_s) - begin_s)
        found["published"].append(by["publish", "hub", step]["end_s"] - begin_s)
    found["reward"] = [row["reward/mean"] for row in rows if "reward/mean" in row]
    found["density"] = [row["swarm/version_density"] for row in rows if "swarm/version_density" in row]
    if not median(found["density"]):
        raise SystemExit("the weights do not change, so versions are not published as in training")
    return found


def table(raw: dict[str, Any]) -> str:
    """Return a Markdown table of the medians over all steps, and of the shares of a step."""
    names = list(dict.fromkeys(run["commit"] for run in raw["runs"]))
    lines = ["| seconds (share of the step) | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row, label in ROWS.items():
        cells = []
        for name in names:
            runs = [run for run in raw["runs"] if run["commit"] == name]
            value, step = (median(s for run in runs for s in run[key]) for key in (row, "step"))
            cells.append(f"{value:.2f} ({value / step:.0%})")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
