"""Checkpoints that are written in the background: at most one, its failure reported, and every wait with a deadline.

`tests/test_power_cut.py` cuts the power while such a checkpoint is unwritten."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from baton.console import Console
from baton.errors import DeadlineExceeded, StorageFault, UserError
from baton.files import memory_directory, verify
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run import loop as loop_module
from baton.run import resume
from baton.run.assemble import build_loop
from baton.run.memory import needed_bytes, processes_of
from baton.specs.model import ModelSpec, model_spec
from baton.swarm.serial_executor import SerialExecutor
from baton.trainer.checkpoint import list_checkpoints
from baton.views.terminal.progress import TerminalObserver
from tests.test_power_cut import STEPS, Scripted, build, recipe

pytestmark = pytest.mark.skipif(memory_directory() is None, reason="needs /dev/shm")


def staged() -> set[Path]:
    memory = memory_directory()
    assert memory is not None
    return set(memory.glob("baton-checkpoint-*"))


def in_background(directory: Path, writer: Any = None) -> Scripted:
    loop = build(recipe(directory, "sync", background=True))
    loop.writer = writer or SerialExecutor("checkpoint")
    return loop


def steps_of(loop: Scripted) -> list[int]:
    return [int(path.name[-6:]) for path in list_checkpoints(loop.run.checkpoints)]


def test_a_run_ends_when_its_last_checkpoint_is_on_disk_and_nothing_is_left_in_memory(tmp_path: Path) -> None:
    before = staged()
    loop = in_background(tmp_path)
    loop.train()
    loop.close()
    assert steps_of(loop) == [STEPS]
    verify(list_checkpoints(loop.run.checkpoints)[0])
    assert staged() == before


def test_a_system_without_files_in_memory_is_refused_before_the_directory_is_made(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load_recipe(Recipe, small.recipe, [f"run.directory={tmp_path / 'runs'}", "checkpoint.background=true"])
    monkeypatch.setattr(resume, "memory_directory", lambda: None)
    with pytest.raises(UserError, match=r"checkpoint.background: got true, but this system has no /dev/shm"):
        build_loop(wanted, TerminalObserver(Console(quiet=True), 2), resume=False, overwrite=False)
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_has_the_state_of_its_step_and_its_groups_stay_until_it_is_written(tmp_path: Path) -> None:
    """Step 3 is trained while the checkpoint of step 2 waits for its thread."""
    released, events = Event(), []
    writer = SerialExecutor("checkpoint")
    submit = writer.submit

    def waits(write: Callable[[], Any]) -> Future[Any]:
        return submit(lambda: (released.wait(60), write())[1])

    writer.submit = waits  # type: ignore[method-assign]
    loop = in_background(tmp_path, writer)
    step, checkpointed = loop.trainer.step, loop.journal.checkpointed

    def stepped(batch: Any) -> Any:
        if batch.step == 3:
            events.append(("step 3", steps_of(loop)))
            released.set()
        return step(batch)

    def recorded(number: int, oldest: int) -> None:
        events.append(("released", [number]))
        checkpointed(number, oldest)

    loop.trainer.step, loop.journal.checkpointed = stepped, recorded  # type: ignore[method-assign]
    loop.train()
    loop.close()
    assert events[0] == ("step 3", [])
    assert [event for event in events if event[0] == "released"] == [("released", [n]) for n in (2, 4, STEPS)]


def test_a_failure_to_write_is_raised_before_the_next_checkpoint_and_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = staged()
    loop = in_background(tmp_path)
    seal = resume.seal

    def full(directory: Path) -> None:
        if "000004" in directory.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(directory))
        seal(directory)

    monkeypatch.setattr(resume, "seal", full)
    with pytest.raises(StorageFault, match=r"the disk is full: .*the last good checkpoint is .*step_000002"):
        loop.train()
    loop.close()
    assert steps_of(loop) == [2]
    assert staged() == before
    monkeypatch.setattr(resume, "seal", seal)
    again = in_background(tmp_path)
    assert again.state.step == 2
    again.train()
    again.close()
    assert steps_of(again) == [STEPS]


def test_a_snapshot_that_does_not_fit_into_host_memory_is_removed(tmp_path: Path) -> None:
    before, loop = staged(), in_background(tmp_path)

    def full(directory: Path) -> None:
        (directory / "a part").write_bytes(bytes(10))
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

    loop.trainer.save = full  # type: ignore[method-assign]
    with pytest.raises(StorageFault, match=r"the disk is full: .*there is no checkpoint yet"):
        loop.train()
    loop.close()
    assert staged() == before


def test_the_end_of_a_run_waits_for_a_checkpoint_until_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs:
        def submit(self, write: Callable[[], Any]) -> Future[Any]:
            return Future()

    loop = in_background(tmp_path, Hangs())
    message = "the checkpoint of train step 2 was not written in 0 s; there is no checkpoint yet"
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "SAVE_S", 0.0)
        with pytest.raises(DeadlineExceeded, match=message):
            loop.train()
    loop.close()
    assert len(staged()) >= 1  # as after a kill
    left = staged()
    again = in_background(tmp_path)
    assert len(left - staged()) == 1
    again.train()
    again.close()
    assert steps_of(again) == [STEPS]


def test_the_dry_run_counts_twelve_bytes_for_each_parameter_that_waits(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64, "num_attention_heads": 2}
    model: ModelSpec = model_spec({**shape, "intermediate_size": 64, "num_key_value_heads": 1}, "qwen3")
    wanted = recipe(tmp_path, "sync", background=True)
    (found,) = [p for p in processes_of(wanted, model, on_cpu=True) if p.name == "the unwritten checkpoint"]
    assert found.num_bytes == pytest.approx(12 * model.params, rel=1e-3)
    assert not [p for p in processes_of(recipe(tmp_path, "sync"), model, on_cpu=True) if p.name == found.name]
    beside = processes_of(wanted, model, on_cpu=False)  # beside GPUs it needs the host's memory, and none of theirs
    (on_host,) = [p for p in beside if p.name == "the unwritten checkpoint in host memory"]
    assert on_host.on_host
    assert on_host.num_bytes == found.num_bytes
    assert needed_bytes(beside, on_cpu=False) == needed_bytes(
        processes_of(recipe(tmp_path, "sync"), model, on_cpu=False), on_cpu=False
    )
