"""The cost of a train step on a pipeline of stages (FLOPs, pipeline bubble, communication, optimiser, memory), and of
publication.

Each stage s has a GPU type, a data-parallel width dp and a tensor-parallel width tp. With M microbatches per update and
S stages, a step takes

    max_s( layers_s · per_layer_s + head + boundary_s ) · (M + S − 1) / M  +  max_s gradients_s  +  max_s optimiser_s

under a 1F1B schedule, whose speed is that of the slowest stage. A microbatch has as many tokens per data-parallel rank
as the longest trajectory. Memory per parameter is 2 bytes (weights, bf16) + 4 (gradient, fp32) + 12 / dp (fp32 master
weights and two moments, which data-parallel ranks shard). AReaL (2505.24298), table 3.

All functions take numpy arrays of equal length for tp, dp and layers, so a search evaluates many candidates at once.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.generate import DeviceClass
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload

Floats = NDArray[np.float64]
Array = Any
"""A number or an array of numbers."""

OPTIMIZER_BYTES, RESIDENT_BYTES = 12.0, 6.0
UPDATE_TRAFFIC_BYTES = 32.0
"""Bytes that AdamW reads and writes per parameter: 4 of the gradient, 12 + 12 of master weights and moments, 2 of
the weights; rounded up."""
GRADIENT_BYTES = 6.0
"""Bytes sent per parameter: gradients are reduced in fp32, weights are gathered in bf16."""
KEPT_BYTES = 34.0
"""Bytes of activations per layer, token and hidden unit without recomputation (Korthikanti et al., 2205.05198)."""
LOGIT_CHUNK_TOKENS = 1024
"""Number of tokens per chunk of logits."""


class StageTerms(msgspec.Struct, frozen=True):
    """Coefficients of a stage's time and memory, which are linear in its layers. Arrays over candidates."""

    per_layer_s: Array
    """Time per layer for the whole batch: compute and tensor-parallel sums."""
    head_s: Array
    boundary_tokens_bytes: Array
    """Bytes that are sent to the next stage, per train step and node of the stage."""
    gradients_per_layer_s: Array
    optimizer_per_layer_s: Array
    params_bytes_per_param: Array
    """Bytes per parameter on one GPU."""
    act_bytes_per_layer: Array
    """Bytes of activations per layer on one GPU, for one microbatch in flight."""
    fixed_bytes: Array
    """Bytes on one GPU for the layer being computed."""
    logits_bytes: Array


def forward_passes(work: Workload, backward: float = 2.0) -> float:
    """Return the time of a train step in forward passes. A backward pass counts as `backward` forward passes,
    recomputation as one."""
    update = work.epochs * (1 + work.trained_share * (backward + work.recompute))
    return update * (1 + work.has_critic) + work.has_proximal_forward + work.has_reference + work.has_critic


def layer_flops(model: ModelSpec, work: Workload) -> float:
    """Return the FLOPs of one layer for one forward pass over the batch."""
    tokens, squared = work.prompt.mean + work.output.mean, work.trajectory_squared
    attention = model.attention_flops_per_pair * squared / 2 * (model.seen(tokens) / tokens)
    return work.num_trajectories * (tokens * model.layer_flops_per_token + attention)


def microbatches(work: Workload, dp: Array) -> Array:
    """Return M, the number of microbatches of one update. `dp` is the largest data-parallel width of any stage."""
    per_rank = work.trained_tokens / work.minibatches / np.asarray(dp)
    return np.maximum(1.0, np.floor(per_rank / work.longest_tokens))


def stage_terms(
    model: ModelSpec, work: Workload, place: DeviceClass, node_gpus: int, tp: Array, dp: Array
) -> StageTerms:
    """Return the coefficients of stages of width tp × dp on one GPU type."""
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
    wide = tp * dp > node_gpus
    models = 1 + work.has_critic
    share = (dp - 1) / dp * GRADIENT_BYTES * work.updates * models * model.layer_params
    across = place.inter_bytes_per_s * eff.link
    gradients = np.where(wide, share / across, share / tp / (place.link_bytes_per_s * eff.link))
    update = UPDATE_TRAFFIC_BYTES * work.updates * models * model.layer_params / (tp * dp)
    nodes = np.maximum(1.0, np.ceil(tp * dp / node_gpus))
    crossings = 2 * work.epochs * models + work.has_proximal_forward + work.has_reference + work.has_critic
    token_bytes = work.longest_tokens * model.hidden / tp
    kept = 2.0 if work.recompute else KEPT_BYTES
    return StageTerms(
        per_layer_s=passes * layer_flops(model, work) / rate + reduce_s,
        head_s=passes * work.trained_tokens * model.head_flops_per_token / rate,
        boundary_tokens_bytes=crossings * work.trained_tokens * model.hidden * 2 / nodes,
        gradients_per_layer_s=gradients,
        optimizer_per_layer_s=update / (gpu.hbm_bytes_per_s * eff.decode),
        params_bytes_per_param=models * (RESIDENT_BYTES + OPTIMIZER_BYTES / dp) / tp + work.has_reference * 2.0 / tp,
        act_bytes_per_layer=kept * token_bytes,
        fixed_bytes=KEPT_BYTES * token_bytes,
        # fp32 logits and their gradient
        logits_bytes=8.0 * min(work.longest_tokens, LOGIT_CHUNK_TOKENS) * model.vocab / tp,
    )


def table_params(model: ModelSpec, is_first: Array, is_last: Array) -> Array:
    """Return the vocabulary parameters of a stage: the input embedding on the first stage, the output head on the
    last. Tied weights count once."""
    both = np.logical_and(is_first, is_last) & model.is_tied
    return model.embedding_params * (np.asarray(is_first, float) + np.asarray(is_last, float) - np.asarray(both, float))


def stage_bytes(
    model: ModelSpec, terms: StageTerms, layers: Array, is_first: Array, is_last: Array, in_flight: Array
) -> Array:
    """Return the bytes of memory used on one GPU of a stage. `in_flight` is the number of microbatches whose
    activations are kept."""
    params = np.asarray(layers) * model.layer_params + table_params(model, is_first, is_last) + model.other_params
    logits = terms.logits_bytes * np.asarray(is_last, float)
    activations = np.asarray(layers) * terms.act_bytes_per_layer * in_flight
    return params * terms.params_bytes_per_param + activations + terms.fixed_bytes + logits


def most_layers(
    model: ModelSpec, terms: StageTerms, limit_bytes: float, is_first: Array, is_last: Array, in_flight: Array
) -> Array:
    """Return the number of layers that fit on a stage; negative if its vocabulary parameters alone do not fit."""
    none = stage_bytes(model, terms, 0, is_first, is_last, in_flight)
    each = model.layer_params * terms.params_bytes_per_param + terms.act_bytes_per_layer * in_flight
    return np.floor((limit_bytes - none) / each)


def tail_s(model: ModelSpec, per_layer_s: Array, layers: Array, is_first: Array, is_last: Array) -> Array:
    """Return the gradient or optimiser time of a stage. Its vocabulary parameters count as layers of the same size."""
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
