"""Reads any part of the tensors in safetensors files, and writes such files tensor by tensor.

    files ─▶ StoredTensors ─ fill ─▶ a tensor, or this rank's shard of it       nothing else is read
    a tensor, or its shards ─ gathered one by one ─▶ TensorFile, `model_files`  nothing else is copied

A stored tensor is named as in the model's `state_dict` and consists of pieces. A piece is a shard that a rank wrote, or
a tensor of a model file, such as one expert of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

from baton.files import writing
from baton.policy.digest import Identity, identity_digest
from baton.policy.sharding import Box, Gather, box_of, local
from baton.policy.tensors import dtype_name, identity, policy_tensors
from baton.policy.tokenizer import read_index_file

MAX_FILE_BYTES = 50 * 10**9
"""Maximum size of a model file. A larger model is split into several files with an index, as in transformers."""
SAFETENSORS_NAMES = {dtype_name(dtype): name for name, dtype in str_to_torch_dtype.items()}
"""dtype → its name in safetensors files."""
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of unquantised tensors in safetensors files."""
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OFFSETS = "DCP_SHARDING_INFO"
"""Key in a file's metadata: the offset of each shard within its tensor, as torch.distributed.checkpoint writes it."""

Spec = tuple[torch.dtype, Sequence[int]]
"""Dtype and shape of a tensor."""


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A part of a tensor, stored in a file as a separate tensor."""

    name: str
    """Name of the piece in its file."""
    box: Box
    """The region of the whole tensor that this piece contains: one slice per dimension of the whole tensor."""
    kept: tuple[int, ...]
    """Dimensions of the whole tensor that the stored piece has. Along every other dimension the region has length 1,
    and the stored piece omits the dimension. Example: one expert of a tensor that combines all experts of a layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.box[dim].stop - self.box[dim].start for dim in self.kept)


