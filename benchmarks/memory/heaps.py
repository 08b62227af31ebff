"""Peak memory of a trainer in `async` on a CPU, with one heap for all threads and with glibc's heaps per thread.

    python benchmarks/smollm2/model.py                    # fetches the model
    python -m benchmarks.memory.heaps --pairs 2           # a quarter of an hour on two cores; raw: results/heaps.json

Train steps run in threads of their own. Runs of SmolLM2-135M alternate: one as it is, and one whose trainer leaves the
heaps of glibc as they are. All runs have equal seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

ROOT = Path(__file__).parents[2]
RAW = Path(__file__).parent / "results" / "heaps.json"
RUN = "import sys; from baton.policy import threads; {change}from baton.cli.main import main; sys.exit(main())"
CHANGES = {"one heap": "", "heaps of threads": "threads.share_heap = lambda: None; "}
OVERRIDES = ("engine.processes=1", "rollout.mode=async", "run.steps=4", "run.seed=1", "eval.enabled=false")


def measure(change: str) -> list[dict[str, Any]]:
    """Run the recipe; return peak bytes, train seconds and step seconds of each train step."""
    with tempfile.TemporaryDirectory() as directory:
        given = [*OVERRIDES, "trainer.warmup_steps=0", "run.name=run", f"run.directory={directory}"]
        command = [sys.executable, "-c", RUN.format(change=change), "train", "recipes/smollm2-sums.toml", *given]
        subprocess.run(command, check=True, cwd=ROOT, timeout=900, stdout=subprocess.DEVNULL)
        rows = map(json.loads, Path(directory, "run", "metrics.jsonl").read_text().splitlines())
        keys = ("perf/trainer_peak_bytes", "time/train", "perf/step_time")
        return [{key: row[key] for key in keys} for row in rows if "policy/loss" in row]


def main() -> None:
    """Run the pairs, and write the raw results after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    raw: dict[str, Any] = {**machine(), "overrides": OVERRIDES, "runs": {name: [] for name in CHANGES}}
    for _ in range(parser.parse_args().pairs):
        for name, change in CHANGES.items():
            raw["runs"][name].append(steps := measure(change))
            peak, train_s = steps[-1]["perf/trainer_peak_bytes"], sum(step["time/train"] for step in steps)
            print(f"{name}: peak {peak / 1e9:.2f} GB, training {train_s:.1f} s", flush=True)
            RAW.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
