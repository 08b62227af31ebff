"""Small policies that change as training changes them, and sources that fail in one way each."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from baton.errors import StorageFault
from baton.policy.tensors import weights_digest
from baton.types import PolicyVersion
from baton.weights.delta import decode_blocks, decode_changes
from baton.weights.manifest import Coding
from baton.weights.publisher import PublishedVersion, Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.store import Store

Tensors = dict[str, torch.Tensor]
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40)
"""1e-40 is subnormal in float32 and bfloat16."""


def policy(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A few tensors as a model has them, an empty one, a scalar and one of integers among them; 3,397 elements."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(40, 32, generator=random) * 0.02,
        "model.layers.0.mlp.up_proj.weight": torch.randn(64, 32, generator=random) * 0.02,
        "model.norm.weight": torch.ones(32),
        "model.none.weight": torch.empty(0, 4),
        "model.scale": torch.tensor(0.5),
    }
    steps = {"model.steps": torch.arange(36, dtype=torch.int64)}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()} | steps


def words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers that share its memory."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def changed(tensors: Mapping[str, torch.Tensor], density: float, seed: int) -> Tensors:
    """The same tensors, a share of whose elements went up or down by one bit pattern, and some to a special value."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        copy = tensor.clone()
        chosen = torch.rand(copy.shape, generator=random) < density
        steps = torch.randint(0, 2, copy.shape, generator=random) * 2 - 1
        words(copy)[chosen] += steps[chosen].to(words(copy).dtype)
        if copy.is_floating_point() and copy.dim() and copy.numel():
            place = int(torch.randint(0, copy.numel(), (), generator=random))
            copy.view(-1)[place] = SPECIAL[seed % len(SPECIAL)]
        found[name] = copy
    return found


def are_bit_equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        t.dtype == second[n].dtype and t.shape == second[n].shape and torch.equal(words(t), words(second[n]))
        for n, t in first.items()
    )


def version_of(tensors: Mapping[str, torch.Tensor], number: int, lineage: str = "first") -> PolicyVersion:
    return PolicyVersion(lineage, number, weights_digest(tensors))


class Run:
    """A publisher with all it has published."""

    def __init__(self, directory: Path | str, lineage: str = "first", **settings: object) -> None:
        self.store = Store(directory)
        self.settings = WeightsSettings.model_validate({"keyframe_every": 4, "chunk_mb": 2**-10} | settings)
        self.publisher = Publisher(self.store, self.settings)
        self.lineage = lineage
        self.tensors: dict[int, Tensors] = {}

    def publish(self, number: int, tensors: Tensors) -> PublishedVersion:
        published = self.publisher.publish(tensors, self.version(number, tensors))
        self.tensors[number] = tensors
        return published

    def version(self, number: int, tensors: Tensors | None = None) -> PolicyVersion:
        return version_of(self.tensors[number] if tensors is None else tensors, number, self.lineage)

    def chain(self, numbers: range, density: float = 0.05) -> None:
        """Publish versions, each a little different from the one before."""
        tensors = self.tensors[max(self.tensors)] if self.tensors else policy()
        for number in numbers:
            self.publish(number, tensors)
            tensors = changed(tensors, density, seed=number)


class Twisted(Store):
    """A source that hands out chunks, or manifests, that a function has been at."""

    def __init__(
        self,
        store: Store,
        name: str,
        chunk: Callable[[bytes], bytes] = lambda data: data,
        manifest: Callable[[bytes], bytes] = lambda data: data,
    ) -> None:
        super().__init__(store.name)
        self.name = name
        self.asked = 0
        self._chunk, self._manifest = chunk, manifest

    def manifest(self, version: PolicyVersion) -> bytes:
        return self._manifest(super().manifest(version))

    def chunk(self, digest: str, size: int) -> bytes:
        self.asked += 1
        return self._chunk(super().chunk(digest, size))


def disk_full(*_: object) -> None:
    raise StorageFault("x cannot be written") from OSError(errno.ENOSPC, "No space left on device")


def decode(coding: Coding, coded: bytes, piece: np.ndarray, word: int) -> None:
    """Decode a part in place: `piece` has the base's bytes before the call, and the decoded bytes after it."""
    if coding in ("same", "sparse"):
        changes = decode_changes(coding, coded, piece, word)
        piece.view(f"u{word}")[changes.positions] += changes.steps
        return
    for begin, block in decode_blocks(coding, coded, piece, word):
        piece[begin : begin + block.size] = block


def replaced(data: bytes, **fields: object) -> bytes:
    """A manifest's bytes with other fields, unchecked."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(data) | fields)


def latest(store: Store, lineage: str = "first") -> PolicyVersion | None:
    """The readable version of a lineage with the highest number, including its digest."""
    numbers = (version.number for version in reversed(store.versions()) if version.lineage == lineage)
    return next((found.version for number in numbers if (found := store.find(lineage, number)) is not None), None)
