"""Writes the metrics of each step to `metrics.jsonl` and to the loggers of the recipe: TensorBoard, Weights & Biases.

docs/metrics.md lists the names of the metrics, which follow the names in other RL trainers.
"""

from __future__ import annotations

import importlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import field_validator

from baton.errors import UserError
from baton.files import append, flush_to_disk, read_rows, write_whole, writing
from baton.settings import Settings

logger = logging.getLogger(__name__)
ROWS = "metrics.jsonl"
WANDB_ID = "wandb_id"
"""File with the run's id at Weights & Biases."""


class LogSettings(Settings):
    """[log] Where metrics are sent, and whether a trace is written."""

    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Loggers that receive the metrics in addition to metrics.jsonl. tensorboard: files in the run's directory. wandb:
    Weights & Biases; if the environment variable WANDB_MODE is `offline`, the metrics stay on disk."""
    wandb: str | None = None
    """Project at Weights & Biases; the default is "baton". If this key is set, `loggers` need not contain wandb."""

    trace: bool = True
    """True: write every lease, train step and publication to trace.jsonl, for `baton trace` and the report page."""

    @field_validator("loggers", "wandb")
    @classmethod
    def _is_installed(cls, given: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        if given == "":
            raise ValueError("got an empty string; set the name of a project, or remove the key")
        is_used = "wandb" in given if isinstance(given, tuple) else given is not None
        if is_used and find_spec("wandb") is None:
            raise ValueError("Weights & Biases is not installed: run `pip install wandb`, or remove wandb from [log]")
        return given

    @property
    def wandb_project(self) -> str | None:
        """Project at Weights & Biases that receives the metrics; None if they are not sent there."""
        return self.wandb or ("baton" if "wandb" in self.loggers else None)


class MetricsWriter:
    """Writes the metrics of each step to metrics.jsonl (JSON lines) and to the loggers of the recipe (sinks)."""

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int = 0,
        log: LogSettings | None = None,
        before_write: Callable[[], None] = lambda: None,
        wandb: WeightsAndBiases | None = None,
    ) -> None:
        """Open the sinks of the run in `directory`, and remove the rows of steps after `resume_step`. `before_write`:
        called before each write; raises if another process has taken over the directory. `wandb`: from
        `start_wandb`."""
        self._directory, self._before_write = directory, before_write
        log = log or LogSettings()
        kept = [row for row in read_metrics(directory) if row["step"] <= resume_step]
        write_whole(directory / ROWS, b"".join(msgspec.json.encode(row) + b"\n" for row in kept))
        self._sinks: list[TensorBoard | WeightsAndBiases] = []
        if "tensorboard" in log.loggers:
            self._sinks.append(TensorBoard(directory, resume_step))
        if wandb is not None:
            self._sinks.append(wandb)
            write_whole(directory / WANDB_ID, wandb.id.encode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append metrics of one step as a row. A step may have several rows."""
        self._before_write()
        append(self._directory / ROWS, msgspec.json.encode({"step": step, **values}) + b"\n")
        for sink in self._sinks:
            sink.write(step, values)

    def flush(self) -> None:
        """Flush `metrics.jsonl` to disk, so that its rows survive a power failure."""
        flush_to_disk(self._directory / ROWS)

    def close(self) -> None:
        """Close all sinks, even if one of them raises an error."""
        with ExitStack() as sinks:
            for sink in self._sinks:
                sinks.callback(sink.close)


class TensorBoard:
    """Sink that writes to `tensorboard/` in the calling thread, because a writer thread would hide errors."""

    def __init__(self, directory: Path, resume_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar, first = Event, scalar, resume_step + 1
        self._directory = directory / "tensorboard"
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
            # the file name includes the step: a resume within the same second would otherwise overwrite the file
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
    """Sink that writes to a run at Weights & Biases. That run has the name of Baton's run, and continues when Baton's
    run is resumed. If a write fails, the failure is logged once, and Baton's run continues without Weights & Biases,
    because metrics.jsonl has all metrics."""

    def __init__(self, directory: Path, project: str, run_id: str, recipe: Mapping[str, Any]) -> None:
        """Start or continue the run `run_id` at Weights & Biases. Raises UserError if this fails."""
        wandb, self.id, self._is_closed = importlib.import_module("wandb"), run_id, False
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                id=run_id,
                resume="allow",
                dir=str(directory),
                config=recipe,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.Error, ValueError) as error:  # ValueError: an environment variable has an invalid value
            raise UserError(
                f"Weights & Biases did not start: {' '.join(str(error).split())} "
                "To run without it, set WANDB_MODE=offline, which keeps its files on disk, or remove wandb from [log]"
            ) from error
        # the x-axis is a separate metric: W&B's own step must not decrease, but a resumed run writes steps again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._is_broken = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._attempt(f"from step {step} on", lambda: self._run.log({"step": step, **values}))

    def close(self) -> None:
        """End the run at Weights & Biases. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._attempt("at the end", self._run.finish)

    def _attempt(self, when: str, call: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a failure of W&B must not stop the run
            self._is_broken = True
            logger.warning(
                "Weights & Biases failed and receives no more metrics %s (%s: %s); metrics.jsonl has all metrics",
                when,
                type(error).__name__,
                error,
            )


def start_wandb(
    directory: Path, log: LogSettings, recipe: Mapping[str, Any], *, is_new: bool
) -> WeightsAndBiases | None:
    """Start the run at Weights & Biases; return None if the recipe does not use it. Writes only to the directory
    `wandb`. If Baton's run is not new, continue the run at Weights & Biases whose id `MetricsWriter` has stored. Raises
    UserError if Weights & Biases cannot start."""
    if log.wandb_project is None:
        return None
    file = directory / WANDB_ID
    run_id = uuid.uuid4().hex[:12] if is_new or not file.exists() else file.read_text(encoding="utf-8")
    return WeightsAndBiases(directory, log.wandb_project, run_id, recipe)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl; empty without the file. Omits an incomplete last row."""
    return read_rows(directory / ROWS, dict[str, Any])
