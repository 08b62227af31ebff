"""Files of policy versions on this machine, from which a process maps a version instead of holding it in memory.

    FlatFile       one flat buffer, written piece by piece and mapped for reading
    VersionFiles   the latest versions as safetensors files, which the run's workers on this machine map too

Mapped pages belong to the system's file cache: the system writes them to the disk and evicts them if memory is short.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np
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


class FlatFile:
    """A flat buffer in a file. It is written with `write`, because writing to a mapping of a full disk ends the process
    with SIGBUS. An unnamed file is deleted when the last reference to `bytes` is dropped."""

    def __init__(self, path: Path, num_bytes: int, header: bytes | None = None) -> None:
        """Create the file `path` with a header; without a header, an unnamed file in the directory `path`. Raises
        StorageFault."""
        self.path, self._begin = path, len(header or b"")
        try:
            if header is None:
                self._file: IO[bytes] = tempfile.TemporaryFile(dir=path, buffering=0)  # noqa: SIM115  closed with `self`
            else:
                self._file = path.open("w+b", buffering=0)
            self._file.write(header or b"")
            self._file.truncate(self._begin + num_bytes)
            mapped = mmap.mmap(self._file.fileno(), self._begin + num_bytes) if num_bytes else b""
        except OSError as error:
            raise self._fault(error) from error
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)[self._begin :]
        """The mapped bytes. The caller must not change them."""

    def write(self, begin: int, data: Bytes) -> None:
        """Write a piece from the byte `begin` of the buffer on. Raises StorageFault, for example if the disk is full.
        Safe to call from several threads."""
        rest = data.data
        try:
            while rest:
                done = os.pwrite(self._file.fileno(), rest, self._begin + begin)
                rest, begin = rest[done:], begin + done
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> StorageFault:
        if self._begin:
            self.path.unlink(missing_ok=True)
        return StorageFault(f"a version cannot be written to {self.path} ({error.strerror or error})")


class VersionFiles:
    """Stores versions in a directory. Only one publisher may use the directory, because a publisher deletes old and
    unfinished `*.safetensors` files."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        """`keep`: number of latest versions whose files are kept. A mapping stays valid after its file is deleted."""
        self.directory, self._keep = directory, keep

    def create(self, entries: tuple[TensorEntry, ...]) -> FlatFile:
        """Create the file of a version, whose digests need not be known. Raises StorageFault."""
        path = self.directory / "new.safetensors.unfinished"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageFault(f"{self.directory} cannot be written ({error.strerror or error})") from error
        return FlatFile(path, sum(entry.num_bytes for entry in entries), _header(entries))

    def finish(self, version: PolicyVersion, file: FlatFile) -> None:
        """Give a completely written file the name of its version; remove the files of old versions."""
        path = self._path(version)
        file.path.replace(path)
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
