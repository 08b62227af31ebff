"""The time of a train step on a pipeline of stages (FLOPs, pipeline bubble, communication, optimiser), and the time of
publication.

Each stage s has a GPU type, a data-parallel width dp and a tensor-parallel width tp. With M microbatches per update and
S stages, a step under a 1F1B schedule takes

    max_s( layers_s · per_layer_s + head + boundary_s ) · (M + S − 1) / M  +  max_s gradients_s  +  max_s optimiser_s

The pipeline is as fast as its slowest stage. On each data-parallel rank, a microbatch has as many tokens as the longest
trajectory (AReaL, 2505.24298, table 3), or `microbatch_tokens` tokens if this is more.

All functions take numpy arrays of equal length for tp, dp and layers, so a search evaluates many candidates at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.generate import DeviceClass
from baton.cost.memory import Array, RankShape, table_params
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload

Floats = NDArray[np.float64]
UPDATE_TRAFFIC_BYTES = 32.0
"""Bytes that AdamW reads and writes per parameter: 4 for the gradient, 24 for master weight and moments, 2 for the
bfloat16 weight, rounded up to 32."""
GRADIENT_BYTES = 6.0
"""Bytes sent per parameter: gradients are reduced in fp32, weights are gathered in bf16."""


class StageTerms(msgspec.Struct, frozen=True):
    """Coefficients of a stage's time, which is linear in the stage's number of layers. The field `rank` determines the
    stage's memory. Arrays have one value per candidate of a search."""

    per_layer_s: Array
    """Time per layer for the whole batch: compute and the all-reduces of tensor parallelism."""
    head_s: Array
    boundary_tokens_bytes: Array
    """Bytes that each node of the stage sends to the next stage per train step."""
    gradients_per_layer_s: Array
    optimizer_per_layer_s: Array
    rank: RankShape


class RowShares(msgspec.Struct, frozen=True):
    """For a stage with ranks on several GPU types: how many of a batch's trajectories each rank trains, as shares of
    the batch."""

    own: Array
    """Share of the batch on a rank of this GPU type; the largest share if ranks of this type have different shares."""
    largest: Array
    """Largest share of the batch on any rank of the stage, which determines the number of microbatches."""


def forward_passes(work: Workload, backward: float = 2.0) -> float:
    """Return the time of a train step as a number of forward passes over the batch. A backward pass counts as
    `backward` forward passes, recomputation as one."""
    trained = 1.0 if work.backwards_all else work.trained_share
    forward = 1.0 if work.forwards_all else trained
    update = work.epochs * (forward + trained * (backward + work.recompute))
    others = forward * (work.has_proximal_forward + work.has_reference + work.has_critic)
    return update * (1 + work.has_critic) + others


def layer_flops(model: ModelSpec, work: Workload) -> float:
    """Return the FLOPs of one layer for one forward pass over the batch."""
    length = work.prompt.mean + work.output.mean
    attention = model.attention_flops_per_pair * work.computed_squared / 2 * (model.seen(length) / length)
    return work.computed_tokens * model.layer_flops_per_token + attention


def batch_flops(model: ModelSpec, work: Workload) -> float:
    """Return the FLOPs of all layers and the output head for one forward pass over the batch."""
    return model.num_layers * layer_flops(model, work) + work.computed_tokens * model.head_flops_per_token


def compute_s(model: ModelSpec, work: Workload, place: DeviceClass, devices: int) -> float:
    """Return the compute time of a train step on `devices` equal GPUs or cores."""
    rate = devices * place.gpu.flops * place.efficiency.train
    return forward_passes(work, place.efficiency.backward) * batch_flops(model, work) / rate


def microbatches(work: Workload, dp: Array) -> Array:
    """Return M, the number of microbatches of one update. `dp` is the largest data-parallel width of any stage."""
    per_rank = work.computed_tokens / work.minibatches / np.asarray(dp)
    return np.maximum(1.0, np.floor(per_rank / max(work.longest_tokens, work.microbatch_tokens)))


