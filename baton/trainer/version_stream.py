"""The weights of a sharded trainer as buckets for direct transfers: all ranks gather a bucket, and rank 0 sends it."""

from __future__ import annotations

from math import prod

import torch
from transformers import PreTrainedModel

from baton.errors import UserError
from baton.policy.adapters import has_adapters
from baton.policy.sharding import Gather
from baton.policy.stored_tensors import file_layout
from baton.policy.tensors import published_dtypes, published_tensors
from baton.weights.direct.stream import BUCKET_TENSORS


class VersionStream:
    """Groups a model's tensors, named as in the model's files, into buckets. All ranks form the same buckets."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, gather: Gather, bucket_bytes: int) -> None:
        """`dtype`: dtype in which weights are published. Raises UserError for a model whose tensors cannot be sent one
        by one: it has adapters, or a tensor in its files combines several tensors of the model."""
        layout = None if has_adapters(model) else file_layout(model)
        if layout is None:
            raise UserError(
                'weights.transport: got "direct" with trainer.ranks above 1, but the model has adapters, or its files '
                'combine several of its tensors into one, so ranks cannot send tensors one by one; use "store"'
            )
        self._model, self._gather, self._layout = model, gather, layout
        tensors = published_tensors(model)
        self.dtypes = published_dtypes(model, tensors, dtype)
        """Dtype of each tensor of the model, by its name in `state_dict`."""
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._buckets: list[list[str]] = []
        sizes: list[int] = []
        pieces = 0
        for name, shape in self.shapes.items():
            size, count = prod(shape) * self.dtypes[name].itemsize, len(layout[name])
            if not sizes or sizes[-1] + size > bucket_bytes or pieces + count > BUCKET_TENSORS:
                self._buckets.append([])
                sizes.append(0)
                pieces = 0
            self._buckets[-1].append(name)
            sizes[-1] += size
            pieces += count
        self.bucket_bytes = tuple(sizes)

    def gather(self, index: int, *, is_first: bool) -> dict[str, torch.Tensor]:
        """Gather the current tensors of a bucket on the first rank. Collective: all ranks must call this method."""
        tensors, found = published_tensors(self._model), {}
        for name in self._buckets[index]:
            full = self._gather(name, tensors[name].to(self.dtypes[name]))
            if is_first:
                for piece in self._layout[name]:
                    found[piece.name] = full[piece.box].reshape(piece.shape).contiguous()
        return found
