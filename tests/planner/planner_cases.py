"""Small clusters, models and workloads for the planner's tests, and searches that share nothing with it but the
costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

import msgspec
import numpy as np

from baton.cost.efficiency import Efficiencies, Efficiency, RatesSettings
from baton.cost.generate import DeviceClass, largest_batch, replica_cost
from baton.cost.memory import rank_phases, stage_bytes, table_params
from baton.cost.train import (
    UPDATE_TRAFFIC_BYTES,
    forward_passes,
    in_flight,
    layer_flops,
    microbatches,
    publish_s,
    rank_of,
    stage_terms,
)
from baton.planner import solve
from baton.planner.problem import Inputs
from baton.specs.cluster import Cluster, ClusterSettings
from baton.specs.model import ModelSpec, model_spec
from baton.specs.plan import Method, Plan
from baton.specs.workload import Workload, WorkloadSettings
from baton.trainer.parallel.balance import balanced

Chosen = Sequence[tuple[int, int, int] | None]
"""(stages, tp, dp) on each type, or no part in training."""
FAST = {"bf16_tflops": 100, "hbm_gb_per_s": 2e5, "hbm_gb": 1.0, "link_gb_per_s": 1e6, "price_per_hour": 4}
SLOW = {"bf16_tflops": 37, "hbm_gb_per_s": 1e5, "hbm_gb": 1.5, "link_gb_per_s": 1e6, "price_per_hour": 1}
"""Own GPU types: memory and links so fast that gradients and the optimiser take no time worth mention."""


def cluster(
    *nodes: tuple[str, int], fast_gb: float = 1.0, slow_gb: float = 1.5, fast_tflops: float = 100.0, cross: float = 5e5
) -> Cluster:
    """Nodes as (type, GPUs)."""
    return ClusterSettings.model_validate(
        {
            "name": "small",
            "links": {"inter_node_gb_per_s": 1e6, "cross_type_gb_per_s": cross, "latency_us": 0},
            "nodes": [{"gpu": kind, "gpus": count, "name": f"n{i}"} for i, (kind, count) in enumerate(nodes)],
            "gpu": {
                "Fast": {**FAST, "hbm_gb": fast_gb, "bf16_tflops": fast_tflops},
                "Slow": {**SLOW, "hbm_gb": slow_gb},
            },
        }
    ).build()


@cache
def model(layers: int = 4) -> ModelSpec:
    """A model of about 17 M parameters."""
    return model_spec(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 2048,
            "vocab_size": 512,
            "tie_word_embeddings": True,
        },
        "small",
    )


def work(**changes: object) -> Workload:
    """24 trajectories; batches of one and two; microbatches of one trajectory."""
    base = {
        "groups": 12,
        "group_size": 2,
        "max_staleness": 4,
        "prompt_tokens": {"mean": 64},
        "output_tokens": {"kind": "measured", "values": [64, 128, 512]},
        "engine": {"max_batch": 2},
    }
    trainer = {"trainer": changes.pop("trainer", "baton"), "microbatch_tokens": changes.pop("microbatch_tokens", 0)}
    return msgspec.structs.replace(WorkloadSettings.model_validate({**base, **changes}).build(), **trainer)


QUICK = Efficiencies(Efficiency(step_overhead_s=2e-5, publish_latency_s=1e-3))
"""Overheads in proportion to so small a model."""


def inputs(of: Cluster, *, mixed_stages: bool = False, **changes: object) -> Inputs:
    """Defaults for the rest."""
    return Inputs(of, model(), work(**changes), QUICK, mixed_stages=mixed_stages)


def make_plan(asked: Inputs, method: Method = "exact") -> Plan:
    """Plan without a time limit: a search that a slow machine ends early has a gap, and may miss the best plan."""
    return solve.make_plan(asked, method, time_limit_s=math.inf)


# ---- a search by hand ------------------------------------------------------------------------------------------------


def brute_step_s(question: Inputs) -> float:
    """Least step time over every packing of training groups and replicas into the nodes, one by one."""
    nodes, spec, load = question.cluster.nodes, question.model, question.work
    types = sorted({n.gpu.name: n.gpu for n in nodes}.values(), key=lambda gpu: (gpu.flops, gpu.name))
    best = np.inf
    shapes = [[None, *((p, tp, dp) for p in (1, 2, 4, 8) for tp in (1, 2, 4) for dp in range(1, 9))] for _ in types]
    for chosen in product(*shapes):
        used = [shape for shape in chosen if shape]
        if not used or (len(used) > 1 and any(p > 2 for p, _, _ in used)):
            continue
        if not _fits_types(nodes, types, chosen):
            continue
        ways = [(_brute_training(question, types, chosen), 0)] if _is_trained(question, used) else []
        ways += list(_brute_groups(question, types, chosen))
        for (train_s, size), replicas in product(ways, _replica_sets(question, types, chosen)):
            if train_s >= best or sum(cost.batch for _, cost in replicas) > load.max_running:
                continue
            groups = [(t, tp) for t, shape in enumerate(chosen) if shape for tp in [shape[1]] * (shape[0] * shape[2])]
            if size:
                groups = [(t, size) for t, (_, _, dp) in enumerate(chosen) for _ in range(dp // size)]  # type: ignore[misc]
            groups += [(t, cost.num_gpus) for t, cost in replicas]
            if not _packs(nodes, types, groups):
                continue
            sync_s = _brute_sync(question, types, chosen, {t for t, _ in replicas})
            rollout_s = _finish_s([cost for _, cost in replicas], load.output_tokens)
            best = min(best, sync_s + max(rollout_s, train_s))
    assert spec.num_layers
    return float(best)


def _place(question: Inputs, kind: str) -> tuple[DeviceClass, int]:
    nodes = [n for n in question.cluster.nodes if n.gpu.name == kind]
    between = 1e15 if len(nodes) > 1 else nodes[0].link_bytes_per_s
    return DeviceClass(nodes[0].gpu, nodes[0].link_bytes_per_s, between, 0.0, question.efficiencies.of(kind)), max(
        n.num_gpus for n in nodes
    )


def _fits_types(nodes: Sequence[object], types: Sequence[object], chosen: Chosen) -> bool:
    return all(
        shape is None or shape[0] * shape[1] * shape[2] <= sum(n.num_gpus for n in nodes if n.gpu.name == kind.name)  # type: ignore[attr-defined]
        for shape, kind in zip(chosen, types, strict=True)
    )


def _is_trained(question: Inputs, used: Sequence[tuple[int, int, int]]) -> bool:
    """Baton's trainer: equally many ranks on each stage; stages without tensor parallelism and critic; products that
    are split evenly among 4 heads, 2 key/value heads and 2,048 columns."""
    if question.work.trainer == "idealised":
        return True
    depth = sum(p for p, _, _ in used)
    has_shape = depth == 1 or (all(tp == 1 for _, tp, _ in used) and not question.work.has_critic)
    return has_shape and len({dp for _, _, dp in used}) == 1 and all(tp <= 2 for _, tp, _ in used)


def _layer_splits(num_layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (num_layers,)
        return
    for first in range(1, num_layers - stages + 2):
        for rest in _layer_splits(num_layers - first, stages - 1):
            yield (first, *rest)


def _brute_training(question: Inputs, types: Sequence[object], chosen: Chosen) -> float:
    """Least time over every way to give layers to stages. Baton's trainer shards gradients if whole ones do not fit."""
    found = _least_training(question, question.work, types, chosen)
    if found < np.inf or question.work.trainer == "idealised":
        return found
    return _least_training(question, msgspec.structs.replace(question.work, shard_gradients=True), types, chosen)


