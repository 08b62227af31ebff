"""The stream of a direct transfer: buckets of tensors. Each tensor has a checksum.

    tensors ─▶ OutgoingVersion ─▶ bucket 0 │ bucket 1 │ … ─▶ communicator ─▶ IncomingVersion ─▶ the model's own loader

Tensors have the names, shapes and dtypes of a model file: an engine fuses, shards or packs them after it has received
them. A checksum is computed from a tensor as the loader receives it, on any device. Checksums detect errors of
transport and order, but not forgery: direct transfers are for machines that trust each other.

A **difference** has only the elements that changed since another version, the base: flat indices and new values for
each tensor, or the whole tensor if that is shorter. From indices and values, vLLM (`load_checkpoint_weight_patches`)
makes a tensor of the whole shape that is NaN at all unchanged elements, and passes it to the model's loader. The
checksum of this tensor therefore covers the indices, the values and the shape. Only a replica that holds the complete
base accepts a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from baton.errors import WeightsFault
from baton.policy.tensors import dtype_name
from baton.types import PolicyVersion

BUCKET_BYTES: Final = 256 * 2**20
BUCKET_TENSORS: Final = 512
"""Maximum number of tensors per bucket, which bounds the size of a bucket's description (`Bucket.info`)."""
NUM_CHANGED: Final = "num_updates_list"
"""Key in the description of a bucket; vLLM defines its name. The value lists the number of changed elements of each
tensor. A bucket of whole tensors does not have this key."""
ABORT: Final = "abort"
"""An update with this key contains no tensors: it ends an unfinished transfer."""
PIECE_WORDS = 2**15
"""Number of words whose checksum a CPU computes in one operation. Torch would divide a larger operation among its
threads, and on a busy machine it takes long to synchronise the threads."""
_ODD: Final = 0x9E3779B97F4A7C15 - 2**64
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's words (elements as integers) and their order: an int64 scalar on its device.

    The checksum is Σ word_i · (2i + 1) · c modulo 2^64 with an odd c. A change of one word always changes the checksum.
    Swapping two different words changes the checksum if words have at most 4 bytes and the two are less than 2^31 words
    apart.
    """
    words, size = _words(tensor), _piece_words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(min(size, words.numel()), dtype=torch.int64, device=tensor.device).mul_(2).add_(1).mul_(_ODD)
    for begin in range(0, words.numel(), size):
        piece = words[begin : begin + size].to(torch.int64)
        # `weights` has the factors (2i + 1) · c of the first piece. The factors of the current piece are these plus
        # 2 · begin · c.
        total += piece.sum() * (2 * begin) * _ODD + (piece * weights[: piece.numel()]).sum()
    return total


def _read(scalars: list[torch.Tensor]) -> list[int]:
    """Return the values of scalars. Waits for the device only once."""
    return torch.stack(scalars).tolist() if scalars else []


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])


def _piece_words(tensor: torch.Tensor) -> int:
    return PIECE_WORDS if tensor.device.type == "cpu" else 512 * PIECE_WORDS


def patch_checksum(indices: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the checksum of a tensor of `numel` elements that has `values` at `indices` (int64) and is NaN elsewhere.

    Only the given elements are read. If all n words were NaN, the checksum would be NaN · n² · c, because the sum of
    (2i + 1) over all i < n is n². The function adds the differences between the given words and NaN to this checksum.
    """
    nan = int(_words(torch.full((1,), math.nan, dtype=values.dtype)))
    all_nan = (nan * numel**2 * _ODD + 2**63) % 2**64 - 2**63
    return ((_words(values).to(torch.int64) - nan) * (2 * indices + 1) * _ODD).sum() + all_nan


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of a version, or the changed elements of tensors, which are described, sent and loaded as one unit."""

    tensors: tuple[torch.Tensor, ...]
    """The tensors in the order in which they are sent. A difference has two tensors for each changed tensor: indices
    and values."""
    info: Mapping[str, Any]
    """Description of the bucket: plain values, with the names that vLLM's transfer engines use."""
    remote_bytes: int = 0
    """Size of the bucket in bytes if another process holds its tensors, so that `tensors` is empty; otherwise 0."""

    @property
    def num_bytes(self) -> int:
        return self.remote_bytes or sum(tensor.nbytes for tensor in self.tensors)


