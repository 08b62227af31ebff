"""The time of a train step on a pipeline of stages (FLOPs, pipeline bubble, communication, optimiser), and of
publication. `memory.py` computes the memory of a train step.

Each stage s has a GPU type, a data-parallel width dp and a tensor-parallel width tp. With M microbatches per update and
S stages, a step takes

    max_s( layers_s · per_layer_s + head + boundary_s ) · (M + S − 1) / M  +  max_s gradients_s  +  max_s optimiser_s

under a 1F1B schedule, whose speed is that of the slowest stage. The number of tokens of a microbatch per data-parallel
rank is the length of the longest trajectory (AReaL, 2505.24298, table 3), or `microbatch_tokens` if that is larger.

All functions take numpy arrays of equal length for tp, dp and layers, so a search evaluates many candidates at once.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.generate import DeviceClass
from baton.cost.memory import Array, RankShape, table_params
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload

Floats = NDArray[np.float64]
UPDATE_TRAFFIC_BYTES = 32.0
"""Bytes that AdamW reads and writes per parameter: gradient 4, master weights and moments 24, weights 2, rounded up."""
GRADIENT_BYTES = 6.0
"""Bytes sent per parameter: gradients are reduced in fp32, weights are gathered in bf16."""


class StageTerms(msgspec.Struct, frozen=True):
    """Coefficients of a stage's time, which is linear in the number of layers, and the rank that determines the stage's
    memory. Arrays have one value per candidate."""

    per_layer_s: Array
    """Time per layer for the whole batch: compute and tensor-parallel sums."""
    head_s: Array
    boundary_tokens_bytes: Array
    """Bytes that are sent to the next stage, per train step and node of the stage."""
    gradients_per_layer_s: Array
    optimizer_per_layer_s: Array
    rank: RankShape


def forward_passes(work: Workload, backward: float = 2.0) -> float:
    """Return the time of a train step as a number of forward passes over the batch. A backward pass counts as
    `backward` forward passes, recomputation as one."""
    forward = 1.0 if work.forwards_all else work.trained_share
    update = work.epochs * (forward + work.trained_share * (backward + work.recompute))
    others = forward * (work.has_proximal_forward + work.has_reference + work.has_critic)
    return update * (1 + work.has_critic) + others


def layer_flops(model: ModelSpec, work: Workload) -> float:
    """Return the FLOPs of one layer for one forward pass over the batch."""
    tokens, squared = work.prompt.mean + work.output.mean, work.trajectory_squared
    attention = model.attention_flops_per_pair * squared / 2 * (model.seen(tokens) / tokens)
    return work.num_trajectories * (tokens * model.layer_flops_per_token + attention)


def microbatches(work: Workload, dp: Array) -> Array:
    """Return M, the number of microbatches of one update. `dp` is the largest data-parallel width of any stage."""
    per_rank = work.trained_tokens / work.minibatches / np.asarray(dp)
    return np.maximum(1.0, np.floor(per_rank / max(work.longest_tokens, work.microbatch_tokens)))


def in_flight(work: Workload, depth: Array, dp: Array) -> Array:
    """Return the number of microbatches whose activations the first of `depth` stages keeps at the same time. For
    Baton's trainer, the number allows for a batch in which all trajectories are as long as the longest."""
    if work.trainer == "idealised":
        return np.minimum(depth, microbatches(work, dp))
    most_tokens = work.num_trajectories * work.longest_tokens / work.minibatches / np.asarray(dp)
    return np.minimum(depth, np.maximum(1.0, most_tokens / max(work.longest_tokens, work.microbatch_tokens)))


def rank_of(work: Workload, rank: RankShape, depth: Array, num_gpus: Array) -> RankShape:
    """Return `rank` as a rank of a stage of `num_gpus` GPUs in a pipeline of `depth` stages. If the trainer has only
    one rank, this rank also publishes versions."""
    if work.trainer == "idealised":
        return rank
    published = np.where((np.asarray(depth) == 1) & (np.asarray(num_gpus) == 1), work.weight_bytes, 0.0)
    return msgspec.structs.replace(rank, is_stage=np.asarray(depth) > 1, published_bytes=published)


