"""Speed and memory of a replica: a roofline model of prefill and decode, and the pause at each new policy version.

A decode step of m trajectories on a pipeline stage takes

    overhead + max( weights + m·KV(context) over bandwidth ,  m·FLOPs(context) over FLOP/s ) + tensor-parallel sums

The context is the mean length of the running trajectories. Long trajectories run longer, so they weigh more in this
mean. In a mixture of experts, only the weights of the experts that the batch uses are read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.efficiency import Efficiency
from baton.cost.memory import KEPT_CONTEXTS, SLOT_MULTIPLE, table_params
from baton.specs.cluster import Gpu
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload

DRAIN_POINTS = 48
"""Number of points of the numerical integrals over positions."""
CLASS_VALUES = 2**16
"""On a CPU, the embedded engine may divide the rows of a decode step into classes of similar length. Each additional
class costs about 30 µs per layer. In this time, attention can read `CLASS_VALUES` elements of the keys and the same
number of elements of the values."""


class DeviceClass(msgspec.Struct, frozen=True, dict=True):
    """GPUs of one type and their links."""

    gpu: Gpu
    link_bytes_per_s: float
    """Bandwidth within a node, one direction."""
    inter_bytes_per_s: float
    """Bandwidth between nodes, one direction; if there is only one node, the bandwidth within this node."""
    latency_s: float
    efficiency: Efficiency

    @cached_property
    def memory_limit_bytes(self) -> float:
        """Memory of one GPU that a plan may use."""
        return self.gpu.hbm_bytes * self.efficiency.memory


class ReplicaCost(msgspec.Struct, frozen=True):
    """Speed and memory of one engine of a given shape."""

    tp: int
    pp: int
    layers: tuple[int, ...]
    batch: int
    tokens_per_s: float
    pause_s: float
    """Generation time lost per train step. If generation and training overlap: the time to prefill running trajectories
    under the new version. Otherwise: the loss at the end of a batch, when few trajectories still run."""
    memory_bytes: float
    """The largest memory use of any GPU of the replica."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp


def split_layers(num_layers: int, stages: int, head_layers: float) -> tuple[int, ...]:
    """Split layers among equally fast stages so that the largest stage is as small as possible. The output head counts
    as `head_layers` layers of the last stage."""
    if stages == 1:
        return (num_layers,)

    def longest(last: int) -> float:
        return max(last + head_layers, math.ceil((num_layers - last) / (stages - 1)))

    last = min(range(num_layers + 1), key=longest)
    rest, left = divmod(num_layers - last, stages - 1)
    return (*(rest + (index < left) for index in range(stages - 1)), last)


