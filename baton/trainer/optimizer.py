"""AdamW, the schedule of the learning rate, gradient clipping, and the optimiser's state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.errors import UserError
from baton.policy.sharding import by_mesh, local, whole
from baton.trainer.settings import Decay, OptimizerName


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up and decay of the learning rate."""

    warmup_steps: int
    decay: Decay
    total_steps: int
    min_lr_frac: float = 0.0

    def learning_rate(self, step: int, peak: float) -> float:
        """Return the learning rate of all updates of train step `step`, counted from 1.

        The warm-up is linear: the rate is above 0 in the first step, and `peak` at step `warmup_steps`. After the
        warm-up, the rate is constant or decays to `peak × min_lr_frac`, which it would reach at step `total_steps + 1`.
        """
        assert step >= 1, f"train steps count from 1: got {step}"
        if step <= self.warmup_steps:
            return peak * step / self.warmup_steps
        if self.decay == "constant":
            return peak
        progress = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        remaining = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return peak * (self.min_lr_frac + (1.0 - self.min_lr_frac) * remaining)

    def check(self, section: str) -> None:
        """Raise UserError when no step remains for the decay after the warm-up. `section`: recipe section, for the
        message."""
        if self.decay != "constant" and self.warmup_steps >= self.total_steps:
            raise UserError(
                f"{section}.warmup_steps: got {self.warmup_steps}, allowed are fewer than the {self.total_steps} steps "
                f"of the run, because the learning rate decays ({self.decay}) after the warm-up; lower it or raise the "
                "number of steps"
            )


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    name: OptimizerName = "adamw",
) -> torch.optim.Optimizer:
    """Return AdamW over `parameters`. Weight decay applies to tensors of two or more dimensions."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": decay}
        for kind, decay in ((matrices, weight_decay), (others, 0.0))
        for group in by_mesh(kind)
    ]
    if name == "adamw8bit":
        from torchao.optim import AdamW8bit

        found: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas)
        return found
    # The fused kernel (CPU and CUDA only) accesses memory only once; on other devices, torch chooses a kernel.
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters.values())
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused or None)


def clip_gradients(
    parameters: Mapping[str, torch.nn.Parameter],
    max_norm: float,
    total_norm: Callable[[torch.Tensor], torch.Tensor] = lambda norm: norm,
    repeated: Collection[str] = (),
) -> float:
    """Scale gradients down so that their Euclidean norm over all shards is at most `max_norm`.

    Return the norm before scaling. `total_norm` maps the norm of this pipeline stage to the norm over all stages.
    `repeated`: parameters that this stage's norm excludes, because another stage counts them. Collective if the
    gradients are sharded.
    """
    counted = by_mesh(p.grad for name, p in parameters.items() if p.grad is not None and name not in repeated)
    norms = [whole(torch.nn.utils.get_total_norm(grads)) for grads in counted]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0] if norms else torch.zeros(())
    norm = total_norm(norm)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as in torch's clip_grads_with_norm_
    for grads in by_mesh(p.grad for p in parameters.values() if p.grad is not None):
        torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
    return norm.item()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the optimiser's state as `<moment>/<parameter name>` → tensor; empty before the first update. An 8-bit
    moment is two tensors: `<moment>.codes/<parameter name>` and `<moment>.scale/<parameter name>`."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            if hasattr(tensor, "codes"):
                found |= {f"{key}.codes/{name}": tensor.codes, f"{key}.scale/{name}": tensor.scale}
            else:
                found[f"{key}/{name}"] = tensor.detach()
    return found


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Load state that `optimizer_tensors` returned. Parameters without an entry in `tensors` get no state.

    A tensor that already has the right device and dtype is not copied: the optimiser keeps and later changes the tensor
    itself.

    Raises UserError for a tensor whose parameter is missing from this model or has another shape, and for moments of
    another optimiser.
    """
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    block: int | None = getattr(optimizer, "block_size", None)  # of moments in 8 bits
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        is_packed, has_shape = "." in key, bool(tensor.ndim) and not key.endswith(".scale")
        is_plain = block and has_shape and not is_packed and tensor.numel() >= 4096 and not tensor.numel() % block
        if is_plain or (is_packed and block is None):  # torchao's optimizer would leave large moments in 32 bits
            bits, own = (8, "adamw8bit") if is_packed else (32, "adamw")
            raise UserError(
                f"the optimizer state has {full_name} in {bits} bits: resume with trainer.optimizer = {own!r}"
            )
        if name not in parameters or (has_shape and tensor.shape != parameters[name].shape):
            raise UserError(
                f"the optimizer state holds {full_name} of shape {tuple(tensor.shape)}, which matches no parameter of "
                "this model; resume with the model and the trained layers of the checkpoint"
            )
        by_name.setdefault(name, {})[key] = tensor
    names = {parameter: name for name, parameter in parameters.items()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[str, Any] = optimizer.state_dict()
    # While the trainer sleeps, `device` of a sharded parameter is still the GPU, but its shard and moments are on the
    # host.
    asleep = {name for name in by_name if local(parameters[name]).device.type != parameters[name].device.type}
    state["state"] = {
        index: _with_packed(by_name[name])
        for index, name in enumerate(ordered)
        if name in by_name and name not in asleep
    }
    optimizer.load_state_dict(state)
    for name in asleep:
        optimizer.state[parameters[name]] = by_name[name]


def _with_packed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a parameter's state with the codes and the scale of each 8-bit moment combined into a torchao tensor."""
    found = {key: tensor for key, tensor in tensors.items() if "." not in key}
    for key in [key.removesuffix(".codes") for key in tensors if key.endswith(".codes")]:
        from torchao.optim.subclass_8bit import OptimState8bit

        codes, is_signed = tensors[f"{key}.codes"], key == "exp_avg"
        qmap = OptimState8bit.zeros((256,), is_signed, 256, codes.device).qmap
        found[key] = OptimState8bit(codes, tensors[f"{key}.scale"], qmap, is_signed, torch.float32)
    return found