def in_flight(work: Workload, depth: Array, dp: Array) -> Array:
    """Return the number of microbatches whose activations the first of `depth` stages keeps at the same time. For
    Baton's trainer, this number is an upper bound, which assumes that all trajectories are as long as the longest."""
    if work.trainer == "idealised":
        return np.minimum(depth, microbatches(work, dp))
    most_tokens = work.num_trajectories * work.longest_tokens / work.minibatches / np.asarray(dp)
    return np.minimum(depth, np.maximum(1.0, most_tokens / max(work.longest_tokens, work.microbatch_tokens)))


def rank_of(work: Workload, rank: RankShape, depth: Array, num_gpus: Array) -> RankShape:
    """Return `rank` after setting the fields that depend on the number of stages (`depth`) and on the number of GPUs of
    a stage. If the trainer has only one rank, this rank also publishes versions."""
    if work.trainer == "idealised":
        return rank
    published = np.where((np.asarray(depth) == 1) & (np.asarray(num_gpus) == 1), work.weight_bytes, 0.0)
    return msgspec.structs.replace(rank, is_stage=np.asarray(depth) > 1, published_bytes=published)


def rank_speeds(work: Workload, places: Sequence[DeviceClass]) -> list[float]:
    """Return the value of `trainer.speeds` for a rank on each of these GPU types: the ratio of its speed to the speed
    on the fastest type.

    If ranks exchange weights or gradients in each pass, all ranks run the same number of passes, and each microbatch
    has at least one trajectory. A rank with a very low speed would get fewer trajectories than the fast ranks have
    passes, so speeds have a lower limit: the ratio of the length of the longest trajectory to the size of the largest
    microbatch.
    """
    passes = [forward_passes(work, place.efficiency.backward) for place in places]
    speeds = [place.gpu.flops * place.efficiency.train / own for place, own in zip(places, passes, strict=True)]
    waits = not work.shard_size or work.shard_gradients
    least = min(1.0, work.longest_tokens / max(work.longest_tokens, work.microbatch_tokens)) if waits else 0.0
    return [max(speed / max(speeds), least) for speed in speeds]


def row_shares(work: Workload, speeds: Sequence[float], counts: Sequence[Array]) -> list[RowShares]:
    """Return the shares of the batch on ranks of several speeds. `speeds`: speed of each GPU type, relative to the
    fastest type. `counts`: number of ranks of each type, [candidates].

    Each trajectory is assigned to the rank that would finish first with it (`trainer/parallel/balance.py`). If all
    trajectories have the same length, no other division lets the slowest rank finish earlier.
    """
    total = work.num_trajectories
    with np.errstate(divide="ignore"):
        most = total / np.sum([count * speed for speed, count in zip(speeds, counts, strict=True)], axis=0)
    while True:  # `most`: trajectories of a rank of the fastest type
        rows = [np.floor(most * speed * (1 + 1e-12) + 1e-9) for speed in speeds]
        short = np.sum([count * own for count, own in zip(counts, rows, strict=True)], axis=0) < total
        if not short.any():
            break
        following = np.min([(own + 1) / speed for own, speed in zip(rows, speeds, strict=True)], axis=0)
        most = np.where(short, following, most)
    return [RowShares(own / total, np.max(rows, axis=0) / total) for own in rows]


def mixed_terms(
    model: ModelSpec, work: Workload, places: Sequence[DeviceClass], counts: Sequence[Array], bytes_per_s: Array
) -> list[StageTerms]:
    """Return the coefficients of each GPU type of a mixed stage. The stage waits for the GPU type that takes longest,
    in computation, in the exchange of gradients and in the optimiser update. `counts`: number of ranks of each type.
    `bytes_per_s` [candidates]: bandwidth of the slowest link between two machines of the stage. With `work.shard_size`,
    each copy of the model is within one machine."""
    shares = row_shares(work, rank_speeds(work, places), counts)
    ranks = np.sum(counts, axis=0)
    # a mixed stage is on several machines, even if it has few ranks
    inside = work.shard_size or 0.5
    slowest = (msgspec.structs.replace(place, inter_bytes_per_s=bytes_per_s) for place in places)
    return [stage_terms(model, work, each, inside, 1, ranks, own) for each, own in zip(slowest, shares, strict=True)]


