"""Sharded models (FSDP2): each rank keeps a shard of every parameter, and gathers the parameters of a block before
computing the block.

Parameters, gradients and optimiser state are DTensors, split along their first dimension. In float32, the results
differ from those of a single process only by the order in which gradients are summed.

If the compute dtype is bfloat16, ranks gather blocks in bfloat16, so embeddings, norms and the residual stream are
bfloat16 too. A process without sharding instead keeps float32 parameters, and rounds them in each linear layer.
Gradients are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from baton.policy.stages import is_float32

Result = TypeVar("Result")


class Sharded(torch.nn.Module):
    """Runs functions on a sharded module while the module's parameters are gathered.

    Blocks, embedding and head are gathered only while they compute; if embedding and head share a weight, this weight
    stays gathered during the whole call. All parameters outside blocks, embedding and head also stay gathered during
    the call, so the function may call any part of the module. FSDP's hooks are attached to this wrapper, so the module
    keeps its parameter names.
    """

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
        """Shard a module in place, over the mesh's last dimension. If the mesh has two dimensions, ranks along the
        first hold copies.

        Gradients are summed over ranks, not averaged, because each rank divides its loss by the number of tokens or
        samples on all ranks together. `dtype`: dtype in which parameters are gathered, except the module's
        `float32_parts`. If `dtype` is not float32, parameters that the model keeps in float32, such as the biases of
        routers, are replicated on each rank instead of sharded.
        """
        super().__init__()
        self.module = module
        self.unsharded: list[str] = []
        """Names of the trained parameters that are replicated instead of sharded. The caller sums their gradients."""
        policy, kept = MixedPrecisionPolicy(), set[torch.nn.Parameter]()
        if dtype is not torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            for name in getattr(module, "float32_parts", ()):
                fully_shard(module.get_submodule(name), mesh=mesh)
            model = getattr(module, "trunk", None) or module  # a critic that uses the policy's body has only a head
            kept = {p for name, p in model.named_parameters() if is_float32(model, name)}
            self.unsharded = [name for name, p in module.named_parameters() if p in kept and p.requires_grad]
        blocks = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
        for part in [*blocks, *_tables(module)]:
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=kept)
            if hasattr(part, "compute"):
                register_fsdp_forward_method(part, "compute")
        # Reshard after the forward pass: parameters that stay gathered would have old values after an optimiser step.
        fully_shard(self, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=kept)
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def forward(self, work: Callable[[Any], Any]) -> Any:
        """Call `work`, which must return a tensor or a tuple of tensors, because FSDP attaches hooks to the result."""
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
        """If `is_on`, the next backward pass sums gradients over the ranks; otherwise each rank keeps its own."""
        cast(FSDPModule, self).set_requires_gradient_sync(is_on)


def _tables(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's embedding and head, or an empty list if they share a weight. The head gets a method `compute`,
    which calls a function while the head's weight is gathered."""
    model: Any = getattr(module, "trunk", module)
    embedding, head = (getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output"))
    if getattr(head, "weight", None) is getattr(embedding, "weight", None):
        return []
    found: list[torch.nn.Module] = [embedding] if isinstance(embedding, torch.nn.Embedding) else []
    if type(head) is torch.nn.Linear:
        head.compute = lambda work, *tensors: work(*tensors)  # type: ignore[assignment]
        found.append(head)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor without a copy. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank. Collective: all ranks must call it. A plain tensor is returned unchanged.
    While the trainer sleeps, shards are on the host; they are first copied to the device."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard, mesh = local(tensor.detach()), tensor.device_mesh
    if shard.device.type != mesh.device_type:
        shard = shard.to(mesh.device_type)
        tensor = DTensor.from_local(
            shard, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor()


Box = tuple[slice, ...]
"""A box within a tensor: the slice of each dimension."""


def box_of(tensor: torch.Tensor) -> Box:
    """Return the box of this rank's shard of a tensor. For a plain tensor, the box is the whole tensor."""
    box = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(box)
    mesh = tensor.device_mesh
    # Tensor parallelism (the last dimension of the mesh) splits the tensor first; FSDP shards the result.
    for place, count, index in reversed(
        list(zip(tensor.placements, mesh.shape, mesh.get_coordinate() or (), strict=True))
    ):
        if place.is_replicate():
            continue
        dim = cast(Shard, place).dim
        begin, end = box[dim].start, box[dim].stop
        size = -((begin - end) // count)  # rounded up, as torch.chunk does
        box[dim] = slice(min(begin + index * size, end), min(begin + (index + 1) * size, end))
    return tuple(box)


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by their device mesh, because torch's foreach functions refuse tensors of different meshes."""
    found: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


Gather = Callable[[str, torch.Tensor], torch.Tensor]
"""Gathers a tensor, given its name and this rank's shard. Returns the whole tensor on the ranks that need it."""
