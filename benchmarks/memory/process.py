"""Measure the peak memory of the processes of a run on a CPU, and compare it with the dry run.

    python -m benchmarks.memory.process OUTPUT.json SCRATCH [--cases 'SmolLM2, full' ...]

Each case trains two steps, publishes, and writes checkpoints, with one thread in each process. The measured number is
the largest resident set of a process (`VmHWM`); the shares of anonymous, file and shared memory are those of the
largest sample. An engine in another process maps the published version, which the dry run lists as a use of its own, so
what is told of such an engine includes it. SmolLM2-135M is read from models/smollm2. Qwen3-0.6B has random weights and
the tokenizer of SmolLM2; it is made in the directory SCRATCH. Its full training needs 14 GB of free memory in one
process, and 19 GB with the engine in another one.
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
from baton.records.metrics import read_metrics
from baton.run.memory import processes_of
from baton.trainer.memory import spec_of
from benchmarks.machine import machine
from benchmarks.memory.cases import config_of

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / "models" / "smollm2"
BFLOAT16 = ["trainer.dtype=bfloat16", "engine.dtype=bfloat16"]
FEW = ["rollout.batch_groups=1", "rollout.max_new_tokens=8"]
TOGETHER, LORA = ["engine.processes=0"], ["lora.rank=16"]
CASES: list[tuple[str, str, list[str]]] = [
    ("SmolLM2", "full", []),
    ("SmolLM2", "LoRA", LORA),
    ("SmolLM2", "full, bfloat16", BFLOAT16),
    ("SmolLM2", "full, one process", TOGETHER),
    ("SmolLM2", "LoRA, one process", [*LORA, *TOGETHER]),
    ("Qwen3-0.6B", "LoRA", [*LORA, *FEW]),
    ("Qwen3-0.6B", "LoRA, bfloat16", [*LORA, *BFLOAT16, *FEW]),
    ("Qwen3-0.6B", "full, colocated", [*FEW, *TOGETHER, "rollout.placement=colocated"]),
    ("Qwen3-0.6B", "full", FEW),
]
"""Model, name of the case, keys."""
COMMON = [
    "run.steps=2",
    "run.threads=1",
    "rollout.batch_groups=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=16",
    "engine.processes=1",
    "engine.slots=8",
    "engine.max_context_tokens=96",
    "trainer.max_tokens_per_microbatch=256",
    "trainer.warmup_steps=0",
    "eval.enabled=false",
    "checkpoint.every=1",
    "checkpoint.keep=1",
    "log.trace=false",
]
EVERY_S = 0.1


def directory_of(model: str, scratch: Path) -> Path:
    """Return the directory of a model, which is made if it has random weights."""
    if model == "SmolLM2":
        return SMOLLM2
    path = scratch / model
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config_of("0.6B"), dtype=torch.bfloat16)
        made.save_pretrained(path)
        AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(path)
    return path


def recipe_in(scratch: Path) -> Path:
    """Write the quickstart's recipe with a reward in which all responses differ; return its path."""
    text = (ROOT / "recipes" / "quickstart.toml").read_text()
    reward = f'kind = "function"\nfunction = "{ROOT / "benchmarks" / "memory" / "length_reward.py"}:length"'
    assert 'kind = "correct"' in text
    path = scratch / "recipe.toml"
    path.write_text(text.replace('kind = "correct"', f"{reward}\nisolate = false"))
    return path


class Sizes:
    """The peaks of a process and of all that it started."""

    def __init__(self, pid: int) -> None:
        self._root = pid
        self.peaks: dict[str, dict[str, int]] = {}
        """Command → bytes: the largest resident set, its anonymous, file and shared part in the largest sample, and the
        largest sample without pages of files."""

    def sample(self) -> None:
        parents, found = {}, {}
        for path in Path("/proc").glob("[0-9]*/status"):
            try:
                lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
                command = (path.parent / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            parents[int(path.parent.name)] = int(lines["PPid"])
            found[int(path.parent.name)] = lines, command
        for pid, (lines, command) in found.items():
            if pid in self._descendants(parents) and "VmHWM" in lines:
                name = "trainer" if pid == self._root else " ".join(command[2:4])
                sizes = {key: 1024 * int(lines[key].split()[0]) for key in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}
                known = self.peaks.setdefault(name, {"VmHWM": 0, "sampled": 0})
                if (total := sum(sizes.values()) - sizes["VmHWM"]) > known["sampled"]:
                    known.update(sizes, sampled=total)
                known["VmHWM"] = max(known["VmHWM"], sizes["VmHWM"])
                known["without_files"] = max(known.get("without_files", 0), sizes["RssAnon"] + sizes["RssShmem"])

    def _descendants(self, parents: dict[int, int]) -> set[int]:
        found = {self._root}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found


def run(command: list[str], log: Path) -> tuple[int, dict[str, dict[str, int]]]:
    """Run a command; return its exit code and the peaks of its processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        sizes = Sizes(process.pid)
        while process.poll() is None:
            sizes.sample()
            time.sleep(EVERY_S)
        return process.wait(), sizes.peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--cases", nargs="*", help="such as 'SmolLM2, full'; default: all")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    base = recipe_in(options.scratch)
    for model, name, keys in CASES:
        if options.cases and f"{model}, {name}" not in options.cases:
            continue
        path = directory_of(model, options.scratch)
        overrides = [*COMMON, f"model.path={path}", f"run.directory={options.scratch / 'run'}", *keys]
        recipe = load_recipe(Recipe, base, overrides)
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            params = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        spec = spec_of(config, params)
        every = processes_of(recipe, spec, on_cpu=True)
        told = [process for process in every if not process.on_host]
        published = sum(process.num_bytes for process in every if process.on_host)
        command = [sys.executable, "-m", "baton", "train", str(base), "--overwrite", *overrides]
        code, peaks = run(command, options.scratch / "log.txt")
        rows = [row for row in rows if (row["model"], row["case"]) != (model, name)]
        steps = read_metrics(options.scratch / "run" / recipe.run.name)
        tokens = max((row.get("perf/trainer_peak_tokens", 0.0) for row in steps), default=0.0)
        at_tokens = {process.name: process for process in processes_of(recipe, spec, on_cpu=True, most_tokens=tokens)}
        own = [item for item in peaks.items() if item[0] in ("trainer", "baton engine")]  # not those that only start
        for process, (key, peak) in zip(told, sorted(own, key=lambda item: item[0] != "trainer"), strict=True):
            row = {"model": model, "case": name, "process": process.name, "command": key, "keys": keys}
            mapped = published if key == "baton engine" else 0
            bytes_told = process.num_bytes + mapped
            row |= {"parameters": params, "exit_code": code, "peak": peak, "told": bytes_told, "published": mapped}
            row |= {"largest_microbatch": tokens, "told_for_it": at_tokens[process.name].num_bytes + mapped}
            row |= {"phase": process.phase, "parts": {part.name: part.num_bytes for part in process.parts}}
            rows.append({**row, **machine()})
            print(
                f"{model}, {name}, {process.name}: exit {code}, measured {peak['VmHWM'] / 1e9:.2f} GB, without files "
                f"{peak['without_files'] / 1e9:.2f}, told "
                f"{bytes_told / 1e9:.2f} ({bytes_told / peak['VmHWM']:.2f}), for {tokens:.0f} tokens "
                f"{row['told_for_it'] / 1e9:.2f}",
                flush=True,
            )
        options.output.write_text(json.dumps({"torch": torch.__version__, "common": COMMON, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
