"""Atomic and durable writes: after a crash or a power failure, a file or directory is complete or absent.

write_whole, atomic_directory   write under a temporary name, flush to disk, rename, flush the parent directory
append, read_rows               files of JSON lines, of which only the last line may be incomplete after a crash
seal, verify                    digests of a directory's files, which are written last and checked before use
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import TypeVar

import msgspec
from blake3 import blake3
from safetensors import SafetensorError

from baton.errors import Damaged, UserError

Row = TypeVar("Row")
SEAL = Path("baton") / "manifest.json"
"""Path of the file with the digests, relative to the sealed directory."""
STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Error numbers of a full, over-quota, damaged or read-only disk."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class _File(msgspec.Struct, frozen=True):
    size: int
    blake3: str


class _Seal(msgspec.Struct, frozen=True):
    files: dict[str, _File]
    """Size and digest by relative path with forward slashes."""
    blake3: str
    """Digest of the JSON encoding of `files`."""


def write_whole(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically and durably. A reader sees either the old or the new content. If `path`
    is a symbolic link, its target is replaced."""
    if path.is_symlink():
        path = path.resolve()
    unfinished = path.with_name(f".{path.name}.unfinished")
    with writing(path):
        unfinished.write_bytes(data)
        flush_to_disk(unfinished)
        unfinished.replace(path)
        flush_to_disk(path.parent)


def append(path: Path, data: bytes) -> None:
    """Append bytes to a file. The bytes survive a kill of the process, but a power failure may lose the last bytes."""
    with writing(path), path.open("ab", buffering=0) as file:
        while data:  # a nearly full disk first accepts a part of the data, and raises at the next write
            data = data[file.write(data) :]


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Read a file of JSON lines. Return an empty list if the file does not exist. A last line that cannot be decoded is
    skipped, because a process may have died while writing it. Raises Damaged if any other line cannot be decoded."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    decoder = msgspec.json.Decoder(kind)
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise Damaged(f"{path} is damaged: line {number} of {len(lines)} cannot be read ({error})") from error
    return rows


def memory_directory() -> Path | None:
    """Return the directory of the in-memory file system; None if the system has none."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else None


def make_directory(path: Path) -> list[Path]:
    """Make a directory and its parents durably. Return the directories that did not exist, deepest first."""
    missing = [each for each in (path, *path.absolute().parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_to_disk(each.parent)
    return missing


def check_output(path: Path) -> None:
    """Raise UserError if `write_whole` could not write a user's output file `path`, or would replace something that is
    not a regular file, such as a directory or a device."""
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise UserError(f"cannot write {path}: it exists and is not a regular file")
        if not target.parent.is_dir():
            raise UserError(f"cannot write {path}: give a file in an existing directory")
        with NamedTemporaryFile(prefix=f".{target.name}.unfinished", dir=target.parent):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a symbolic link refers to itself
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', error)}") from error


def check_output_directory(path: Path) -> None:
    """Raise UserError if `atomic_directory` could not write a user's output directory `path`."""
    try:
        if os.path.ismount(path):  # `Path.is_mount` is wrong for "." in Python 3.11
            raise UserError(f"cannot write {path}: a mount point cannot be replaced; give a directory within it")
        parent = next(each for each in path.absolute().parents if each.exists())
        with TemporaryDirectory(prefix=f".{path.name}.unfinished", dir=parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another directory") from error


@contextmanager
def atomic_directory(path: Path, before_rename: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield an empty temporary directory, and rename it to `path` when the block succeeds.

    A directory that exists at `path` is replaced. If the block or `before_rename` raises, `path` does not change, and
    the temporary directory is removed.
    """
    path = path.absolute()
    make_directory(path.parent)
    unfinished, replaced = path.with_name(f".{path.name}.unfinished"), path.with_name(f".{path.name}.replaced")
    for leftover in (unfinished, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for entry in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(entry)
        before_rename()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if path.exists():
        path.rename(replaced)  # a rename cannot replace a directory that contains files
    unfinished.rename(path)
    flush_to_disk(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Rename a directory, then delete it, so that its name never refers to an incomplete directory."""
    doomed = path.with_name(f".{path.name}.removed")
    path.rename(doomed)
    flush_to_disk(path.parent)  # otherwise a power failure could undo the rename but not the deletion of files
    shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files that a process left in `directory` when it died within a function of this module. If
    `atomic_directory` was replacing a directory and the new content is incomplete, restore the old content."""
    for replaced in directory.glob(".*.replaced"):
        path = directory / replaced.name[1 : -len(".replaced")]
        if not path.exists():
            replaced.rename(path)
    for suffix in ("unfinished", "replaced", "removed"):
        for leftover in directory.glob(f".*.{suffix}"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def flush_to_disk(path: Path) -> None:
    """Flush a file or directory to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with writing(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def seal(directory: Path) -> None:
    """Write the digests of all files of a directory into the directory. Call after all other writes."""
    files = {
        path.relative_to(directory).as_posix(): _File(path.stat().st_size, _digest(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    file = directory / SEAL
    file.parent.mkdir(exist_ok=True)
    made = _Seal(files, blake3(msgspec.json.encode(files)).hexdigest())
    with writing(file):
        file.write_bytes(msgspec.json.format(msgspec.json.encode(made)))


def verify(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Check the files of a directory against the digests that `seal` wrote. A directory without digests passes.
    `wanted`: selects files by relative path. Raises Damaged naming the first file that differs."""
    file = directory / SEAL
    if not file.is_file():
        return
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Seal)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{directory} is damaged: {SEAL} cannot be read ({error})") from error
    if found.blake3 != blake3(msgspec.json.encode(found.files)).hexdigest():
        raise Damaged(f"{directory} is damaged: {SEAL} does not match the digest that it contains")
    for name, expected in found.files.items():
        path = directory / name
        if not wanted(name):
            continue
        if not path.is_file():
            raise Damaged(f"{directory} is damaged: {name} is missing")
        if (size := path.stat().st_size) != expected.size:
            raise Damaged(f"{directory} is damaged: {name} has {size} bytes instead of {expected.size}")
        if _digest(path) != expected.blake3:
            raise Damaged(f"{directory} is damaged: the content of {name} does not match its digest in {SEAL}")


def _digest(path: Path) -> str:
    # `update_mmap` is not used, because the pages of a mapped file count as memory of this process. One thread computes
    # the digest, because a thread pool would not survive a fork.
    with path.open("rb") as file:
        return file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]  # typed for hashlib's own algorithms


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add `path` to each OSError of the context that names no file; convert I/O errors of safetensors to OSError."""
    try:
        yield
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        raise OSError(int(found[1]) if found else errno.EIO, str(error), str(path)) from error
    except OSError as error:
        if error.errno is not None:  # an OSError without a number would print the file name instead of its message
            error.filename = error.filename or str(path)
        raise
