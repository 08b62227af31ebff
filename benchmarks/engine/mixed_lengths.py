"""The time of a decode step on a CPU when the rows of the batch have different lengths.

    python benchmarks/engine/mixed_lengths.py               # a few minutes of one core

64 slots are filled with noise, and one step is computed again and again at fixed positions. Compared are one class of
rows (attention of all rows up to the longest) and the classes that the engine chooses. The two sides alternate, and
each reports the least processor time of all repetitions. Raw results go to results/mixed_lengths.json.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from baton.policy.tokenizer import load_tokenizer
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.cache import Masks, SlotLayer
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.embedded.length_classes import SlotRange
from baton.rollout.engines.embedded.network import Network
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Trajectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from machine import machine  # noqa: E402

SLOTS, CONTEXT_TOKENS = 64, 512
SHORT, LONG = 40, 480
REQUESTS = 384
REPETITIONS = {"quickstart": 120, "135M": 12}


def lengths() -> dict[str, list[int]]:
    """Return the number of positions of each row, by workload."""
    rng = random.Random(0)
    return {
        "short": [SHORT] * SLOTS,
        "long": [LONG] * SLOTS,
        "mixed": [SHORT, LONG] * (SLOTS // 2),
        "spread": [rng.randint(16, LONG) for _ in range(SLOTS)],
    }


def load(name: str) -> PreTrainedModel:
    """Load the quickstart's model, or make one of SmolLM2-135M's shape with random weights."""
    if name == "quickstart":
        path = HERE.parent.parent / "models" / "quickstart"
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def measure(name: str, repetitions: int) -> list[dict[str, Any]]:
    """Measure all workloads with one model."""
    begin = time.process_time()
    network = Network(load(name), SLOTS, CONTEXT_TOKENS)
    start_s = time.process_time() - begin
    classes = network.classes
    assert classes is not None, "this CPU computes other bits in classes of rows"
    ids_W = torch.arange(SLOTS) % network.vocabulary
    found = []
    for workload, rows in lengths().items():
        positions, reorder_ms = np.array(rows) - 1, 0.0
        network.classes = classes
        classes.ends = ()
        order = network.order(positions)
        if order is not None:
            moves = order.tolist(), positions.tolist()
            reorder_ms = least([lambda: network.cache.reorder(*moves)], 5)[0]  # noqa: B023
            positions = positions[order]
        position_W = torch.from_numpy(positions)
        kv_length = next(n for n in network.kv_lengths if n > positions.max())

        def step(with_classes: bool) -> torch.Tensor:
            network.classes = classes if with_classes else None
            return network.decode(ids_W, position_W, kv_length)  # noqa: B023

        same = torch.equal(step(True), step(False))
        one, own = least([lambda: step(False), lambda: step(True)], repetitions)
        ranges = classes.ranges(positions + 1) or [SlotRange(0, SLOTS, kv_length)]
        row = {
            "model": name,
            "workload": workload,
            "one_class_ms": one,
            "classes_ms": own,
            "choice_ms": least([lambda: network.order(positions)], 20)[0],  # noqa: B023
            "reorder_ms": reorder_ms,
            "classes": ranges,
            "scanned_positions": [SLOTS * kv_length, sum((r.end - r.begin) * r.kv_length for r in ranges)],
            "bits_are_equal": same,
            "parts_of_one_class_ms": parts(lambda: step(False), repetitions),
            "engine_start_s": start_s,
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def parts(step: Callable[[], object], repetitions: int) -> dict[str, float]:
    """Return the least processor time of the parts of a step in milliseconds, each summed over all layers."""
    owners = {
        "masks": (Masks, "additive"),
        "write new keys and values, and slice": (SlotLayer, "update"),
        "scaled_dot_product_attention": (torch.nn.functional, "scaled_dot_product_attention"),
        "linear": (torch.nn.functional, "linear"),
    }
    spent: dict[str, list[float]] = {name: [] for name in owners}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            begin = time.process_time()
            found = call(*arguments, **options)
            spent[name][-1] += (time.process_time() - begin) * 1e3
            return found

        return run

    originals = {name: getattr(*owner) for name, owner in owners.items()}
    for name, (owner, attribute) in owners.items():
        setattr(owner, attribute, timed(name, originals[name]))
    try:
        for _ in range(max(4, repetitions // 4)):
            for times in spent.values():
                times.append(0.0)
            step()
    finally:
        for name, (owner, attribute) in owners.items():
            setattr(owner, attribute, originals[name])
    return {name: min(times) for name, times in spent.items()}


def measure_engine(repetitions: int = 3) -> dict[str, Any]:
    """Generate responses of lognormal lengths with the quickstart's model, and time the steps from the end of the first
    64 responses on, as long as all slots are in use.

    Both sides make the same steps, so each step counts with the least time of its repetitions.
    """
    path = HERE.parent.parent / "models" / "quickstart"
    settings = EngineSettings(slots=SLOTS, max_context_tokens=CONTEXT_TOKENS)
    engine = EmbeddedEngine(load("quickstart"), load_tokenizer(str(path)), settings, PolicyVersion("benchmark", 0), ())
    classes, rng = engine.network.classes, random.Random(0)
    wanted = [min(LONG, 1 + int(rng.lognormvariate(3.9, 1.0))) for _ in range(REQUESTS)]
    prompt = tuple(range(10, 26))
    taken: dict[bool, list[list[float]]] = {False: [], True: []}
    responses: dict[bool, Any] = {}
    for repetition in range(repetitions):
        for with_classes in (False, True):
            engine.network.classes = classes if with_classes else None
            for i, num_tokens in enumerate(wanted):
                lease_id = 2 * REQUESTS * repetition + REQUESTS * with_classes + i
                engine.submit(Lease(lease_id, Trajectory(i, 0, prompt), SamplingParams(num_tokens), 7, 0, True))
            left, times, reports = REQUESTS, [], []
            while left:
                is_counted = SLOTS <= left <= REQUESTS - SLOTS
                begin = time.process_time()
                found = [report for report in engine.step() if isinstance(report, Report)]
                if is_counted:
                    times.append((time.process_time() - begin) * 1e3)
                reports += [(report.lease_id % REQUESTS, report.segments) for report in found]
                left -= sum(report.finish_reason is not None for report in found)
            taken[with_classes].append(times)
            responses[with_classes] = reports
    one, own = (np.array(taken[side]).min(0).sum() for side in (False, True))
    steps = len(taken[True][0])
    row = {
        "model": "quickstart",
        "workload": "engine with full slots, lognormal lengths",
        "mean_tokens": sum(wanted) / REQUESTS,
        "longest_tokens": max(wanted),
        "steps": steps,
        "one_class_ms": one / steps,
        "classes_ms": own / steps,
        "responses_are_equal": sorted(responses[True], key=str) == sorted(responses[False], key=str),
    }
    print(json.dumps(row), flush=True)
    return row


def least(sides: list[Callable[[], object]], repetitions: int) -> list[float]:
    """Return the least processor time of each side in milliseconds; the sides alternate."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repetitions + 1):
        for side, taken in zip(sides, times, strict=True):
            begin = time.process_time()
            side()
            taken.append((time.process_time() - begin) * 1e3)
    return [min(taken[1:]) for taken in times]  # the first one warms up


def main() -> None:
    """Measure the models, and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=REPETITIONS, default=list(REPETITIONS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "mixed_lengths.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found: dict[str, Any] = {"machine": {**machine(), "torch": torch.__version__}, "cases": []}
    with torch.inference_mode():
        for name in arguments.models:
            found["cases"] += measure(name, REPETITIONS[name])
    if "quickstart" in arguments.models:
        found["cases"].append(measure_engine())
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