def whole_bucket(tensors: Mapping[str, torch.Tensor], place: Mapping[str, Any]) -> Bucket:
    """Return a bucket of whole tensors. `place`: the bucket's index, the number of buckets, the version and its base;
    these values become part of `Bucket.info`."""
    return _bucket([_whole_part(name, tensor) for name, tensor in tensors.items()], place)


class OutgoingVersion:
    """A version as a sequence of buckets, computed once for all replicas."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: PolicyVersion,
        base: OutgoingVersion | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`base`: the version relative to which the difference is computed; may be freed after this call."""
        self.tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self.version, self._bucket_bytes = version, bucket_bytes
        self._base = None if base is None else base.version
        self._difference = () if base is None else self._compare(base.tensors)

    def buckets(self, base: PolicyVersion | None = None) -> tuple[Bucket, ...]:
        """Return the buckets for a replica that holds the complete version `base`, or no complete version (None)."""
        return self._difference if self._difference and base == self._base else self._whole

    def without_difference(self) -> OutgoingVersion:
        """Return this version as the base of the next version. To save memory, the result does not contain the
        difference to this version's own base."""
        return OutgoingVersion(self.tensors, self.version, bucket_bytes=self._bucket_bytes)

    @cached_property
    def _whole(self) -> tuple[Bucket, ...]:
        return self._bucketed([_whole_part(name, tensor) for name, tensor in self.tensors.items()], None)

    def _compare(self, base: Mapping[str, torch.Tensor]) -> tuple[Bucket, ...]:
        """Return the buckets of the difference; no buckets if names, shapes or dtypes of the tensors differ."""

        def form(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
            return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]

        if not self.tensors or form(base) != form(self.tensors):
            return ()
        parts = [_part(name, base[name], tensor) for name, tensor in self.tensors.items()]
        # a transfer must contain a tensor, even if no element has changed
        smallest = min(self.tensors.items(), key=lambda item: item[1].nbytes)
        return self._bucketed([part for part in parts if part.changed != 0] or [_whole_part(*smallest)], self._base)

    def _bucketed(self, parts: Iterable[_Part], base: PolicyVersion | None) -> tuple[Bucket, ...]:
        groups: list[list[_Part]] = []
        size = 0
        for part in sorted(parts, key=lambda part: part.changed is None):  # a bucket has parts of only one kind
            last = groups[-1] if groups else []
            is_full = len(last) == BUCKET_TENSORS or size + part.num_bytes > self._bucket_bytes
            if not last or is_full or (last[-1].changed is None) != (part.changed is None):
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.num_bytes
        place = {"count": len(groups), "version": label(self.version), "base": label(base)}
        return tuple(_bucket(parts, {"index": index, **place}) for index, parts in enumerate(groups))


