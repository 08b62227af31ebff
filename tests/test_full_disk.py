"""A disk that takes no more ends a run with the file and the last good checkpoint; with room again the run goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter

from baton import files
from baton.console import Console
from baton.errors import StorageFault
from baton.records.run_directory import RunDirectory
from baton.run.assemble import build_loop
from baton.run.loop import Loop
from baton.views.terminal.progress import TerminalObserver
from tests.fork_server import exit_code_of, start_process
from tests.run.test_resume import assert_equal_runs, recipe, tiny_model, unbroken

__all__ = ["tiny_model", "unbroken"]

pytestmark = pytest.mark.numerics

FULL = r"(the disk is full|could not be read or written).*the last good checkpoint is .*step_00000[246]"


def loop_of(wanted: Any, *, resume: bool) -> Loop:
    observer = TerminalObserver(Console(quiet=True), 9)
    return build_loop(wanted, observer, resume=resume, overwrite=False)


def finish(wanted: Any) -> None:
    loop = loop_of(wanted, resume=True)
    loop.train()
    loop.close()


def no_room(*arguments: Any, **more: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def after_a_checkpoint(loop: Loop, then: Callable[[], None]) -> None:
    """Have something happen within the train step after the first checkpoint."""
    step = loop.trainer.step

    def wrapped(batch: Any) -> dict[str, float]:
        if batch.step == 3:
            then()
        return step(batch)

    loop.trainer.step = wrapped  # type: ignore[method-assign]


WRITERS = ("metrics", "tensorboard", "trace", "checkpoint", "tokenizer", "manifest", "flush", "evaluations")


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_each_writer_that_finds_no_room_ends_the_run_with_its_file_and_the_way_back(
    tiny_model: Path,
    tmp_path: Path,
    writer: str,
) -> None:
    wanted = recipe(tiny_model, tmp_path)
    loop = loop_of(wanted, resume=False)
    file = {
        "metrics": "metrics.jsonl",
        "tensorboard": "tensorboard",
        "trace": "trace.jsonl",
        "checkpoint": "step_000004",
        "tokenizer": "step_000004",
        "manifest": "manifest.json",
        "flush": "step_00000",
        "evaluations": "evaluations.jsonl",
    }[writer]
    with pytest.MonkeyPatch.context() as patch:

        def break_it() -> None:
            opened = Path.open
            match writer:
                case "metrics" | "trace" | "checkpoint":
                    name = "model.safetensors" if writer == "checkpoint" else file
                    patch.setattr(
                        Path, "open", lambda self, *a, **k: no_room() if self.name == name else opened(self, *a, **k)
                    )
                case "tensorboard":
                    patch.setattr(EventsWriter, "flush", no_room)
                case "tokenizer":
                    patch.setattr(type(loop.evaluator.encoder.tokenizer.hf), "save_pretrained", no_room)
                case "manifest":
                    wrote = Path.write_bytes
                    patch.setattr(
                        Path, "write_bytes", lambda self, data: no_room() if self.name == file else wrote(self, data)
                    )
                case "flush":
                    patch.setattr(files.os, "fsync", no_room)
                case "evaluations":
                    wrote = Path.write_bytes
                    patch.setattr(
                        Path,
                        "write_bytes",
                        lambda self, data: no_room() if file in self.name else wrote(self, data),
                    )

        after_a_checkpoint(loop, break_it)
        with pytest.raises(StorageFault, match=FULL) as caught:
            loop.train()
        assert file in str(caught.value)
        loop.close()  # hides nothing, and raises nothing more
    finish(wanted)
    assert RunDirectory(wanted.run.path).recorded_steps() == list(range(1, 10))


def test_a_journal_that_finds_no_room_ends_the_run_likewise(
    tiny_model: Path,
    tmp_path: Path,
    unbroken: Any,
) -> None:
    wanted = recipe(tiny_model, tmp_path)
    connect, opened = sqlite3.connect, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *a, **k: opened.append(connect(*a, **k)) or opened[-1])
        loop = loop_of(wanted, resume=False)
    (database,) = opened

    def bound() -> None:
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count={pages}")

    after_a_checkpoint(loop, bound)
    with pytest.raises(StorageFault, match=r"journal.sqlite could not be read or written: database or disk is full; t"):
        loop.train()
    loop.close()
    finish(wanted)
    assert_equal_runs(unbroken, wanted)


def _train_with_bounded_files(wanted: Any, said: Path) -> None:
    loop = loop_of(wanted, resume=False)
    after_a_checkpoint(loop, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY)))
    try:
        loop.train()
    except StorageFault as error:
        loop.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        said.write_text(str(error))
        sys.exit(1)


def test_a_file_that_may_not_grow_ends_the_run_likewise(tiny_model: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the system itself refuses the write, in the middle of a file of the next checkpoint."""
    wanted = recipe(tiny_model, tmp_path)
    said = tmp_path / "said"
    assert exit_code_of(start_process(_train_with_bounded_files, wanted, said)) == 1
    assert "step_000002" in said.read_text()
    finish(wanted)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root and a container that lets it")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("room_bytes", [0, 3_000, 20_000, 80_000, 200_000])
def test_a_real_full_disk_ends_the_run_and_with_room_it_goes_on_to_the_same_bits(
    tiny_model: Path,
    small_disk: Path,
    room_bytes: int,
    unbroken: Any,
) -> None:
    wanted = recipe(tiny_model, small_disk)
    loop = loop_of(wanted, resume=False)
    filler = small_disk / "filler"

    def fill() -> None:
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        filler.write_bytes(bytes(max(0, free - room_bytes)))

    after_a_checkpoint(loop, fill)
    with pytest.raises(StorageFault, match=FULL):
        loop.train()
    loop.close()
    filler.unlink()
    finish(wanted)
    assert_equal_runs(unbroken, wanted)
