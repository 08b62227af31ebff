"""The training of docs/tutorial-own-task.md over several seeds: held-out accuracy before and after.

    python benchmarks/tutorial/run.py --seeds 0 1 2

Each seed is one `baton train orders.toml run.seed=S` with the files of the page. Raw reports: results/raw.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))


def main() -> None:
    """Write the page's files, train each seed in turn, and print a row per seed."""
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    page = (ROOT / "docs" / "tutorial-own-task.md").read_text(encoding="utf-8")
    found = {"machine": machine(), "runs": []}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as scratch:
        for title, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', page, re.DOTALL | re.MULTILINE):
            (Path(scratch) / title).write_text(text, encoding="utf-8")
        subprocess.run([sys.executable, "make_data.py"], cwd=scratch, check=True, timeout=60)
        for seed in seeds:
            overrides = [f"run.seed={seed}", f"run.name=seed{seed}"]
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "baton", "train", "orders.toml", *overrides, "--json"],
                cwd=scratch,
                env=environment,
                stdout=subprocess.PIPE,
                check=True,
                timeout=3600,
            )
            wall_s, report = time.perf_counter() - begin, json.loads(done.stdout)
            found["runs"].append({"wall_s": wall_s, "report": report})
            for change in report["changes"]:
                before, after = (100 * change[when]["accuracy"]["value"] for when in ("before", "after"))
                temperature = change["before"]["temperature"]
                print(f"| {seed} | {temperature:g} | {before:.1f} % | {after:.1f} % | {wall_s:.0f} |", flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "raw.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
