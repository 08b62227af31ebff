"""Files and directories that are whole or absent, whenever the process dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file's content in one step: a reader finds the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(data)
    flush_to_disk(unfinished)
    unfinished.replace(path)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path`; when the block ends well, it takes that name in one step.

    What already lay at `path` is replaced. When the block raises, `path` is as it was and the rest is removed.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, replaced = path.with_name(f".{path.name}.unfinished"), path.with_name(f".{path.name}.replaced")
    for leftover in (unfinished, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for entry in [*unfinished.rglob("*"), unfinished]:
        flush_to_disk(entry)
    if path.exists():
        path.rename(replaced)  # a directory cannot be renamed over a full one
    unfinished.rename(path)
    flush_to_disk(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory that is whole until it is gone."""
    doomed = path.with_name(f".{path.name}.removed")
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Remove what the functions above left in a directory when a process died within them."""
    for suffix in ("unfinished", "replaced", "removed"):
        for leftover in directory.glob(f".*.{suffix}"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def flush_to_disk(path: Path) -> None:
    """Have the operating system write a file or directory out."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
