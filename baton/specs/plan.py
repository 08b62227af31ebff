"""A plan: which GPUs train, which generate, in what shape, and what that is expected to give. JSON both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from baton.errors import UserError
from baton.files import write_whole

Method = Literal["exact", "paper"]
FORMAT = 1
PROVEN = 1e-6
"""A gap below this is none."""


class Stage(msgspec.Struct, frozen=True):
    """One stage of the training pipeline."""

    gpu: str
    gpu_ids: tuple[str, ...]
    """`node:index`; the GPUs of each tensor-parallel group stand together."""
    dp: int
    tp: int
    layers: tuple[int, int]
    """First layer, and the one behind the last."""
    memory_bytes: float
    """Needed on each GPU."""
    memory_limit_bytes: float


class Training(msgspec.Struct, frozen=True):
    """The trainer's side."""

    stages: tuple[Stage, ...]
    microbatches: int
    """Of each optimiser update."""
    time_s: float
    compute_s: float
    """Of the slowest stage, without waiting."""
    bubble_s: float
    """Waiting for the pipeline to fill and drain."""
    comm_s: float
    """Gradients and parameters between data-parallel ranks; tensor-parallel sums and stage boundaries are in
    compute."""
    optimizer_s: float

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        return tuple(gpu for stage in self.stages for gpu in stage.gpu_ids)


class Replica(msgspec.Struct, frozen=True):
    """One engine of the rollout side."""

    gpu: str
    gpu_ids: tuple[str, ...]
    """Stage by stage."""
    tp: int
    pp: int
    layers: tuple[tuple[int, int], ...]
    """Of each pipeline stage."""
    batch: int
    """Trajectories it generates at once."""
    tokens_per_s: float
    """While it decodes, prefill of new prompts included."""
    pause_s: float
    """Per train step: prefill of running trajectories under the new version, or the tail of a batch without overlap."""
    share: float
    """Of the batch's trajectories."""
    trajectories: int
    """Of the batch; shares rounded by largest remainder."""
    memory_bytes: float
    memory_limit_bytes: float


class Idle(msgspec.Struct, frozen=True):
    """GPUs without a role."""

    gpu_ids: tuple[str, ...]
    why: str


class Breakdown(msgspec.Struct, frozen=True):
    """Where a step's time goes: step = sync + max(rollout + reward, train), or their sum without overlap."""

    step_s: float
    sync_s: float
    rollout_s: float
    reward_s: float
    """Exposed: what judging adds behind rollout."""
    train_s: float
    overlaps: bool


class Bound(msgspec.Struct, frozen=True):
    """How good the plan can be at best."""

    step_s: float
    """No plan of the search space is faster."""
    gap: float
    """step_s of the plan over that bound, minus 1."""
    is_proven: bool
    """Whether the gap is below PROVEN: the plan is an optimum of the search space."""
    note: str = ""

    @classmethod
    def of(cls, step_s: float, least_s: float, note: str = "") -> Bound:
        """Return the bound of a plan with this step time, where no plan is faster than `least_s`."""
        gap = max(0.0, step_s / least_s - 1)
        return cls(least_s, gap, gap < PROVEN, note)


class Plan(msgspec.Struct, frozen=True):
    """A complete plan."""

    cluster: str
    model: str
    workload: str
    method: str
    training: Training
    replicas: tuple[Replica, ...]
    idle: tuple[Idle, ...]
    breakdown: Breakdown
    tokens_per_step: float
    """Prompt and output tokens trained per step."""
    max_staleness: int
    mean_staleness: float
    price_per_h: float
    currency: str
    bound: Bound
    limits: tuple[str, ...] = ()
    """What limits the plan, in sentences."""
    is_colocated: bool = False
    """Trainer and engines take turns on the same GPUs."""
    format: int = FORMAT

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second: the throughput."""
        return self.tokens_per_step / self.breakdown.step_s

    @property
    def price_per_million_tokens(self) -> float:
        """Price of 10⁶ trained tokens, in `currency`."""
        return self.price_per_h / 3600 / self.tokens_per_s * 1e6


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises UserError where the file is none."""
    if not path.is_file():
        raise UserError(f"there is no plan {path}: `baton plan … --out {path}` writes one")
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is not a plan: {error}") from error
    if plan.format != FORMAT:
        raise UserError(f"{path}: format: got {plan.format}, this Baton reads {FORMAT}")
    return plan
