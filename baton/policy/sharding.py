"""Sharded models (FSDP2): each rank keeps a part of every parameter, and gathers all parameters of a block to compute
the block.

Parameters, gradients and optimiser state are DTensors, split along their first dimension. The results are those of one
process, except for the order in which gradients are summed.
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
    """Runs functions on a sharded module while its parameters are gathered.

    Parameters outside the blocks (embedding, last norm, head) stay gathered during the whole call, so the function may
    call any part of the module. The module keeps its parameter names, because FSDP's hooks are attached to this
    wrapper.
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Shard a module in place. Gradients are summed over ranks, not averaged, because each rank divides its loss by
        a number of tokens or samples of all ranks."""
        super().__init__()
        self.module = module
        for block in [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]:
            fully_shard(block, mesh=mesh)
        # Reshard after forward, because parameters that stay gathered would have old values after an optimiser step.
        fully_shard(self, mesh=mesh, reshard_after_forward=True)
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def forward(self, work: Callable[[Any], Any]) -> Any:
        """Call `work`, which must return a tensor or a tuple of tensors, because FSDP attaches its hooks to the
        returned tensors."""
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
        """Set whether the next backward pass sums gradients over the ranks. If not, each rank keeps its own
        gradients."""
        cast(FSDPModule, self).set_requires_gradient_sync(is_on)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor without a copy. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank, which is a collective operation. A plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a tensor in the layout of `like`. Every rank must have the whole tensor, so no communication is needed."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor) or tensor.ndim == 0:
        return tensor
    own = tensor
    # Tensor parallelism, which is the last dimension of the mesh, splits the tensor first. FSDP shards the result.
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
    """Group tensors by their device mesh, because torch's foreach functions refuse tensors of different meshes."""
    found: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


def gathered(tensors: Mapping[str, torch.Tensor], *, is_kept: bool) -> dict[str, torch.Tensor]:
    """Gather tensors one after another. Ranks with `is_kept` get the gathered tensors in host memory; other ranks get
    an empty dict.

    Collective: all ranks must pass the same names in the same order.
    """
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if is_kept:
            found[name] = full.cpu()
    return found
