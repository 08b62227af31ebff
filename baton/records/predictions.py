"""Predictions of a plan or a simulation for a run, and their comparison with the metrics of the run.

A run writes its predictions to predictions.json, and reads this file only when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from baton.errors import Damaged
from baton.files import write_whole

FILE = "predictions.json"
MEMORY = "trainer memory"
"""Name of the term whose prediction depends on the number of tokens of the run's largest microbatch."""
TOLERANCE = 0.15
"""Maximum absolute value of `Comparison.error` for a prediction that counts as correct."""
WARM_SHARE = 0.2
"""This fraction of a run's train steps, at the start of the run, is excluded from means of measured values."""

Row = Mapping[str, float]


def generation_s(row: Row) -> float:
    """Return for how many seconds of a train step trajectories were running."""
    return row["time/generate"] + row.get("time/generate_hidden", 0.0)


TERMS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "step": ("s", lambda row: row["perf/step_time"]),
    "generation": ("s", generation_s),
    "rewards": ("s", lambda row: row["time/judge"]),
    "training": ("s", lambda row: row["time/train"]),
    "transfer": ("s", lambda row: row.get("swarm/broadcast_s", row["time/weight_sync"])),
    "staleness": ("versions", lambda row: row["staleness/mean"]),
    MEMORY: ("bytes", lambda row: row["perf/trainer_peak_bytes"]),
    "trainer idle": ("share", lambda row: 1 - row["time/train"] / row["perf/step_time"]),
    "engine slots idle": (
        "share",
        lambda row: 1 - row.get("perf/slot_occupancy", 0.0) * generation_s(row) / row["perf/step_time"],
    ),
    "reward model idle": ("share", lambda row: 1 - row["time/reward_model_busy"] / row["perf/step_time"]),
    "response length": ("tokens", lambda row: row["response_length/mean"]),
}
"""Name of a predicted term → its unit, and a function that computes its measured value from a row of metrics. The
function raises KeyError if the row lacks a metric. The response length is an input of the other predictions: if the
measured length differs, the other terms differ too."""


MemoryByTokens = tuple[tuple[int, float], ...]
"""Pairs (tokens of the largest microbatch including padding, the trainer's memory in bytes), in ascending order. The
last pair is for the largest microbatch that the recipe allows."""


class Prediction(msgspec.Struct, frozen=True):
    """A predicted value of one of the `TERMS`."""

    term: str
    value: float
    by_tokens: MemoryByTokens = ()
    """Only for the term `MEMORY`. The field `value` is then the memory in the last pair, which assumes responses of the
    maximum length."""

    def at(self, tokens: float | None) -> float:
        """Return the value predicted for a run whose largest microbatch has `tokens` tokens. None assumes the largest
        microbatch that the recipe allows."""
        if tokens is None or not self.by_tokens:
            return self.value
        places, values = np.array(self.by_tokens).T
        return float(np.interp(tokens, places, values))

    def assumption(self, tokens: float | None) -> str:
        """Return a sentence that states what `at` assumes about the largest microbatch; empty without an assumption."""
        if not self.by_tokens:
            return ""
        most = f"{self.by_tokens[-1][0]:,} tokens, the most that the recipe allows"
        if tokens is None:
            return f"{self.term} is predicted for a microbatch of {most}"
        if tokens > self.by_tokens[-1][0]:  # on a CPU in bfloat16, shapes are rounded up
            return f"{self.term} is predicted for {most}; with padding, the run's largest microbatch has {tokens:,.0f}"
        return (
            f"{self.term} is predicted for the largest microbatch of the run, {tokens:,.0f} tokens; "
            f"it is {self.value / 2**30:.3g} GiB for {most}"
        )


class Predictions(msgspec.Struct, frozen=True):
    """The predictions for a run."""

    source: str
    """The plan or the calibration from which the predictions come."""
    terms: tuple[Prediction, ...]
    after_step: int = 0
    """The predictions apply to the train steps after this step."""

    @property
    def memory(self) -> MemoryByTokens:
        return next((each.by_tokens for each in self.terms if each.term == MEMORY), ())

    def of(self, term: str) -> float | None:
        return next((each.value for each in self.terms if each.term == term), None)


