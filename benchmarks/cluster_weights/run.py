"""Versions to the workers of a cluster: whole through Ray's object store, against chunks from the hub.

    python benchmarks/cluster_weights/run.py                 # 4, 40 and 400 MB, three machines with a worker each
    python benchmarks/cluster_weights/run.py --sizes 4 --repeats 2

A real hub, real workers (their engine only takes the weights) and a local Ray cluster of one node per worker, all on
this machine. Each version changes some elements (1 %) by a unit in the last place. Time is from the trainer's handing a
version over to the last worker's serving it. Raw results: results/raw.json; the table goes to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
from ray.cluster_utils import Cluster

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "swarm")]

from swarm_bench import SwarmBench, wait_until  # noqa: E402

from baton.fleet.ray_cluster import RayCluster  # noqa: E402
from baton.fleet.ray_weights import Broadcast  # noqa: E402
from baton.policy.tensors import weights_digest  # noqa: E402
from baton.types import PolicyVersion  # noqa: E402


class Taker:
    """An actor with a swarm worker whose engine only takes weights."""

    def __init__(self, url: str, token: str, shared: str) -> None:
        from baton.rollout.engines.fake import FakeEngine
        from baton.swarm.worker import SwarmWorker, WorkerOptions

        async def run() -> None:
            await SwarmWorker(
                WorkerOptions(url, token, shared=shared, say=lambda text: None),
                lambda welcome, directory, base: FakeEngine(
                    welcome.engine_settings(), PolicyVersion("none", 0), lambda group_id, sample_index: 1
                ),
            ).run()

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()


def main() -> None:
    """Measure both ways at each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 40, 400], help="MB")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that change")
    parser.add_argument("--raw", default="raw.json", help="name of the file in results/")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="versions beside the first")
    arguments = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    raw: dict[str, Any] = {
        "commit": git.stdout.strip(), "processor": platform.processor(), "cores": len(os.sched_getaffinity(0)),
        "workers": arguments.workers, "density": arguments.density, "rows": [],
    }  # fmt: skip
    head = {"include_dashboard": False, "num_cpus": 1, "object_store_memory": 3 * 2**30}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(arguments.workers):
        nodes.add_node(num_cpus=1, object_store_memory=2 * 2**30)
    cluster = RayCluster(nodes.address)
    try:
        for size in arguments.sizes:
            for way in ("chunks", "object_store"):
                raw["rows"].append(measure(cluster, way, size, arguments.repeats, arguments.density))
                print(json.dumps(raw["rows"][-1]), flush=True)
    finally:
        cluster.leave()
        nodes.shutdown()
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / arguments.raw).write_text(json.dumps(raw, indent=1) + "\n")
    print_table(raw["rows"])


def measure(cluster: RayCluster, way: str, size_mb: int, repeats: int, density: float) -> dict[str, Any]:
    """Publish versions one after another; return seconds and bytes of each."""
    torch.manual_seed(size_mb)
    tensors = {f"layer.{i}": torch.randn(size_mb * 10**6 // 4 // 8) for i in range(8)}
    workers = [row["NodeID"] for row in cluster.rows() if row["Alive"] and row["NodeID"] != cluster.here]
    with tempfile.TemporaryDirectory() as directory:
        bench = SwarmBench(Path(directory), lease_rules={"silence_s": 600.0, "wedge_s": 600.0})
        broadcast = Broadcast(cluster, print) if way == "object_store" else None
        if broadcast is not None:
            bench.port._parts = dataclasses.replace(bench.port._parts, broadcast=broadcast.send)
        seat = cluster.ray.remote(Taker)
        takers = [
            seat.options(**cluster.on_node(node)).remote(
                bench.url, bench.worker_token, broadcast.directory(node) if broadcast else ""
            )
            for node in workers
        ]
        wait_until(lambda: len(bench.hub.peers) == len(workers), "workers to join")
        seconds, sent, published = [], [], []
        for number in range(repeats + 1):
            if number:
                tensors = changed(tensors, density)
            version = PolicyVersion("bench", number, weights_digest(tensors))
            before, begin = bench.hub.counters.bytes_out, time.perf_counter()
            bench.port.load_weights(tensors, version)
            wait_until(lambda number=number: served(bench, number), f"version {number}")
            seconds.append(time.perf_counter() - begin)
            wait_until(lambda: all(future.done() for future in bench.port._futures), "chunks behind it")
            published.append(time.perf_counter() - begin)
            bench.port.receive(0)
            sent.append(bench.hub.counters.bytes_out - before)
        for taker in takers:
            cluster.ray.kill(taker)
        bench.port.close()
        if broadcast is not None:
            broadcast.close()
    whole = sum(t.numel() * t.element_size() for t in tensors.values())
    moved = [whole * len(workers)] * len(sent) if way == "object_store" else sent
    return {
        "way": way, "size_mb": size_mb, "first_s": seconds[0], "seconds": seconds[1:], "published_s": published[1:],
        "first_bytes": moved[0], "bytes": moved[1:],
    }  # fmt: skip


def served(bench: SwarmBench, number: int) -> bool:
    """Whether all workers serve a version."""
    bench.port.receive(0)
    return all(peer.served == number for peer in list(bench.hub.peers.values()))


def changed(tensors: Mapping[str, torch.Tensor], density: float) -> dict[str, torch.Tensor]:
    """Return tensors of which some elements differ in their last place."""
    found = {}
    for name, tensor in tensors.items():
        words = tensor.clone().view(torch.int32)
        words[torch.rand(words.shape) < density] += 1
        found[name] = words.view(torch.float32)
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what the README holds."""
    print("| MB | way | first, s | MB moved | next, s (median) | MB moved | chunks written after, s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['size_mb']} | {row['way']} | {row['first_s']:.2f} | {row['first_bytes'] / 1e6:.1f} | "
            f"{statistics.median(row['seconds']):.2f} | {statistics.median(row['bytes']) / 1e6:.1f} | "
            f"{statistics.median(row['published_s']):.2f} |"
        )


if __name__ == "__main__":
    main()
