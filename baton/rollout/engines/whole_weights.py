"""Published tensors as vLLM loads them: a whole model, under the names that its files have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from baton.errors import EngineFault
from baton.policy.adapters import BaseWeights, is_adapter
from baton.rollout.engines.fit import check_fit

ReadBase = Callable[[], Mapping[str, Tensor]]
"""Returns the tensors that adapters are published for, by the names of `state_dict`."""


class WholeWeights:
    """The model's shape, without its values: says whether tensors fit, and makes whole models of adapters.

    An adapter is merged into the base here, as the embedded engine does it: vLLM then serves an ordinary model, and
    what it samples from is to the bit what a merged checkpoint of the run would be.
    """

    def __init__(self, model: PreTrainedModel, read_base: ReadBase | None) -> None:
        """model: its parameters may be on the meta device."""
        self._model = model
        self._own: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        self._read_base, self._base = read_base, BaseWeights()
        self._base_tensors: Mapping[str, Tensor] | None = None

    def whole(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a version's tensors by their names in a file, each of tied ones once.

        Raises EngineFault for tensors that do not fit, and for an adapter of weights that are not here.
        """
        if is_adapter(tensors):
            base = self._adapted_base()
            tensors = {**base, **self._base.merged(base, tensors)}
        check_fit(self._model, self._own, tensors)
        first = {id(p): name for name, p in self._model.named_parameters()}
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found.setdefault(first.get(id(self._own[name]), name), tensor.detach())
        named: dict[str, Tensor] = revert_weight_conversion(self._model, found)
        return {name: tensor.cpu().contiguous() for name, tensor in named.items()}

    def _adapted_base(self) -> Mapping[str, Tensor]:
        if self._base_tensors is None:
            if self._read_base is None:
                raise EngineFault("an adapter has come, but this engine was built without the base model's tensors")
            self._base_tensors = dict(self._read_base())
        return self._base_tensors