def _least_training(question: Inputs, load: Workload, types: Sequence[object], chosen: Chosen) -> float:
    spec = question.model
    stages = [
        (kind.name, tp, dp)
        for kind, shape in zip(types, chosen, strict=True)
        if shape
        for p, tp, dp in [shape]
        for _ in range(p)
    ]  # type: ignore[attr-defined]
    if len(stages) > spec.num_layers:
        return np.inf
    count = float(microbatches(load, max(dp for _, _, dp in stages)))
    best = np.inf
    for split in _layer_splits(spec.num_layers, len(stages)):
        slowest, tail, fits = 0.0, 0.0, True
        for index, ((kind, tp, dp), layers) in enumerate(zip(stages, split, strict=True)):
            place, node_gpus = _place(question, kind)
            terms = stage_terms(spec, load, place, node_gpus, tp, dp)
            first, last = index == 0, index == len(stages) - 1
            rank = rank_of(load, terms.rank, len(stages), tp * dp)
            kept = in_flight(load, len(stages), max(dp for _, _, dp in stages))
            phases = rank_phases(spec, rank, first, last, kept)
            need = stage_bytes(phases, layers)
            fits &= bool(need <= place.memory_limit_bytes)
            slowest = max(slowest, float(terms.per_layer_s) * layers + last * float(terms.head_s))
            tables = float(table_params(spec, np.array(first), np.array(last))) / spec.layer_params
            tail = max(tail, (layers + tables) * float(terms.gradients_per_layer_s + terms.optimizer_per_layer_s))
        if fits:
            best = min(best, slowest * (count + len(stages) - 1) / count + tail)
    return best