class Comparison(msgspec.Struct, frozen=True):
    """The predicted and the measured value of one term. A value that is not known is None."""

    term: str
    unit: str
    predicted: float | None
    measured: float | None
    """Mean over train steps; for memory, the maximum."""

    error: float | None
    """Measured value divided by predicted value, minus 1. If the unit is `share` or the predicted value is 0: measured
    value minus predicted value."""
    is_off: bool
    """Whether the absolute value of `error` exceeds `TOLERANCE`."""
    assumption: str = ""
    """Sentence that states the predicted value's assumption about the run; empty without an assumption."""


def num_warm(num_steps: int) -> int:
    """Return how many of the first train steps are excluded from means over a run of `num_steps` steps."""
    return max(min(1, num_steps - 1), int(WARM_SHARE * num_steps))


def steady_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows of train steps, without the first steps that `num_warm` excludes."""
    steps = [row for row in rows if "perf/step_time" in row]
    return steps[num_warm(len(steps)) :] if steps else []


def compare(predictions: Predictions, rows: Sequence[Row]) -> tuple[Comparison, ...]:
    """Compare predictions with rows of metrics.jsonl, except evaluations and the first train steps (`num_warm`)."""
    steps = steady_rows([row for row in rows if row["step"] > predictions.after_step])
    tokens, found = _peak_tokens(steps), []
    told_of = {each.term: each for each in predictions.terms}
    for term, (unit, of) in TERMS.items():
        told, measured, error = told_of.get(term), _measured(steps, unit, of), None
        predicted = None if told is None else told.at(tokens)
        assumption = "" if told is None else told.assumption(tokens)
        if predicted is not None and measured is not None:
            error = measured - predicted if unit == "share" or not predicted else measured / predicted - 1
        is_off = error is not None and abs(error) > TOLERANCE
        found.append(Comparison(term, unit, predicted, measured, error, is_off, assumption))
    return tuple(found)


def ratios(predictions: Predictions, row: Row) -> dict[str, float]:
    """Return `measured_over_predicted/TERM` → ratio, for terms with a measured value and a prediction above 0."""
    tokens = _peak_tokens([row])
    found = ((each.term, each.at(tokens), _measured([row], *TERMS[each.term])) for each in predictions.terms)
    return {
        f"measured_over_predicted/{term.replace(' ', '_')}": measured / predicted
        for term, predicted, measured in found
        if measured is not None and predicted
    }


def _peak_tokens(rows: Sequence[Row]) -> float | None:
    """Return the number of tokens of the largest microbatch; None if the metrics lack it."""
    return max((row[key] for row in rows if (key := "perf/trainer_peak_tokens") in row), default=None)


def _measured(rows: Sequence[Row], unit: str, of: Callable[[Row], float]) -> float | None:
    values, weights = [], []
    for row in rows:
        try:
            values.append(of(row))
            # a predicted share refers to the total time of all steps, so longer steps have larger weights
            weights.append(row["perf/step_time"] if unit == "share" else 1.0)
        except (KeyError, TypeError):  # the metric is missing, or None, which stands for a number that is not finite
            continue
    if not values:
        return None
    return max(values) if unit == "bytes" else float(np.average(values, weights=weights))


class RunPredictions:
    """The predictions of a run. Changes of predictions.json by other processes are not read."""

    def __init__(self, directory: Path, current: Predictions | None) -> None:
        self.current = current
        self._directory = directory

    def replace(self, predictions: Predictions, after_step: int) -> None:
        """Write predictions for the train steps after `after_step`, unless the run already has equal predictions."""
        old = self.current
        if old is None or (old.source, old.terms) != (predictions.source, predictions.terms):
            self.current = msgspec.structs.replace(predictions, after_step=after_step)
            write_whole(self._directory / FILE, msgspec.json.format(msgspec.json.encode(self.current)) + b"\n")


def read_predictions(directory: Path) -> Predictions | None:
    """Return the predictions of a run, or None if it has none. Raises Damaged if the file cannot be read."""
    file = directory / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Predictions) if file.is_file() else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{file} cannot be read: {error}; delete it to continue without predictions") from error
