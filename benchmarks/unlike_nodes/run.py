"""A trainer on Ray nodes of unlike speed: rows in proportion to speed, equal shares, and the fast node alone.

    python -m benchmarks.unlike_nodes.run     # about three minutes on two cores; needs Ray, root and cgroups (Linux)

Two nodes of a local Ray cluster have two cores and one core. Quotas of cgroups limit the rank on the first node to
1.2 cores and the rank on the second to 0.6. Each kind of trainer starts its ranks as `baton train --plan` does, from a
plan by hand. All kinds start from the same weights, train on the same batches and take turns. Raw results:
results/raw.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import msgspec
import torch

from baton.cluster.inventory import Machine, machines
from baton.cluster.placement import place
from baton.cluster.ray.connection import RayCluster
from baton.cluster.ray.ranks import RayRanks
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.threads import set_up_threads
from baton.policy.tokenizer import load_tokenizer
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.factory import make_trainer
from baton.trainer.parallel.messages import TrainerSetup
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.trainer.settings import TrainerSettings
from baton.trainer.trainer import Trainer
from baton.types import (
    Batch,
    FinishReason,
    Group,
    Message,
    PolicyVersion,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)
from benchmarks.machine import machine
from tests.cluster.plans import plan_of, stage

HERE = Path(__file__).parent
QUOTAS = {2: 1.2, 1: 0.6}
"""Threads of a rank → cores that it may use."""
PERIOD_US = 5_000
CGROUPS = Path("/sys/fs/cgroup/cpu") if Path("/sys/fs/cgroup/cpu").is_dir() else Path("/sys/fs/cgroup")


def batch(step: int) -> Batch:
    """Sixteen groups of four; lognormal lengths around 200 tokens."""
    rng, groups = random.Random(step), []
    for group_id in range(16):
        members = []
        for index in range(4):
            length = min(600, max(2, round(200 * rng.lognormvariate(0.0, 0.6))))
            ids = tuple(rng.randrange(3, 250) for _ in range(length))
            segment = Segment(ids, (-5.0,) * length, step - 1)
            trajectory = Trajectory(group_id, index, (5, 6, 7, 8) * 4, (segment,), FinishReason.STOP)
            members.append(ScoredTrajectory(trajectory, RewardResult(float(index % 2), {}, bool(index % 2))))
        groups.append(Group(group_id, Prompt(str(group_id), "bench", (Message("user", ""),)), tuple(members)))
    return Batch(step, tuple(groups))


def limit(pid: int, cores: float, group: str) -> None:
    """Limit a process to this many cores with a cgroup (version 1 or 2)."""
    directory = CGROUPS / group
    directory.mkdir(exist_ok=True)
    quota = round(cores * PERIOD_US)
    if (directory / "cpu.max").exists():
        (directory / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (directory / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (directory / "cpu.cfs_quota_us").write_text(str(quota))
    (directory / "cgroup.procs").write_text(str(pid))


def setup_in(directory: str, settings: Mapping[str, Any]) -> TrainerSetup:
    """Return the setup of a trainer of a model that `directory` has, or gets."""
    if not (Path(directory) / "config.json").exists():
        tokenizer = scratch_tokenizer(["a corpus"], 300)
        shape = ScratchSettings(vocab_size=300, hidden_size=256, num_layers=4, num_heads=4, intermediate_size=704)
        scratch_model(shape, tokenizer, seed=0).save_pretrained(directory)
        tokenizer.hf.save_pretrained(directory)
    trainer = {"lr": 1e-4, "max_tokens_per_microbatch": 4096, **settings}
    wide = {"max_mismatch_kl": (1e9, 1e9), "max_logprob_diff": (1e9, 1e9)}
    return TrainerSetup(
        model_path=directory,
        device="cpu",
        attention="sdpa",
        trainer=TrainerSettings.model_validate({**trainer, **wide}).model_dump(),
        algorithm=AlgorithmSettings(name="grpo").model_dump(),
        lora=None,
        temperature=1.0,
        total_steps=1000,
        max_new_tokens=600,
        max_staleness=None,
        publish_dtype="float32",
        version=PolicyVersion("bench", 0),
        seed=0,
    )


class _Cluster(RayCluster):
    """Gives each trainer's placement group its own name, because three trainers exist at the same time."""

    def reserve(self, bundles: Sequence[tuple[str, Mapping[str, float]]], name: str) -> Any:
        return super().reserve(bundles, f"{name}-{random.randrange(2**32)}")


