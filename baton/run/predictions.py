"""Converts a plan to predictions for a run, and corrects the cost model's efficiencies by the measurements of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.cost.efficiency import Efficiencies, Efficiency, most_share
from baton.records.metrics import read_metrics
from baton.records.predictions import MEMORY, MemoryByTokens, Prediction, Predictions, compare
from baton.specs.plan import Plan

DECODE_SHARES = "decode", "decode_compute", "prefill"
DECODE_TIMES = "step_overhead_s", "row_overhead_s", "prefill_overhead_s", "trajectory_overhead_s", "handover_s"
MIN_REWARD_SHARE = 0.01
FACTORS = 0.1, 10.0
"""Smallest and largest factor by which measured rates may correct an efficiency."""


def predictions_of_plan(plan: Plan, source: str, memory: MemoryByTokens) -> Predictions:
    """Return the predictions of a plan. `memory`: memory of the trainer, computed from the recipe; empty if unknown."""
    times, work = plan.breakdown, plan.work
    values: dict[str, float | None] = {
        "step": times.step_s,
        "generation": times.rollout_s,
        "rewards": reward_stage_s(times.reward_s, times.step_s, overlaps=times.overlaps),
        "training": times.train_s,
        "transfer": times.sync_s - times.cycle_overhead_s,
        "staleness": plan.mean_staleness,
        "trainer idle": 1 - times.train_s / times.step_s,
        # without overlap, slots become idle one by one at the end of a batch, at times that a plan does not predict
        "engine slots idle": 1 - times.rollout_s / times.step_s if times.overlaps else None,
        "reward model idle": _reward_idle_share(plan),
        "response length": None if work is None else work.mean_output_tokens,
    }
    return predictions(source, values, memory)


def predictions(source: str, values: Mapping[str, float | None], memory: MemoryByTokens) -> Predictions:
    """Return one prediction for each element of `values` that is not None. If `memory` is not empty, also return a
    prediction of the memory."""
    found = [Prediction(term, value) for term, value in values.items() if value is not None]
    if memory:
        found.append(Prediction(MEMORY, memory[-1][1], memory))
    return Predictions(source, tuple(found))


def reward_stage_s(reward_s: float, step_s: float, *, overlaps: bool) -> float | None:
    """Return the predicted time, within a step, during which rewards are computed and no trajectory runs. Return None
    if this time is below 1 % of the step, because noise would dominate a comparison. With overlap, return None too,
    because other trajectories run while rewards are computed."""
    return None if overlaps or reward_s < MIN_REWARD_SHARE * step_s else reward_s


def _reward_idle_share(plan: Plan) -> float | None:
    """Return the share of a step in which a slot of the reward model scores no trajectory."""
    stage, work = plan.reward, plan.work
    if stage is None or work is None:
        return None
    timing, num_trajectories = stage.timing, work.groups * work.group_size
    busy_s = num_trajectories * timing["reward_latency_s"] / timing["reward_concurrency"]
    return 1 - busy_s / plan.breakdown.step_s


def measured_rates(
    known: Efficiencies, plan: Plan, told: Predictions | None, run: Path
) -> tuple[Efficiencies, tuple[str, ...]]:
    """Correct the efficiencies of a plan's GPU types by the measurements of a run. Return the efficiencies, and a line
    for each correction. If the run's predictions do not come from this plan, nothing is corrected.

    `told`: the run's predictions. Times per token are compared, because responses may be longer or shorter than
    planned. Training, generation and the transfer of versions have one factor each, which is applied to all GPU types
    that take part.
    """
    if told is None or told.of("step") != plan.breakdown.step_s:
        return known, ()
    values = {
        each.term: (each.predicted, each.measured)
        for each in compare(told, read_metrics(run))
        if each.predicted and each.measured
    }
    generated = trained = 1.0
    """Measured number of tokens divided by the planned number, for generated and for trained tokens."""
    if "response length" in values and plan.work is not None:
        predicted, measured = values["response length"]
        generated = measured / predicted
        trained += (measured - predicted) * plan.work.groups * plan.work.group_size / plan.tokens_per_step
    trainers = {stage.gpu for stage in plan.training.stages}
    own, lines = dict(known.by_gpu), []
    for term, tokens, gpus, shares, times in (
        ("training", trained, trainers, ("train",), ("train_overhead_s",)),
        ("generation", generated, {each.gpu for each in plan.replicas}, DECODE_SHARES, DECODE_TIMES),
        ("transfer", 1.0, trainers, ("publish",), ("publish_latency_s",)),
    ):
        if term in values:
            predicted, measured = values[term]
            faster = min(FACTORS[1], max(FACTORS[0], predicted * tokens / measured))
            lines.append(f"{term} on {', '.join(sorted(gpus))}: measured {faster:.2f} × the predicted rate")
            own |= {gpu: scaled(own.get(gpu, known.default), gpu, faster, shares, times) for gpu in gpus}
    return msgspec.structs.replace(known, by_gpu=own), tuple(lines)


def scaled(known: Efficiency, gpu: str, factor: float, shares: Sequence[str], times: Sequence[str]) -> Efficiency:
    """Correct the efficiency of a GPU type whose measured speed is `factor` times the planned speed. Multiply the
    fields that `shares` names by `factor`, up to a maximum. Divide the fields that `times` names by `factor`."""
    most = {key: 1.0 if key == "publish" else most_share(gpu) for key in shares}
    changed: dict[str, Any] = {key: min(most[key], getattr(known, key) * factor) for key in shares}
    return known.model_copy(update=changed | {key: getattr(known, key) / factor for key in times})
