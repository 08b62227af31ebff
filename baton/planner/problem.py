"""The inputs of the planner and its search space: candidate training shapes in a table, replica shapes as columns of an
integer program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.cost.efficiency import Efficiencies, RatesSettings
from baton.cost.generate import ReplicaCost, largest_batch, replica_cost
from baton.cost.memory import Array
from baton.cost.train import publish_s
from baton.planner.pools import GpuPool, Pools
from baton.specs.cluster import Cluster
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
REPLICA_STAGES = (1, 2, 4)
"""Pipeline depths of a replica."""


class Inputs(msgspec.Struct, frozen=True):
    """The cluster, model and workload to plan."""

    cluster: Cluster
    model: ModelSpec
    work: Workload
    efficiencies: Efficiencies = Efficiencies()
    rates: RatesSettings | None = None
    """Measured rates; they replace the cost model."""
    cross_types: bool = True
    """Whether a training pipeline may span GPU types."""
    mixed_stages: bool = False
    """Whether the ranks of one training stage may be on two GPU types."""

    def on(self, cluster: Cluster) -> Inputs:
        return msgspec.structs.replace(self, cluster=cluster)


class ReplicaShape(msgspec.Struct, frozen=True):
    """A replica shape on a pool; a column of the integer program."""

    pool: int
    cost: ReplicaCost

    @property
    def num_gpus(self) -> int:
        return self.cost.num_gpus

    def work(self, time_s: float) -> float:
        """Return the number of tokens that the replica generates in `time_s` seconds, which include a pause of
        `cost.pause_s` seconds."""
        return self.cost.tokens_per_s * max(0.0, time_s - self.cost.pause_s)


class TrainTable(msgspec.Struct, frozen=True):
    """Candidate training shapes. A pool that does not train has 0 stages."""

    stages: Ints
    """[candidates, pools] number of pipeline stages."""
    tp: Ints
    """[candidates, pools] tensor-parallel width."""
    dp: Ints
    """[candidates, pools] data-parallel width."""
    time_s: Floats
    """[candidates] time of the training part of a step."""
    shares: Floats
    """[candidates, pools] share of the model's layers that a pool trains."""
    is_complete: bool
    """Whether the table has all shapes of the search space."""
    shard_size: Ints
    """[candidates] number of ranks that share a copy of a stage (HSDP); 0 if all ranks of a stage share one copy."""
    is_mixed: Bools
    """[candidates] whether the pools that train form one stage, instead of stages of a pipeline."""

    @property
    def gpus(self) -> Ints:
        """[candidates, pools] number of GPUs that train."""
        return self.stages * self.tp * self.dp

    @property
    def groups(self) -> Ints:
        """[candidates, pools] number of GPUs that must be on one machine together: a tensor-parallel group, or a copy
        of the stage."""
        return np.where(self.stages > 0, np.maximum(self.tp, self.shard_size[:, None]), 0)

    def __len__(self) -> int:
        return len(self.time_s)

    def take(self, rows: Ints | Bools) -> TrainTable:
        return TrainTable(**{key: each[rows] for key, each in self._arrays().items()}, is_complete=self.is_complete)

    @classmethod
    def joined(cls, tables: Sequence[TrainTable], *, is_complete: bool) -> TrainTable:
        """Return a table with the candidates of all `tables`, in order."""
        arrays = [table._arrays() for table in tables]
        joined = {key: np.concatenate([each[key] for each in arrays]) for key in arrays[0]}
        return cls(**joined, is_complete=is_complete)

    def _arrays(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.__struct_fields__ if key != "is_complete"}


