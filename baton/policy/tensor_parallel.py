"""Tensor parallelism: ranks split the matrix products of each block by heads and columns.

`base_model_tp_plan` of transformers states for each model family how each linear layer of a block is split. Every rank
computes all other layers (norms, embedding, head) completely and has the whole residual stream, so the rest of the
trainer is unchanged.
"""

from __future__ import annotations

import fnmatch
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from baton.errors import UserError
from baton.policy.adapters import has_adapters
from baton.specs.trainer_shapes import can_split

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE = ("replicated_with_grad_allreduce",)
"""Styles in `base_model_tp_plan` for layers whose weights are whole on every rank, although each rank applies them to
its own attention heads only. The gradients of these layers must be summed over the ranks."""


def split_products(model: PreTrainedModel, mesh: DeviceMesh) -> list[torch.nn.Parameter]:
    """Split a model's layers over a one-dimensional mesh, in place. Returns the parameters whose gradients must be
    summed over the ranks. Raises UserError if the model has no supported `base_model_tp_plan`, or if the mesh's size
    does not divide the model's dimensions."""
    plan = products_plan(model, mesh.size())
    base = cast(PreTrainedModel, model.base_model)
    parallelize_module(base, mesh, {name: _STYLES[style]() for name, style in plan.items() if style in _STYLES})
    whole = [name for name, style in plan.items() if style in _WHOLE]
    return [
        parameter
        for name, module in base.named_modules()
        if any(fnmatch.fnmatch(name, pattern) for pattern in whole)
        for parameter in module.parameters()
    ]


def products_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the checked `base_model_tp_plan`: pattern of layer names in the base model → style of splitting."""
    kind, shape = type(model).__name__, model.config.get_text_config()
    plan: dict[str, str] = getattr(shape, "base_model_tp_plan", None) or {}
    if not plan:
        raise UserError(f"trainer.tensor_parallel: transformers has no plan for {kind}; allowed is 1")
    if unknown := sorted(set(plan.values()) - _STYLES.keys() - set(_WHOLE)):
        raise UserError(
            f"trainer.tensor_parallel: the plan of {kind} has layers of style {', '.join(unknown)}, but only "
            f"{', '.join((*_STYLES, *_WHOLE))} are supported; allowed is 1"
        )
    assert not has_adapters(model), "support.toml refuses adapters: they are in no model's plan"
    counts = shape.num_attention_heads, getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    if not can_split(size, *counts, shape.intermediate_size):
        raise UserError(
            f"trainer.tensor_parallel: got {size}, but {kind} has {counts[0]} query heads, {counts[1]} key/value heads "
            f"and {shape.intermediate_size} columns in its MLP; allowed are common divisors of these"
        )
    return plan
