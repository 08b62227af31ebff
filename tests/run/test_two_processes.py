"""Two processes on one run: the second is refused, and a run that lost its directory writes nothing more to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.console import Console
from baton.errors import RunTakenOver, UserError
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.metrics import read_metrics
from baton.run.assemble import build_loop
from baton.run.loop import Loop
from baton.views.terminal.progress import TerminalObserver
from tests.records.test_journal import issue
from tests.records.test_run_lock import from_elsewhere

pytestmark = pytest.mark.timing

ROOT = Path(__file__).parents[2]


def loop_of(small: Any, directory: Path, *, resume: bool = False, overwrite: bool = False) -> Loop:
    wanted = load_recipe(Recipe, small.recipe, [f"run.directory={directory}"])
    return build_loop(wanted, TerminalObserver(Console(quiet=True), 3), resume=resume, overwrite=overwrite)


def test_a_second_process_on_a_run_ends_with_the_name_of_the_first(small: Any, tmp_path: Path) -> None:
    first = loop_of(small, tmp_path)
    held = rf"{tmp_path / 'small'} is in use by process {os.getpid()} on "
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match=held):
            loop_of(small, tmp_path, **options)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    command = [sys.executable, "-m", "baton", "train", small.recipe, f"run.directory={tmp_path}", "--resume"]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert second.returncode == 2, second.stderr
    assert f"is in use by process {os.getpid()} on " in second.stderr.replace("\n", " ")
    assert "Traceback" not in second.stderr
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    first.close()
    loop_of(small, tmp_path, resume=True).close()


def test_a_run_whose_directory_another_machine_took_writes_neither_metrics_nor_journal(
    small: Any, tmp_path: Path
) -> None:
    loop = loop_of(small, tmp_path)
    from_elsewhere(loop.run.path)
    taken = pytest.raises(RunTakenOver, match=r"is held by process 4711 on other-host.*this process stops")
    with taken:
        loop.metrics.write(1, {"reward/mean": 1.0})
    issue(loop.journal, 1)
    with taken:
        loop.journal.commit()
    with taken:
        loop.close()
    assert read_metrics(loop.run.path) == []