class StepModel(msgspec.Struct, frozen=True):
    """The formula of the step time, with the constants that the workload determines."""

    output_tokens: float
    """Tokens generated per step."""
    max_running: float
    """Maximum number of running trajectories over all replicas; infinite with a table of rates (`--rates`)."""
    scoring_s: float
    """Time to score all trajectories of a batch."""
    latency_s: float
    """Time to score the last trajectory."""
    overlaps: bool
    """Whether generation continues while the trainer works."""

    def step_s(self, sync_s: Array, rollout_s: Array, train_s: Array) -> Array:
        """Return `sync + max(rollout + reward, train)` if generation and training overlap, otherwise the sum of the
        four times."""
        filled_s = np.maximum(rollout_s, self.scoring_s) + self.latency_s
        return sync_s + (np.maximum(filled_s, train_s) if self.overlaps else filled_s + train_s)

    def reward_s(self, rollout_s: float) -> float:
        """Return the scoring time that remains after the rollout. All trajectories except the last can be scored during
        the rollout."""
        return max(0.0, self.scoring_s - rollout_s) + self.latency_s

    def rollout_budget_s(self, step_s: float, sync_s: float, train_s: float) -> float:
        """Return the longest rollout time with which a step takes at most `step_s`; negative if there is none."""
        left = step_s - sync_s - self.latency_s - (0.0 if self.overlaps else train_s)
        is_possible = left >= self.scoring_s and (not self.overlaps or sync_s + train_s <= step_s)
        return left if is_possible else -1.0


class AssignmentProblem(msgspec.Struct, frozen=True):
    """One instance of the planner's optimisation problem."""

    inputs: Inputs
    pools: Pools
    columns: tuple[ReplicaShape, ...]
    table: TrainTable
    sync_s: Floats
    """[candidates, pools] time to publish from a candidate's trainer to engines of a pool."""
    step: StepModel
    train_rate_bound: Floats
    """[pools] upper bound, over all shapes, on the batches per second that one GPU trains. Lower bounds on the step
    time use this rate for shapes that are not in the table."""
    sync_bound_s: float
    """Lower bound on the publication time."""


def replica_columns(inputs: Inputs, pools: Pools) -> tuple[ReplicaShape, ...]:
    """Return every replica shape that fits into memory, with its largest batch and with 1/2, 1/4, … of this batch.
    Smaller batches are useful if the staleness bound limits the number of running trajectories."""
    model, work, found = inputs.model, inputs.work, []
    for index, pool in enumerate(pools.pools):
        for tp in tensor_widths(model, pool):
            for pp in REPLICA_STAGES:
                if pp > model.num_layers or tp * pp > max(pool.sizes):  # a worker runs on one machine
                    continue
                batch = largest_batch(model, work, pool.place, tp, pp)
                while batch >= pp:
                    found.append(ReplicaShape(index, replica_cost(model, work, pool.place, tp, pp, batch)))
                    batch //= 2
    return tuple(found)


def tensor_widths(model: ModelSpec, pool: GpuPool) -> list[int]:
    """Return the tensor-parallel widths: powers of two that fit into a node and divide the number of attention heads.
    As vLLM requires, each width also divides the number of key/value heads or is a multiple of this number."""
    heads, keys = model.num_heads, model.num_kv_heads
    return [level for level in pool.levels if heads % level == 0 and (keys % level == 0 or level % keys == 0)]


def make_step(work: Workload) -> StepModel:
    """Return the step model of a workload."""
    at_once = min(work.reward_concurrency, work.num_trajectories)
    return StepModel(
        output_tokens=work.output_tokens,
        max_running=work.max_running,
        scoring_s=work.num_trajectories * work.reward_latency_s / at_once,
        latency_s=work.reward_latency_s,
        overlaps=work.max_staleness > 0,
    )


def sync_table(inputs: Inputs, pools: Pools, shares: Floats) -> Floats:
    """Return the times [candidates, pools] from the end of a train step until engines serve the new version. `shares`
    [candidates, pools]: share of the weights that a pool trains."""
    latency = np.array([pool.place.efficiency.between_steps_s for pool in pools.pools])
    return publish_s(inputs.model, inputs.work, shares, pools.publish_bytes_per_s, latency)
