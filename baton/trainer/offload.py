"""Moves a trainer's tensors to the host while an engine uses the device, and later moves them back unchanged.

      active                         resting (on CUDA, in pinned host memory)
      weights of all models   ◀───▶  the same bits
      moments of AdamW        ◀───▶  the same bits
      gradients                      none: every update starts from zero gradients

While a tensor is on the host, its storage object on the device remains, resized to 0 bytes. References to the storage
object by modules, optimisers, tied weights and FSDP therefore stay valid. On a CPU, tensors do not move, and only the
memory of gradients is returned to the system.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from baton.policy.memory import held_bytes, release_free_memory


class Offload:
    """The tensors of models and optimisers, which are on a device or, during sleep, on the host."""

    def __init__(
        self,
        device: torch.device,
        models: Sequence[Module | None],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        moves: bool | None = None,
    ) -> None:
        """`moves`: whether `sleep` moves tensors; the default is True except on a CPU."""
        self.device = device
        self._models = [model for model in dict.fromkeys(models) if model is not None]
        self._optimizers = optimizers
        self._moves = device.type != "cpu" if moves is None else moves
        self._hosts: dict[int, Tensor] = {}
        """`id(tensor)` → host memory of the offloaded tensor."""
        self._resting: dict[int, tuple[Tensor, Tensor, int]] = {}
        """`id(tensor)` → (the offloaded tensor, a tensor object with its storage on the device, bytes of this
        storage)."""
        self.is_resting = False

    @property
    def held_bytes(self) -> int:
        """Bytes that the tensors use on the device now, including gradients."""
        if self.is_resting and self._moves:
            return 0
        gradients = (_own(p.grad) for model in self._models for p in model.parameters() if p.grad is not None)
        return held_bytes((*self._tensors(), *gradients), self.device)

    @torch.no_grad()
    def sleep(self) -> None:
        """Free the gradients and move the tensors to the host. Idempotent."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.is_resting:
            return
        if not self._moves:
            self.is_resting = True
            release_free_memory()
            return
        moved = {id(tensor): (tensor, self._host(tensor)) for tensor in self._tensors()}
        for tensor, host in moved.values():
            host.copy_(tensor, non_blocking=True)
        self._synchronize()
        for key, (tensor, host) in moved.items():
            self._resting[key] = tensor, tensor.data, tensor.untyped_storage().nbytes()
            tensor.data = host
        for _, active, _ in self._resting.values():
            active.untyped_storage().resize_(0)
        self._hosts = {key: host for key, (_, host) in moved.items()}
        self.is_resting = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the next user of the device allocates blocks of other sizes

    @torch.no_grad()
    def wake_up(self) -> None:
        """Move the tensors back to the device, including changes that were made on the host. Idempotent."""
        if self.is_resting and self._moves:
            for tensor in self._tensors():
                if (resting := self._resting.get(id(tensor))) is None:  # created while the trainer slept
                    tensor.data = tensor.to(self.device, non_blocking=True, copy=True)
                    continue
                _, active, num_bytes = resting
                active.untyped_storage().resize_(num_bytes)
                tensor.data = active.copy_(tensor, non_blocking=True)
            self._synchronize()
            self._resting = {}
        self.is_resting = False

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the parameters and buffers of the models and the moments of the optimisers. For sharded tensors, yield
        this rank's shards."""
        for model in self._models:
            yield from map(_own, model.parameters())
            yield from map(_own, model.buffers())
        for optimizer in self._optimizers:
            for moments in optimizer.state.values():
                for value in moments.values():
                    packed = [getattr(value, name) for name in getattr(value, "tensor_attrs", ())]  # torchao's
                    yield from packed or ([_own(value)] if isinstance(value, Tensor) else [])

    def _host(self, tensor: Tensor) -> Tensor:
        """Return host memory for a tensor. The memory of the last offload is reused if shape and dtype are equal."""
        kept = self._hosts.get(id(tensor))
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty_like(tensor, device="cpu", pin_memory=self.device.type == "cuda")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor object that stores this rank's shard of a sharded tensor (`to_local` would return a view)."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
