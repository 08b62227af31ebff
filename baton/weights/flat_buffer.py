"""The flat buffer is one array of bytes with all tensors of a version. The buffer is a memory-mapped file
(`version_files.py`), which publisher and fetcher write and read in pieces, so neither holds a whole version in
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, groupby
from typing import Any

import torch
from blake3 import blake3

from baton.clock import in_order
from baton.errors import WeightsFault
from baton.policy.tensors import dtype_name
from baton.weights.bitstream import Bytes
from baton.weights.manifest import MAX_PART_BYTES, WORD_BYTES, TensorEntry, payload_order
from baton.weights.version_files import FlatFile

Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of each tensor, in `payload_order`. Versions of the same model have equal layouts."""


def layout_of(entries: tuple[TensorEntry, ...]) -> Layout:
    """Return the layout of a version, which determines each tensor's position in the flat buffer."""
    return tuple((entry.name, entry.dtype, entry.shape) for entry in entries)


def unsigned(
    tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] | None = None
) -> tuple[TensorEntry, ...]:
    """Return the manifest entries of tensors after a cast to `dtypes`, in the order of the flat buffer. Digests are
    empty. Raises WeightsFault for a dtype that the manifest does not support."""
    entries = [
        TensorEntry(name, dtype_name(t.dtype if dtypes is None else dtypes[name]), tuple(t.shape), "")
        for name, t in tensors.items()
    ]
    for entry in entries:
        if entry.dtype not in WORD_BYTES:
            raise WeightsFault(
                f"{entry.name} cannot be published: got dtype torch.{entry.dtype}, allowed are {', '.join(WORD_BYTES)}"
            )
    return tuple(sorted(entries, key=payload_order))


def flattened(
    tensors: Mapping[str, torch.Tensor],
    create: Callable[[tuple[TensorEntry, ...]], FlatFile],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> tuple[tuple[TensorEntry, ...], FlatFile]:
    """Write tensors into a flat buffer, several at a time and each in pieces; return the manifest's entries and the
    buffer. `create`: creates the buffer for entries with empty digests. `dtypes`: dtypes to which tensors are cast,
    piece by piece. Raises WeightsFault for a dtype that the manifest does not support, and StorageFault."""
    ordered = unsigned(tensors, dtypes)
    file = create(ordered)

    def write(place: tuple[TensorEntry, int]) -> TensorEntry:
        entry, end = place
        flat, digest, at = tensors[entry.name].detach().reshape(-1), blake3(), end - entry.num_bytes
        dtype: Any = getattr(torch, entry.dtype)
        for piece in torch.split(flat, MAX_PART_BYTES // max(flat.element_size(), dtype.itemsize)):
            data = piece.to(dtype).cpu().view(torch.uint8).numpy()
            file.write(at, data)
            digest.update(data.data)
            at += data.nbytes
        return TensorEntry(entry.name, entry.dtype, entry.shape, digest.hexdigest())

    places = zip(ordered, accumulate(entry.num_bytes for entry in ordered), strict=True)
    # a mapping other than a dict may read a tensor into memory at each access, so process one tensor at a time
    threads = None if isinstance(tensors, dict) else 1
    return tuple(in_order(write, places, lambda place: place[0].num_bytes, threads=threads)), file


def signed(entries: tuple[TensorEntry, ...], digests: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    """Return entries with the digests of their tensors. Raises WeightsFault if a digest is missing."""
    if missing := [e.name for e in entries if e.name not in digests]:
        raise WeightsFault(f"{len(missing)} tensors have no digest, among them {missing[0]}")
    return tuple(TensorEntry(e.name, e.dtype, e.shape, digests[e.name]) for e in entries)


def tensors_of(entries: tuple[TensorEntry, ...], flat_buffer: Bytes) -> dict[str, torch.Tensor]:
    """Return the tensors in a flat buffer, keyed by name, as views of the buffer."""
    whole = torch.from_numpy(flat_buffer)
    found, at = {}, 0
    for entry in entries:
        dtype: Any = getattr(torch, entry.dtype)
        found[entry.name] = whole[at : at + entry.num_bytes].view(dtype).reshape(entry.shape)
        at += entry.num_bytes
    return found


def pieces(entries: tuple[TensorEntry, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, bytes of a word) of each piece of a flat buffer. All words of a piece have the same size."""
    begin = 0
    for word, same in groupby(entries, lambda entry: WORD_BYTES[entry.dtype]):
        end = begin + sum(entry.num_bytes for entry in same)
        for at in range(begin, end, MAX_PART_BYTES):
            yield at, min(at + MAX_PART_BYTES, end), word
        begin = end