def ranked(cluster: RayCluster, there: Mapping[str, Machine], kind: str, directory: str) -> tuple[Trainer, Any]:
    """Start the ranks of one kind of trainer on the nodes, limit them, and return the trainer and its settings."""
    fast, slow = there["fast"], there["slow"]
    ids = [f"{fast.name}:0", f"{fast.name}:1", *([f"{slow.name}:0"] if kind != "fast node alone" else [])]
    placed = place(plan_of([stage("CPU", *ids)], []), list(there.values()), here=fast.id)
    given = dict(override.removeprefix("trainer.").split("=") for override in placed.overrides)
    if kind == "equal shares":
        del given["speeds"]
    settings = {key: json.loads(value) for key, value in given.items()}
    ranks = RayRanks(cluster, placed.ranks, {placed.names[each.id]: each for each in there.values()})
    for pid, spec in zip(ranks.pids, placed.ranks, strict=True):
        limit(pid, QUOTAS[spec.threads], f"baton-bench-{spec.threads}")
    return RankedTrainer(ranks, setup_in(directory, settings), 300), settings


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def take_turns(kinds: Mapping[str, Trainer], steps: int) -> dict[str, list[dict[str, float]]]:
    """Return seconds and imbalance of each step after the first; the trainers alternate."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for step in range(1, steps + 2):
        given = batch(step)
        for kind, trainer in kinds.items():
            begin = time.perf_counter()
            metrics = trainer.step(given)
            found[kind].append(
                {"seconds": time.perf_counter() - begin, "imbalance": metrics.get("tokens/imbalance", 1.0)}
            )
    return {kind: rows[1:] for kind, rows in found.items()}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    from ray.cluster_utils import Cluster

    # three trainers exist at the same time, and one of them works: three times the cores of the plan
    size = {"object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, "num_cpus": 6, **size})
    nodes.add_node(num_cpus=3, **size)
    raw: dict[str, Any] = {**machine(), "quotas": {str(k): v for k, v in QUOTAS.items()}, "kinds": {}}
    kinds: dict[str, Trainer] = {}
    with tempfile.TemporaryDirectory() as directory:
        set_up_threads(1)
        alone = make_trainer(setup_in(directory, {}), load_tokenizer(directory))
        take_turns({"one process": alone}, arguments.steps)
        expected = weights_of(alone)
        cluster = _Cluster(nodes.address)
        try:
            found = sorted(machines(cluster.rows()), key=lambda each: each.num_gpus)
            there = {"slow": found[0], "fast": found[1]}
            for kind in ("fast node alone", "equal shares", "shares by speed"):
                kinds[kind], settings = ranked(cluster, there, kind, directory)
                raw["kinds"][kind] = {"settings": settings}
            for kind, rows in take_turns(kinds, arguments.steps).items():
                weights = weights_of(kinds[kind])
                squares = sum((weights[name] - tensor).square().sum().item() for name, tensor in expected.items())
                distance = (squares / sum(t.square().sum().item() for t in expected.values())) ** 0.5
                raw["kinds"][kind] |= {"steps": rows, "distance": distance}
                seconds = [row["seconds"] for row in rows]
                print(f"| {kind} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {distance:.1e} |")
        finally:
            for trainer in kinds.values():
                trainer.close()
            cluster.leave()
            nodes.shutdown()
            for threads in QUOTAS:
                with suppress(OSError):  # a process in it has not ended yet
                    (CGROUPS / f"baton-bench-{threads}").rmdir()
    raw["load_after"] = os.getloadavg()[0]
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "raw.json").write_bytes(msgspec.json.format(msgspec.json.encode(raw), indent=1) + b"\n")


if __name__ == "__main__":
    main()
