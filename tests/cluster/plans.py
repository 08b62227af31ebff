"""Plans made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.specs.plan import Bound, Breakdown, Plan, Replica, RewardStage, Stage, Training

SCORING = {"model": "judge", "trajectory_s": 0.01, "memory_bytes": 1.0, "memory_limit_bytes": 2.0}


def stage(gpu: str, *gpu_ids: str, tp: int = 1, layers: tuple[int, int] = (0, 4)) -> Stage:
    """One stage of the trainer."""
    return Stage(gpu, gpu_ids, len(gpu_ids) // tp, tp, layers, 1.0, 2.0)


def replica(gpu: str, *gpu_ids: str, share: float, batch: int = 16, tp: int = 1) -> Replica:
    """One engine."""
    return Replica(gpu, gpu_ids, tp, len(gpu_ids) // tp, ((0, 4),), batch, 100.0, 0.0, share, 8, 1.0, 2.0)


def scoring(gpu: str, *gpu_ids: str, **changes: Any) -> RewardStage:
    """A reward model."""
    return RewardStage(gpu=gpu, gpu_ids=gpu_ids, **{**SCORING, **changes})


def plan_of(stages: Sequence[Stage], replicas: Sequence[Replica], **changes: object) -> Plan:
    """A plan whose times say nothing."""
    training = Training(tuple(stages), 1, 1.0, 1.0, 0.0, 0.0, 0.0)
    values: dict[str, object] = {
        "cluster": "c",
        "model": "m",
        "workload": "w",
        "method": "exact",
        "training": training,
        "replicas": tuple(replicas),
        "idle": (),
        "breakdown": Breakdown(1.0, 0.0, 1.0, 0.0, 1.0, True),
        "tokens_per_step": 1000.0,
        "max_staleness": 0,
        "mean_staleness": 0.0,
        "price_per_h": 1.0,
        "currency": "USD",
        "bound": Bound(1.0, 0.0, True),
        **changes,
    }
    return Plan(**values)  # type: ignore[arg-type]


def mixed(plan: Plan) -> Plan:
    """The plan with its stages as the parts of one data-parallel group."""
    return msgspec.structs.replace(plan, training=msgspec.structs.replace(plan.training, is_mixed=True))
