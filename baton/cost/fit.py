"""Fits efficiencies to measured times: finds the parameters with which the cost model predicts these times best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.efficiency import Efficiency, most_share
from baton.cost.generate import DeviceClass, decode_s, prefill_s, replica_cost
from baton.cost.train import compute_s
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload, constant

ROUNDS = 400
LEAST = 1e-6
"""`_descend` first raises smaller start values to this value. Its results are at least a thousandth of this value."""
BACKWARD = 0.5, 10.0
"""Range of the fitted `backward`."""


class Measurement(msgspec.Struct, frozen=True):
    """A measured time, and the time that the cost model predicts."""

    phase: str
    """`decode`, `prefill`, `train`, or `rollout` (a whole batch)."""
    batch: int
    """Number of trajectories at once."""
    context: int
    """Tokens per trajectory."""
    seconds: float
    """Measured time of a decode step, of a prefill, of a train step, or of the generation of a whole batch."""
    predicted_s: float = 0.0
    """Prediction of the cost model with the fitted efficiencies."""
    trained_share: float = 1.0
    """For a train step: fraction of its groups that have a nonzero advantage."""

    @property
    def tokens_per_s(self) -> float:
        return self.batch * (1 if self.phase == "decode" else self.context) / self.seconds


def predicted_s(model: ModelSpec, work: Workload, place: DeviceClass, devices: int, point: Measurement) -> float:
    """Predict the time of the decode step, prefill or train step that `point` measured. The trainer has `devices` GPUs
    or cores."""
    if point.phase == "decode":
        return decode_s(model, work, place, 1, (model.num_layers,), point.batch, point.context)
    if point.phase == "prefill":
        each = prefill_s(model, place, 1, (model.num_layers,), point.context, point.context**2)
        return place.efficiency.prefill_overhead_s + point.batch * each
    load = msgspec.structs.replace(
        work,
        groups=1,
        group_size=point.batch,
        prompt=constant(1e-9),
        output=constant(point.context),
        trained_share=point.trained_share,
        forwards_all=True,  # as `baton profile` measures
    )
    return place.efficiency.train_overhead_s + compute_s(model, load, place, devices)


def rollout_s(model: ModelSpec, work: Workload, place: DeviceClass, engines: int, point: Measurement) -> float:
    """Predict the time in which `engines` engines generate a whole batch. `work` has the batch's prompt and response
    lengths."""
    each = point.batch / engines
    cost = replica_cost(model, work, place, 1, 1, min(work.max_batch, math.ceil(each)))
    return each * work.output.mean / cost.tokens_per_s + cost.pause_s


def with_rollout(
    model: ModelSpec, work: Workload, place: DeviceClass, engines: int, point: Measurement
) -> tuple[Efficiency, Measurement]:
    """Fit `trajectory_overhead_s` to the time of a whole batch. Return the efficiencies, and the measurement with its
    prediction."""
    rest_s = point.seconds - rollout_s(model, work, place, engines, point)
    overhead_s = max(0.0, rest_s * engines / point.batch)
    found = place.efficiency.model_copy(update={"trajectory_overhead_s": overhead_s})
    tried = msgspec.structs.replace(place, efficiency=found)
    return found, msgspec.structs.replace(point, predicted_s=rollout_s(model, work, tried, engines, point))


def fit(
    model: ModelSpec, work: Workload, place: DeviceClass, devices: int, points: Sequence[Measurement]
) -> tuple[Efficiency, list[Measurement]]:
    """Fit the efficiencies of decode, prefill and training by least squares of relative errors. Return the
    efficiencies, and the measurements with their predictions."""

    def predictions(efficiency: Efficiency, measured: Sequence[Measurement]) -> list[float]:
        tried = msgspec.structs.replace(place, efficiency=efficiency)
        return [predicted_s(model, work, tried, devices, point) for point in measured]

    def error(measured: Sequence[Measurement], efficiency: Efficiency) -> float:
        pairs = zip(predictions(efficiency, measured), measured, strict=True)
        return sum(math.log(seconds / point.seconds) ** 2 for seconds, point in pairs)

    found = _fit_train(model, work, place, devices, [point for point in points if point.phase == "train"])
    for phase, keys in (
        ("decode", ("step_overhead_s", "row_overhead_s", "decode", "decode_compute")),
        ("prefill", ("prefill", "prefill_overhead_s")),
    ):
        if own := [point for point in points if point.phase == phase]:
            found = _descend(found, keys, partial(error, own), most_share(place.gpu.name))
    pairs = zip(points, predictions(found, points), strict=True)
    return found, [msgspec.structs.replace(point, predicted_s=seconds) for point, seconds in pairs]


def _fit_train(
    model: ModelSpec, work: Workload, place: DeviceClass, devices: int, points: Sequence[Measurement]
) -> Efficiency:
    """Fit training by linear least squares: a step takes `overhead + forward / share + backward · forward / share`,
    where `forward` is the time of the forward pass at peak FLOP/s and `share` is `Efficiency.train`. If all points have
    the same `trained_share`, or if the share has no effect, `backward` cannot be identified and keeps its value."""
    if not points:
        return place.efficiency
    given = place.efficiency.backward
    bare = place.efficiency.model_copy(update={"train": 1.0, "train_overhead_s": 0.0})

    def times(backward: float) -> NDArray[np.float64]:
        tried = msgspec.structs.replace(place, efficiency=bare.model_copy(update={"backward": backward}))
        return np.array([predicted_s(model, work, tried, devices, point) for point in points])

    is_identifiable = len({point.trained_share for point in points}) > 1 and not work.backwards_all
    columns = [times(0.0), times(1.0) - times(0.0)] if is_identifiable else [times(given)]
    seconds = np.array([point.seconds for point in points])
    overhead_s, slower, *rest = _least_squares([np.ones(len(points)), *columns], seconds)
    slower = max(1 / most_share(place.gpu.name), slower)
    backward = min(BACKWARD[1], max(BACKWARD[0], rest[0] / slower)) if is_identifiable else given
    found = {"train": 1 / slower, "backward": backward, "train_overhead_s": max(0.0, overhead_s)}
    return place.efficiency.model_copy(update=found)


def _least_squares(columns: Sequence[NDArray[np.float64]], seconds: NDArray[np.float64]) -> list[float]:
    """Return the coefficients of the columns that minimise the squared relative errors. The coefficient of the first
    column is at least 0."""
    matrix = np.stack(columns, axis=1) / seconds[:, None]
    ones = np.ones(len(seconds))
    found = [float(value) for value in np.linalg.lstsq(matrix, ones, rcond=None)[0]]
    if found[0] < 0:
        found = [0.0, *(float(value) for value in np.linalg.lstsq(matrix[:, 1:], ones, rcond=None)[0])]
    return found


def _descend(start: Efficiency, keys: Sequence[str], error: Callable[[Efficiency], float], most: float) -> Efficiency:
    """Minimise `error` by coordinate descent. In each round, each value is multiplied and divided by a factor, and a
    changed value is kept if it lowers the error. If a round does not lower the error, the factor is reduced. `most`:
    upper limit of each value."""
    values = {key: max(getattr(start, key), LEAST) for key in keys}
    best = error(start.model_copy(update=values))
    factor = 4.0
    for _ in range(ROUNDS):
        improved = False
        for key in keys:
            for change in (factor, 1 / factor):
                tried = {**values, key: min(most, max(LEAST * 1e-3, values[key] * change))}
                now = error(start.model_copy(update=tried))
                if now < best - 1e-12:
                    values, best, improved = tried, now, True
        if not improved:
            factor = math.sqrt(factor)
            if factor < 1.0005:
                break
    return start.model_copy(update=values)
