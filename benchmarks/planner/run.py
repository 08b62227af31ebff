"""How long planning takes, how good the plan is proven to be, how much memory it needs.

    python -m benchmarks.planner.run [--out benchmarks/planner/results/times.json] [--repeat 3]

Each case runs in a process of its own, from reading nothing to a complete plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from baton.planner.problem import Inputs
from baton.planner.solve import make_plan
from baton.specs.cluster import Cluster, ClusterSettings
from baton.specs.model import read_model
from baton.specs.workload import Workload, WorkloadSettings

HERE = Path(__file__).parent
MODELS = HERE.parent / "areal_hex" / "models"
PUBLISHED = {"24 GPUs": 14.9, "32 GPUs": 23.1, "40 GPUs": 46.7, "56 GPUs": 120.0}
"""Seconds, AReaL-Hex table 5; its processor is not stated."""


def cluster(*nodes: tuple[str, int], inter: float = 5, cross: float = 1.5, size: int = 8) -> Cluster:
    """Return machines of eight GPUs, (type, machines)."""
    shown = [{"gpu": gpu, "gpus": size, "count": count} for gpu, count in nodes]
    links = {"inter_node_gb_per_s": inter, "cross_type_gb_per_s": cross}
    return ClusterSettings.model_validate({"name": "x", "links": links, "nodes": shown}).build()


def asymmetric(of: Cluster, seed: int, least: float = 0.5) -> Cluster:
    """Return the cluster with every link between machines drawn anew, from `least` to all of its bandwidth."""
    draw = random.Random(seed)
    rows = [list(row) for row in of.bytes_per_s]
    for a in range(len(rows)):
        for b in range(a):
            rows[a][b] = rows[b][a] = rows[a][b] * draw.uniform(least, 1.0)
    return msgspec.structs.replace(of, bytes_per_s=tuple(map(tuple, rows)))


def workload(groups: int = 512) -> Workload:
    """Return mathematics with answers of up to 27,648 tokens."""
    lengths = {"kind": "lognormal", "mean": 8000, "max": 27648}
    shown = {"groups": groups, "group_size": 16, "prompt_tokens": {"mean": 300}, "output_tokens": lengths}
    return WorkloadSettings.model_validate(shown).build()


def thousand(*types: str) -> Cluster:
    """Return 256 GPUs of each type."""
    return cluster(*((name, 32) for name in types), inter=25, cross=10)


def cases() -> dict[str, Inputs]:
    """Return what is timed, by name."""
    seven = read_model(MODELS / "r1-distill-qwen-7b")
    fourteen = read_model(MODELS / "r1-distill-qwen-14b")
    found = {
        f"{8 + 8 * count} GPUs": Inputs(cluster(("H800-paper", 1), ("H20-paper", count)), seven, workload())
        for count in (2, 3, 4, 6)
    }
    large = workload(2048)
    found["1,024 GPUs: H100, A100, H20, L40S; 7B"] = Inputs(thousand("H100", "A100-80", "H20", "L40S"), seven, large)
    found["1,024 GPUs: H100, A100, H20, L40S; 14B"] = Inputs(
        thousand("H100", "A100-80", "H20", "L40S"), fourteen, large
    )
    found["1,024 GPUs: H800, H20, A800, L20; 7B"] = Inputs(thousand("H800", "H20", "A800", "L20"), seven, large)
    found["1,024 GPUs: A100, L40S, A10, L4; 7B"] = Inputs(thousand("A100-80", "L40S", "A10", "L4"), seven, large)
    found["1,024 GPUs: H200, H100, A100-80, A100-40; 14B"] = Inputs(
        thousand("H200", "H100", "A100-80", "A100-40"), fourteen, large
    )
    small = cluster(("H800-paper", 1), ("H20-paper", 6))
    found["56 GPUs, every link different"] = Inputs(asymmetric(small, 0), seven, workload())
    for types in (("H100", "A100-80", "H20", "L40S"), ("H800", "H20", "A800", "L20"), ("A100-80", "L40S", "A10", "L4")):
        for size, model in (("7B", seven), ("14B", fourteen)):
            name = f"1,024 GPUs, every link different: {', '.join(types)}; {size}"
            found[name] = Inputs(asymmetric(thousand(*types), 0), model, large)
    name = "1,024 GPUs, links of 10 to 100 %: H100, A100-80, H20, L40S; 7B"
    found[name] = Inputs(asymmetric(thousand("H100", "A100-80", "H20", "L40S"), 0, 0.1), seven, large)
    return found


def once(name: str) -> dict[str, float | bool]:
    """Plan one case in this process."""
    inputs = cases()[name]
    started = time.perf_counter()
    plan = make_plan(inputs)
    return {
        "seconds": time.perf_counter() - started,
        "gap": plan.bound.gap,
        "is_proven": plan.bound.is_proven,
        "step_s": plan.breakdown.step_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Time every case, print the table and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results" / "times.json")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", help="one case, in this process; prints JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(once(arguments.one)))
        return
    rows = {}
    for name in cases():
        command = [sys.executable, "-m", "benchmarks.planner.run", "--one", name]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(arguments.repeat)
        ]
        seconds = [run["seconds"] for run in runs]
        rows[name] = {**runs[0], "seconds": statistics.median(seconds), "slowest_s": max(seconds)}
        rows[name]["published_s"] = PUBLISHED.get(name)
        print(
            f"| {name} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | {PUBLISHED.get(name, '')} "
            f"| {'optimum' if runs[0]['is_proven'] else format(runs[0]['gap'], '.2%')} | {runs[0]['memory_mb']:.0f} |",
            flush=True,
        )
    facts = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"commit": commit, **facts, "cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
