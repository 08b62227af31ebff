"""Speed and memory of a reward model. A classifier scores a trajectory in one forward pass, without a KV cache. A
generative model also decodes a reply, as an engine does (`generate.py`), with `concurrency` replies at a time.

Each GPU holds the whole model. A classifier scores one batch after another. Its time per trajectory is

    max( FLOPs of prompt and response over FLOP/s ,  bytes of weights over (bandwidth · batch) ) + overhead / batch
"""

from __future__ import annotations

import msgspec

from baton.cost.generate import DeviceClass, decode_s, prefill_s
from baton.cost.memory import scorer_terms, server_terms
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload


class ScoringCost(msgspec.Struct, frozen=True):
    """Speed and memory of a reward model on one GPU."""

    trajectory_s: float
    """Mean time per trajectory: 1 / throughput."""
    memory_bytes: float
    concurrency: int = 1
    """Maximum number of trajectories that are scored at the same time."""
    latency_s: float = 0.0
    """Time to score one trajectory while other trajectories are scored too. 0 for a classifier, which scores one batch
    after another; its latency is `trajectory_s`."""


def scoring_cost(model: ModelSpec, work: Workload, place: DeviceClass) -> ScoringCost:
    """Return the cost of a reward model. The model computes in bfloat16 on a GPU and in float32 on a CPU. On a CPU, a
    classifier scores one trajectory at a time. The cost excludes the tokens of a prompt template."""
    if work.reward_reply_tokens:
        return _generative_cost(model, work, place)
    on_cpu, efficiency = place.gpu.name == "CPU", place.efficiency
    tokens = work.prompt.mean + work.output.mean
    batch = 1.0 if on_cpu else max(1.0, work.reward_batch_tokens / tokens)
    held = work.longest_tokens if on_cpu else max(work.reward_batch_tokens, work.longest_tokens)
    weights, block = scorer_terms(model, 4 if on_cpu else 2, held)
    compute_s = prefill_s(model, place, 1, (model.num_layers,), tokens, work.trajectory_squared)
    read_s = weights.fixed / (place.gpu.hbm_bytes_per_s * efficiency.decode)
    trajectory_s = max(compute_s, read_s / batch) + efficiency.prefill_overhead_s / batch
    return ScoringCost(trajectory_s, float(weights.fixed + block.fixed))


def _generative_cost(model: ModelSpec, work: Workload, place: DeviceClass) -> ScoringCost:
    bytes_each, efficiency = 4 if place.gpu.name == "CPU" else 2, place.efficiency
    at_once, layers = min(work.reward_calls, work.num_trajectories), (model.num_layers,)
    own = msgspec.structs.replace(work, weight_bytes=float(bytes_each), kv_bytes=float(bytes_each))
    tokens, reply = work.prompt.mean + work.output.mean, work.reward_reply_tokens
    step_s = decode_s(model, own, place, 1, layers, at_once, tokens + reply / 2)
    prompt_s = prefill_s(model, place, 1, layers, tokens, work.trajectory_squared) + efficiency.prefill_overhead_s
    trajectory_s = (reply * step_s / at_once + prompt_s + efficiency.trajectory_overhead_s) / efficiency.rollout
    terms = server_terms(model, bytes_each, work.reward_calls, work.reward_context_tokens)
    memory_bytes = float(sum(term.fixed for term in terms))
    return ScoringCost(trajectory_s, memory_bytes, work.reward_calls, at_once * trajectory_s)
