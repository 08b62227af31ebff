"""The tensors of a policy version: their names, their digest, and the check that they fit a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from baton.clock import in_order
from baton.errors import EngineFault
from baton.policy.adapters import BaseWeights, adapter_tensors, has_adapters, is_adapter, raw_tensors
from baton.policy.digest import Identity, identity_digest
from baton.policy.stages import all_tensors, is_float32


def policy_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors, keyed by their names in `state_dict` (`all_tensors`). The tensors are detached, but
    not copied. Tied weights appear once, under the name that safetensors files use."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {name: tensor.detach() for name, tensor in all_tensors(model).items() if name not in tied}


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that are trained and saved: those of the adapter if there is one, otherwise all."""
    return raw_tensors(model) if has_adapters(model) else policy_tensors(model)


def published_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that engines load: those of the adapter, including its scale, or else all tensors."""
    return adapter_tensors(model) if has_adapters(model) else policy_tensors(model)


def published_dtypes(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor is published. Floating-point tensors are published in `dtype`, except
    tensors that the model's class keeps in float32, such as the bias by which DeepSeek-V3's router chooses experts."""
    return {
        name: t.dtype if not t.is_floating_point() else torch.float32 if is_float32(model, name) else dtype
        for name, t in tensors.items()
    }


def as_published(tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Return copies of tensors for publication, cast to the dtypes that `published_dtypes` returned."""

    def cast(name: str) -> torch.Tensor:
        return tensors[name].detach().to(dtypes[name], copy=True)

    return dict(zip(tensors, in_order(cast, tensors, lambda name: tensors[name].nbytes), strict=True))


def check_fit(
    model: PreTrainedModel, own: Mapping[str, torch.Tensor], tensors: Mapping[str, Any], which: str = "new weights do"
) -> None:
    """Raise EngineFault if `tensors` lack a parameter of the model, or have an unknown name or a different shape.
    `own`: the model's `state_dict(keep_vars=True)`. A tied parameter may occur under any of its names. `which`: first
    words of the error message, such as "new weights do"; the words "not fit the" and the model's class follow."""
    given = {id(own[name]) for name in tensors if name in own}
    missing = [n for n, p in model.named_parameters() if id(p) not in given]
    unexpected = [name for name in tensors if name not in own]
    misshapen = [
        f"{name} has {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in tensors
        if name in own and tuple(tensors[name].shape) != tuple(own[name].shape)
    ]
    faults = [
        f"{what} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape:", misshapen))
        if names
    ]
    if faults:
        raise EngineFault(f"{which} not fit the {type(model).__name__}: {'; '.join(faults)}")


def load_version(
    model: PreTrainedModel, base: BaseWeights, tensors: Mapping[str, Any], which: str = "new weights do"
) -> bool:
    """Copy a version into a model's parameters, cast to their dtype. Return whether the version is a whole model. An
    adapter is merged into the last whole model; `base` keeps the original values of the changed weights. `which`: as in
    `check_fit`. Raises EngineFault, without changing any weight, for tensors that do not fit."""
    own = model.state_dict(keep_vars=True)
    is_whole = not is_adapter(tensors)
    if is_whole:
        check_fit(model, own, tensors, which)
        base.forget()
    changes = tensors.items() if is_whole else base.merged(own, tensors)
    with torch.inference_mode():
        for name, tensor in changes:
            own[name].copy_(tensor)
    return is_whole


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return blake3 (hexadecimal) over a tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return blake3(flat.view(torch.uint8).numpy().data).hexdigest()


def identity(name: str, tensor: torch.Tensor) -> Identity:
    """Return the identity of a published tensor: its name, dtype, shape and `tensor_digest`."""
    return name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor)


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of published weights, computed from the `identity` of each tensor."""
    return identity_digest(in_order(lambda item: identity(*item), tensors.items(), lambda item: item[1].nbytes))
