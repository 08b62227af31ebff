"""Train SmolLM2-135M on arithmetic on this machine: `make demo-llm`.

    python benchmarks/smollm2/demo.py                     # needs pip install '.[gguf,report]'
    python benchmarks/smollm2/demo.py run.steps=4         # overrides of recipes/smollm2-sums.toml

At the end it prints held-out accuracy before and after the training with 95 % intervals, and writes a page with curves
and responses of the first and of the last train step.
"""

from __future__ import annotations

import subprocess
import sys

from model import ROOT, settings


def main() -> None:
    """Prepare the model, train, and write the page."""
    baton = [sys.executable, "-m", "baton"]
    chosen = settings()
    print(f"settings of this machine: {' '.join(chosen)}", flush=True)
    train = [*baton, "train", "recipes/smollm2-sums.toml", "--overwrite", *chosen, *sys.argv[1:]]
    for command in (train, [*baton, "report", "runs/smollm2-sums", "--html"]):
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
