"""Metrics by step, written to `metrics.jsonl` and TensorBoard, and to Weights & Biases if configured.

Names follow those of other RL trainers; docs/metrics.md lists them.
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
    """[log] where metrics go in addition to metrics.jsonl and TensorBoard, and the size of the trace."""

    wandb: str | None = None
    """Project of Weights & Biases that receives the metrics; WANDB_MODE=offline keeps them on disk."""

    trace: bool = True
    """Whether every lease, train step and publication is written to trace.jsonl, for `baton trace` and the
    report page."""
    trace_mb: int = Field(default=32, ge=1)
    """Maximum size of a run's trace, MB; a longer trace keeps its first half and its most recent part."""

    @field_validator("wandb")
    @classmethod
    def _is_installed(cls, project: str | None) -> str | None:
        if project == "":
            raise ValueError("allowed is the name of a project, or leave the key out")
        if project is not None and find_spec("wandb") is None:
            raise ValueError("Weights & Biases is not installed: run `pip install wandb`, or leave log.wandb out")
        return project


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step. A step may be written in several parts, and again after a resume."""

    def close(self) -> None:
        """Flush and close."""


class MetricsWriter:
    """Writes each row to every sink. When a run resumes from a checkpoint, later rows are cut."""

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int = 0,
        log: LogSettings | None = None,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the sinks of the run in `directory`, dropping rows later than `resume_step`.

        before_write: raises if this process may no longer write to the directory. Raises UserError if Weights & Biases
        is configured and does not start.
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
        """Flush `metrics.jsonl` to disk, so that its rows survive a power failure."""
        flush_to_disk(self._directory / ROWS)

    def close(self) -> None:
        """Close all sinks, also if one of them raises."""
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
    """`tensorboard/`: event files. Written synchronously, because a background thread would hide its errors."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar, first = Event, scalar, resume_step + 1
        self._directory = directory / "tensorboard"
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
            # the step is in the name because a resume within the same second would overwrite the file
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
    """A run of the same name at Weights & Biases; a resumed run continues the same one.

    A failure to start raises. Later failures are logged once and do not stop the run: `metrics.jsonl` has all metrics.
    """

    def __init__(self, directory: Path, project: str) -> None:
        """Start the run with the recipe in `directory`. Raises UserError if it does not start."""
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
        # W&B's own step may not decrease, but a step may be written in parts and again after a resume
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._is_broken = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._is_broken:
            return
        try:
            self._run.log({"step": step, **values})
        except Exception as error:  # noqa: BLE001  # no failure of W&B may stop the run
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
    """Return the run's id at Weights & Biases, generated at the first start and stored in the directory."""
    file = directory / "wandb_id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex[:12].encode())
    return file.read_text(encoding="utf-8")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl in order, without an incomplete last row; empty if there is no file."""
    return read_rows(directory / ROWS, dict[str, Any])
