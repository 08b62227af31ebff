"""From measured speeds to efficiencies: the cost model's own functions, with the shares that bring them nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from baton.cost.efficiency import Efficiency
from baton.cost.generate import Place, decode_s, prefill_s, replica_cost
from baton.cost.train import forward_passes, layer_flops
from baton.model import ModelSpec
from baton.workload import Workload, constant

ROUNDS = 400
LEAST, MOST = 1e-6, 1.0
"""Range of shares."""


class Measured(msgspec.Struct, frozen=True):
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

    @property
    def tokens_per_s(self) -> float:
        """Generated, prefilled or trained."""
        return self.batch * (1 if self.phase == "decode" else self.context) / self.seconds


def predicted_s(model: ModelSpec, work: Workload, place: Place, devices: int, point: Measured) -> float:
    """What the cost model says of a measurement; `devices` GPUs (or cores) train together."""
    if point.phase == "decode":
        return decode_s(model, work, place, 1, (model.num_layers,), point.batch, point.context)
    if point.phase == "prefill":
        return point.batch * prefill_s(model, place, 1, (model.num_layers,), point.context, point.context**2)
    load = msgspec.structs.replace(
        work, groups=1, group_size=point.batch, prompt=constant(1e-9), output=constant(point.context), trained_share=1.0
    )
    flops = model.num_layers * layer_flops(model, load) + load.trained_tokens * model.head_flops_per_token
    rate = devices * place.gpu.flops * place.efficiency.train
    return place.efficiency.train_overhead_s + forward_passes(load) * flops / rate


def rollout_s(model: ModelSpec, work: Workload, place: Place, engines: int, point: Measured) -> float:
    """What the cost model says of a batch that engines share and generate to its end; `work` has its lengths."""
    each = point.batch / engines
    cost = replica_cost(model, work, place, 1, 1, min(work.max_batch, math.ceil(each)))
    return each * work.output.mean / cost.tokens_per_s + cost.pause_s


def with_rollout(
    model: ModelSpec, work: Workload, place: Place, engines: int, point: Measured
) -> tuple[Efficiency, Measured]:
    """Return the efficiencies with an overhead for each trajectory that explains a whole batch, and the batch so."""
    rest_s = point.seconds - rollout_s(model, work, place, engines, point)
    overhead_s = max(0.0, rest_s * engines / point.batch)
    found = msgspec.structs.replace(place.efficiency, trajectory_overhead_s=overhead_s)
    tried = msgspec.structs.replace(place, efficiency=found)
    return found, msgspec.structs.replace(point, predicted_s=rollout_s(model, work, tried, engines, point))


def fit(
    model: ModelSpec, work: Workload, place: Place, devices: int, points: Sequence[Measured]
) -> tuple[Efficiency, list[Measured]]:
    """Return the efficiencies with the least squared relative errors, and the measurements with what they predict."""

    def errors(efficiency: Efficiency, phase: str) -> float:
        tried = msgspec.structs.replace(place, efficiency=efficiency)
        return sum(
            math.log(predicted_s(model, work, tried, devices, point) / point.seconds) ** 2
            for point in points
            if point.phase == phase
        )

    found = place.efficiency
    for phase, keys in (
        ("decode", ("step_overhead_s", "row_overhead_s", "decode", "decode_compute")),
        ("prefill", ("prefill",)),
        ("train", ("train", "train_overhead_s")),
    ):
        if any(point.phase == phase for point in points):
            found = _descend(found, keys, lambda tried, phase=phase: errors(tried, phase))  # type: ignore[misc]
    tried = msgspec.structs.replace(place, efficiency=found)
    shown = [
        msgspec.structs.replace(point, predicted_s=predicted_s(model, work, tried, devices, point)) for point in points
    ]
    return found, shown


def _descend(start: Efficiency, keys: Sequence[str], error: Callable[[Efficiency], float]) -> Efficiency:
    """Change one share after the other by a factor that shrinks: coordinate descent in logarithms."""
    values = {key: max(getattr(start, key), LEAST) for key in keys}
    best = error(msgspec.structs.replace(start, **values))
    factor = 4.0
    for _ in range(ROUNDS):
        improved = False
        for key in keys:
            for change in (factor, 1 / factor):
                tried = {**values, key: min(MOST, max(LEAST * 1e-3, values[key] * change))}
                now = error(msgspec.structs.replace(start, **tried))
                if now < best - 1e-12:
                    values, best, improved = tried, now, True
        if not improved:
            factor = math.sqrt(factor)
            if factor < 1.0005:
                break
    return msgspec.structs.replace(start, **values)