def replica_layers(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage of a replica."""
    return split_layers(model.num_layers, pp, model.embedding_params / model.layer_params)


def weight_bytes(model: ModelSpec, work: Workload, tp: int, layers: tuple[int, ...]) -> float:
    """Return the bytes of weights on the GPU that holds the most weights of its replica."""
    last = len(layers) - 1
    most = max(
        count * model.layer_params + float(table_params(model, stage == 0, stage == last))
        for stage, count in enumerate(layers)
    )
    return (most + model.other_params) / tp * work.weight_bytes


def context_bytes(model: ModelSpec, work: Workload, tp: int, layers: tuple[int, ...], tokens: float) -> float:
    """Return the bytes that the KV cache of a trajectory of `tokens` tokens takes on the GPU with its largest part.
    If `tp` exceeds the number of KV heads, several GPUs hold copies of a head's cache."""
    per_layer = model.seen(tokens) * model.kv_values_per_token * work.kv_bytes
    return max(layers) * per_layer / min(tp, model.num_kv_heads)


def cache_bytes(model: ModelSpec, work: Workload, tp: int, layers: tuple[int, ...], batch: int) -> float:
    """Return the bytes that the KV cache of a replica takes on the GPU with its largest part. The replica generates
    `batch` trajectories at once. A paged cache also has room for one trajectory of maximum length."""
    if work.engine_context_tokens:
        tokens = max(work.engine_context_tokens, work.longest_tokens)
        return (max(SLOT_MULTIPLE, batch) + KEPT_CONTEXTS) * context_bytes(model, work, tp, layers, tokens)
    mean, longest = (
        context_bytes(model, work, tp, layers, tokens) for tokens in (work.live_context_tokens, work.longest_tokens)
    )
    return max(batch * mean, longest)


def largest_batch(model: ModelSpec, work: Workload, place: DeviceClass, tp: int, pp: int) -> int:
    """Return the largest batch that fits into memory; 0 if no batch fits."""
    layers = replica_layers(model, pp)
    room = place.memory_limit_bytes - weight_bytes(model, work, tp, layers)
    batches = range(1, min(work.max_batch, work.num_trajectories) + 1)
    # the memory grows with the batch
    return bisect_right(batches, room, key=lambda batch: cache_bytes(model, work, tp, layers, batch))


def decode_s(
    model: ModelSpec, work: Workload, place: DeviceClass, tp: int, layers: tuple[int, ...], batch: float, context: float
) -> float:
    """Return the time of a decode step of `batch` trajectories. A stage processes `batch / pp` trajectories at a
    time."""
    pp, eff, gpu = len(layers), place.efficiency, place.gpu
    rows = batch / pp
    seen = model.seen(context)
    fixed = model.attention_params + model.ffn_params - model.expert_params
    read = fixed + model.expert_params * model.experts_read(rows)
    kv = rows * seen * model.kv_values_per_token * work.kv_bytes / min(tp, model.num_kv_heads)
    slowest = 0.0
    for stage, count in enumerate(layers):
        head = stage == pp - 1
        weights = (count * read + head * model.embedding_params) * work.weight_bytes / tp
        memory = (weights + count * kv) / (gpu.hbm_bytes_per_s * eff.decode)
        flops = count * (model.layer_flops_per_token + model.attention_flops_per_pair * seen)
        compute = rows * (flops + head * model.head_flops_per_token) / tp / (gpu.flops * eff.decode_compute)
        activations = rows * model.hidden * work.weight_bytes
        comm = 0.0
        if tp > 1:
            # the latency within a node is assumed to be a quarter of the latency between nodes
            sums = place.latency_s / 4 + 2 * (tp - 1) / tp * activations / (place.link_bytes_per_s * eff.link)
            comm += 2 * count * sums
        if pp > 1:
            comm += place.latency_s + activations / (place.inter_bytes_per_s * eff.link)
        slowest = max(slowest, eff.step_overhead_s + rows * eff.row_overhead_s + max(memory, compute) + comm)
    return pp * slowest


def prefill_s(
    model: ModelSpec, place: DeviceClass, tp: int, layers: tuple[int, ...], tokens: float, squared: float
) -> float:
    """Return the prefill time of one sequence on the slowest stage. `tokens`: mean number of tokens of a sequence.
    `squared`: mean of the squares of these numbers."""
    window = model.seen(tokens) / tokens if tokens else 1.0
    flops = model.layer_flops_per_token * tokens + model.attention_flops_per_pair * squared / 2 * window
    return max(layers) * flops / tp / (place.gpu.flops * place.efficiency.prefill)


def replica_cost(model: ModelSpec, work: Workload, place: DeviceClass, tp: int, pp: int, batch: int) -> ReplicaCost:
    """Return the speed and memory of a replica that generates `batch` trajectories at once."""
    layers = replica_layers(model, pp)
    weights = weight_bytes(model, work, tp, layers)
    prompt = prefill_s(model, place, tp, layers, work.prompt.mean, work.prompt.moment(2))
    prompt /= work.group_size if work.shared_prefill else 1
    efficiency = place.efficiency
    prompt += efficiency.prefill_overhead_s * prefills_per_trajectory(work, batch)
    step = decode_s(model, work, place, tp, layers, batch, read_context_tokens(model, work, place, batch))
    # a slot that waits for its next trajectory stays empty for a whole number of decode steps
    empty_s = step * math.ceil(efficiency.handover_s / step)
    per_token = step / batch + (empty_s / batch + prompt + efficiency.trajectory_overhead_s) / work.output.mean
    if work.max_staleness == 0:
        pause = max(0.0, drain_s(model, work, place, tp, layers, batch) - batch * work.output.mean * step / batch)
    elif work.reprefills:
        live = prefill_s(model, place, tp, layers, work.live_context_tokens, work.live_context_squared)
        pause = efficiency.prefill_overhead_s + batch * live
    else:
        pause = 0.0
    used = weights + cache_bytes(model, work, tp, layers, batch)
    return ReplicaCost(tp, pp, layers, batch, efficiency.rollout / per_token, pause, used)


def read_context_tokens(model: ModelSpec, work: Workload, place: DeviceClass, batch: float) -> float:
    """Return the mean number of positions that a decode step of a full batch reads per trajectory.

    In a paged cache, a trajectory reads its own context. In a fixed cache, all slots are rows of one tensor. All
    trajectories of a length class then read the same number of positions: the length of the longest one. Let L be the
    length of a response. At a random time, a running trajectory is beyond position x with the probability ∫_x^∞ P(L >
    y) dy / E[L].
    """
    if not work.engine_context_tokens:
        return work.live_context_tokens
    edges = np.linspace(0, work.output.longest, DRAIN_POINTS + 1)
    alive = work.output.survival((edges[1:] + edges[:-1]) / 2)
    beyond = np.cumsum(alive[::-1])[::-1] / max(1e-12, alive.sum())
    longest = float(np.sum(1 - (1 - beyond) ** batch) * (edges[1] - edges[0]))
    rows_N = batch * (1 - np.append(beyond[1:], 0.0))
    return scanned_tokens(work.prompt.mean + np.minimum(edges[1:], longest), rows_N, class_cost_tokens(model, place))


def class_cost_tokens(model: ModelSpec, place: DeviceClass) -> float:
    """Return the cost of one more length class, in positions: in the time that the class costs, attention could read
    this number of positions. The cost is infinite on a GPU, because only engines on a CPU have length classes."""
    return 2 * CLASS_VALUES / model.kv_values_per_token if place.gpu.name == "CPU" else math.inf


def scanned_tokens(length_N: NDArray[np.float64], rows_N: NDArray[np.float64], class_cost: float) -> float:
    """Return the cost of a decode step per row of a fixed cache, in positions. This cost is the mean number of
    positions that a row reads, plus the cost of the length classes divided by the number of rows.

    The rows are divided into the one to three classes that minimise this cost. `length_N`: lengths in ascending order;
    the longest row of a class has one of these lengths. `rows_N`: for each of these lengths, the number of rows that
    are not longer.
    """
    last = len(length_N) - 1
    if math.isinf(class_cost):
        return float(length_N[last])
    first, second = np.triu_indices(last + 1)
    read = rows_N[first] * length_N[first] + (rows_N[second] - rows_N[first]) * length_N[second]
    read += (rows_N[last] - rows_N[second]) * length_N[last]
    read += class_cost * ((first < second) * 1 + (second < last))
    return float(read.min() / rows_N[last])


def prefills_per_trajectory(work: Workload, batch: float) -> float:
    """Return the number of prefill calls per trajectory, for an engine with a full batch.

    Trajectories that arrive between two decode steps share a prefill call. With `shared_prefill`, the trajectories of
    one prompt also share a prefill call. Let E[L] be the mean length of a response. On average, batch / E[L]
    trajectories arrive per decode step. If arrivals are independent, the fraction of steps in which at least one
    trajectory arrives is 1 - exp(-batch / E[L]).
    """
    arrivals = batch / work.output.mean
    return min(1 / work.group_size if work.shared_prefill else 1.0, -math.expm1(-arrivals) / arrivals)


def drain_s(
    model: ModelSpec, work: Workload, place: DeviceClass, tp: int, layers: tuple[int, ...], batch: int
) -> float:
    """Return the time to generate `batch` trajectories that all start at the same time, until the last one has ended.
    Steps become faster as trajectories end."""
    edges = np.linspace(0, work.output.longest, DRAIN_POINTS + 1)
    middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    alive = work.output.survival(middle)
    # alive: probability that a given trajectory still runs; longest: that at least one of the batch still runs
    longest = 1 - (1 - alive) ** batch
    total = 0.0
    for position, share, any_alive in np.stack([middle, alive, longest], axis=1).tolist():
        if any_alive > 1e-9:
            rows = max(share * batch / any_alive, 1.0)
            total += any_alive * decode_s(model, work, place, tp, layers, rows, work.prompt.mean + position)
    return float(total * width)
