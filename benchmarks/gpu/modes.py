"""(c) The modes of rollout with long-tailed forced lengths, and (d) what longer ones would bring, by the simulator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from decode import make_engine, prompt_of
from shapes import PROMPT_TOKENS, Scale

from baton.profile.bench import CONTROL, ScriptedLengths, bench_engine, sides_of
from baton.rollout.settings import RolloutSettings
from baton.simulator.inputs import EngineSpec, Setting
from baton.simulator.result import summarise
from baton.simulator.run import simulate
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant, lognormal
from baton.types import Prompt

TAIL = 4.0
"""The longest length over the mean."""
BETWEEN, WITHIN = 0.6, 0.6
"""Standard deviations of the log length between groups and within one."""
WARM_UP = STEPS = 1
_MODES = ("sync", "partial", "async")


class Numbered:
    """Endless different prompts."""

    def __init__(self) -> None:
        self.position = {"bench": 0}

    def take(self) -> tuple[Prompt, tuple[int, ...]]:
        """Return the next prompt and its token ids."""
        number = self.position["bench"]
        self.position["bench"] += 1
        return Prompt(str(number), "bench", ()), prompt_of(number)


def steps_needed(cap: int, scale: Scale) -> float:
    """Estimate the decode steps of all modes: sync waits for its longest, the control for twice the work."""
    size = scale.batch_groups * scale.group_size
    full = size * cap / TAIL / scale.slots
    return (WARM_UP + STEPS) * (cap + 1.3 * full + (cap + 2 * full) + 1.3 * full)


def measure_modes(shape: str, scale: Scale, device: torch.device, *, cap: int, way: str) -> dict[str, Any]:
    """Let sync, partial, async and the control take turns, each with an engine of its own and the same weights."""
    model = make_engine(shape, scale, device, way=way).network.model
    found = bench_engine(
        lambda: make_engine(shape, scale, device, way=way),
        _sides(scale),
        Numbered,
        ScriptedLengths(cap / TAIL, cap, BETWEEN, WITHIN),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        on_cpu=device.type == "cpu",
        steps=STEPS,
        warm_up=WARM_UP,
    )
    return {"shape": shape, "cap": cap, "way": way, "is_simulated": False, **msgspec.to_builtins(found)}


def simulate_modes(
    shape: str, scale: Scale, decode: Sequence[dict[str, Any]], prefill_s_per_token: float
) -> list[dict[str, Any]]:
    """Simulate the same modes at longer lengths, with decode steps that are linear in the context, as measured here."""
    base_s, context_s = line([(d["mean_context"], d["step_s"]) for d in decode])
    speed = FlatSpeed(base_s=base_s, context_s=context_s / scale.slots, token_s=prefill_s_per_token)
    variance = BETWEEN**2 + WITHIN**2
    cv = math.sqrt(math.expm1(variance))
    found = []
    for longest in scale.extrapolated:
        work = TrajectoryWork(constant(PROMPT_TOKENS), lognormal(longest / TAIL, cv, longest), BETWEEN**2 / variance)
        rates = {}
        for name, settings in _sides(scale).items():
            engine = EngineSpec(shape, scale.slots, speed)
            setting = Setting(settings.rules(), (engine,), work, TrainSpeed(0.0, 0.0, 0.0), num_steps=24)
            rates[name] = summarise(setting, simulate(setting)).generated_tokens_per_s
        found.append(
            {
                "shape": shape,
                "cap": longest,
                "is_simulated": True,
                "tokens_per_s": rates,
                "over_sync": {name: rate / rates["sync"] for name, rate in rates.items()},
                "over_control": {name: rate / rates[CONTROL] for name, rate in rates.items()},
                "base_s": base_s,
                "context_s": context_s,
            }
        )
    return found


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit y = a + b x by least squares, neither below zero; one point is taken for a constant."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(set(xs)) < 2:
        return statistics.fmean(ys), 0.0
    slope = max(0.0, statistics.linear_regression(xs, ys).slope)
    return max(1e-6, statistics.fmean(ys) - slope * statistics.fmean(xs)), slope


def _sides(scale: Scale) -> dict[str, RolloutSettings]:
    return sides_of(RolloutSettings(batch_groups=scale.batch_groups, group_size=scale.group_size), _MODES)
