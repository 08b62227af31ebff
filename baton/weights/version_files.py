"""Files of policy versions on this machine. A process maps a version's file instead of holding the version in memory.

* `FlatFile` is a flat buffer that is written piece by piece and mapped for reading.
* `TensorsOfFile` has the tensors of a safetensors file that a publisher on this machine may adopt.
* `VersionFiles` stores the latest versions as safetensors files. The run's workers on this machine map these files too.

Mapped pages belong to the system's file cache: the system writes them to the disk and evicts them if memory is short.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from baton.errors import StorageFault, WeightsFault
from baton.policy.stored_tensors import SAFETENSORS_NAMES
from baton.types import PolicyVersion
from baton.weights.bitstream import Bytes
from baton.weights.manifest import TensorEntry, check_version, name_of

NUM_FILES = 2
"""Number of latest versions whose files `VersionFiles` keeps."""


class TensorsOfFile(dict[str, torch.Tensor]):
    """The mapped tensors of a safetensors file. The file is deleted together with this object."""

    def __init__(self, path: Path, digests: Mapping[str, str]) -> None:
        """`digests`: the digest of each tensor by name, computed by the writer of the file."""
        super().__init__(load_file(path))
        self.path, self.digests = path, digests
        weakref.finalize(self, _remove, path)


def _remove(path: Path) -> None:
    with suppress(OSError):  # the run removes its directory when it ends
        path.unlink()


class FlatFile:
    """A flat buffer in a file. Data is written with `write`, because a write to the mapping would end the process with
    SIGBUS if the disk is full. An unnamed file is deleted when the last reference to `bytes` is dropped."""

    def __init__(self, path: Path, num_bytes: int, header: bytes | None = None, *, is_written: bool = False) -> None:
        """Create the file `path` with a header or, if `header` is None, an unnamed file in the directory `path`. With
        `is_written`, map the existing file `path`, which begins with `header`. Raises StorageFault."""
        self.path, self._begin = path, len(header or b"")
        try:
            if header is None:
                self._file: IO[bytes] = tempfile.TemporaryFile(dir=path, buffering=0)  # noqa: SIM115  closed with `self`
            else:
                self._file = path.open("r+b" if is_written else "w+b", buffering=0)
            if not is_written:
                self._file.write(header or b"")
                self._file.truncate(self._begin + num_bytes)
            mapped = mmap.mmap(self._file.fileno(), self._begin + num_bytes) if num_bytes else b""
        except OSError as error:
            raise self._fault(error) from error
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)[self._begin :]
        """The mapped bytes, which the caller must not change."""
        self._lent: weakref.ref[Bytes] | None = None

    def lend(self) -> Bytes:
        """Return the mapped bytes. `is_lent` is true while any code uses tensors that the caller makes from them."""
        lent = self.bytes.view()
        self._lent = weakref.ref(lent)
        return lent

    @property
    def is_lent(self) -> bool:
        """True while the bytes that the last `lend` returned are still in use. During this time, the file must not
        change."""
        return self._lent is not None and self._lent() is not None

    @functools.cached_property
    def allows_mapped_writes(self) -> bool:
        """Whether a completely written file should be changed through `bytes`, without `write`. True only on tmpfs,
        which overwrites its pages. On copy-on-write and network file systems, such a change may fail and end the
        process with SIGBUS. On ext4, the change is slower than `write`: each page written back costs a page fault."""
        device = os.fstat(self._file.fileno()).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace").split("\n")
        except OSError:
            return False
        found = [line.split(" ") for line in mounts if line]
        return any(each[2] == number and each[each.index("-") + 1] == "tmpfs" for each in found)

    @classmethod
    def of_tensors(cls, path: Path, entries: tuple[TensorEntry, ...]) -> FlatFile:
        """Create a safetensors file with the tensors of `entries` in this order. Raises StorageFault."""
        return cls(path, sum(entry.num_bytes for entry in entries), _header(entries))

    @classmethod
    def unnamed(cls, entries: tuple[TensorEntry, ...]) -> FlatFile:
        """Create an unnamed file for the tensors of `entries`. Raises StorageFault."""
        return cls(Path(tempfile.gettempdir()), sum(entry.num_bytes for entry in entries))

    def write(self, begin: int, data: Bytes) -> None:
        """Write a piece to the buffer, starting at byte `begin`. Raises StorageFault, for example if the disk is full.
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

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(self, entries: tuple[TensorEntry, ...]) -> FlatFile:
        """Create the file of a version; the `entries` need no digests. Raises StorageFault."""
        return FlatFile.of_tensors(self._unfinished(), entries)

    def adopt(self, path: Path, entries: tuple[TensorEntry, ...]) -> FlatFile | None:
        """Use a completely written file as the file of a version. The file is not copied, but hard-linked. Return None
        if the file is on another file system, or does not have `entries` in this order. Raises StorageFault."""
        unfinished = self._unfinished()
        try:
            os.link(path, unfinished)
        except OSError:
            return None
        header = _header_in(unfinished)
        if _places(header) != _places(_header(entries)):
            unfinished.unlink()
            return None
        return FlatFile(unfinished, sum(entry.num_bytes for entry in entries), header, is_written=True)

    def _unfinished(self) -> Path:
        path = self.directory / "new.safetensors.unfinished"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageFault(f"{self.directory} cannot be written ({error.strerror or error})") from error
        return path

    def finish(self, version: PolicyVersion, file: FlatFile) -> None:
        """Give a completely written file the name of its version; remove the files of old versions."""
        path = self._path(version)
        file.path.replace(path)
        files = sorted(self.directory.glob("*.safetensors"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        for old in files[:-NUM_FILES]:  # a mapping stays valid after its file is deleted
            if old != path:
                old.unlink()

    def read(self, version: PolicyVersion) -> dict[str, torch.Tensor] | None:
        """Map a version's tensors, unverified; None if there is no file. Raises WeightsFault for a damaged file."""
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
            "dtype": SAFETENSORS_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (at, at + entry.num_bytes),
        }
        at += entry.num_bytes
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _header_in(path: Path) -> bytes:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        text = file.read(size)
    return struct.pack("<Q", size) + text


def _places(header: bytes) -> dict[str, Any]:
    """Return the dtype, the shape and the offsets of each tensor in a header, by the tensor's name."""
    found: dict[str, Any] = msgspec.json.decode(header[8:])
    found.pop("__metadata__", None)
    return found
