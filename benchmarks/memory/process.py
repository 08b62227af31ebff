"""Measure the peak memory of training processes on a CPU, and compare it with the dry run.

    python -m benchmarks.memory.process OUTPUT.json SCRATCH [--models SmolLM2 Qwen3-0.6B Qwen3-0.6B-4-layers]

Each case trains two steps with one thread, publishes, and writes a checkpoint, in one process with an embedded engine.
The measured number is the process's largest resident set (`VmHWM`). SmolLM2-135M is read from models/smollm2; the other
models have random weights in the shape of Qwen3-0.6B, with the tokenizer of SmolLM2, in the directory SCRATCH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run.memory import processes_of
from baton.trainer.memory import spec_of
from benchmarks.machine import machine
from benchmarks.memory.cases import config_of

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / "models" / "smollm2"
LAYERS = {"Qwen3-0.6B": 28, "Qwen3-0.6B-4-layers": 4}
CASES: list[tuple[str, str, list[str]]] = [
    ("SmolLM2", "full", []),
    ("SmolLM2", "full, bfloat16", ["trainer.dtype=bfloat16", "engine.dtype=bfloat16"]),
    ("SmolLM2", "LoRA", ["lora.rank=16"]),
    ("Qwen3-0.6B-4-layers", "full", []),
    ("Qwen3-0.6B", "LoRA, bfloat16 engine", ["lora.rank=16", "engine.dtype=bfloat16"]),
]
"""Model, name of the case, keys."""
COMMON = [
    "run.steps=2",
    "run.threads=1",
    "rollout.batch_groups=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=96",
    "engine.processes=0",
    "engine.slots=16",
    "engine.max_context_tokens=192",
    "trainer.max_tokens_per_microbatch=1024",
    "trainer.warmup_steps=0",
    "eval.enabled=false",
    "checkpoint.every=1",
    "log.trace=false",
]


def directory_of(model: str, scratch: Path) -> Path:
    """Return the directory of a model, which is made if it has random weights."""
    if model == "SmolLM2":
        return SMOLLM2
    path = scratch / model
    if not (path / "config.json").exists():
        config = config_of("0.6B")
        config.num_hidden_layers, config.layer_types = LAYERS[model], None
        config = type(config)(**config.to_dict())
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(path)
        AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(path)
    return path


def peak_of(command: list[str], log: Path) -> tuple[int, int]:
    """Run a command; return its exit code and the largest resident set of its process, bytes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    peak = 0
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        while process.poll() is None:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                break
            peak = max([peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
            time.sleep(0.2)
        return process.wait(), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--models", nargs="*")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model, name, keys in CASES:
        if options.models and model not in options.models:
            continue
        path = directory_of(model, options.scratch)
        run = options.scratch / f"run-{model}-{name}".replace(" ", "-").replace(",", "")
        overrides = [*COMMON, f"model.path={path}", f"run.directory={run}", *keys]
        recipe = load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", overrides)
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            params = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        (told,) = processes_of(recipe, spec_of(config, params), on_cpu=True)
        command = [sys.executable, "-m", "baton", "train", str(ROOT / "recipes" / "quickstart.toml"), "--overwrite"]
        code, peak = peak_of([*command, *overrides], options.scratch / "log.txt")
        parts = {part.name: part.num_bytes for part in told.parts}
        rows.append(
            {
                "model": model,
                "case": name,
                "keys": keys,
                "parameters": params,
                "exit_code": code,
                "measured_bytes": peak,
                "told_bytes": told.num_bytes,
                "phase": told.phase,
                "parts": parts,
            }
        )
        print(
            f"{model}, {name}: exit {code}, measured {peak / 1e9:.2f} GB, told {told.num_bytes / 1e9:.2f}", flush=True
        )
        found = {"machine": machine(), "torch": torch.__version__, "common": COMMON, "rows": rows}
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
