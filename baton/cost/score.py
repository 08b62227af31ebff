"""Speed and memory of a reward model, which scores a trajectory in one forward pass, without a KV cache.

A GPU holds the whole model and scores one batch after another. The time of a trajectory is

    max( FLOPs of prompt and response over FLOP/s , weights over bandwidth, divided by the batch ) + overhead / batch
"""

from __future__ import annotations

import msgspec

from baton.cost.generate import DeviceClass, prefill_s
from baton.cost.memory import scorer_terms
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload


class ScoringCost(msgspec.Struct, frozen=True):
    """Speed and memory of a reward model on one GPU."""

    trajectory_s: float
    """Mean time per trajectory."""
    memory_bytes: float


def scoring_cost(model: ModelSpec, work: Workload, place: DeviceClass) -> ScoringCost:
    """Return the cost of a reward model: in bfloat16 on a GPU, in float32 on a CPU, which scores without batches."""
    on_cpu, efficiency = place.gpu.name == "CPU", place.efficiency
    tokens = work.prompt.mean + work.output.mean
    batch = 1.0 if on_cpu else max(1.0, work.reward_batch_tokens / tokens)
    held = work.longest_tokens if on_cpu else max(work.reward_batch_tokens, work.longest_tokens)
    weights, block = scorer_terms(model, 4 if on_cpu else 2, held)
    compute_s = prefill_s(model, place, 1, (model.num_layers,), tokens, work.trajectory_squared)
    read_s = weights.fixed / (place.gpu.hbm_bytes_per_s * efficiency.decode)
    trajectory_s = max(compute_s, read_s / batch) + efficiency.prefill_overhead_s / batch
    return ScoringCost(trajectory_s, float(weights.fixed + block.fixed))
