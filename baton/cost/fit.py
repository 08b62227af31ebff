"""From measured speeds to efficiencies: the cost model's own functions, with the shares that bring them nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.efficiency import Efficiency
from baton.cost.generate import DeviceClass, decode_s, prefill_s, read_context_tokens, replica_cost
from baton.cost.train import forward_passes, layer_flops
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload, constant

ROUNDS = 400
LEAST, MOST = 1e-6, 1.0
"""Range of shares."""
BACKWARD = 0.5, 10.0
"""The same of forward passes that a backward pass is worth."""


class Measurement(msgspec.Struct, frozen=True):
    """One measurement."""

    phase: str
    """`decode`, `prefill`, `train`, or `rollout`: a whole batch."""
    batch: int
    """Trajectories at once."""
    context: int
    """Tokens each has."""
    seconds: float
    """Of a decode step of the whole batch, of its prefill, of a train step, of a batch to its end."""
    predicted_s: float = 0.0
    """By the cost model after the fit."""
    trained_share: float = 1.0
    """Of groups that have an advantage, in a train step."""

    @property
    def tokens_per_s(self) -> float:
        """Generated, prefilled or trained."""
        return self.batch * (1 if self.phase == "decode" else self.context) / self.seconds


def predicted_s(model: ModelSpec, work: Workload, place: DeviceClass, devices: int, point: Measurement) -> float:
    """What the cost model says of a measurement; `devices` GPUs (or cores) train together."""
    if point.phase == "decode":
        return decode_s(model, work, place, 1, (model.num_layers,), point.batch, point.context)
    if point.phase == "prefill":
        each = prefill_s(model, place, 1, (model.num_layers,), point.context, point.context**2)
        return place.efficiency.prefill_overhead_s + point.batch * each
    return train_step_s(model, work, place, devices, point.batch, point.context, point.trained_share)


def train_step_s(
    model: ModelSpec, work: Workload, place: DeviceClass, devices: int, count: int, tokens: float, trained_share: float
) -> float:
    """What the cost model says of a train step of so many trajectories of so many tokens."""
    load = msgspec.structs.replace(
        work,
        groups=1,
        group_size=count,
        prompt=constant(1e-9),
        output=constant(tokens),
        trained_share=trained_share,
    )
    flops = model.num_layers * layer_flops(model, load) + load.trained_tokens * model.head_flops_per_token
    rate = devices * place.gpu.flops * place.efficiency.train
    return place.efficiency.train_overhead_s + forward_passes(load, place.efficiency.backward) * flops / rate


def rollout_s(model: ModelSpec, work: Workload, place: DeviceClass, engines: int, point: Measurement) -> float:
    """What the cost model says of a batch that engines share and generate to its end; `work` has its lengths."""
    each = point.batch / engines
    cost = replica_cost(model, work, place, 1, 1, min(work.max_batch, math.ceil(each)))
    return each * work.output.mean / cost.tokens_per_s + cost.pause_s


def with_rollout(
    model: ModelSpec, work: Workload, place: DeviceClass, engines: int, point: Measurement
) -> tuple[Efficiency, Measurement]:
    """Return the efficiencies with an overhead for each trajectory that explains a whole batch, and the batch so."""
    rest_s = point.seconds - rollout_s(model, work, place, engines, point)
    overhead_s = max(0.0, rest_s * engines / point.batch)
    found = place.efficiency.model_copy(update={"trajectory_overhead_s": overhead_s})
    tried = msgspec.structs.replace(place, efficiency=found)
    return found, msgspec.structs.replace(point, predicted_s=rollout_s(model, work, tried, engines, point))


class OverlapMeasurement(msgspec.Struct, frozen=True):
    """Engines that are always full and a train step at the same time, on cores that they share."""

    threads: int
    """Of the trainer."""
    train_s: float
    tokens_per_s: float
    """Of all engines."""


def with_beside(
    model: ModelSpec, work: Workload, place: DeviceClass, engines: int, cores: int, beside: OverlapMeasurement
) -> tuple[Efficiency, list[Measurement]]:
    """Return the efficiencies with what trainer and engines cost each other beyond their share of the cores, and both
    as measurements that they explain: a train step, and a token of each slot."""
    share = max(1.0, (beside.threads + engines) / cores)
    tokens = work.prompt.mean + work.output.mean
    train_s = train_step_s(model, work, place, beside.threads, work.num_trajectories, tokens, 1.0) * share
    tokens_per_s = engines * replica_cost(model, work, place, 1, 1, work.max_batch).tokens_per_s / share
    extra = {"train_beside": beside.train_s / train_s, "engine_beside": tokens_per_s / beside.tokens_per_s}
    found = place.efficiency.model_copy(update=extra)
    token_s = engines * work.max_batch / beside.tokens_per_s
    points = [
        Measurement("train_beside", work.num_trajectories, round(tokens), beside.train_s, beside.train_s),
        Measurement(
            "decode_beside",
            engines * work.max_batch,
            round(read_context_tokens(work, work.max_batch)),
            token_s,
            token_s,
        ),
    ]
    return found, points


def fit(
    model: ModelSpec, work: Workload, place: DeviceClass, devices: int, points: Sequence[Measurement]
) -> tuple[Efficiency, list[Measurement]]:
    """Return the efficiencies with the least squared relative errors, and the measurements with what they predict."""

    def errors(efficiency: Efficiency, phase: str) -> float:
        tried = msgspec.structs.replace(place, efficiency=efficiency)
        return sum(
            math.log(predicted_s(model, work, tried, devices, point) / point.seconds) ** 2
            for point in points
            if point.phase == phase
        )

    found = _fit_train(model, work, place, devices, [point for point in points if point.phase == "train"])
    for phase, keys in (
        ("decode", ("step_overhead_s", "row_overhead_s", "decode", "decode_compute")),
        ("prefill", ("prefill", "prefill_overhead_s")),
    ):
        if any(point.phase == phase for point in points):
            found = _descend(found, keys, lambda tried, phase=phase: errors(tried, phase))  # type: ignore[misc]
    tried = msgspec.structs.replace(place, efficiency=found)
    shown = [
        msgspec.structs.replace(point, predicted_s=predicted_s(model, work, tried, devices, point)) for point in points
    ]
    return found, shown


def _fit_train(
    model: ModelSpec, work: Workload, place: DeviceClass, devices: int, points: Sequence[Measurement]
) -> Efficiency:
    """Least squares: a step takes overhead + forward / share + backward passes · forward / share, linear in all three.

    Where all points teach as much, a backward pass cannot be told from the rate, and counts as it did.
    """
    if not points:
        return place.efficiency
    given = place.efficiency.backward
    bare = place.efficiency.model_copy(update={"train": 1.0, "train_overhead_s": 0.0})

    def times(backward: float) -> NDArray[np.float64]:
        tried = msgspec.structs.replace(place, efficiency=bare.model_copy(update={"backward": backward}))
        return np.array([predicted_s(model, work, tried, devices, point) for point in points])

    is_told = len({point.trained_share for point in points}) > 1
    columns = [times(0.0), times(1.0) - times(0.0)] if is_told else [times(given)]
    seconds = np.array([point.seconds for point in points])
    overhead_s, slower, *rest = _least_squares([np.ones(len(points)), *columns], seconds)
    slower = max(1.0 / MOST, slower)
    backward = min(BACKWARD[1], max(BACKWARD[0], rest[0] / slower)) if is_told else given
    found = {"train": 1 / slower, "backward": backward, "train_overhead_s": max(0.0, overhead_s)}
    return place.efficiency.model_copy(update=found)


def _least_squares(columns: Sequence[NDArray[np.float64]], seconds: NDArray[np.float64]) -> list[float]:
    """Factors of the columns with the least squared relative errors, the first one not below 0."""
    matrix = np.stack(columns, axis=1) / seconds[:, None]
    ones = np.ones(len(seconds))
    found = [float(value) for value in np.linalg.lstsq(matrix, ones, rcond=None)[0]]
    if found[0] < 0:
        found = [0.0, *(float(value) for value in np.linalg.lstsq(matrix[:, 1:], ones, rcond=None)[0])]
    return found


def _descend(start: Efficiency, keys: Sequence[str], error: Callable[[Efficiency], float]) -> Efficiency:
    """Change one share after the other by a factor that shrinks: coordinate descent in logarithms."""
    values = {key: max(getattr(start, key), LEAST) for key in keys}
    best = error(start.model_copy(update=values))
    factor = 4.0
    for _ in range(ROUNDS):
        improved = False
        for key in keys:
            for change in (factor, 1 / factor):
                tried = {**values, key: min(MOST, max(LEAST * 1e-3, values[key] * change))}
                now = error(start.model_copy(update=tried))
                if now < best - 1e-12:
                    values, best, improved = tried, now, True
        if not improved:
            factor = math.sqrt(factor)
            if factor < 1.0005:
                break
    return start.model_copy(update=values)
