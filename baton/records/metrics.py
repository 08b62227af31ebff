"""Numbers by step, written to every sink: `metrics.jsonl` and TensorBoard always, Weights & Biases when asked for.

Names follow the set that users of other trainers look for; docs/metrics.md lists them.
"""

from __future__ import annotations

import importlib
import logging
import time
import tomllib
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import Field, field_validator

from baton.errors import UserError
from baton.files import append, flush_to_disk, read_rows, write_whole, writing
from baton.settings import Settings

logger = logging.getLogger(__name__)
ROWS = "metrics.jsonl"


class LogSettings(Settings):
    """[log] where metrics go besides metrics.jsonl and TensorBoard, and how much is kept of who did what when."""

    wandb: str | None = None
    """Project of Weights & Biases that receives the metrics; WANDB_MODE=offline keeps them on disk."""

    trace: bool = True
    """Whether every lease, train step and publication is written to trace.jsonl, for `baton trace` and the page."""
    trace_mb: int = Field(default=32, ge=1)
    """MB that the trace of a run may take; of a longer one the first half is kept, and the end."""

    @field_validator("wandb")
    @classmethod
    def _is_installed(cls, project: str | None) -> str | None:
        if project == "":
            raise ValueError("allowed is the name of a project, or leave the key out")
        if project is not None and find_spec("wandb") is None:
            raise ValueError("Weights & Biases is not installed: run `pip install wandb`, or leave log.wandb out")
        return project


class Sink(Protocol):
    """Where metrics go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step; a step may come in several parts, and again after a resume."""

    def close(self) -> None:
        """Bring everything to its place."""


class MetricsWriter:
    """Writes each row to every sink. Rows after a checkpoint are cut when a run is resumed from it."""

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int = 0,
        log: LogSettings | None = None,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the sinks of the run in `directory`, dropping rows later than `resume_step`.

        before_write: raises where this process may no longer write there.
        Raises UserError when Weights & Biases is asked for and does not start.
        """
        self._directory, self._before_write = directory, before_write
        self._sinks: list[Sink] = [JsonLines(directory, resume_step), TensorBoard(directory, resume_step)]
        if log is not None and log.wandb is not None:
            self._sinks.append(WeightsAndBiases(directory, log.wandb))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of one step; a step may be written in several rows."""
        self._before_write()
        for sink in self._sinks:
            sink.write(step, values)

    def flush(self) -> None:
        """Have the rows written so far outlive a power cut."""
        flush_to_disk(self._directory / ROWS)

    def close(self) -> None:
        """Flush and close."""
        with ExitStack() as sinks:
            for sink in self._sinks:
                sinks.callback(sink.close)


class JsonLines:
    """`metrics.jsonl`: one object per row."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        self._file = directory / ROWS
        kept = [row for row in read_metrics(directory) if row["step"] <= resume_step]
        write_whole(self._file, b"".join(msgspec.json.encode(row) + b"\n" for row in kept))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        append(self._file, msgspec.json.encode({"step": step, **values}) + b"\n")

    def close(self) -> None:
        pass


class TensorBoard:
    """`tensorboard/`: event files. Written at once, as a thread that writes later would hide its errors."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar, first = Event, scalar, resume_step + 1
        self._directory = directory / "tensorboard"
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
            # with the step in its name, else a resume within the second would write over its predecessor
            self._file = EventsWriter(str(self._directory / "events"), f".from_{first:06d}")
            self._file.write_event(Event(step=first, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        event = self._event(step=step, wall_time=time.time())
        for name, value in values.items():
            event.summary.value.extend(self._scalar(name, value).value)
        with writing(self._directory):
            self._file.write_event(event)
            self._file.flush()

    def close(self) -> None:
        with writing(self._directory):
            self._file.close()


class WeightsAndBiases:
    """A run of the same name at Weights & Biases; a resumed run goes on in the same place.

    It has to start, but what goes wrong later is said once and does not stop the run: `metrics.jsonl` has everything.
    """

    def __init__(self, directory: Path, project: str) -> None:
        """Start the run with the recipe that lies in `directory`. Raises UserError when it does not start."""
        wandb = importlib.import_module("wandb")
        recipe = directory / "recipe.toml"
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                id=_wandb_id(directory),
                resume="allow",
                dir=str(directory),
                config=tomllib.loads(recipe.read_text(encoding="utf-8")) if recipe.exists() else None,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"Weights & Biases did not start: {str(error).strip()} "
                "Or set WANDB_MODE=offline to keep its files on disk, or leave log.wandb out"
            ) from error
        # steps may come in parts and, after a resume, again: W&B's own step could not go back
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._is_broken = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._is_broken:
            return
        try:
            self._run.log({"step": step, **values})
        except Exception as error:  # noqa: BLE001  # whatever breaks in there, the run must not
            self._break(error, f"from step {step} on")

    def close(self) -> None:
        if self._is_broken:
            return
        try:
            self._run.finish()
        except Exception as error:  # noqa: BLE001  # as above
            self._break(error, "at the end")

    def _break(self, error: Exception, when: str) -> None:
        self._is_broken = True
        logger.warning(
            "Weights & Biases failed and gets no more metrics %s (%s: %s); metrics.jsonl has all of them",
            when,
            type(error).__name__,
            error,
        )


def _wandb_id(directory: Path) -> str:
    """Return the id of a run at Weights & Biases, made at its start and kept beside it."""
    file = directory / "wandb_id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex[:12].encode())
    return file.read_text(encoding="utf-8")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl, in order; a half-written last row is left out, and there may be none yet."""
    return read_rows(directory / ROWS, dict[str, Any])
