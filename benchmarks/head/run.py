"""Compare the trainer's head with torch's `linear_cross_entropy` on a CPU: time, memory and error of the gradient.

    python -m benchmarks.head.run benchmarks/head/results/raw.json [--tokens 1024]

Each case runs in a process of its own, with one thread: the forward pass and the backward pass of a weighted sum of
log-probabilities, as a policy gradient has. Times are processor times, which other work on the machine disturbs little.
The shapes are those of SmolLM2's head; values are random. Memory is the growth of the largest resident set over that
before the first pass. The error is relative, of the weight's gradient against a float64 computation with the values
that the matrix product gets.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear_cross_entropy

from baton.policy.head import Head, RequestedScores, head_scores
from benchmarks.machine import machine

HIDDEN, VOCABULARY = 576, 49152
REPEATS = 3
Scores = Callable[[torch.Tensor, torch.nn.Linear, torch.Tensor], torch.Tensor]


def of_baton(with_entropy: bool) -> Scores:
    wanted = RequestedScores(1.0, with_entropy, False)

    def scores(hidden: torch.Tensor, layer: torch.nn.Linear, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=hidden.dtype is torch.bfloat16):
            return head_scores(Head(layer), hidden, targets, wanted)[0]

    return scores


def of_torch(policy: str | None) -> Scores:
    options = None if policy is None else torch.nn.LinearCrossEntropyOptions(acc_policy=policy)  # type: ignore[arg-type]

    def scores(hidden: torch.Tensor, layer: torch.nn.Linear, targets: torch.Tensor) -> torch.Tensor:
        weight = layer.weight.to(hidden.dtype)
        return -linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)

    return scores


CASES: dict[str, Scores] = {
    "Baton": of_baton(False),
    "Baton, with entropy": of_baton(True),
    "torch, options=None": of_torch(None),
    "torch, auto": of_torch("auto"),
    "torch, accurate": of_torch("accurate"),
    "torch, balanced": of_torch("balanced"),
    "torch, compact": of_torch("compact"),
}


def measure(name: str, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    layer.weight.data.normal_(std=0.05)
    hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
    targets, weights = torch.randint(VOCABULARY, (tokens,)), torch.randn(tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(REPEATS):
        layer.weight.grad = hidden.grad = None
        begin = time.process_time()
        (CASES[name](hidden, layer, targets).float() * weights).sum().backward()
        times.append(time.process_time() - begin)
        if times[0] > 30:
            break
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": times, "bytes": 1024 * grown, "error": error_of(layer, hidden, targets, weights)}


@torch.no_grad()
def error_of(layer: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> float:
    """Return the relative error of the weight's gradient, computed in pieces of 64 tokens."""
    weight, exact = layer.weight.to(hidden.dtype).double(), torch.zeros(VOCABULARY, HIDDEN, dtype=torch.float64)
    for begin in range(0, len(hidden), 64):
        rows = slice(begin, begin + 64)
        own = hidden[rows].double()
        of_logits = -(own @ weight.T).softmax(-1)
        of_logits[range(len(own)), targets[rows]] += 1.0
        exact += (of_logits * weights[rows, None]).T @ own
    assert layer.weight.grad is not None
    return float((layer.weight.grad - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--only", nargs="*", help="such as 'float32, Baton'; default: all")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], getattr(torch, options.case[1]), options.tokens)))
        return
    rows: list[dict[str, Any]] = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    for dtype in ("float32", "bfloat16"):
        for name in CASES:
            if options.only and f"{dtype}, {name}" not in options.only:
                continue
            command = [sys.executable, "-m", "benchmarks.head.run", str(options.output), "--case", name, dtype]
            done = subprocess.run([*command, "--tokens", str(options.tokens)], capture_output=True, check=False)
            if done.returncode:
                print(f"{dtype}, {name}: {done.stderr.decode()[-300:]}")
                continue
            row = {"case": name, "dtype": dtype, "tokens": options.tokens, **json.loads(done.stdout), **machine()}
            rows = [each for each in rows if (each["case"], each["dtype"]) != (name, dtype)] + [row]
            fastest, memory = min(row["seconds"]), row["bytes"] / 1e6
            print(f"| {dtype} | {name} | {fastest:.2f} s | {memory:.0f} MB | {row['error']:.1e} |", flush=True)
            options.output.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
