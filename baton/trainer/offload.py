"""A trainer's tensors leave the device while somebody else needs it, and come back with the same bits.

      at work                        at rest (on CUDA, in pinned host memory)
      weights of all models   ◀───▶  the same bits
      moments of AdamW        ◀───▶  the same bits
      gradients                      none: every update begins with zeroed ones

Tensors keep their identity: what is exchanged is the memory behind them, so that modules, optimisers and tied weights
need not know. The host's copies are allocated once and written again in each turn. On a CPU there is nowhere to go:
the gradients are dropped, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from baton.policy.memory import held_bytes
from baton.trainer.passes import Passes
from baton.trainer.update import Learner


def offload_of(passes: Passes, learners: Sequence[Learner]) -> Offload:
    """Return what a trainer of these has on its device."""
    models = (passes.model, passes.reference, passes.critic)
    return Offload(passes.model.device, models, [learner.optimizer for learner in learners])


class Offload:
    """The tensors of some models and their optimisers, on a device or at rest."""

    def __init__(
        self,
        device: torch.device,
        models: Sequence[Module | None],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        moves: bool | None = None,
    ) -> None:
        """Take them as they are, at work. moves: whether memory is exchanged; None: on any device but a CPU."""
        self.device = device
        self._models = [model for model in dict.fromkeys(models) if model is not None]
        self._optimizers = optimizers
        self._moves = device.type != "cpu" if moves is None else moves
        self._hosts: dict[int, Tensor] = {}
        """By the tensor's id: the host memory that it rests in."""
        self.is_resting = False

    @property
    def held_bytes(self) -> int:
        """What is on the device now, gradients included."""
        if self.is_resting and self._moves:
            return 0
        gradients = (p.grad for model in self._models for p in model.parameters() if p.grad is not None)
        return held_bytes((*self._tensors(), *gradients), self.device)

    @torch.no_grad()
    def rest(self) -> None:
        """Leave the device. Does nothing at rest."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.is_resting or not self._moves:
            self.is_resting = True
            return
        moved = [(tensor, self._host(tensor)) for tensor in self._tensors()]
        for tensor, host in moved:
            host.copy_(tensor, non_blocking=True)
        self._synchronize()
        for tensor, host in moved:
            tensor.data = host
        self._hosts = {id(tensor): host for tensor, host in moved}
        self.is_resting = True
        self._empty_cache()

    @torch.no_grad()
    def wake(self) -> None:
        """Come back: what was restored or written meanwhile comes as it is now. Does nothing at work."""
        if self.is_resting and self._moves:
            for tensor in self._tensors():
                tensor.data = tensor.to(self.device, non_blocking=True, copy=True)
            self._synchronize()
        self.is_resting = False

    def _tensors(self) -> Iterator[Tensor]:
        """All that is no gradient, each once."""
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()
        for optimizer in self._optimizers:
            for moments in optimizer.state.values():
                yield from (value for value in moments.values() if isinstance(value, Tensor))

    def _host(self, tensor: Tensor) -> Tensor:
        """Return the memory for a tensor on the host; that of its last rest where it fits."""
        kept = self._hosts.get(id(tensor))
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty_like(tensor, device="cpu", pin_memory=self.device.type == "cuda")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _empty_cache(self) -> None:
        """Large blocks go back to the driver: whoever is next cuts memory into other pieces."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
