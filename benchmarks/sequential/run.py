"""Sequential pull against co-located training: are the weights the same to the bit?

    python benchmarks/sequential/run.py [--steps 20]

The quickstart, with its engine beside the trainer; with one worker; with four; and with four of which one is killed
(kill -9) and another joins in the middle. Everything goes through the commands that users run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from safetensors.numpy import load_file

from baton.records.metrics import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BATON = [sys.executable, "-m", "baton"]
DEADLINE_S = 1200.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Swarm:
    """Workers of one run, started by hand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = directory / "token"
        self.url = ""
        self.processes: list[subprocess.Popen[bytes]] = []
        create = [*BATON, "token", "create", "--role", "worker", "--expires", "1d", "--out", str(self.token)]
        subprocess.run([*create, "--file", str(directory / "tokens.json")], check=True, env=ENVIRONMENT, cwd=directory)

    def add(self) -> None:
        """Start one more worker."""
        with (self.directory / f"worker-{len(self.processes)}.log").open("wb") as log:
            command = [*BATON, "worker", self.url, "--token-file", str(self.token), "--device", "cpu"]
            self.processes.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log))

    def close(self) -> None:
        """End them all."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)


Events = dict[int, Callable[[Swarm], None]]
"""Step → what happens to the workers once it is done."""


def run(name: str, directory: Path, steps: int, workers: int, at: Events) -> dict[str, object]:
    """Train once, and say what came of it."""
    overrides = [
        f"run.name={name}", f"run.directory={directory}", f"run.steps={steps}", "run.threads=1",
        "engine.processes=1", "eval.num_prompts=64", "eval.every=0", "rollout.stall_timeout_s=120",
    ]  # fmt: skip
    swarm = Swarm(directory) if workers else None
    if swarm is not None:
        overrides += [f"swarm.token_file={directory / 'tokens.json'}", "swarm.heartbeat_timeout_s=10"]
    command = [*BATON, "train", str(ROOT / "recipes" / "quickstart.toml"), "--overwrite", *overrides]
    command += ["--serve", "127.0.0.1:0"] if workers else []
    begin = time.monotonic()
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "the hub listens at" in line and swarm is not None:
                swarm.url = re.findall(r"https?://[^\s:]+:\d+", line)[0]
                for _ in range(workers):
                    swarm.add()
            found = re.match(r"step\s+(\d+)/", line)
            if found and int(found[1]) in at and swarm is not None:
                at[int(found[1])](swarm)
            if "rror" in line or "joined" in line or "worker" in line:
                print(f"  {name}: {line.rstrip()}")
        assert process.wait(DEADLINE_S) == 0, f"{name} ended with {process.returncode}"
    seconds = time.monotonic() - begin
    if swarm is not None:
        swarm.close()
    weights = load_file(directory / name / "checkpoints" / f"step_{steps:06d}" / "model.safetensors")
    digest = blake3(b"".join(weights[key].tobytes() for key in sorted(weights))).hexdigest()
    rows = [row for row in read_metrics(directory / name) if "reward/mean" in row]
    return {
        "digest": digest,
        "seconds": round(seconds, 1),
        "rewards": [row["reward/mean"] for row in rows],
        "lost_tokens": sum(row.get("tokens/lost", 0.0) for row in rows),
        "generated_tokens": sum(row["tokens/generated"] for row in rows),
        "max_staleness": max(row.get("staleness/max", 0.0) for row in rows),
    }


def kill_one(swarm: Swarm) -> None:
    """The end of a worker, without a word."""
    swarm.processes[1].send_signal(signal.SIGKILL)


def main() -> None:
    """Run the four and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    cases: dict[str, tuple[int, Events]] = {
        "colocated": (0, {}),
        "one_worker": (1, {}),
        "four_workers": (4, {}),
        "four_one_killed_one_joins": (4, {steps // 3: kill_one, steps // 2: Swarm.add}),
    }
    results = {}
    with tempfile.TemporaryDirectory(prefix="sequential-") as scratch:
        for name, (workers, at) in cases.items():
            directory = Path(scratch) / name
            directory.mkdir()
            results[name] = run(name, directory, steps, workers, at)
            print(name, results[name]["digest"][:16], results[name]["seconds"], "s")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    is_same = len({result["digest"] for result in results.values()}) == 1
    found = {"commit": commit, "steps": steps, "cores": os.cpu_count(), "is_same": is_same, "runs": results}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "raw.json").write_text(json.dumps(found, indent=1) + "\n")
    print("bit-identical" if is_same else "DIFFERENT")
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
