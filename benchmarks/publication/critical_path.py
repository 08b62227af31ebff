"""Seconds of a `sync` train step for which the workers on the run's machine wait for the publication of a version.

    python benchmarks/publication/critical_path.py [--steps 12] [--turns 2]

A live run of the quickstart's tasks with one local worker, in turn as it is and "in line": the workers learn of a
version when all of its encodings are stored, as if publication were part of the step. The model has random weights and
is made larger, so that its publication takes a time that can be seen. Raw results: results/critical_path.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODEL = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 32}
RECIPE = (
    "run.threads=1", "weights.dtype=bfloat16", "weights.keyframe_every=4", "rollout.batch_groups=2",
    "rollout.group_size=4", "rollout.max_new_tokens=8", "engine.slots=8", "eval.every=0", "eval.num_prompts=2",
    "checkpoint.every=1000", "trainer.lr=1e-5", "rollout.mode=sync",
)  # fmt: skip
VARIANTS = ("as it is", "in line")


def main() -> None:
    """Run both variants in turn, write the results, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "critical_path.json")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        train(given.run[0], Path(given.run[1]), given.steps)
        return
    sys.path.insert(0, str(HERE.parent))
    from machine import machine

    from baton.records.metrics import read_metrics

    names = ("swarm/broadcast_s", "swarm/publish_s", "time/step", "time/train", "time/wait_for_batch")
    raw: dict[str, Any] = {**machine(), "model": MODEL, "recipe": RECIPE, "steps": given.steps, "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        raw["params"] = make_model(Path(scratch) / "model")
        for _ in range(given.turns):
            for variant in VARIANTS:
                command = [sys.executable, __file__, "--steps", str(given.steps), "--run", variant, scratch]
                subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=900)
                rows = [{n: row.get(n) for n in names} for row in read_metrics(Path(scratch) / "run")]
                raw["runs"].append({"variant": variant, "rows": rows})
    given.out.write_text(json.dumps(raw, indent=1) + "\n")
    print(table(raw))


def make_model(directory: Path) -> int:
    """Write a model with random weights and the quickstart's tokenizer; return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(ROOT / "models" / "quickstart", directory, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, **MODEL))
    model.save_pretrained(directory)
    return int(model.num_parameters())


def train(variant: str, scratch: Path, steps: int) -> None:
    """Train with one local worker in this process."""
    from baton.cli.main import main as baton
    from baton.swarm.background_publisher import BackgroundPublisher
    from baton.types import PolicyVersion

    def in_line(self: BackgroundPublisher, tensors: Mapping[str, Any], version: PolicyVersion, since_s: float) -> None:
        verifier = self._hub.members.verifier
        self.last = self._publisher.publish(
            tensors, version, when_shared=lambda mapped: verifier.published(version, mapped)
        )
        self._hub.call(lambda: self._announce(version, since_s, False))
        self._hub.call(self._remove_unused)

    if variant == "in line":
        BackgroundPublisher._publish = in_line  # type: ignore[method-assign]
    own = ["run.name=run", f"run.directory={scratch}", f"run.steps={steps}", f"model.path={scratch}/model"]
    sys.argv = ["baton", "train", str(ROOT / "recipes" / "quickstart.toml"), "--overwrite", "--workers", "1"]
    sys.argv += [*RECIPE, *own]
    baton()


def table(raw: dict[str, Any]) -> str:
    """Return a Markdown table of the medians over all steps but the first two."""
    lines = ["| | " + " | ".join(VARIANTS) + " |", "|---" * (len(VARIANTS) + 1) + "|"]
    for name in raw["runs"][0]["rows"][0]:
        cells = []
        for variant in VARIANTS:
            runs = [run["rows"][2:] for run in raw["runs"] if run["variant"] == variant]
            cells.append(f"{median(row[name] for rows in runs for row in rows if row[name] is not None):.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
