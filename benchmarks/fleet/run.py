"""The quickstart on a local Ray cluster of three nodes, against one process: the same reward?

    python benchmarks/fleet/run.py                     # 2 trainer ranks, 3 workers; then one process with one worker
    python benchmarks/fleet/run.py --steps 60 --only cluster
    python benchmarks/fleet/run.py --vllm .venv-vllm/bin/python     # the third worker is a vLLM in its own environment

All nodes are on this machine and share its cores: the time says nothing about clusters. A plan made by hand gives the
workers unequal shares (2 : 1 : 1); how many trajectories each was given is read from the trace. Raw results:
results/raw.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fleet")]

SHARES = (0.5, 0.25, 0.25)


def main() -> None:
    """Run both, write what they reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", choices=("cluster", "process"))
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM and Baton (make test-vllm)")
    parser.add_argument("overrides", nargs="*", help="of the recipe, for both")
    arguments = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    raw: dict[str, Any] = {
        "commit": git.stdout.strip(), "processor": platform.processor(), "cores": len(os.sched_getaffinity(0)),
        "steps": arguments.steps, "shares": SHARES,
    }  # fmt: skip
    given = [f"run.steps={arguments.steps}", *arguments.overrides]
    (HERE / "results").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        if arguments.only != "cluster":
            raw["process"] = train(Path(directory) / "process", [*given, "engine.processes=1"], [])
        if arguments.only != "process":
            given.append("engine.processes=0")
            raw["cluster"] = on_cluster(Path(directory) / "cluster", given, arguments.vllm)
    (HERE / "results" / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    for name in ("process", "cluster"):
        if name in raw:
            print(name, json.dumps({key: raw[name][key] for key in ("wall_s", "eval", "reward_last_10", "granted")}))


def on_cluster(directory: Path, overrides: list[str], vllm: str | None) -> dict[str, Any]:
    """Three nodes: two ranks on one, three workers on the others; with vLLM two, and it joins from outside."""
    import ray
    from plans import plan_of, replica, stage
    from ray.cluster_utils import Cluster

    from baton.cluster.inventory import machines
    from baton.specs.plan import write_plan

    size = {"num_cpus": 1, "object_store_memory": 150 * 2**20}
    nodes = Cluster(
        initialize_head=True, head_node_args={"include_dashboard": False, "resources": {"gpu_type_H100": 2}, **size}
    )
    nodes.add_node(resources={"gpu_type_L20": 2}, **size)
    nodes.add_node(resources={"gpu_type_L20": 1}, **size)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        there = machines(ray.nodes())
        ray.shutdown()
        h, two, one = (
            next(m.name for m in there if (m.gpu, m.num_gpus) == kind) for kind in (("H100", 2), ("L20", 2), ("L20", 1))
        )
        ids = (f"{two}:0", f"{two}:1", f"{one}:0")
        shares = SHARES if vllm is None else (2 / 3, 1 / 3)
        workers = [replica("L20", gpu, share=share, batch=64) for gpu, share in zip(ids, shares, strict=False)]
        directory.mkdir(parents=True)
        write_plan(plan_of([stage("H100", f"{h}:0", f"{h}:1")], workers), directory / "plan.json")
        options = ["--plan", str(directory / "plan.json"), "--ray", nodes.address]
        if vllm is None:
            return train(directory, overrides, options)
        with joined(vllm, directory) as (address, tokens):
            return train(directory, [*overrides, f"swarm.token_file={tokens}"], [*options, "--serve", address])
    finally:
        nodes.shutdown()


@contextmanager
def joined(python: str, directory: Path) -> Iterator[tuple[str, Path]]:
    """A vLLM worker that comes by itself to a hub at the address, with a token of the file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    tokens, token = directory / "tokens.json", directory / "vllm.token"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    make = [sys.executable, "-m", "baton", "token", "create", "--role", "worker", "--trusted", "--expires", "1d"]
    subprocess.run([*make, "--name", "vllm", "--file", tokens, "--out", token], check=True, env=environment, cwd=ROOT)
    worker = [python, "-m", "baton", "worker", f"http://{address}", "--token-file", str(token), "--engine", "vllm"]
    with (directory / "vllm.log").open("wb") as log:
        process = subprocess.Popen(worker, stdout=log, stderr=log, env=environment, cwd=directory)
        try:
            yield address, tokens
        finally:
            process.terminate()
            process.wait(60)


def train(directory: Path, overrides: list[str], options: list[str]) -> dict[str, Any]:
    """Run the command and read what it reached."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "baton", "train", str(ROOT / "recipes" / "quickstart.toml"), *options]
    command += [*overrides, f"run.directory={directory}", "run.name=r", "log.trace=true"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    wall_s = time.perf_counter() - begin
    from baton.records.metrics import read_metrics

    rows = read_metrics(directory / "r")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    evals = [{k: v for k, v in row.items() if k == "step" or k.startswith("eval/")} for row in rows]
    shutil.copy(directory / "r" / "metrics.jsonl", HERE / "results" / f"{directory.name}.jsonl")
    return {
        "wall_s": wall_s,
        "rewards": rewards,
        "reward_last_10": sum(rewards[-10:]) / max(1, len(rewards[-10:])),
        "eval": [row for row in evals if len(row) > 1],
        "granted": granted(directory / "r"),
        "said": done.stdout[:3000] if options else "",
    }


def granted(run: Path) -> dict[str, int]:
    """How many trajectories each worker finished, by the trace."""
    from baton.records.trace import read_trace

    spans = read_trace(run)
    return dict(Counter(s.actor for s in spans if s.name == "generate" and s.facts.get("ended") == "finish"))


if __name__ == "__main__":
    main()