def stage_terms(
    model: ModelSpec,
    work: Workload,
    place: DeviceClass,
    node_gpus: float,
    tp: Array,
    dp: Array,
    shares: RowShares | None = None,
) -> StageTerms:
    """Return the coefficients of stages that have `dp` tensor-parallel groups of `tp` GPUs each, all of one GPU type.
    `shares`: division of the batch among ranks; by default, each rank gets equally many trajectories.

    Baton's trainer gathers the weights of a layer for each pass over a microbatch, while it computes another layer.
    Each tensor-parallel rank of Baton's trainer computes the whole head. With `work.shard_size`, each group of this
    many ranks shares one copy of the model: weights are gathered within a group, and gradients are also summed over the
    groups. The idealised trainer gathers weights once per update.
    """
    tp, dp = np.asarray(tp, dtype=float), np.asarray(dp, dtype=float)
    eff, gpu = place.efficiency, place.gpu
    # all ranks wait for those that have one trajectory more than the others
    share = np.ceil(work.num_trajectories / dp) / work.num_trajectories if shares is None else shares.own
    flop_s = share / (tp * gpu.flops * eff.train)
    passes = forward_passes(work, eff.backward)
    sums = work.epochs * (1 + work.has_critic) * (4 + 2 * work.recompute)
    sums += 2 * (work.has_proximal_forward + work.has_reference + work.has_critic)
    rank_bytes = work.computed_tokens * share * model.hidden * 2
    reduce_s = sums * rank_bytes * 2 * (tp - 1) / tp / (place.link_bytes_per_s * eff.link)
    shards = np.minimum(dp, work.shard_size or np.inf)
    models = 1 + work.has_critic
    across, within = place.inter_bytes_per_s * eff.link, place.link_bytes_per_s * eff.link
    # for one byte per parameter: time to gather or reduce among the ranks of a copy; time to sum over the copies
    sent = (shards - 1) / shards * model.layer_params
    exchange_s = np.where(tp * shards > node_gpus, sent / across, sent / tp / within)
    copies_s = 2 * (1 - shards / dp) * model.layer_params / np.where(tp * dp > node_gpus, across, within)
    update = UPDATE_TRAFFIC_BYTES * work.updates * models * model.layer_params / (tp * shards)
    nodes = np.maximum(1.0, np.ceil(tp * dp / node_gpus))
    crossings = 2 * work.epochs * models + work.has_proximal_forward + work.has_reference + work.has_critic
    is_baton = work.trainer == "baton"
    gathers = work.minibatches * microbatches(work, dp if shares is None else 1 / shares.largest)
    reductions = work.epochs * gathers if work.shard_gradients else work.updates
    reduced = 4.0 * models * reductions if is_baton else GRADIENT_BYTES * work.updates * models
    reduced_s = reduced * (exchange_s + copies_s)
    overlapped_s = 2.0 * crossings * gathers * exchange_s + reduced_s * work.shard_gradients
    return StageTerms(
        per_layer_s=np.maximum(passes * layer_flops(model, work) * flop_s + reduce_s, overlapped_s * is_baton),
        head_s=passes * work.computed_tokens * model.head_flops_per_token * flop_s * (tp if is_baton else 1),
        boundary_tokens_bytes=crossings * work.computed_tokens * model.hidden * 2 / nodes,
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
    """Return the gradient or optimiser time of a stage. Embedding and head count as the number of layers that have as
    many parameters."""
    tables = table_params(model, is_first, is_last) / model.layer_params
    return (np.asarray(layers) + tables) * per_layer_s


def publish_s(model: ModelSpec, work: Workload, shares: Floats, bytes_per_s: Floats, latency_s: Floats) -> Floats:
    """Return the time until the engines of each pool have all weights, [..., pools].

    `shares` [..., pools]: share of the weights that each pool trains. `bytes_per_s` [from, to]: bandwidth of
    publication. `latency_s` [pools]: fixed time of a publication from a pool. The pools send their parts of the weights
    one after the other. Engines forward weights while they receive them, so the time does not depend on the number of
    engines.
    """
    size = model.params * work.weight_bytes
    times: Floats = shares @ (size / bytes_per_s) + np.max((shares > 0) * latency_s, axis=-1, keepdims=True)
    return times