@dataclass(frozen=True, slots=True)
class _Part:
    """The data that is sent for one tensor."""

    name: str
    whole: torch.Tensor
    sent: tuple[torch.Tensor, ...]
    """The tensor, or the indices and the values of its changed elements."""
    checksum: torch.Tensor
    """Checksum of the tensor that the loader receives."""
    changed: int | None = None
    """Number of changed elements; None if the whole tensor is sent."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.sent)


def _bucket(parts: Sequence[_Part], place: Mapping[str, Any]) -> Bucket:
    """Return a bucket of parts, which are all whole tensors or all changed elements."""
    counts = [part.changed for part in parts if part.changed is not None]
    info = {
        "names": [part.name for part in parts],
        "dtype_names": [dtype_name(part.whole.dtype) for part in parts],
        "shapes": [list(part.whole.shape) for part in parts],
        "bucket": {**place, "checksums": _read([part.checksum for part in parts])},
        **({NUM_CHANGED: counts} if counts else {}),
    }
    return Bucket(tuple(tensor for part in parts for tensor in part.sent), info)


def _whole_part(name: str, tensor: torch.Tensor) -> _Part:
    return _Part(name, tensor, (tensor,), checksum(tensor))


def _part(name: str, old: torch.Tensor, new: torch.Tensor) -> _Part:
    """Return the new tensor, or its changed elements if these have fewer bytes. Both tensors have the same shape and
    dtype.

    The whole new tensor is also sent if a new value is NaN, the dtype has no NaN, or an index exceeds int32.
    """
    if not new.is_floating_point() or new.numel() > 2**31 - 1:
        return _whole_part(name, new)
    before, after, size = _words(old), _words(new), _piece_words(new)
    indices = [
        (before[begin : begin + size] != after[begin : begin + size]).nonzero().view(-1).add_(begin)
        for begin in range(0, new.numel(), size)
    ]
    found = torch.cat(indices) if indices else torch.zeros(0, dtype=torch.int64, device=new.device)
    values = new.reshape(-1)[found]
    if found.numel() * 4 + values.nbytes >= max(1, new.nbytes) or bool(values.isnan().any()):
        return _whole_part(name, new)
    total = patch_checksum(found, values, new.numel())
    return _Part(name, new, (found.to(torch.int32), values), total, found.numel())


def label(version: PolicyVersion | None) -> str | None:
    """Return the name of a version in descriptions."""
    return None if version is None else f"{version.lineage}-{version.number}-{version.digest}"


class IncomingVersion:
    """Checks, on a replica, that a version arrives completely and with its buckets in order. Between `begin` and
    `finish`, the replica's weights are incomplete. Every violation raises WeightsFault, and afterwards only `begin` is
    allowed.
    """

    def __init__(self) -> None:
        self._next: int | None = None
        """Index of the next bucket; None outside of a transfer."""
        self._count: int | None = None
        self._holds: str | None = None
        """The version that the replica holds completely; None if its weights are incomplete."""
        self._base: str | None = None
        """The version that the replica held when the transfer began."""
        self._incoming = ""
        """The version of the current transfer."""
        self._expected: dict[str, int] = {}
        """Tensors of the current bucket that the loader has not received yet: the checksum of each tensor, by name."""

    def begin(self) -> None:
        """Start a transfer. An unfinished transfer is discarded."""
        self._base, self._holds = self._holds, None
        self._next, self._count, self._expected = 0, None, {}

    def abandon(self) -> None:
        """End a transfer that failed. Afterwards, the replica holds no complete version."""
        self._next = self._holds = None

    def expect(self, names: Sequence[str], bucket: Mapping[str, Any]) -> None:
        """Start a bucket. Raises WeightsFault unless this bucket is the next one of a whole version, or of a difference
        from the version that the replica held."""
        index, count, sums = bucket["index"], bucket["count"], bucket["checksums"]
        if self._next is None:
            raise self._fault(f"got bucket {index}, but no transfer is running")
        if index != self._next or self._count not in (None, count):
            raise self._fault(f"got bucket {index} of {count}, expected {self._next} of {self._count or count}")
        if len(sums) != len(names):
            raise self._fault(f"bucket {index} has {len(sums)} checksums for {len(names)} tensors")
        if bucket["base"] not in (None, self._base):
            raise self._fault(f"got a difference from version {bucket['base']}, but the replica held {self._base}")
        self._incoming = bucket["version"]
        self._count, self._expected = count, dict(zip(names, sums, strict=True))

    def loaded(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Check tensors that the loader receives. Raises WeightsFault for a wrong name or a wrong checksum."""
        sums = _read([checksum(tensor) for _, tensor in weights])
        for (name, _), found in zip(weights, sums, strict=True):
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
        self._next, self._holds = None, self._incoming

    def _fault(self, what: str) -> WeightsFault:
        self._next = None
        return WeightsFault(f"a direct transfer of weights is broken: {what}; this engine needs a whole version")
