"""Checks that published tensors fit a model. Every engine runs this check before it changes any weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from baton.errors import EngineFault


def check_fit(
    model: PreTrainedModel, own: Mapping[str, Tensor], tensors: Mapping[str, Any], which: str = "new weights do"
) -> None:
    """Raise EngineFault if parameters are missing, names are unknown, or shapes differ.

    own: the model's `state_dict(keep_vars=True)`. Tied parameters may occur under any of their names. which: subject of
    the error sentence.
    """
    parameters = {id(p) for p in model.parameters()}
    given = {id(own[name]) for name in tensors if name in own}
    missing = [n for n, p in model.named_parameters() if id(p) not in given]
    unexpected = [name for name in tensors if name not in own]
    misshapen = [
        f"{name} is {tuple(tensors[name].shape)} for {tuple(own[name].shape)}"
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
    assert given >= parameters
