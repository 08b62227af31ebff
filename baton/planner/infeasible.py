"""Errors for infeasible inputs. Each error names the binding constraint. An error about memory also states the bytes
needed and available."""

from __future__ import annotations

from itertools import product
from typing import NoReturn

import msgspec
import numpy as np

from baton.cost.generate import cache_bytes, replica_layers, weight_bytes
from baton.cost.memory import KEPT_CONTEXTS, SLOT_MULTIPLE, rank_phases, stage_bytes
from baton.cost.train import in_flight, rank_of, stage_terms
from baton.errors import UserError
from baton.planner.pools import GpuPool, Pools
from baton.planner.problem import REPLICA_STAGES, AssignmentProblem, Inputs, tensor_widths
from baton.planner.training_shapes import trained_widths
from baton.specs.cluster import GB
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload


def refuse_without_columns(inputs: Inputs, pools: Pools) -> NoReturn:
    """Raise the UserError for a model that does not fit into the memory of any pool with any replica shape."""
    model, work, lines = inputs.model, inputs.work, []
    for pool in pools.pools:
        needs = []
        for tp, pp in product(tensor_widths(model, pool), REPLICA_STAGES):
            if tp * pp <= max(pool.sizes) and pp <= model.num_layers:
                layers = replica_layers(model, pp)
                needs.append((weight_bytes(model, work, tp, layers) + cache_bytes(model, work, tp, layers, 1), tp, pp))
        least, tp, pp = min(needs)
        limit = pool.place.memory_limit_bytes
        lines.append(
            f"{pool.name}: {least / GB:.3g} GB needed with tp = {tp}, pp = {pp}, {limit / GB:.3g} GB available"
        )
    cache, shorter = f"one trajectory of {work.longest_tokens:,.0f} tokens", "Shorter responses"
    if work.engine_context_tokens:
        tokens, shorter = max(work.engine_context_tokens, work.longest_tokens), "A smaller engine.context_tokens"
        cache = f"a KV cache of {SLOT_MULTIPLE + KEPT_CONTEXTS} × {tokens:,.0f} tokens"
    raise UserError(
        f"infeasible: rollout memory. {model.name} with {cache} fits on no "
        f"GPU type in any replica shape ({'; '.join(lines)}). {shorter} or GPUs with more memory would help"
    )


def refuse_without_shapes(inputs: Inputs, pools: Pools, *, may_mix: bool = False) -> NoReturn:
    """Raise the UserError for a model that does not fit into the memory of any pool with any training shape. `may_mix`:
    True if mixed stages were not tried, so that one of them may still fit."""
    model, work = inputs.model, inputs.work
    lines = [_training_need(model, work, pool) for pool in pools.pools]
    also = ". --mixed-stages also tries stages on two GPU types" if may_mix else ""
    raise UserError(
        f"infeasible: training memory. {model.name} with microbatches of {work.longest_tokens:,.0f} tokens fits in no "
        f"training shape ({'; '.join(lines)}). More GPUs per shape, shorter responses or a smaller model would help"
        f"{also}"
    )


def _training_need(model: ModelSpec, work: Workload, pool: GpuPool) -> str:
    """Return a text that states the minimum memory per GPU for training with all GPUs of this pool."""
    needs = []
    if work.trainer == "baton":
        work = msgspec.structs.replace(work, shard_gradients=True)
    for stages, tp in trained_widths(model, work, pool):
        dp = pool.capacity(tp) // (stages * tp)
        if dp < 1:
            continue
        terms = stage_terms(model, work, pool.place, max(pool.sizes), tp, dp)
        layers = -(-model.num_layers // stages)
        rank = rank_of(work, terms.rank, stages, tp * dp)
        need = float(stage_bytes(rank_phases(model, rank, stages == 1, True, in_flight(work, stages, dp)), layers))
        needs.append((need, tp, stages, dp))
    need, tp, stages, dp = min(needs)
    return (
        f"{pool.name}: {need / GB:.3g} GB per GPU needed with tp = {tp}, dp = {dp}, {stages} stages, "
        f"{pool.place.memory_limit_bytes / GB:.3g} GB available"
    )


def refuse_division(problem: AssignmentProblem) -> NoReturn:
    """Raise the UserError for the first cause that applies: the staleness bound is too strict, no training shape fits,
    or a training shape fits and a replica fits, but not both at once."""
    table, pools = problem.table, problem.pools.pools
    smallest = min(column.cost.batch for column in problem.columns)
    if smallest > problem.step.max_running:
        raise UserError(
            f"infeasible: staleness bound. max_staleness allows {problem.step.max_running:.1f} running trajectories, "
            f"but the smallest replica runs {smallest}. A larger batch or a larger max_staleness would help"
        )
    if not len(table):
        refuse_without_shapes(problem.inputs, problem.pools)
    gpus = table.gpus.sum(axis=1)
    row = int(np.argmin(gpus))
    shape = ", ".join(f"{count} {pool.name}" for count, pool in zip(table.gpus[row], pools, strict=True) if count)
    replica = min(problem.columns, key=lambda column: column.num_gpus)
    total = sum(pool.num_gpus for pool in pools)
    raise UserError(
        f"infeasible: number of GPUs. The smallest training shape of {problem.inputs.model.name} takes {shape}, the "
        f"smallest replica {replica.num_gpus} {pools[replica.pool].name}, and they do not fit side by side into "
        f"{total} GPUs. More GPUs would help"
    )