class StoredTensors:
    """Reads any part of named tensors in files or in memory. Files stay mapped while the object exists."""

    def __init__(self, pieces: Mapping[str, Sequence[tuple[StoredPiece, Callable[[], Any]]]]) -> None:
        """`pieces`: name of a tensor → its pieces. Each piece has a function that returns the stored piece, as a tensor
        or as another object whose slices are tensors."""
        self._pieces = pieces
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(
                max(sides) for sides in zip(*([side.stop for side in piece.box] for piece, _ in parts), strict=True)
            )
            for name, parts in pieces.items()
        }

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> StoredTensors:
        """Return an object that reads tensors in memory."""
        return cls({name: [(_all_of(name, t.shape), partial(lambda t: t, t))] for name, t in tensors.items()})

    @classmethod
    def in_files(cls, paths: Iterable[Path]) -> StoredTensors:
        """Return the tensors of files. The pieces of a tensor are its shards. Raises FileNotFoundError, or
        SafetensorError for a file that is not safetensors."""
        found: dict[str, list[tuple[StoredPiece, Callable[[], Any]]]] = {}
        opened = _opener()
        for path in paths:
            offsets = json.loads((opened(path).metadata() or {}).get(_OFFSETS, "{}"))
            for name in opened(path).keys():  # noqa: SIM118  it is no mapping
                shape = opened(path).get_slice(name).get_shape()
                begin = offsets.get(name, {}).get("saved_offsets", [0] * len(shape))
                box = tuple(slice(first, first + size) for first, size in zip(begin, shape, strict=True))
                piece = StoredPiece(name, box, tuple(range(len(shape))))
                found.setdefault(name, []).append((piece, partial(_slices, opened, path, name)))
        return cls(found)

    def fill(self, name: str, into: torch.Tensor, box: Box | None = None) -> None:
        """Read a tensor, or its part `box`, into the tensor `into` of the same shape. Raises ValueError if the files
        lack any of the values."""
        box = box_of(into) if box is None else box
        num_read = 0
        for piece, source in self._pieces[name]:
            common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(piece.box, box, strict=True)]
            if any(side.start >= side.stop for side in common):
                continue
            there = tuple(_moved(common[dim], piece.box[dim].start) for dim in piece.kept)
            here = into[tuple(_moved(side, own.start) for side, own in zip(common, box, strict=True))]
            here.copy_(source()[there or ...].reshape(here.shape))
            num_read += here.numel()
        if num_read != into.numel():
            raise ValueError(f"{name} is incomplete: the files have {num_read} of {into.numel()} numbers")

    def like(self, name: str, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Read a tensor in the dtype, layout and (by default) device of `like`. If `like` is sharded, read only this
        rank's shard."""
        own = torch.empty(local(like).shape, dtype=like.dtype, device=device or like.device)
        self.fill(name, own, box_of(like))
        if not isinstance(like, DTensor):
            return own
        found = DTensor.from_local(
            own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        found._local_tensor.data = own  # `from_local` copies a shard on the host to the device of the mesh
        return found

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor into host memory."""
        source = self._pieces[name][0][1]()
        dtype = source.dtype if isinstance(source, torch.Tensor) else str_to_torch_dtype[source.get_dtype()]
        found = torch.empty(self.shapes[name], dtype=dtype)
        self.fill(name, found)
        return found

    def digest(self) -> str:
        """Return the digest of a published version with these tensors. Reads the tensors one after another."""
        return identity_digest(identity(name, self.whole(name)) for name in self.shapes)


@dataclass(frozen=True)
class ReadAtAccess(Mapping[str, torch.Tensor]):
    """A mapping that reads a stored tensor into host memory at each access, without a cache."""

    stored: StoredTensors
    specs: Mapping[str, torch.Tensor]
    """Tensors with the shapes and dtypes to return; they may be on the meta device."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stored.like(name, self.specs[name], torch.device("cpu"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def _opener() -> Callable[[Path], Any]:
    return cache(lambda path: safe_open(path, framework="pt"))


def _slices(opened: Callable[[Path], Any], path: Path, name: str) -> Any:
    return opened(path).get_slice(name)


def _all_of(name: str, shape: Sequence[int]) -> StoredPiece:
    return StoredPiece(name, tuple(slice(0, size) for size in shape), tuple(range(len(shape))))


def _moved(side: slice, start: int) -> slice:
    return slice(side.start - start, side.stop - start)


# ---- models ----------------------------------------------------------------------------------------------------------


class _KeepViews(TorchFunctionMode):
    """Makes `contiguous` return the tensor itself without a copy, so that parts of a tensor remain views of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def file_layout(model: PreTrainedModel) -> dict[str, list[StoredPiece]] | None:
    """Return the pieces of each tensor of the model. Each piece is a tensor in the model's files. Return None if a
    tensor in the files is not a slice of one tensor of the model, for example because it combines several tensors."""
    found = {}
    for name, tensor in policy_tensors(model).items():
        source = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        try:
            with _KeepViews():
                parts = revert_weight_conversion(model, {name: source})
        except (ValueError, KeyError, IndexError, RuntimeError):
            return None
        pieces = [_piece(key, part, source) for key, part in parts.items()]
        if sum(0 if piece is None else prod(piece.shape) for piece in pieces) != source.numel():
            return None
        found[name] = [piece for piece in pieces if piece is not None]
    names = [piece.name for pieces in found.values() for piece in pieces]
    return found if len(set(names)) == len(names) else None


def _piece(name: str, part: torch.Tensor, source: torch.Tensor) -> StoredPiece | None:
    """Return the part of `source` that the view `part` covers. Return None if `part` is not a view of `source` with
    dimensions in the same order."""
    if part.untyped_storage()._cdata != source.untyped_storage()._cdata:
        return None
    if part.shape == source.shape and part.stride() == source.stride():
        return _all_of(name, source.shape)
    box: list[slice] = []
    kept: list[int] = []
    offset = int(part.storage_offset())
    for dim, stride in enumerate(source.stride()):
        begin, offset = divmod(offset, stride)
        is_kept = len(kept) < part.ndim and part.stride(len(kept)) == stride
        box.append(slice(begin, begin + (part.shape[len(kept)] if is_kept else 1)))
        kept += [dim] if is_kept else []
    return StoredPiece(name, tuple(box), tuple(kept)) if len(kept) == part.ndim else None


def read_index(directory: Path) -> dict[str, str]:
    """Return the index of a model's files: name of a tensor → name of its file. The result is empty if there is no
    index, or if all tensors are in one file: transformers then ignores an index, and does not delete that of an earlier
    model when it saves a model. Raises ValueError for a damaged index."""
    path = directory / _INDEX
    return read_index_file(path) if path.is_file() and not (directory / _SINGLE).is_file() else {}


def stored_model(directory: Path, model: PreTrainedModel, *, is_exact: bool = False) -> StoredTensors | None:
    """Return the tensors of a model's files, keyed by their names in the model.

    Returns None if `file_layout` returns None, or if the files lack one of its tensors or have another shape for it.
    With `is_exact`, returns None also if the files have further tensors. Raises SafetensorError for a damaged file, and
    ValueError for a damaged index or for quantised values of a tensor that is not quantised in the model.
    """
    opened, single = _opener(), directory / _SINGLE
    where = read_index(directory)
    if not where and single.is_file():
        where = dict.fromkeys(opened(single).keys(), single.name)
    if (layout := file_layout(model)) is None:
        return None
    wanted = {piece.name for piece in chain(*layout.values())}
    if not wanted <= where.keys() or (is_exact and wanted != where.keys()):
        return None
    found = {
        name: [(piece, partial(_slices, opened, directory / where[piece.name], piece.name)) for piece in pieces]
        for name, pieces in layout.items()
    }
    for name in (name for name, tensor in policy_tensors(model).items() if tensor.is_floating_point()):
        for stored in {source().get_dtype() for _, source in found[name]}.difference(_FLOATS):
            raise ValueError(f"the files have {name} in {stored}, so the model is quantised; use unquantised files")
    fits = all(tuple(source().get_shape()) == piece.shape for piece, source in chain(*found.values()))
    return StoredTensors(found) if fits else None


def fill_model(module: torch.nn.Module, stored: StoredTensors, device: torch.device) -> None:
    """Read all parameters of a module that are on the meta device, and the buffers that the files contain. The module
    is a model, which may have adapters, or contains the body of a model as `trunk`. Sharded parameters stay sharded,
    and tied parameters stay tied."""
    trunk = getattr(module, "trunk", None)

    def stored_name(name: str) -> str:
        if trunk is not None:
            return f"{trunk.base_model_prefix}{name.removeprefix('trunk')}"
        return name.replace(".base_layer.", ".")

    read: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter not in read and local(parameter).is_meta and stored_name(name) in stored.shapes:
            tensor = stored.like(stored_name(name), parameter.detach(), device)
            read[parameter] = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for part in module.modules():
        for name, each in part._parameters.items():
            if each in read:
                part._parameters[name] = read[each]
    for name, buffer in module.named_buffers():
        if stored_name(name) in stored.shapes:
            stored.fill(stored_name(name), buffer)


# ---- writing ---------------------------------------------------------------------------------------------------------


class TensorFile:
    """A safetensors file that is written tensor by tensor, in any order."""

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> None:
        """Create the file with the names, dtypes and shapes of its tensors. Raises OSError."""
        self._path = path
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        # Sort by descending item size, so that each tensor is aligned, and then by name, as in published versions.
        for name, (dtype, shape) in sorted(specs.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            begin, end = end, end + prod(shape) * dtype.itemsize
            short = SAFETENSORS_NAMES[dtype_name(dtype)]
            header[name] = {"dtype": short, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._offsets = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in specs}
        with writing(path):
            self._file = path.open("wb")
            self._file.write(len(text).to_bytes(8, "little") + text)
            self._file.truncate(8 + len(text) + end)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor. Raises OSError."""
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with writing(self._path):
            self._file.seek(self._offsets[name])
            self._file.write(data.data)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        with writing(self._path):
            self._file.close()


@contextmanager
def model_files(
    directory: Path, layout: Mapping[str, Sequence[StoredPiece]], dtypes: Mapping[str, torch.dtype]
) -> Iterator[Callable[[str, torch.Tensor], None]]:
    """Create a model's weight files in the form that transformers reads, with an index if there are several files.
    Yield the function (name, tensor) that writes a tensor of the model. `layout`: the pieces of each tensor. Raises
    OSError, as the yielded function does."""
    groups: list[dict[str, Spec]] = [{}]
    size = total = 0
    for name, pieces in layout.items():
        for piece in pieces:
            num_bytes = prod(piece.shape) * dtypes[name].itemsize
            total += num_bytes
            if groups[-1] and size + num_bytes > MAX_FILE_BYTES:
                groups.append({})
                size = 0
            size += num_bytes
            groups[-1][piece.name] = dtypes[name], piece.shape
    names = [_SINGLE]
    if len(groups) > 1:
        names = [f"model-{place:05}-of-{len(groups):05}.safetensors" for place in range(1, len(groups) + 1)]
        where = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        index = directory / _INDEX
        with writing(index):
            index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
    with ExitStack() as opened:
        files: dict[str, TensorFile] = {}
        for name, group in zip(names, groups, strict=True):
            files |= dict.fromkeys(group, opened.enter_context(TensorFile(directory / name, group)))

        def put(name: str, tensor: torch.Tensor) -> None:
            for piece in layout[name]:
                files[piece.name].put(piece.name, tensor[piece.box].reshape(piece.shape))

        yield put


def write_gathered(
    tensors: Mapping[str, torch.Tensor],
    put: Callable[[str, torch.Tensor], None] | None,
    gather: Gather,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[Identity]:
    """Gather tensors one after another, cast them to `dtypes`, and pass them to `put`. Return the `identity` of each
    tensor, or an empty list if `put` is None. Collective: all ranks must pass the same names in the same order."""
    identities = []
    for name, tensor in tensors.items():
        full = gather(name, tensor if dtypes is None else tensor.to(dtypes[name]))
        if put is not None:
            full = full.cpu()
            put(name, full)
            identities.append(identity(name, full))
        del full
    return identities


def write_own_shards(path: Path, tensors: Mapping[str, torch.Tensor], *, rank: int, first: int) -> None:
    """Write this rank's shards of tensors into a file; if the rank has nothing to write, there is no file. If several
    ranks have equal copies of a shard, only one of these ranks writes it. Rank `first`, the first rank that has these
    tensors, writes the tensors that are not sharded. Raises OSError."""
    own = {name: tensor for name, tensor in tensors.items() if local(tensor).numel() and _is_ours(tensor, rank, first)}
    if not own:
        return
    offsets = {name: {"saved_offsets": [side.start for side in box_of(tensor)]} for name, tensor in own.items()}
    specs: dict[str, Spec] = {name: (tensor.dtype, local(tensor).shape) for name, tensor in own.items()}
    with TensorFile(path, specs, {_OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}) as file:
        for name, tensor in own.items():
            file.put(name, local(tensor))


def _is_ours(tensor: torch.Tensor, rank: int, first: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == first
    mesh = tensor.device_mesh
    places = zip(tensor.placements, mesh.get_coordinate() or (), strict=True)
    # If each tensor-parallel rank computes a layer completely, equal shards of the layer are on several meshes. Only
    # the mesh with rank `first` writes its shards.
    return first in mesh.mesh.flatten().tolist() and all(index == 0 for place, index in places if place.is_replicate())
