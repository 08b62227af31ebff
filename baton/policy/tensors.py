"""The tensors of a policy version: their names, and the digest that identifies them on every machine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from baton.policy.adapters import adapter_tensors, has_adapters, raw_tensors
from baton.policy.digest import identity_digest


def policy_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors, detached and not copied, by their names in `state_dict`.

    Tied weights appear once, under the name that safetensors files use.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapter if there is one, else the model's. These are trained and saved."""
    return raw_tensors(model) if has_adapters(model) else policy_tensors(model)


def published_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that engines load: the adapter's with its scale if there is one, else the model's."""
    return adapter_tensors(model) if has_adapters(model) else policy_tensors(model)


def as_published(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return copies for publication, with floating-point tensors cast to `dtype`."""
    return {name: t.to(dtype if t.is_floating_point() else t.dtype, copy=True) for name, t in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return blake3 (hexadecimal) over a tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return blake3(flat.view(torch.uint8).numpy().data).hexdigest()


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of published weights, over name, dtype, shape and `tensor_digest` of each tensor."""
    return identity_digest((n, dtype_name(t.dtype), tuple(t.shape), tensor_digest(t)) for n, t in tensors.items())