def stage_terms(
    model: ModelSpec, work: Workload, place: DeviceClass, node_gpus: int, tp: Array, dp: Array
) -> StageTerms:
    """Return the coefficients of stages of width tp × dp on one GPU type.

    Baton's trainer gathers the weights of a layer for each pass over a microbatch, while it computes another layer, and
    computes the head on each tensor-parallel rank. With `work.shard_size`, weights are gathered only among so many
    ranks, and gradients are also summed over the copies. The idealised trainer gathers weights once per update.
    """
    tp, dp = np.asarray(tp, dtype=float), np.asarray(dp, dtype=float)
    eff, gpu = place.efficiency, place.gpu
    # ranks wait for the rank with one trajectory more
    uneven = np.ceil(work.num_trajectories / dp) * dp / work.num_trajectories
    rate = dp * tp * gpu.flops * eff.train / uneven
    passes = forward_passes(work, eff.backward)
    sums = work.epochs * (1 + work.has_critic) * (4 + 2 * work.recompute)
    sums += 2 * (work.has_proximal_forward + work.has_reference + work.has_critic)
    rank_bytes = work.trained_tokens * uneven / dp * model.hidden * 2
    reduce_s = sums * rank_bytes * 2 * (tp - 1) / tp / (place.link_bytes_per_s * eff.link)
    shards = np.minimum(dp, work.shard_size or np.inf)
    models = 1 + work.has_critic
    across, within = place.inter_bytes_per_s * eff.link, place.link_bytes_per_s * eff.link
    # time to gather or reduce one byte per value among the ranks of a copy, and to add it over the copies
    share = (shards - 1) / shards * model.layer_params
    exchange_s = np.where(tp * shards > node_gpus, share / across, share / tp / within)
    copies_s = 2 * (1 - shards / dp) * model.layer_params / np.where(tp * dp > node_gpus, across, within)
    update = UPDATE_TRAFFIC_BYTES * work.updates * models * model.layer_params / (tp * shards)
    nodes = np.maximum(1.0, np.ceil(tp * dp / node_gpus))
    crossings = 2 * work.epochs * models + work.has_proximal_forward + work.has_reference + work.has_critic
    is_baton = work.trainer == "baton"
    gathers = work.minibatches * microbatches(work, dp)
    reductions = work.epochs * gathers if work.shard_gradients else work.updates
    reduced = 4.0 * models * reductions if is_baton else GRADIENT_BYTES * work.updates * models
    reduced_s = reduced * (exchange_s + copies_s)
    overlapped_s = 2.0 * crossings * gathers * exchange_s + reduced_s * work.shard_gradients
    return StageTerms(
        per_layer_s=np.maximum(passes * layer_flops(model, work) / rate + reduce_s, overlapped_s * is_baton),
        head_s=passes * work.trained_tokens * model.head_flops_per_token / rate * (tp if is_baton else 1),
        boundary_tokens_bytes=crossings * work.trained_tokens * model.hidden * 2 / nodes,
        gradients_per_layer_s=reduced_s * (not (is_baton and work.shard_gradients)),
        optimizer_per_layer_s=update / (gpu.hbm_bytes_per_s * eff.decode),
        rank=RankShape(
            tokens=max(work.longest_tokens, work.microbatch_tokens),
            shards=shards,
            split=tp,
            splits_tables=not is_baton,
            recomputes=work.recompute,
            whole_gradients=not work.shard_gradients,
            has_critic=work.has_critic,
            reference_bytes=2.0 if work.has_reference else 0.0,
        ),
    )


def tail_s(model: ModelSpec, per_layer_s: Array, layers: Array, is_first: Array, is_last: Array) -> Array:
    """Return the gradient or optimiser time of a stage. Vocabulary parameters count as layers of equal size."""
    tables = table_params(model, is_first, is_last) / model.layer_params
    return (np.asarray(layers) + tables) * per_layer_s


def publish_s(
    model: ModelSpec,
    work: Workload,
    shares: NDArray[np.float64],
    bytes_per_s: NDArray[np.float64],
    latency_s: NDArray[np.float64],
) -> Any:
    """Return the time until the engines of each pool have all weights, [..., pools].

    `shares` [..., pools] is the share of the weights that each pool trains, `bytes_per_s` [from, to] the bandwidth of
    publication, and `latency_s` [pools] the fixed time of a publication from a pool. The parts from different pools are
    sent one after the other. Engines forward weights while they receive them, so the time does not depend on the number
    of engines.
    """
    size = model.params * work.weight_bytes
    return shares @ (size / bytes_per_s) + np.max((shares > 0) * latency_s, axis=-1, keepdims=True)
