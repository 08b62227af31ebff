"""Whatever file of a run is damaged: a command succeeds, with a warning where it matters, or says one sentence.

A run is killed at its sixth step, after checkpoints of its fourth and fifth; then each file is emptied, cut in half, or
has one bit flipped, and the run is resumed, evaluated, shown and reported.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.errors import BatonError, Damaged
from baton.recipe.recipe import Recipe
from baton.records.run_directory import RunDirectory
from baton.records.trace import read_trace
from baton.run.assemble import build_loop, evaluate_recipe, evaluated_model
from baton.run.summary import summarise
from baton.run.trajectories import read_trajectories
from baton.types import SamplingParams
from baton.views.pages.report import write_page
from baton.views.terminal.progress import TerminalObserver
from tests.fork_server import exit_code_of, start_process
from tests.run.stopping import StopWhen
from tests.run.test_resume import recipe, tiny_model

__all__ = ["tiny_model"]

WARNS = ("warning", "damaged")


class Ears(TerminalObserver):
    """Remembers what is said."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), 9)
        self.on_reports: list[str] = []

    def said(self, text: str) -> None:
        self.on_reports.append(text)


def _die_in_sixth_step(wanted: Recipe) -> None:
    steps = wanted.run.path / "trajectories"
    stop = StopWhen(lambda: (steps / "step_000005.jsonl.gz").exists())
    loop = build_loop(wanted, Ears(), resume=False, overwrite=False, stop=stop)
    loop.train()
    loop.close()
    loop = build_loop(wanted, Ears(), resume=True, overwrite=False)
    loop.trainer.step = lambda batch: os._exit(7)  # type: ignore[method-assign]
    loop.train()


@pytest.fixture(scope="module")
def killed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run that was killed within its sixth step, with a log of its journal that SQLite has not taken over yet."""
    wanted = recipe(tiny_model, tmp_path_factory.mktemp("killed"), eval__every=0, eval__num_prompts=2)
    assert exit_code_of(start_process(_die_in_sixth_step, wanted)) == 7
    assert RunDirectory(wanted.run.path).recorded_steps() == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (wanted.run.path / "checkpoints").iterdir()) == ["step_000004", "step_000005"]
    assert (wanted.run.path / "journal.sqlite-wal").stat().st_size
    return wanted


def emptied(data: bytes) -> bytes:
    return b""


def halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def resumed(wanted: Recipe) -> list[str]:
    """Resume for two steps; return what was said."""
    ears = Ears()
    steps = wanted.run.path / "trajectories"
    loop = build_loop(
        wanted,
        ears,
        resume=True,
        overwrite=False,
        stop=StopWhen(lambda: (steps / "step_000007.jsonl.gz").exists()),
    )
    try:
        loop.train()
    finally:
        loop.close()
    ids = [group.group_id for step in range(1, 8) for group in loop.run.groups(step)]
    assert len(set(ids)) == len(ids), "a group was trained twice"
    return ears.on_reports


def evaluated(wanted: Recipe) -> list[str]:
    handler = logging.Handler()
    heard: list[str] = []
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("baton")
    logger.addHandler(handler)
    try:
        evaluate_recipe(*evaluated_model(wanted.run.path, None), SamplingParams(0), num_prompts=1)
    finally:
        logger.removeHandler(handler)
    return heard


def shown(wanted: Recipe) -> list[str]:
    for step in range(1, 7):
        read_trajectories(wanted.run.path, step, limit=1)
    return []


def reported(wanted: Recipe) -> list[str]:
    run = RunDirectory.open(wanted.run.path)
    summarise(run)
    write_page(run, wanted.run.path / "report.html")
    return []


def traced(wanted: Recipe) -> list[str]:
    read_trace(RunDirectory.open(wanted.run.path).path)
    return []


def commands_for(name: str) -> list[Any]:
    """Those that read a file of this name."""
    folder, _, file = name.rpartition("/")
    if folder.startswith("checkpoints/step_000004"):
        return []  # is not read while the later one is whole
    if folder.startswith("checkpoints"):
        return [resumed, evaluated]
    if folder == "trajectories":
        return {"step_000001.jsonl.gz": [shown, reported], "step_000006.jsonl.gz": [resumed]}.get(file, [shown])
    if folder == "tokenizer" or folder.startswith("tokenizer/"):
        return [shown]
    if name.startswith("journal") or folder == "tensorboard":
        return [resumed]
    return [shown, reported, traced, evaluated, resumed]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [emptied, halved, flipped])
def test_no_damaged_file_ends_in_a_traceback_or_is_taken_for_a_good_one(
    killed: Recipe, tmp_path: Path, damage: Any
) -> None:
    wrong: list[str] = []
    source = killed.run.path
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    assert {"journal.sqlite-wal", "run.json", "checkpoints/step_000005/baton/optimizer.safetensors"} <= set(names)
    wanted = killed.model_copy(update={"run": killed.run.model_copy(update={"directory": str(tmp_path / "runs")})})
    for name in names:
        data = (source / name).read_bytes()
        if not data:
            continue
        for command in commands_for(name):
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
            shutil.copytree(source, wanted.run.path)
            (wanted.run.path / name).write_bytes(damage(data))
            try:
                heard = command(wanted)
            except BatonError as error:
                if not str(error):
                    wrong.append(f"{command.__name__} {name}: no sentence")
            except Exception as error:  # noqa: BLE001 - which is what is looked for
                wrong.append(f"{command.__name__} {name}: {type(error).__name__}: {error}")
            else:
                is_read = name.startswith("checkpoints/step_000005/") or (
                    name == "journal.sqlite" and command is resumed
                )
                if is_read and not any(word in line for line in heard for word in WARNS):
                    wrong.append(f"{command.__name__} {name}: taken for a good one")
    assert not wrong, "\n".join(wrong)


def test_a_recipe_that_was_cut_at_a_line_is_damaged_or_enough_for_a_report(tmp_path: Path) -> None:
    path = tmp_path / "async"
    shutil.copytree(Path(__file__).parent / "golden" / "run" / "runs" / "async", path)
    run = RunDirectory.open(path)
    lines = (path / "recipe.toml").read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        (path / "recipe.toml").write_text("".join(lines[:kept]))
        try:
            run.recipe()
        except Damaged:
            continue
        break
    assert 1 < kept < len(lines) - 1
    summarise(run)
    write_page(run, path / "report.html")
