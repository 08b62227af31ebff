"""A model in shards: each rank keeps a part of every parameter, and gathers a block's when it computes that block.

FSDP2 (`torch.distributed.fsdp.fully_shard`). Parameters, gradients and optimiser state are DTensors, split along their
first dimension; arithmetic is what it is in one process, but for the order in which gradients are added up.
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
    """Runs work on a module whose parameters lie in shards: within it they are whole.

    What is outside of the blocks (embedding, last norm, head) is gathered for the whole of the work, so that the work
    may call any part of the module. The module keeps its own names; this wrapper is where its hooks hang.
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Shard a module in place. Its gradients become sums over the ranks, not means: divisors are global."""
        super().__init__()
        self.module = module
        for block in [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]:
            fully_shard(block, mesh=mesh)
        # Gathered again on the way back, and never kept past a forward pass: an optimiser's step would outdate it.
        fully_shard(self, mesh=mesh, reshard_after_forward=True)
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def forward(self, work: Callable[[Any], Any]) -> Any:
        """Do the work. Tensors have to be returned in tuples, for the hooks to find them."""
        return work(self.module)

    def run(self, work: Callable[[Any], Result]) -> Result:
        """Do the work; tensors among its result are it alone, or the fields of a dataclass."""
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
        """Whether the next backward pass adds gradients up over the ranks; else each keeps its own, whole."""
        cast(FSDPModule, self).set_requires_gradient_sync(is_on)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor (not a copy), or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank; all ranks have to take part. A plain tensor is itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cut from a whole tensor, which every rank has, what this rank keeps of one that lies like another."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor) or tensor.ndim == 0:
        return tensor
    own = tensor
    # Tensor parallelism, the last dimension of a mesh, has cut first: FSDP shards what it left.
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
    """Part tensors by the mesh they lie on: torch takes those of one at a time."""
    found: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


def gathered(tensors: Mapping[str, torch.Tensor], *, is_kept: bool) -> dict[str, torch.Tensor]:
    """Gather tensors one after the other; who keeps them gets them on the host, the others get none.

    All ranks have to take part, with the same names in the same order.
    """
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if is_kept:
            found[name] = full.cpu()
    return found