def _brute_groups(question: Inputs, types: Sequence[object], chosen: Chosen) -> Iterator[tuple[float, int]]:
    """Time and shard size of each data-parallel group over two types: with one copy, and with copies of as many ranks
    as a power of two allows. Rows are dealt by the trainer's own function."""
    counts = [shape[2] for shape in chosen if shape and shape[:2] == (1, 1)]
    if not question.mixed_stages or question.work.trainer == "idealised" or len(types) != 2 or len(counts) != 2:
        return
    widest = min(_place(question, kind.name)[1] for kind in types)  # type: ignore[attr-defined]
    for size in (0, max(s for s in (1, 2, 4) if s <= widest and not any(count % s for count in counts))):
        if size != 1:
            load = msgspec.structs.replace(question.work, shard_size=size)
            found = _group_s(question, load, types, counts)
            if found == np.inf:
                found = _group_s(question, msgspec.structs.replace(load, shard_gradients=True), types, counts)
            yield found, size


def _group_s(question: Inputs, load: Workload, types: Sequence[object], counts: Sequence[int]) -> float:
    spec, ranks = question.model, sum(counts)
    places = [_place(question, kind.name)[0] for kind in types]  # type: ignore[attr-defined]
    fits = True
    for place in places:
        rank = stage_terms(spec, load, place, 1, 1, ranks).rank
        fits &= bool(stage_bytes(rank_phases(spec, rank), spec.num_layers) <= place.memory_limit_bytes)
    if not fits:
        return np.inf
    passes = [forward_passes(load, place.efficiency.backward) for place in places]
    speeds = [place.gpu.flops * place.efficiency.train / own for place, own in zip(places, passes, strict=True)]
    if not load.shard_size or load.shard_gradients:  # passes together: the smallest microbatch is one trajectory
        longest = load.longest_tokens / max(load.longest_tokens, load.microbatch_tokens)
        given = [max(speed, max(speeds) * longest) for speed in speeds]
    else:
        given = speeds
    owner = [t for t, count in enumerate(counts) for _ in range(count)]
    dealt = balanced([1.0] * load.num_trajectories, ranks, [given[t] for t in owner])
    flops = spec.num_layers * layer_flops(spec, load) + load.trained_tokens * spec.head_flops_per_token
    slowest = max(len(rows) / speeds[t] for rows, t in zip(dealt, owner, strict=True))
    weights = spec.num_layers * spec.layer_params + float(table_params(spec, np.array(1), np.array(1)))
    models = 1 + load.has_critic
    update = UPDATE_TRAFFIC_BYTES * load.updates * models * weights / (load.shard_size or ranks)
    slow_update = max(update / (place.gpu.hbm_bytes_per_s * place.efficiency.decode) for place in places)
    return slowest / load.num_trajectories * flops + slow_update


