"""Two processes never write into one run's directory; a directory that is no run is never taken or removed."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.errors import RunTakenOver, UserError
from baton.files import atomic_directory
from baton.records.evaluation import Evaluation, Interval
from baton.records.journal import Journal
from baton.records.metrics import MetricsWriter, read_metrics
from baton.records.run_directory import RunDirectory
from baton.records.run_lock import LockHolder, RunLock
from tests.records.test_journal import issue

pytestmark = pytest.mark.timing

HOLD = """
import sys, time
from pathlib import Path
from baton.records.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def other_process(directory: Path) -> subprocess.Popen[str]:
    """A process that holds a directory until it is killed."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def from_elsewhere(directory: Path) -> LockHolder:
    """Take a directory over as a process on a machine that this one's locks do not reach."""
    before = msgspec.json.decode((directory / "holder.json").read_bytes(), type=LockHolder)
    after = LockHolder(before.epoch + 1, 4711, "other-host", "2026-01-01T00:00:00+00:00", ("baton", "train", "r.toml"))
    (directory / "holder.json").write_bytes(msgspec.json.encode(after))
    return after


def begun(path: Path) -> tuple[RunDirectory, RunLock]:
    lock = RunLock.take(path)
    run = RunDirectory.create(path, lock)
    run.write_start({"run": {"name": "r"}}, seed=1, threads=1)
    return run, lock


def test_a_lock_that_a_starting_child_holds_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed while it starts a program: until the program's exec, a copy of the lock's file is open."""
    copy = (tmp_path / "lock").open("ab")
    fcntl.flock(copy, fcntl.LOCK_EX)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            copy.close()

    monkeypatch.setattr("baton.records.run_lock.time.sleep", sleep)
    RunLock.take(tmp_path).release()
    assert len(waits) == 3


def test_a_second_process_is_refused_with_the_first_ones_name_until_that_is_dead(tmp_path: Path) -> None:
    child = other_process(tmp_path / "r")
    try:
        said = rf"in use by process {child.pid} on .*, since 20\d\d-.*: -c .*; wait until it ends"
        with pytest.raises(UserError, match=said):
            RunLock.take(tmp_path / "r")
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
    lock = RunLock.take(tmp_path / "r")
    lock.check()
    lock.release()
    assert not (tmp_path / "r").exists() or not (tmp_path / "r" / "holder.json").exists(), "no run was begun in it"


def test_a_process_is_refused_also_by_itself_and_not_after_it_let_go(tmp_path: Path) -> None:
    _, lock = begun(tmp_path / "r")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        RunLock.take(tmp_path / "r")
    lock.release()
    lock.release()
    again = RunLock.take(tmp_path / "r")
    again.release()
    assert msgspec.json.decode((tmp_path / "r" / "holder.json").read_bytes(), type=LockHolder).epoch == 2


def test_every_durable_write_stops_where_another_machine_has_taken_over(tmp_path: Path) -> None:
    run, lock = begun(tmp_path / "r")
    journal = Journal(run.journal, keeps_partials=True, before_commit=lock.check)
    metrics = MetricsWriter(run.path, before_write=lock.check)
    from_elsewhere(run.path)
    taken = pytest.raises(
        RunTakenOver, match=r"is held by process 4711 on other-host, since 2026.*: baton train r.toml"
    )
    with taken:
        metrics.write(1, {"a": 1.0})
    with taken:
        run.write_groups(1, [])
    half = Interval(0.5, 0.4, 0.6)
    with taken:
        run.write_evaluation(1, [Evaluation("t", 1, 1, 1.0, half, half, 1.0, 0.0)])
    with taken:
        run.cut_after(0)
    with taken, atomic_directory(run.checkpoints / "step_000001", before_rename=run.check_held) as directory:
        (directory / "f").write_bytes(b"1")
    issue(journal, 1)
    with taken:
        journal.commit()
    with taken:
        RunDirectory.create(run.path, lock)
    assert read_metrics(run.path) == []
    assert run.recorded_steps() == []
    assert list(run.checkpoints.iterdir()) == []
    assert (run.path / "run.json").exists()
    holder = (run.path / "holder.json").read_bytes()
    lock.release()
    assert (run.path / "holder.json").read_bytes() == holder, "what is another's stays"


def test_a_directory_that_another_machine_left_is_taken_over_with_a_warning(tmp_path: Path) -> None:
    _, lock = begun(tmp_path / "r")
    from_elsewhere(tmp_path / "r")
    lock.release()
    said: list[str] = []
    taken = RunLock.take(tmp_path / "r", said.append)
    taken.check()
    (line,) = said
    assert re.search(r"was held by process 4711 on other-host.*it stops at its next write", line)
    taken.release()


def test_an_unreadable_holder_is_taken_over(tmp_path: Path) -> None:
    _, lock = begun(tmp_path / "r")
    (tmp_path / "r" / "holder.json").write_bytes(b"")
    with pytest.raises(RunTakenOver, match=r"held by an unknown process, because holder\.json cannot be read"):
        lock.check()
    lock.release()
    RunLock.take(tmp_path / "r").release()


def test_a_directory_that_is_no_run_is_neither_used_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"is not empty and not a run \(thesis.tex\): choose another run.name"):
            RunDirectory.check_free(tmp_path / "r", overwrite=overwrite)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a directory"):
        RunDirectory.check_free(tmp_path / "file", overwrite=True)
    (tmp_path / "r" / "run.json").write_text("{}")  # of some other program
    with pytest.raises(UserError, match="lacks seed, resumed or command"):
        RunDirectory.check_free(tmp_path / "r", overwrite=True)


def test_overwriting_removes_a_run_and_keeps_the_lock(tmp_path: Path) -> None:
    run, lock = begun(tmp_path / "r")
    run.write_groups(1, [])
    (run.path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.check_free(run.path, overwrite=False)
    RunDirectory.check_free(run.path, overwrite=True)
    again = RunDirectory.create(run.path, lock)
    assert sorted(entry.name for entry in run.path.iterdir()) == ["holder.json", "lock"]
    again.write_start({}, seed=1, threads=1)
    with pytest.raises(UserError, match="in use by process"):
        RunLock.take(run.path)
    lock.release()


def test_what_a_start_left_that_died_before_its_run_began_is_no_obstacle(tmp_path: Path) -> None:
    child = other_process(tmp_path / "r")
    (tmp_path / "r" / "recipe.toml").write_text("")
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    RunDirectory.check_free(tmp_path / "r", overwrite=False)
    _, lock = begun(tmp_path / "r")
    lock.release()
