"""Computes the times of decode, prefill and training by the cost model. Decode times are tabulated, because a
simulation needs millions of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.cost.generate import DeviceClass, context_bytes, decode_s, prefill_s, weight_bytes
from baton.cost.train import batch_flops, forward_passes
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload
from baton.types import Group

KNOTS = 64
"""Number of context lengths with a tabulated decode time; times at other lengths are interpolated linearly."""


def steps_within(elapsed_s: float, step_s: float, slope_s: float) -> float:
    """Return how many steps are computed in `elapsed_s` seconds, as a real number: an incomplete last step counts as a
    fraction. The first step takes `step_s`, and each step takes `slope_s` longer than the step before."""
    half = slope_s / 2
    first = step_s - half
    if abs(half) < 1e-15:
        return elapsed_s / first
    return (math.sqrt(max(0.0, first * first + 4 * half * elapsed_s)) - first) / (2 * half)


@dataclass(frozen=True, slots=True)
class FlatSpeed:
    """The speed of an engine as constant times per step, trajectory and token."""

    base_s: float = 0.01
    """Fixed time of a decode step."""
    row_s: float = 0.0
    """Additional time of a decode step per running trajectory."""
    context_s: float = 0.0
    """Additional time of a decode step per token of context."""
    token_s: float = 0.0
    """Prefill time per token."""
    trajectory_s: float = 0.0
    """Engine time per trajectory, in addition to prefill and decode."""
    prefill_overhead_s: float = 0.0
    """Fixed time of a prefill, independent of the number of sequences."""

    def step_s(self, rows: int, context: float) -> float:
        """Return the time of a decode step of `rows` trajectories with this mean context."""
        return self.base_s + rows * (self.row_s + self.context_s * context)

    def prefill_s(self, tokens: int) -> float:
        """Return the time to prefill one sequence."""
        return self.token_s * tokens


class CostSpeed:
    """Speed of a replica according to the cost model."""

    def __init__(self, model: ModelSpec, work: Workload, place: DeviceClass, tp: int, layers: tuple[int, ...]) -> None:
        self._model, self._work, self._place, self._tp, self._layers = model, work, place, tp, layers
        self.trajectory_s = place.efficiency.trajectory_overhead_s
        self.prefill_overhead_s = place.efficiency.prefill_overhead_s
        self._spacing = max(1.0, work.longest_tokens / KNOTS)
        self._tables: dict[int, list[float]] = {}

    def step_s(self, rows: int, context: float) -> float:
        table = self._tables.get(rows)
        if table is None:
            table = self._tables[rows] = [
                decode_s(self._model, self._work, self._place, self._tp, self._layers, rows, knot * self._spacing)
                for knot in range(KNOTS + 2)
            ]
        place = context / self._spacing
        knot = min(int(place), KNOTS)
        low = table[knot]
        return low + (place - knot) * (table[knot + 1] - low)

    def prefill_s(self, tokens: int) -> float:
        return prefill_s(self._model, self._place, self._tp, self._layers, tokens, float(tokens) ** 2)


Speed = FlatSpeed | CostSpeed
"""Speed of an engine: `trajectory_s`, `prefill_overhead_s`, `step_s` and `prefill_s`."""


def kv_tokens(model: ModelSpec, work: Workload, place: DeviceClass, tp: int, layers: tuple[int, ...]) -> float:
    """Return the number of tokens that fit into a replica's KV cache; infinity if each slot has a fixed-size cache."""
    if work.engine_context_tokens:
        return math.inf
    room = place.memory_limit_bytes - weight_bytes(model, work, tp, layers)
    longest = work.longest_tokens
    return room / (context_bytes(model, work, tp, layers, longest) / longest)


@dataclass(frozen=True, slots=True)
class TrainSpeed:
    """Terms whose sum is the time of a train step."""

    fixed_s: float
    """Time that does not depend on the batch, such as overheads, optimiser and gradients."""
    token_s: float
    """Seconds per token of prompts and responses."""
    squared_s: float
    """Seconds per square of a trajectory's number of tokens (attention)."""
    zero_advantage: float = 1.0
    """Time of a trajectory whose advantage is zero, as a share of the time of an equally long trajectory whose
    advantage is nonzero. The trainer skips the backward pass if the advantage is zero, and perhaps the forward pass."""
    shares_prompts: bool = False
    """As in `Workload`."""

    def step_s(self, groups: Sequence[Group]) -> float:
        total_s = self.fixed_s
        for group in groups:
            tokens, squared = computed_tokens(group, shares_prompts=self.shares_prompts)
            own_s = self.token_s * tokens + self.squared_s * squared
            total_s += own_s if rewards_differ(group) else self.zero_advantage * own_s
        return total_s


def rewards_differ(group: Group) -> bool:
    """Return whether the trajectories of a group have advantages. Members that could not be scored do not count."""
    return len({member.judgement.reward for member in group.members if member.judgement.is_judged}) > 1


def computed_tokens(group: Group, *, shares_prompts: bool) -> tuple[int, int]:
    """Return `Workload.computed_tokens` and `Workload.computed_squared` of one group. Masked tokens are included,
    because the trainer computes them too."""
    prompt = len(group.members[0].trajectory.prompt_ids)
    lengths = [prompt + member.trajectory.num_tokens for member in group.members]
    repeated = len(lengths) - 1 if shares_prompts else 0
    return sum(lengths) - repeated * prompt, sum(n * n for n in lengths) - repeated * prompt * prompt


def train_speed(model: ModelSpec, work: Workload, batch_s: float, fixed_s: float, backward: float = 2.0) -> TrainSpeed:
    """Return the speed of a trainer that computes an average batch in `batch_s` seconds. The part of these seconds that
    the linear layers and the head take gives the time per token; the part of attention gives the time per squared
    length. The parts are in proportion to FLOPs. `backward`: as in `forward_passes`."""
    tokens, squared = work.computed_tokens, work.computed_squared
    linear = model.num_layers * model.layer_flops_per_token + model.head_flops_per_token
    share = min(1.0, tokens * linear / batch_flops(model, work))
    none, every = (forward_passes(msgspec.structs.replace(work, trained_share=each), backward) for each in (0.0, 1.0))
    full_s = batch_s * every / forward_passes(work, backward)  # if all advantages of the batch were nonzero
    return TrainSpeed(
        fixed_s, full_s * share / tokens, full_s * (1 - share) / squared, none / every, work.shares_prompts
    )
