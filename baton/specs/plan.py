"""A plan: the GPUs that train and generate, their parallel shapes, and the expected times. Plans are stored as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from baton.errors import UserError
from baton.files import write_whole
from baton.specs.model import ModelSpec
from baton.specs.trainer_shapes import Trainer
from baton.specs.workload import Workload

Method = Literal["exact", "paper"]
FORMAT = 1
RATED_SLOTS = 64
"""Assumed number of trajectories that an engine generates at once, in a plan that was made from a table of token rates.
The table does not state this number."""
PROVEN = 1e-6
"""A plan counts as proven optimal if `Bound.gap` is below this value."""


GpuIds = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
"""Ids of at least one GPU, each as `node:index`. `read_plan` refuses a plan in which such a list is empty."""
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Stage(msgspec.Struct, frozen=True):
    """One stage of the training pipeline."""

    gpu: str
    gpu_ids: GpuIds
    """Each GPU as `node:index`. The GPUs of one tensor-parallel group are adjacent in this list."""
    dp: Count
    tp: Count
    layers: tuple[int, int]
    """Index of the first layer, and index of the last layer + 1."""
    memory_bytes: float
    """Memory used on each GPU."""
    memory_limit_bytes: float
    speed: Positive = 1.0
    """Speed of each rank, relative to the fastest rank of the mixed stage. Only used if `Training.is_mixed` is set."""


class Training(msgspec.Struct, frozen=True):
    """The training side of a plan."""

    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1)]
    """The pipeline stages. If `is_mixed` is set, there is one element for each GPU type instead."""
    microbatches: Count
    """Microbatches per optimiser update."""
    time_s: Seconds
    compute_s: Seconds
    """Compute time of the slowest stage."""
    bubble_s: Seconds
    """Idle time while the pipeline fills and drains."""
    comm_s: Seconds
    """Time to exchange gradients and parameters between data-parallel ranks. `compute_s` includes the communication
    within tensor-parallel groups and between pipeline stages."""
    optimizer_s: Seconds
    shard_gradients: bool = False
    """Whether the trainer reduces gradients after each microbatch (`trainer.shard_gradients`)."""
    shard_size: int = 0
    """Number of ranks that share one copy of a stage's parameters (`trainer.shard_size`); 0 if all ranks of the stage
    share one copy."""
    is_mixed: bool = False
    """True if there is only one pipeline stage, whose ranks are on two GPU types. Each element of `stages` then
    describes the ranks on one GPU type. Each element has all layers, and its ranks train trajectories in proportion to
    `speed` (`trainer.speeds`)."""

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        return tuple(gpu for stage in self.stages for gpu in stage.gpu_ids)

    def row_share(self, stage: Stage) -> float:
        """Return the share of a batch's trajectories that the ranks of a stage train."""
        total = sum(each.speed * each.dp for each in self.stages)
        return stage.speed * stage.dp / total if self.is_mixed else 1.0


class Replica(msgspec.Struct, frozen=True):
    """One engine of the rollout side."""

    gpu: str
    gpu_ids: GpuIds
    """Each GPU as `node:index`, in the order of the pipeline stages."""
    tp: Count
    pp: Count
    layers: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(min_length=1)]
    """(index of the first layer, index of the last layer + 1) of each pipeline stage."""
    batch: Count
    """Number of trajectories generated at once."""
    tokens_per_s: Positive
    """Generated tokens per second, including the time to prefill new prompts."""
    pause_s: float
    """Generation time lost per train step. With overlap, it is lost because running trajectories are prefilled again
    under the new version. Without overlap, it is lost at the end of a batch, when few trajectories still run."""
    share: float
    trajectories: int
    """Number of trajectories that the replica generates per batch. It is the batch size times `share`, rounded so that
    the numbers of all replicas add up to the batch size."""
    memory_bytes: float
    memory_limit_bytes: float


class RewardStage(msgspec.Struct, frozen=True):
    """The GPUs of the reward model. Each GPU holds the whole model."""

    model: str
    gpu: str
    gpu_ids: GpuIds
    """Each GPU as `node:index`."""
    trajectory_s: float
    """Mean time that one GPU needs to score a trajectory."""
    memory_bytes: float
    """Memory used on each GPU."""
    memory_limit_bytes: float
    params: float = 0.0
    """Number of parameters of the model; 0 in a plan that an earlier version of Baton wrote."""
    num_layers: int = 0
    batch_tokens: int = 0
    """Maximum tokens of a batch, with padding."""
    concurrency: int = 1
    """Maximum number of trajectories that a GPU scores at the same time; 1 for a classifier."""
    latency_s: float = 0.0
    """Time from the start to the end of the scoring of one trajectory, while other trajectories are scored too. For a
    classifier, this field is 0, and `trajectory_s` is used instead."""
    context_tokens: int = 0
    """Context limit of a generative reward model in tokens, for its input and its reply together; 0 for a
    classifier."""

    @property
    def timing(self) -> dict[str, float]:
        """The scoring time of a trajectory and the number of trajectories that are scored at once, as fields of a
        workload."""
        at_once = len(self.gpu_ids) * self.concurrency
        return {"reward_latency_s": self.latency_s or self.trajectory_s, "reward_concurrency": at_once}


