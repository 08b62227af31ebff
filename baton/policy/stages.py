"""Pipeline stages: cuts a model in place to the blocks of one stage, using the model family's `base_model_pp_plan` of
transformers.

    first stage    ids ─▶ embedding, blocks ─▶ hidden states
    other stages   hidden states ─▶ blocks ─▶ hidden states
    last stage     hidden states ─▶ blocks, norm, head ─▶ scores

Modules without weights replace the modules of other stages. The model's own `forward` therefore still works: it
computes masks, rotary embeddings and everything else that a family needs. Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from baton.errors import UserError


class StageModel:
    """A model that has been cut to one stage."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], stage: int) -> None:
        """Cut `model` in place. `layers`: number of layers of each stage. Raises UserError if the model has no pipeline
        plan."""
        base: Any = model.base_model
        before, after = stages_plan(model)
        is_first, is_last = stage == 0, stage == len(layers) - 1
        own = range(sum(layers[:stage]), sum(layers[: stage + 1]))
        self.arrived: Tensor | None = None
        """Output of the previous stage; None in a test run of this stage alone."""
        self.specs = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        """Tensors of the whole model, on the meta device."""
        prefix = f"{model.base_model_prefix}."
        by_layer = chain.from_iterable([owner] * count for owner, count in enumerate(layers))
        self._owners = {f"{prefix}layers.{place}.": owner for place, owner in enumerate(by_layer)}
        self._owners |= {f"{prefix}{name}.": len(layers) - 1 for name in after} | {prefix: 0, "": len(layers) - 1}
        """Prefix of tensor names → stage with these tensors. The first prefix that matches a name applies."""
        embedding, head = base.get_submodule(before[0]), model.get_output_embeddings()  # type: ignore[no-untyped-call]
        is_tied = getattr(head, "weight", None) is embedding.weight
        self.shared = [f"{prefix}{before[0]}.weight"] if is_tied and (is_first or is_last) and len(layers) > 1 else []
        """Names of the parameters that the first and the last stage share (a tied embedding); empty on other stages."""
        if not is_first:
            setattr(base, before[0], _Embedding(self, embedding, embedding.weight if is_tied and is_last else None))
        for name in () if is_first else before[1:]:
            setattr(base, name, _Elsewhere(getattr(base, name)))
        for place, block in enumerate(base.layers):
            if place not in own:
                base.layers[place] = _Entry(self, block) if place == own.start - 1 else _Elsewhere(block)
        if not is_last:
            for parent, names in ((base, after), (model, [n for n, _ in model.named_children()])):
                for name in names:
                    if (part := getattr(parent, name)) is not base:
                        setattr(parent, name, _Elsewhere(part))
        model._baton_stage = self  # type: ignore[assignment]

    def owner_of(self, name: str) -> int:
        """Return the stage with the tensor `name`; for a tied embedding, the first of two stages."""
        return next(stage for prefix, stage in self._owners.items() if name.startswith(prefix))


# vLLM keeps the biases by which routers choose experts in float32. Without this line, `from_pretrained` would round the
# biases of MiniMax-M2 and AFMoE, whose classes in transformers do not list them.
PreTrainedModel._keep_in_fp32_modules_strict = ["e_score_correction_bias", "expert_bias"]


def is_float32(model: torch.nn.Module, name: str) -> bool:
    """Return whether the class of a model keeps a tensor in float32 when other weights are bfloat16."""
    kept: Collection[str] = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(f".{part}." in f".{name}." for part in kept)


def all_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the whole model's `state_dict`. Tensors that are only on other stages are on the meta device."""
    own: dict[str, Tensor] = model.state_dict()
    cut: StageModel | None = getattr(model, "_baton_stage", None)
    return own if cut is None else {name: own.get(name, spec) for name, spec in cut.specs.items()}


def stages_plan(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of the base model's parts before its blocks (the embedding first), and the names of the parts
    after its blocks. Raises UserError if the model cannot be cut into stages."""
    base, shape = cast(Any, model.base_model), model.config.get_text_config()
    names = list(getattr(shape, "base_model_pp_plan", None) or ())
    others = [name for name, part in base.named_children() if name not in names and list(part.parameters())]
    if others or "layers" not in names or getattr(shape, "num_kv_shared_layers", None):
        why = "passes more than hidden states between its layers" if names else "has no pipeline plan in transformers"
        raise UserError(f"trainer.stages: {type(model).__name__} {why}; allowed is 1")
    place = names.index("layers")
    return names[:place], names[place + 1 :]


class _Elsewhere(torch.nn.Module):
    """Replaces a module of another stage. Returns hidden states unchanged."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        # Base models read attributes of their blocks, such as the kind of attention, so these are copied.
        vars(self).update({key: value for key, value in vars(part).items() if not key.startswith("_")})

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class _Entry(_Elsewhere):
    """Replaces the last block of the previous stage: ignores its input, and returns what the previous stage sent."""

    def __init__(self, stage: StageModel, part: torch.nn.Module) -> None:
        super().__init__(part)
        self._stage = stage

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        arrived = self._stage.arrived
        return hidden_states if arrived is None else arrived.view_as(hidden_states)


class _Embedding(_Elsewhere):
    """Replaces the embedding of the first stage. On the last stage of a model with tied weights, the replacement holds
    the stage's copy of the weight."""

    def __init__(self, stage: StageModel, part: torch.nn.Embedding, tied: torch.nn.Parameter | None) -> None:
        super().__init__(part)
        self._stage, self.weight = stage, tied
        self._width, self._dtype = part.embedding_dim, part.weight.dtype

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the previous stage's output, or placeholders in a test run of this stage alone."""
        if self._stage.arrived is not None:
            return self._stage.arrived.view(*hidden_states.shape, -1)
        return torch.nn.functional.one_hot(hidden_states % self._width, self._width).to(self._dtype)
