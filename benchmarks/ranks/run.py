"""What sharding a trainer costs and gains on one machine, and how evenly rows are dealt.

    python benchmarks/ranks/run.py              both parts; about two minutes on two cores
    python benchmarks/ranks/run.py --no-times   the dealing alone: pure arithmetic, seconds

Raw results go to results/raw.json, tables to the terminal.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch, as the command does: waiting threads sleep soon

import argparse
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.threads import set_up_threads
from baton.policy.tokenizer import Tokenizer
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.factory import make_trainer
from baton.trainer.microbatches import under_budget
from baton.trainer.parallel.balance import BatchShare, balanced
from baton.trainer.parallel.local_ranks import LocalRanks
from baton.trainer.parallel.messages import TrainerSetup
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.trainer.samples import TrainingSample
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

HERE = Path(__file__).parent
EVEN_TOKENS = 10_000.0
"""Of a model of 0.6B parameters, 28 layers and 2048 columns of attention."""


def lengths_of(count: int, seed: int, median: float, sigma: float) -> list[int]:
    """Lognormal lengths, in tokens."""
    rng = random.Random(seed)
    return [max(2, round(median * rng.lognormvariate(0.0, sigma))) for _ in range(count)]


def dealing() -> list[dict[str, Any]]:
    """Max over mean of the ranks' costs, and of the places they are fed, for three ways of dealing rows.

    No way can have a costliest rank below the costliest row: that is the fourth.
    """
    found = []
    for ranks in (2, 4, 8, 16):
        for sigma in (0.5, 1.0):
            ways: dict[str, list[tuple[float, float]]] = {"bound": [], "balanced": [], "round robin": [], "runs": []}
            for seed in range(20):
                lengths = lengths_of(256, seed, 1500, sigma)
                costs = [BatchShare(0, ranks, EVEN_TOKENS).cost(length) for length in lengths]
                dealt = {
                    "balanced": balanced(costs, ranks),
                    "round robin": [list(range(rank, 256, ranks)) for rank in range(ranks)],
                    "runs": [list(range(256 * r // ranks, 256 * (r + 1) // ranks)) for r in range(ranks)],
                }
                ways["bound"].append((max(1.0, max(costs) * ranks / sum(costs)), 1.0))
                for way, parts in dealt.items():
                    loads = [sum(costs[place] for place in part) for part in parts]
                    fed = [places([lengths[place] for place in part]) for part in parts]
                    ways[way].append((max(loads) / statistics.fmean(loads), max(fed) / statistics.fmean(fed)))
            for way, pairs in ways.items():
                cost, fed_apart = (statistics.fmean(each) for each in zip(*pairs, strict=True))
                found.append({"ranks": ranks, "sigma": sigma, "way": way, "cost": cost, "places": fed_apart})
    return found


def places(lengths: list[int]) -> int:
    """Return the places, padding included, of a rank's microbatches of at most 32768."""
    rows = [TrainingSample(0, "", (0,) * n, 1, (), (), (), (), 0.0) for n in lengths]
    return sum(len(chunk) * max(len(row.token_ids) for row in chunk) for chunk in under_budget(rows, 32768))


def batch(step: int) -> Batch:
    """Sixteen groups of eight; lognormal lengths around 64 tokens."""
    rng, groups = random.Random(step), []
    for group_id in range(16):
        members = []
        for index, length in enumerate(lengths_of(8, 100 * step + group_id, 64, 0.8)):
            ids = tuple(rng.randrange(3, 250) for _ in range(min(400, length)))
            segment = Segment(ids, (-5.0,) * len(ids), step - 1)
            trajectory = Trajectory(group_id, index, (5, 6, 7, 8) * 4, (segment,), FinishReason.STOP)
            members.append(ScoredTrajectory(trajectory, RewardResult(float(index % 2), {}, bool(index % 2))))
        groups.append(Group(group_id, Prompt(str(group_id), "bench", (Message("user", ""),)), tuple(members)))
    return Batch(step, tuple(groups))


def times(steps: int) -> tuple[list[dict[str, Any]], int]:
    """Seconds of a train step, the trainers taking turns; and the parameters of the model."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = scratch_tokenizer(["a corpus"], 300)
        shape = ScratchSettings(vocab_size=300, hidden_size=192, num_layers=4, num_heads=4, intermediate_size=512)
        model = scratch_model(shape, tokenizer, seed=0)
        model.save_pretrained(directory)
        tokenizer.hf.save_pretrained(directory)
        setup = TrainerSetup(
            model_path=directory,
            device="cpu",
            attention="sdpa",
            trainer=TrainerSettings(
                lr=1e-5, max_tokens_per_microbatch=2048, max_mismatch_kl=(1e9, 1e9), max_logprob_diff=(1e9, 1e9)
            ).model_dump(),
            algorithm=AlgorithmSettings(name="grpo").model_dump(),
            lora=None,
            temperature=1.0,
            total_steps=1000,
            max_new_tokens=400,
            max_staleness=None,
            publish_dtype="float32",
            version=PolicyVersion("bench", 0),
            seed=0,
        )
        return _take_turns(setup, tokenizer, steps), model.num_parameters()


def _take_turns(setup: TrainerSetup, tokenizer: Tokenizer, steps: int) -> list[dict[str, Any]]:
    kinds: dict[str, tuple[Trainer, int]] = {
        "no ranks, 1 thread": (make_trainer(setup, tokenizer), 1),
        "no ranks, 2 threads": (make_trainer(setup, tokenizer), 2),
    }
    found: dict[str, list[float]] = {}
    try:
        for count, threads in ((1, 1), (1, 2), (2, 1)):
            ranks = LocalRanks(count, threads=threads)
            kinds[f"{count} ranks of {threads} threads"] = (RankedTrainer(ranks, setup, 600), 1)
        for step in range(1, steps + 2):
            given = batch(step)
            for name, (trainer, threads) in kinds.items():
                set_up_threads(threads)
                begin = time.perf_counter()
                trainer.step(given)
                if step > 1:  # the first warms up
                    found.setdefault(name, []).append(time.perf_counter() - begin)
    finally:
        for trainer, _ in kinds.values():
            trainer.close()
    return [{"trainer": name, "seconds": seconds} for name, seconds in found.items()]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--no-times", action="store_true")
    arguments = parser.parse_args()
    raw: dict[str, Any] = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg(),
        "torch": str(torch.__version__),
        "dealing": dealing(),
    }
    print("| ranks | σ | dealt | costliest / mean | most places / mean |\n|---|---|---|---|---|")
    for row in raw["dealing"]:
        print(f"| {row['ranks']} | {row['sigma']} | {row['way']} | {row['cost']:.3f} | {row['places']:.3f} |")
    if not arguments.no_times:
        raw["times"], raw["parameters"] = times(arguments.steps)
        raw["load_after"] = os.getloadavg()
        one = statistics.median(raw["times"][0]["seconds"])
        print("\n| trainer | s per step, median | fastest | of one thread |\n|---|---|---|---|")
        for row in raw["times"]:
            middle = statistics.median(row["seconds"])
            print(f"| {row['trainer']} | {middle:.2f} | {min(row['seconds']):.2f} | {middle / one:.2f} |")
    (HERE / "results" / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
