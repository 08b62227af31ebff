"""Weight transfer on one machine: the trainer writes each version as a safetensors file in shared memory, and workers
map the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from baton.errors import StorageFault, WeightsFault
from baton.types import PolicyVersion
from baton.weights.bitstream import Bytes
from baton.weights.manifest import TensorEntry, check_version, name_of

_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""dtype → its name in safetensors files."""


class SharedMemory:
    """Stores versions in a directory in memory, such as `/dev/shm/NAME`. Only one publisher may use the directory,
    because a publisher deletes old and unfinished `*.safetensors` files.
    """

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        """`keep`: number of latest versions whose files are kept. A mapping stays valid after its file is deleted."""
        self.directory, self._keep = directory, keep

    def write(self, version: PolicyVersion, entries: tuple[TensorEntry, ...], flat_buffer: Bytes) -> None:
        """Write a version's file atomically; remove the files of old versions. Raises StorageFault if this fails."""
        path = self._path(version)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("*.safetensors.unfinished"):
                leftover.unlink()
            # The file is written with `write`, which reports full memory as an OSError. Writing to a mapping would end
            # the process with SIGBUS.
            with unfinished.open("wb") as file:
                file.write(_header(entries))
                file.write(flat_buffer.data)
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise StorageFault(f"{path} cannot be written ({error.strerror or error})") from error
        files = sorted(self.directory.glob("*.safetensors"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        for old in files[: -self._keep]:
            if old != path:
                old.unlink()

    def read(self, version: PolicyVersion) -> dict[str, torch.Tensor] | None:
        """Map a version's unverified tensors; return None without a file. Raises WeightsFault for a damaged file."""
        path = self._path(version)
        try:
            return load_file(path)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            raise WeightsFault(f"cannot load {name_of(version)} from {path}: {error}") from error

    def _path(self, version: PolicyVersion) -> Path:
        check_version(version)
        return self.directory / f"{version.lineage}-{version.number:09d}-{version.digest[:16]}.safetensors"


def _header(entries: tuple[TensorEntry, ...]) -> bytes:
    """Return the header of a safetensors file: length of the JSON, and the JSON, padded to a multiple of 8 bytes."""
    described, at = {}, 0
    for entry in entries:
        described[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (at, at + entry.num_bytes),
        }
        at += entry.num_bytes
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