def _replica_sets(question: Inputs, types: Sequence[object], chosen: Chosen) -> Iterator[list]:  # type: ignore[type-arg]
    """Every multiset of replicas on the GPUs that training leaves."""
    per_type = []
    for t, (kind, shape) in enumerate(zip(types, chosen, strict=True)):
        name = kind.name  # type: ignore[attr-defined]
        total = sum(n.num_gpus for n in question.cluster.nodes if n.gpu.name == name)
        left = total - (shape[0] * shape[1] * shape[2] if shape else 0)
        place, _ = _place(question, name)
        costs = []
        for tp, pp in product((1, 2, 4), (1, 2, 4)):
            batch = largest_batch(question.model, question.work, place, tp, pp) if tp * pp <= left else 0
            while batch >= pp:
                costs.append(replica_cost(question.model, question.work, place, tp, pp, batch))
                batch //= 2
        per_type.append([[(t, cost) for cost in some] for some in _multisets(costs, left)])
    for parts in product(*per_type):
        together = [each for part in parts for each in part]
        if together:
            yield together


def _multisets(costs: Sequence, left: int) -> Iterator[list]:  # type: ignore[type-arg]
    if not costs:
        yield []
        return
    first, rest = costs[0], costs[1:]
    for count in range(left // first.num_gpus + 1):
        for others in _multisets(rest, left - count * first.num_gpus):
            yield [first] * count + others


def _packs(nodes: Sequence[object], types: Sequence[object], groups: Sequence[tuple[int, int]]) -> bool:
    """Whether groups fit into nodes, each within one: by trying all."""
    ordered = sorted(groups, key=lambda g: -g[1])
    room = [n.num_gpus for n in nodes]  # type: ignore[attr-defined]

    def place(index: int) -> bool:
        if index == len(ordered):
            return True
        t, size = ordered[index]
        for k, node in enumerate(nodes):
            if node.gpu.name == types[t].name and room[k] >= size:  # type: ignore[attr-defined]
                room[k] -= size
                if place(index + 1):
                    return True
                room[k] += size
        return False

    return place(0)


def _finish_s(costs: Sequence, tokens: float) -> float:  # type: ignore[type-arg]
    """When replicas that pause have generated so many tokens: grow the set by least pause."""
    best = np.inf
    ordered = sorted(costs, key=lambda c: c.pause_s)
    for count in range(1, len(ordered) + 1):
        speed = sum(c.tokens_per_s for c in ordered[:count])
        time_s = (tokens + sum(c.tokens_per_s * c.pause_s for c in ordered[:count])) / speed
        if time_s >= ordered[count - 1].pause_s:
            best = min(best, time_s)
    return float(best)


def _brute_sync(question: Inputs, types: Sequence[object], chosen: Chosen, engines: set[int]) -> float:
    """Publication takes the latency of the trainer's types here: links are too fast to matter."""
    latency = max(
        question.efficiencies.of(kind.name).publish_latency_s  # type: ignore[attr-defined]
        for kind, shape in zip(types, chosen, strict=True)
        if shape
    )
    quick = publish_s(question.model, question.work, np.array([1.0]), np.array([[1e14]]), np.array([latency]))
    assert engines
    return float(quick[0])


# ---- measured rates --------------------------------------------------------------------------------------------------


def rates(**by_gpu: tuple[float, float]) -> RatesSettings:
    """Rates as (train, rollout)."""
    return RatesSettings.model_validate(
        {"rates": {name.replace("_", "-"): {"train": t, "rollout": r} for name, (t, r) in by_gpu.items()}}
    )


def enumerated_step_s(question: Inputs) -> float:
    """Least step time over every number of training GPUs of each type, with rates."""
    assert question.rates is not None
    load, table = question.work, question.rates.rates
    counts = question.cluster.count()
    best = np.inf
    for train in product(*(range(count + 1) for count in counts.values())):
        rate = sum(n * table[kind].train for n, kind in zip(train, counts, strict=True))
        speed = sum((counts[kind] - n) * table[kind].rollout for n, kind in zip(train, counts, strict=True))
        if rate and speed:
            best = min(best, max(load.trained_tokens / rate, load.output_tokens / speed) + question.rates.sync_s)
    return float(best)
