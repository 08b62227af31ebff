"""(a) Decode steps of the embedded engine against the time that reading weights, keys and values would take alone."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from shapes import PROMPT_TOKENS, Scale, make_model, spec_of, synchronize

from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Trajectory

_WARM_STEPS = 3
"""Before the clock: the first step prefills, the next ones meet the shape and capture it."""


class Wordless:
    """A tokenizer for engines that are never asked for text."""

    def text(self, ids: Any, *, keep_special: bool = False) -> str:
        """Say nothing."""
        return ""


WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "rows": {"row_attention": True},
}
"""Settings of the engine; on a CPU there is but the first."""


def make_engine(shape: str, scale: Scale, device: torch.device, *, way: str) -> EmbeddedEngine:
    """Make an engine of random weights; bfloat16 on CUDA. Nothing ends a response but its length."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = EngineSettings(
        slots=scale.slots,
        max_context_tokens=scale.longest_context,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        **WAYS[way],
    )
    return EmbeddedEngine(make_model(shape, dtype, device), Wordless(), settings, PolicyVersion("bench", 0), ())  # type: ignore[arg-type]


def measure_decode(
    shape: str, scale: Scale, device: torch.device, bytes_per_s: float, *, way: str
) -> list[dict[str, Any]]:
    """Time full-width decode steps: all rows at each context, and rows of all lengths up to the longest one."""
    engine = make_engine(shape, scale, device, way=way)
    longest = max(scale.contexts)
    cases = [(str(context), [context] * scale.slots) for context in scale.contexts]
    cases.append(("mixed", [max(1, longest * (i + 1) // scale.slots) for i in range(scale.slots)]))
    keys = itertools.count()
    found = []
    for name, contexts in cases:
        found.append({"context": name, "way": way, **_timed(engine, contexts, scale, device, keys)})
    spec, width = spec_of(shape), 2 if device.type == "cuda" else 4
    weight_bytes, kv_bytes = spec.params * width, spec.kv_bytes_per_token(width)
    for case in found:
        own = weight_bytes + case["own_positions"] * kv_bytes
        scanned = weight_bytes + case["scanned_positions"] * kv_bytes
        case |= {
            "shape": shape,
            "weight_bytes": weight_bytes,
            "own_kv_bytes": case["own_positions"] * kv_bytes,
            "tokens_per_s": scale.slots / case["step_s"],
            "roofline_tokens_per_s": scale.slots * bytes_per_s / own,
            "of_roofline": own / bytes_per_s / case["step_s"],
            "of_roofline_as_scanned": (own if "rows" in way else scanned) / bytes_per_s / case["step_s"],
        }
    return found


def _timed(
    engine: EmbeddedEngine, contexts: list[int], scale: Scale, device: torch.device, keys: Any
) -> dict[str, Any]:
    """Fill all slots, and time steps in which each of them grows by a token."""
    budget = _WARM_STEPS + scale.decode_steps + 2
    leases = []
    for context in contexts:  # rows of equal length share one prefill
        key = next(keys)
        prompt = tuple((7 * i + 3) % 300 for i in range(context))
        leases.append(key)
        engine.submit(Lease(key, Trajectory(key, 0, prompt), SamplingParams(budget), 1, 0))
    for _ in range(_WARM_STEPS):
        engine.step()
    times = []
    for _ in range(scale.decode_steps):
        synchronize(device)
        begin_s = time.perf_counter()
        engine.step()  # ends with its tokens on the host
        times.append(time.perf_counter() - begin_s)
    assert not any(isinstance(r, Report) and r.finish_reason for r in engine.flush()), "a row ended while it was timed"
    lengths = engine.network.kv_lengths
    positions = [context + _WARM_STEPS + scale.decode_steps // 2 for context in contexts]
    for key in leases:
        engine.abort(key)
    engine.step()
    return {
        "rows": len(contexts),
        "step_s": statistics.median(times),
        "step_s_spread": statistics.pstdev(times),
        "mean_context": statistics.fmean(positions),
        "own_positions": sum(positions),
        "scanned_positions": len(contexts) * next(n for n in lengths if n >= max(positions)),
    }


def prompt_of(number: int) -> tuple[int, ...]:
    """Return the ids of one of many different prompts."""
    return tuple((number * 31 + 7 * i + 3) % 300 for i in range(PROMPT_TOKENS))
