"""Numbers reach every sink, a resume cuts what came after its checkpoint, and W&B can never stop a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.metrics import LogSettings, MetricsWriter, read_metrics, start_wandb

pytestmark = pytest.mark.timing


class FakeWandb(ModuleType):
    """Remembers what it was told; fails where a test says so."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.errors = SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.finished = 0
        self.fault: Exception | None = None

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def init(self, **arguments: Any) -> FakeWandb:
        self._raise()
        self.inits.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, row: dict[str, float]) -> None:
        self._raise()
        self.rows.append(row)

    def finish(self) -> None:
        self._raise()
        self.finished += 1

    def _raise(self) -> None:
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    fake.__spec__ = SimpleNamespace(name="wandb")  # type: ignore[assignment]
    return fake


def test_a_row_is_an_object_with_its_step_and_a_step_may_have_several(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, resume_step=-1)
    writer.write(0, {"eval/all/greedy": 0.25})
    writer.write(1, {"reward/mean": 0.5, "time/train": 2.0})
    writer.write(1, {"eval/all/greedy": 0.75})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step":0,"eval/all/greedy":0.25}',
        '{"step":1,"reward/mean":0.5,"time/train":2.0}',
        '{"step":1,"eval/all/greedy":0.75}',
    ]


def test_rows_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, resume_step=-1)
    writer.write(1, {"reward/mean": 0.5})
    assert read_metrics(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":2,"reward/me')  # the process dies within a row
    assert read_metrics(tmp_path) == [{"step": 1, "reward/mean": 0.5}]


def test_a_run_without_rows_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_a_resume_cuts_the_rows_after_its_checkpoint_and_keeps_the_others(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, resume_step=-1)
    for step in range(5):
        writer.write(step, {"reward/mean": step / 10})
    writer.close()
    resumed = MetricsWriter(tmp_path, resume_step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    resumed.write(3, {"reward/mean": 0.9})
    resumed.close()
    assert [row["reward/mean"] for row in read_metrics(tmp_path)] == [0.0, 0.1, 0.2, 0.9]


def test_tensorboard_shows_the_same_numbers_and_forgets_what_a_resume_cut(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(tmp_path, resume_step=-1)
    for step in range(5):
        writer.write(step, {"reward/mean": step / 8})
    writer.close()
    resumed = MetricsWriter(tmp_path, resume_step=2)
    resumed.write(3, {"reward/mean": 0.875})
    resumed.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.875)]


def test_wandb_receives_every_row_with_its_step_and_the_recipe(tmp_path: Path, wandb: FakeWandb) -> None:
    started = start_wandb(tmp_path, LogSettings(wandb="arithmetic"), {"run": {"seed": 7}}, is_new=True)
    writer = MetricsWriter(tmp_path, resume_step=-1, wandb=started)
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    assert wandb.rows == [{"step": 1, "reward/mean": 0.5}]
    assert wandb.finished == 1
    start = wandb.inits[0]
    assert (start["project"], start["name"], start["config"]) == ("arithmetic", tmp_path.name, {"run": {"seed": 7}})


def test_without_the_key_wandb_is_not_touched(tmp_path: Path, wandb: FakeWandb) -> None:
    assert start_wandb(tmp_path, LogSettings(), {}, is_new=True) is None
    writer = MetricsWriter(tmp_path, resume_step=-1, log=LogSettings())
    writer.write(1, {"reward/mean": 0.5})
    writer.close()
    assert (wandb.inits, wandb.rows, wandb.finished) == ([], [], 0)


def test_loggers_are_chosen_by_name(tmp_path: Path, wandb: FakeWandb) -> None:
    for name, loggers in (("none", ()), ("tensorboard", ("tensorboard",)), ("wandb", ("wandb",))):
        (tmp_path / name).mkdir()
        log = LogSettings(loggers=loggers)
        started = start_wandb(tmp_path / name, log, {}, is_new=True)
        MetricsWriter(tmp_path / name, log=log, wandb=started).close()
        assert (tmp_path / name / "tensorboard").is_dir() == (name == "tensorboard")
    assert [(start["project"], start["name"]) for start in wandb.inits] == [("baton", "wandb")]


def test_a_resumed_run_goes_on_in_the_same_place_and_another_run_does_not(tmp_path: Path, wandb: FakeWandb) -> None:
    for directory, is_new in (("a", True), ("a", False), ("a", True), ("b", False)):
        (tmp_path / directory).mkdir(exist_ok=True)
        started = start_wandb(tmp_path / directory, LogSettings(wandb="p"), {}, is_new=is_new)
        MetricsWriter(tmp_path / directory, wandb=started).close()
    first, resumed, overwritten, other = (start["id"] for start in wandb.inits)
    assert first == resumed
    assert len({first, overwritten, other}) == 3
    assert (tmp_path / "a" / "wandb_id").read_text() == overwritten


@pytest.mark.parametrize("fault", [ConnectionError("gone"), RuntimeError("odd")])
def test_wandb_that_fails_in_the_middle_is_said_once_and_stops_nothing(
    tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    started = start_wandb(tmp_path, LogSettings(wandb="p"), {}, is_new=True)
    writer = MetricsWriter(tmp_path, resume_step=-1, wandb=started)
    writer.write(1, {"reward/mean": 0.1})
    wandb.fault = fault
    with caplog.at_level(logging.WARNING, logger="baton"):
        for step in (2, 3):
            writer.write(step, {"reward/mean": 0.2})
        writer.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert [record.message.count("from step 2 on") for record in caplog.records] == [1]


def test_wandb_that_fails_at_the_end_stops_nothing(
    tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    started = start_wandb(tmp_path, LogSettings(wandb="p"), {}, is_new=True)
    writer = MetricsWriter(tmp_path, resume_step=-1, wandb=started)
    wandb.fault = ConnectionError("gone")
    with caplog.at_level(logging.WARNING, logger="baton"):
        writer.close()
    assert "at the end" in caplog.text


def test_wandb_that_does_not_start_says_what_to_do(tmp_path: Path, wandb: FakeWandb) -> None:
    login = wandb.errors.Error("No API key configured. Use `wandb login` to log in.")
    for fault in (login, ValueError("1 validation error for Settings\nmode\n  Input should be 'online', wandb login")):
        wandb.fault = fault
        with pytest.raises(UserError, match=r"^Weights & Biases did not start: .*wandb login.*WANDB_MODE=offline"):
            start_wandb(tmp_path, LogSettings(wandb="p"), {}, is_new=True)


def test_wandb_that_is_not_installed_is_one_sentence_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.records.metrics.find_spec", lambda name: None)
    file = tmp_path / "r.toml"
    file.write_text('[run]\nname = "r"\n[model]\npath = "m"\n[[task]]\nname = "chain_sum"\n[log]\nwandb = "p"\n')
    with pytest.raises(UserError) as caught:
        load_recipe(Recipe, file)
    assert str(caught.value).count("\n") == 0
    assert "log.wandb: got 'p', Weights & Biases is not installed: run `pip install wandb`" in str(caught.value)


OFFLINE = """
import sys
from pathlib import Path
from baton.records.metrics import LogSettings, MetricsWriter, start_wandb

directory = Path(sys.argv[1])
started = start_wandb(directory, LogSettings(wandb="p"), {}, is_new=True)
writer = MetricsWriter(directory, resume_step=-1, wandb=started)
writer.write(1, {"reward/mean": 0.5})
writer.write(1, {"eval/all/greedy": 0.25})
writer.close()
"""


@pytest.mark.slow
def test_the_real_wandb_writes_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    # in a process of its own: offline, W&B may write until the process ends
    environment = {**os.environ, "WANDB_MODE": "offline"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    run_id = (tmp_path / "wandb_id").read_text()
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    assert b"reward/mean" in content
    assert b"eval/all/greedy" in content
