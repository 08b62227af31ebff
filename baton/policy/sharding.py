"""Sharded models (FSDP2): each rank keeps a part of every parameter, and gathers a block's parameters to compute it.

Parameters, gradients and optimiser state are DTensors, split along their first dimension. The computation is that of
one process, except for the order in which gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

Result = TypeVar("Result")


class Sharded(torch.nn.Module):
    """Runs functions on a sharded module, with parameters gathered.

    Parameters outside the blocks (embedding, last norm, head) are gathered for the whole call, so the function may call
    any part of the module. The module keeps its parameter names; FSDP's hooks are attached to this wrapper.
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Shard a module in place. Gradients are summed over ranks, not averaged, because loss divisors are global."""
        super().__init__()
        self.module = module
        for block in [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]:
            fully_shard(block, mesh=mesh)
        # Reshard after forward: parameters kept gathered would be outdated by an optimiser step.
        fully_shard(self, mesh=mesh, reshard_after_forward=True)
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def forward(self, work: Callable[[Any], Any]) -> Any:
        """Call `work`, which must return a tensor or a tuple of tensors, because FSDP attaches its hooks to these."""
        return work(self.module)

    def run(self, work: Callable[[Any], Result]) -> Result:
        """Call `work` with the module; `work` returns a tensor or a dataclass of tensors."""
        kind: list[Any] = []

        def opened(module: Any) -> Any:
            found = work(module)
            if not is_dataclass(found):
                return found
            kind.append(type(found))
            return tuple(getattr(found, field.name) for field in fields(cast(Any, found)))

        found = self(opened)
        return cast(Result, kind[0](*found) if kind else found)

    def sync_gradients(self, is_on: bool) -> None:
        """Set whether the next backward pass reduces gradients over the ranks, or each rank keeps its own."""
        cast(FSDPModule, self).set_requires_gradient_sync(is_on)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor (not a copy), or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank (collective), or return a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor, which every rank has, in the layout of `like`. No communication."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor) or tensor.ndim == 0:
        return tensor
    own = tensor
    # Tensor parallelism, the last dimension of the mesh, splits first; FSDP shards the result.
    for place, count, index in reversed(
        list(zip(like.placements, like.device_mesh.shape, like.device_mesh.get_coordinate() or (), strict=True))
    ):
        if place.is_replicate():
            continue
        dim = cast(Shard, place).dim
        parts = own.chunk(count, dim)
        own = parts[index] if index < len(parts) else own.narrow(dim, 0, 0)
    return DTensor.from_local(
        own.contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.contiguous().stride(),
    )


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by their device mesh, because torch's foreach functions accept only one mesh at a time."""
    found: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


def gathered(tensors: Mapping[str, torch.Tensor], *, is_kept: bool) -> dict[str, torch.Tensor]:
    """Gather tensors one at a time. Ranks with `is_kept` get them on the host; other ranks get an empty dict.

    Collective: all ranks must pass the same names in the same order.
    """
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if is_kept:
            found[name] = full.cpu()
    return found
