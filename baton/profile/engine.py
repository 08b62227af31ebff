"""Measures decode steps and prefills of the recipe's engine, for several batch sizes and context lengths."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from baton.clock import call_within, time_left
from baton.cost.fit import Measurement
from baton.errors import EngineFault
from baton.policy.load import load_policy
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.recipe import Recipe
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.run.assemble import set_up_torch
from baton.types import Lease, PolicyVersion, SamplingParams, Trajectory

DECODE_STEPS = 24
REPEATS = 5
POINT_S = 10.0
"""A measurement is repeated only within this number of seconds, because longer measurements are precise enough."""
CONTEXT_SHARES = (0.125, 0.35, 0.7)
"""Context lengths at which decode and prefill are measured, as shares of the engine's maximum context length."""
START_S = 600.0
"""Maximum seconds until a busy engine has started; several engines start at the same time."""
Say = Callable[[str], None]


@contextmanager
def companions(command: Sequence[str], count: int) -> Iterator[None]:
    """Run `count` processes with busy engines while the context is open."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)
        for _ in range(max(0, count) if command else 0)
    ]
    try:
        for child in started:
            assert child.stdout is not None, "stdout is a pipe"
            if not call_within(START_S, "the start of a busy engine", child.stdout.readline):
                raise EngineFault("a busy engine ended before it started to generate; its output is above")
        yield
    finally:
        for child in started:
            child.kill()
            child.wait()


def keep_busy(recipe: Recipe) -> None:
    """Generate like an engine process until this process is killed. Writes `busy` to stdout after the first batch."""
    set_up_torch(1)
    engine = endless_engine(recipe)
    context, first = int(recipe.engine.max_context_tokens * CONTEXT_SHARES[0]), 0
    while True:
        _timed(engine, recipe.engine.slots, context, first, DECODE_STEPS)
        first += recipe.engine.slots
        if first == recipe.engine.slots:
            sys.stdout.write("busy\n")
            sys.stdout.flush()


def endless_engine(recipe: Recipe) -> EmbeddedEngine:
    """Build the recipe's engine without end tokens, so that a trajectory ends only at its maximum length."""
    model, tokenizer = load_policy(recipe.model, recipe.engine.dtype), load_tokenizer(recipe.model.path)
    return EmbeddedEngine(model, tokenizer, recipe.engine, PolicyVersion("profile", 0), ())


def engine_points(recipe: Recipe, say: Say) -> Iterator[Measurement]:
    """Measure decode steps and prefills for several batch sizes and contexts, and the prefill of one sequence."""
    engine = endless_engine(recipe)
    slots, longest = recipe.engine.slots, recipe.engine.max_context_tokens
    batches = sorted({max(1, slots // 4), max(1, slots // 2), slots})
    leases = 0
    for share in CONTEXT_SHARES:
        context = max(2, int(longest * share))
        alone, _ = _median(engine, 1, context, leases, 8)
        leases += REPEATS
        yield Measurement("prefill", 1, context, max(alone, 1e-6))
        for batch in batches:
            steps = min(DECODE_STEPS, longest - context - 1)
            prefill, decode = _median(engine, batch, context, leases, steps)
            leases += batch * REPEATS
            middle = context + DECODE_STEPS // 2
            yield Measurement("decode", batch, middle, decode)
            yield Measurement("prefill", batch, context, max(prefill, 1e-6))
            say(
                f"batch {batch}, context {context}: decode {batch / decode:,.0f} tokens/s, "
                f"prefill {batch * context / max(prefill, 1e-6):,.0f} tokens/s"
            )


def _median(engine: EmbeddedEngine, batch: int, context: int, first: int, steps: int) -> tuple[float, float]:
    runs: list[tuple[float, float]] = []
    left_s = time_left(POINT_S)
    while len(runs) < REPEATS and (not runs or left_s() > 0):
        runs.append(_timed(engine, batch, context, first + batch * len(runs), steps))
    return statistics.median(prefill for prefill, _ in runs), statistics.median(decode for _, decode in runs)


def _timed(engine: EmbeddedEngine, batch: int, context: int, first: int, steps: int) -> tuple[float, float]:
    """Return (seconds of the prefill, seconds of a decode step) for a batch of distinct prompts."""
    generator = torch.Generator().manual_seed(first)
    sampling = SamplingParams(steps + 2)
    for index in range(batch):
        ids = torch.randint(3, 60, (context,), generator=generator).tolist()
        trajectory = Trajectory(first + index, 0, tuple(ids))
        engine.submit(Lease(first + index, trajectory, sampling, 0, engine.version.number))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    for index in range(batch):
        engine.abort(first + index)
    engine.step()
    decode = statistics.median(times[len(times) // 4 :])  # the first quarter of the steps warms up and is not counted
    return times[0] - decode, decode  # the first step includes the prefill
