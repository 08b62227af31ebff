"""The stream of a direct transfer: buckets of whole tensors. Each tensor has a checksum.

    tensors ─▶ OutgoingVersion ─▶ bucket 0 │ bucket 1 │ … ─▶ communicator ─▶ IncomingVersion ─▶ the model's own loader

Tensors have the names, shapes and dtypes of a model file, before an engine fuses, shards or packs them. A checksum
covers a tensor as it arrives at the loader, on any device. Checksums detect errors of transport and order, but not
forgery: direct transfers are for machines that trust each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from baton.errors import WeightsFault
from baton.policy.tensors import dtype_name

BUCKET_BYTES: Final = 256 * 2**20
BUCKET_TENSORS: Final = 512
"""Maximum number of tensors per bucket, which bounds the size of a bucket's description (`Bucket.info`)."""
ABORT: Final = "abort"
"""Key of an update that ends an unfinished transfer."""
PIECE_WORDS = 2**15
"""Number of words whose checksum a CPU computes in one operation. Above 2^15 elements, torch divides it among its
threads, whose synchronisation takes longer on a busy machine."""
_ODD: Final = 0x9E3779B97F4A7C15 - 2**64
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's words and their order: an int64 scalar on the tensor's device.

    It is Σ word_i · (2i + 1) · c modulo 2^64 with an odd c. A change of one word always changes the
    checksum. So does an exchange of two different words of at most 4 bytes that are less than 2^31 words apart.
    """
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    size = PIECE_WORDS if tensor.device.type == "cpu" else 512 * PIECE_WORDS
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(min(size, words.numel()), dtype=torch.int64, device=tensor.device).mul_(2).add_(1).mul_(_ODD)
    for begin in range(0, words.numel(), size):
        piece = words[begin : begin + size].to(torch.int64)
        # the weights of this piece are those of the first one plus 2 · begin · c
        total += piece.sum() * (2 * begin) * _ODD + (piece * weights[: piece.numel()]).sum()
    return total


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the checksums of tensors. Waits for the device only once."""
    found = [checksum(tensor) for tensor in tensors]
    return torch.stack(found).tolist() if found else []


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a version, which are described, sent and loaded as one unit."""

    tensors: tuple[torch.Tensor, ...]
    info: Mapping[str, Any]
    """Description: plain values, with the names that vLLM's transfer engines use."""


class OutgoingVersion:
    """A version as a sequence of buckets, computed once for all replicas."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        groups: list[list[str]] = []
        size = 0
        for name, tensor in tensors.items():
            if not groups or size + tensor.nbytes > bucket_bytes or len(groups[-1]) == BUCKET_TENSORS:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += tensor.nbytes
        self.tensors = tensors
        self.buckets = tuple(self._bucket(index, len(groups), names) for index, names in enumerate(groups))

    def _bucket(self, index: int, count: int, names: Sequence[str]) -> Bucket:
        tensors = tuple(self.tensors[name].detach().contiguous() for name in names)
        info = {
            "names": list(names),
            "dtype_names": [dtype_name(tensor.dtype) for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "bucket": {"index": index, "count": count, "checksums": checksums(tensors)},
        }
        return Bucket(tensors, info)


class IncomingVersion:
    """Checks, on a replica, that a version arrives completely and with its buckets in order. Between `begin` and
    `finish`, the replica's weights are incomplete. Every violation raises WeightsFault, and afterwards only `begin` is
    allowed.
    """

    def __init__(self) -> None:
        self._next: int | None = None
        """Index of the next bucket; None outside of a transfer."""
        self._count: int | None = None
        self._expected: dict[str, int] = {}
        """Name → checksum of each tensor of the current bucket that the loader has not received."""

    @property
    def is_receiving(self) -> bool:
        """Whether a transfer has begun but not ended."""
        return self._next is not None

    def begin(self) -> None:
        """Start a transfer. An unfinished transfer is discarded."""
        self._next, self._count, self._expected = 0, None, {}

    def abandon(self) -> None:
        self._next = None

    def expect(self, names: Sequence[str], bucket: Mapping[str, Any]) -> None:
        """Start a bucket. Raises WeightsFault unless it is the next bucket."""
        index, count, sums = bucket["index"], bucket["count"], bucket["checksums"]
        if self._next is None or index != self._next or self._count not in (None, count) or len(sums) != len(names):
            raise self._fault(f"got bucket {index} of {count}, expected {self._next} of {self._count or 'any number'}")
        self._count, self._expected = count, dict(zip(names, sums, strict=True))

    def loaded(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Check tensors that the loader receives. Raises WeightsFault for a wrong name or a wrong checksum."""
        for (name, _tensor), found in zip(weights, checksums(tensor for _, tensor in weights), strict=True):
            expected = self._expected.pop(name, None)
            if found != expected:
                raise self._fault(f"{name} has the checksum {found}, expected {expected}")

    def end_bucket(self) -> None:
        """End a bucket. Raises WeightsFault if a tensor is missing."""
        if self._next is None or self._expected:
            raise self._fault(f"the loader did not receive {', '.join(list(self._expected)[:5]) or 'any bucket'}")
        self._next += 1

    def finish(self) -> None:
        """End the transfer. Raises WeightsFault if a bucket is missing."""
        if self._next is None or self._next != self._count:
            raise self._fault(f"the transfer ends after bucket {self._next} of {self._count}")
        self._next = None

    def _fault(self, what: str) -> WeightsFault:
        self._next = None
        return WeightsFault(f"a direct transfer of weights is broken: {what}; this engine needs a whole version")
