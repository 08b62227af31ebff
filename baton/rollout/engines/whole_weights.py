"""Converts a published version to the form that vLLM and SGLang load: all tensors, named as in the model's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from baton.errors import EngineFault
from baton.policy.adapters import BaseWeights, adapted_modules, base_of_adapter, is_adapter
from baton.policy.load import end_ids, load_model, load_skeleton, save_skeleton, torch_device, torch_dtype
from baton.policy.settings import ModelSettings
from baton.policy.tensors import check_fit, policy_tensors
from baton.policy.tokenizer import load_tokenizer, model_directory
from baton.rollout.engine import EngineSettings
from baton.weights.direct.remote import RemoteTensors

ReadBase = Callable[[], Mapping[str, Tensor]]
"""Function that returns the tensors of an adapter's base model, by their names in `state_dict`."""


class Skeleton:
    """A model's configuration and tokenizer. The model's parameters are on the meta device and take no memory."""

    def __init__(self, directory: Path, settings: EngineSettings) -> None:
        meta = torch.device("meta")
        with meta:
            self.model = load_skeleton(
                directory, dtype=torch_dtype(settings.dtype, torch_device("auto")), device=meta, attention="sdpa"
            )
        self._tokenizer = load_tokenizer(str(directory))
        self.end_ids = end_ids(self.model, self._tokenizer)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._tokenizer.text(ids, keep_special=True)

    def save(self, directory: Path) -> None:
        save_skeleton(self.model, self._tokenizer, directory)


class ModelFiles:
    """The files of a model, or of an adapter and its base model, in a directory or in the local Hugging Face cache."""

    def __init__(self, model: ModelSettings, settings: EngineSettings) -> None:
        self.path, self._attention = model.path, model.attention
        self.base_path = base_of_adapter(Path(model.path)) or model.path
        self._dtype = torch_dtype(settings.dtype, torch_device("auto"))

    def load(self) -> PreTrainedModel:
        """Load the model into host memory. An adapter is merged into its base model."""
        return self._load(self.path)

    def read_base(self) -> Mapping[str, Tensor]:
        return policy_tensors(self._load(self.base_path))

    def base_directory(self) -> Path:
        return model_directory(self.base_path)

    def _load(self, path: str) -> PreTrainedModel:
        return load_model(path, dtype=self._dtype, device=torch.device("cpu"), attention=self._attention)


class WholeWeights:
    """Assembles a whole model from the tensors of a version. An adapter is merged in the same way as in the embedded
    engine. vLLM and SGLang therefore serve an ordinary model whose weights are bit-identical to a merged checkpoint of
    the run."""

    def __init__(self, model: PreTrainedModel, read_base: ReadBase | None) -> None:
        """`model`: a model of the same architecture. Only names and shapes are used, so the meta device suffices."""
        self._model = model
        self.on_host = True
        """Whether `whole` moves the tensors to host memory; otherwise the tensors stay on their device."""
        self._own: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        self._read_base, self._base = read_base, BaseWeights()

    def whole(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a version by their names in a model file. Tied tensors occur once. Tensors in the
        memory of the trainer's ranks (`RemoteTensors`) have these names already and are returned unchanged. Raises
        EngineFault for tensors that do not fit the model, and for an adapter if `read_base` is None."""
        if isinstance(tensors, RemoteTensors):
            check_fit(self._model, self._own, tensors)
            return tensors
        if is_adapter(tensors):
            tensors = {**self.base_tensors, **dict(self._base.merged(self.base_tensors, tensors))}
        check_fit(self._model, self._own, tensors)
        first = {id(p): name for name, p in self._model.named_parameters()}
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found.setdefault(first.get(id(self._own[name]), name), tensor.detach())
        named: dict[str, Tensor] = revert_weight_conversion(self._model, found)
        return {name: (tensor.cpu() if self.on_host else tensor).contiguous() for name, tensor in named.items()}

    def check_adapter(self, tensors: Mapping[str, Any]) -> None:
        """Raise EngineFault if an adapter does not fit the model."""
        adapted_modules(self._own, tensors)

    @cached_property
    def base_tensors(self) -> Mapping[str, Tensor]:
        """Tensors of the base model. Raises EngineFault if `read_base` is None."""
        if self._read_base is None:
            raise EngineFault("cannot load an adapter: this engine was built without the tensors of a base model")
        return dict(self._read_base())
