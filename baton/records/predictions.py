"""Predictions of a plan or a simulation for a run, and their comparison with the metrics of the run.

A run writes its predictions to predictions.json, and reads the file only at its start. `compare` gets the predictions
and the rows of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from baton.errors import Damaged
from baton.files import write_whole

FILE = "predictions.json"
TOLERANCE = 0.15
"""A term is off if the measured value differs from the predicted value by more than this fraction, or, for shares, by
more than this difference."""
WARM_SHARE = 0.2
"""Share of the train steps at the start of the run that the measured means exclude."""

Row = Mapping[str, float]


def _generation_s(row: Row) -> float:
    return row["time/generate"] + row.get("time/generate_hidden", 0.0)


TERMS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "step": ("s", lambda row: row["perf/step_time"]),
    "generation": ("s", _generation_s),
    "training": ("s", lambda row: row["time/train"]),
    "transfer": ("s", lambda row: row.get("swarm/broadcast_s", row["time/weight_sync"])),
    "staleness": ("versions", lambda row: row["staleness/mean"]),
    "trainer memory": ("bytes", lambda row: row["perf/trainer_peak_bytes"]),
    "trainer idle": ("share", lambda row: 1 - row["time/train"] / row["perf/step_time"]),
    "engine slots idle": (
        "share",
        lambda row: 1 - row["perf/slot_occupancy"] * _generation_s(row) / row["perf/step_time"],
    ),
    "response length": ("tokens", lambda row: row["response_length/mean"]),
}
"""Name → (unit, function of a row of metrics). The function raises KeyError if the row lacks a metric. The response
length is an input of the predictions: a difference in it explains differences of other terms."""


class Prediction(msgspec.Struct, frozen=True):
    """A predicted value of one of the TERMS."""

    term: str
    value: float


class Predictions(msgspec.Struct, frozen=True):
    """The predictions for a run."""

    source: str
    """The plan or the calibration from which the predictions come."""
    terms: tuple[Prediction, ...]
    after_step: int = 0
    """The predictions apply to train steps after this one."""

    def of(self, term: str) -> float | None:
        return next((each.value for each in self.terms if each.term == term), None)


class Comparison(msgspec.Struct, frozen=True):
    """The predicted and the measured value of one term; None if unknown."""

    term: str
    unit: str
    predicted: float | None
    measured: float | None
    """Mean over train steps; for memory, the maximum."""

    error: float | None
    """Measured value divided by predicted value, minus 1. For shares, and if the prediction is 0: the difference."""
    is_off: bool
    """Whether the error exceeds the TOLERANCE."""


def compare(predictions: Predictions, rows: Sequence[Row]) -> tuple[Comparison, ...]:
    """Compare predictions with the metrics of a run. Rows of evaluations and the first train steps are excluded."""
    steps = [row for row in rows if "perf/step_time" in row and row["step"] > predictions.after_step]
    steps = steps[max(min(1, len(steps) - 1), int(WARM_SHARE * len(steps))) :] if steps else []
    found = []
    for term, (unit, of) in TERMS.items():
        predicted, measured, error = predictions.of(term), _measured(steps, unit, of), None
        if predicted is not None and measured is not None:
            error = measured - predicted if unit == "share" or not predicted else measured / predicted - 1
        found.append(Comparison(term, unit, predicted, measured, error, error is not None and abs(error) > TOLERANCE))
    return tuple(found)


def ratios(predictions: Predictions, row: Row) -> dict[str, float]:
    """Return the quotient measured / predicted as a metric, for each term that has both values."""
    found = ((each, _measured([row], *TERMS[each.term])) for each in predictions.terms)
    return {
        f"measured_over_predicted/{each.term.replace(' ', '_')}": value / each.value
        for each, value in found
        if value is not None and each.value
    }


def _measured(rows: Sequence[Row], unit: str, of: Callable[[Row], float]) -> float | None:
    values = []
    for row in rows:
        try:
            values.append(of(row))
        except (KeyError, TypeError):  # not measured; a value that is not finite is read as None
            continue
    if not values:
        return None
    return max(values) if unit == "bytes" else sum(values) / len(values)


class RunPredictions:
    """The predictions of an open run. The run does not read changes that others make to the file."""

    def __init__(self, directory: Path, current: Predictions | None) -> None:
        self.current = current
        self._directory = directory

    def replace(self, predictions: Predictions, after_step: int) -> None:
        """Write predictions for the train steps after the given one, unless the run already has equal predictions."""
        old = self.current
        if old is None or (old.source, old.terms) != (predictions.source, predictions.terms):
            self.current = msgspec.structs.replace(predictions, after_step=after_step)
            write_whole(self._directory / FILE, msgspec.json.format(msgspec.json.encode(self.current)) + b"\n")


def read_predictions(directory: Path) -> Predictions | None:
    """Return the predictions of a run; None if it has none. Raises Damaged if they cannot be read."""
    file = directory / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Predictions) if file.is_file() else None
    except msgspec.DecodeError as error:
        raise Damaged(f"{file} cannot be read: {error}; delete it to continue without predictions") from error