class Idle(msgspec.Struct, frozen=True):
    """GPUs without a role, and the reason."""

    gpu_ids: tuple[str, ...]
    why: str


class Breakdown(msgspec.Struct, frozen=True):
    """The time of a train step and its parts. With overlap, the step time is sync + max(rollout + reward, train).
    Without overlap, it is the sum of the four parts."""

    step_s: Positive
    sync_s: Seconds
    """Time from the end of a train step until engines serve the new version."""
    rollout_s: float
    reward_s: float
    """Time for which scoring continues after the rollout has ended."""
    train_s: float
    overlaps: bool
    cycle_overhead_s: float = 0.0
    """The part of `sync_s` that is not publication, for example the time for journal and metrics."""


class Bound(msgspec.Struct, frozen=True):
    """A lower bound on the step time, and the gap between the plan's step time and this bound."""

    step_s: float
    """No plan of the search space has a shorter step time than this."""
    gap: float
    """Ratio of the plan's step time to the bound, minus 1."""
    is_proven: bool
    """True if the gap is below `PROVEN`. The plan is then optimal in the search space."""
    note: str = ""

    @classmethod
    def of(cls, step_s: float, least_s: float, note: str = "") -> Bound:
        """Compare the step time `step_s` of a plan with `least_s`, which is a lower bound on the step time of all
        plans."""
        gap = max(0.0, step_s / least_s - 1)
        return cls(least_s, gap, gap < PROVEN, note)


class PlannedWork(msgspec.Struct, frozen=True):
    """The dimensions of the model and of the workload for which a plan was made."""

    params: float
    num_layers: int
    hidden: int
    vocab: int
    groups: int
    group_size: int
    longest_prompt_tokens: float
    mean_output_tokens: float
    longest_output_tokens: float
    max_output_tokens: int
    """Maximum response length in tokens; 0 if unknown."""
    engine_context_tokens: int
    updates: int
    """Optimiser updates per train step."""
    has_critic: bool
    has_reference: bool
    recompute: bool
    microbatch_tokens: int = 0
    """Maximum tokens of a microbatch; 0 in a plan that an earlier version of Baton wrote."""

    @classmethod
    def of(cls, model: ModelSpec, work: Workload) -> PlannedWork:
        lengths = work.prompt.longest, work.output.mean, work.output.longest
        own: dict[str, Any] = dict(
            zip(("longest_prompt_tokens", "mean_output_tokens", "longest_output_tokens"), lengths, strict=True)
        )
        names = (name for name in cls.__struct_fields__ if name not in own)
        return cls(**own, **{name: getattr(model if hasattr(model, name) else work, name) for name in names})


class Plan(msgspec.Struct, frozen=True):
    """A complete plan, as `baton plan --out` writes it."""

    cluster: str
    model: str
    workload: str
    method: str
    training: Training
    replicas: Annotated[tuple[Replica, ...], msgspec.Meta(min_length=1)]
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
    """One sentence for each limit of the plan's throughput."""
    is_colocated: bool = False
    """Whether trainer and engines use the same GPUs alternately."""
    work: PlannedWork | None = None
    """None in a plan that was written by hand or by an earlier version of Baton."""
    trainer: Trainer = "baton"
    reward: RewardStage | None = None
    format: int = FORMAT

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.breakdown.step_s

    @property
    def used_gpu_ids(self) -> set[str]:
        """The GPUs that train or generate."""
        return {*self.training.gpu_ids, *(gpu for replica in self.replicas for gpu in replica.gpu_ids)}

    @property
    def price_per_million_tokens(self) -> float:
        """Price of 10⁶ trained tokens, in `currency`."""
        return self.price_per_h / 3600 / self.tokens_per_s * 1e6


class _AnyFormat(msgspec.Struct):
    """The only field that a plan has in every format; other fields may change from one format to the next."""

    format: int = FORMAT


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises UserError if the file does not exist, has no plan, or has an unsupported format number."""
    if not path.is_file():
        raise UserError(f"there is no plan {path}: `baton plan … --out {path}` writes one")
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_AnyFormat).format  # a newer format may have other fields
        if found > FORMAT:
            raise UserError(
                f"{path}: a newer Baton wrote this plan, in format {found}; this Baton reads format {FORMAT}. Update "
                f"Baton, or make the plan again with this one: `baton plan … --out {path}`"
            )
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a plan: {error}") from error
    if plan.format != FORMAT:
        raise UserError(f"{path}: format: got {plan.format}, this Baton reads {FORMAT}")
    return plan
