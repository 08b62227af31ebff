"""A workload: the lengths, batch shape, staleness, algorithm and rewards that determine time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from baton.errors import UserError
from baton.settings import Settings
from baton.specs.model import ModelSpec, read_model
from baton.specs.trainer_shapes import Trainer

QUANTILES = 512
"""Maximum number of quantiles that represent a distribution of lengths."""


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of token counts, represented by its quantiles: equally likely values in ascending order."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return self.moment(1)

    @property
    def longest(self) -> float:
        return self.values[-1]

    def moment(self, order: int) -> float:
        return _moment(self.values, order)

    def longest_of(self, count: float) -> float:
        """Return the expected maximum of `count` independent lengths."""
        ranks = np.arange(len(self.values) + 1) / len(self.values)
        return float(np.dot(self.values, np.diff(ranks**count)))

    def survival(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each position, return the share of lengths that are greater than this position."""
        return 1 - np.searchsorted(self.values, positions, side="right") / len(self.values)


@lru_cache(maxsize=1024)  # the planner needs the same few moments for each candidate shape
def _moment(values: tuple[float, ...], order: int) -> float:
    return float(np.mean(np.asarray(values) ** order))


def constant(mean: float) -> Lengths:
    """Return a distribution with one length."""
    return Lengths((float(mean),))


def lognormal(mean: float, cv: float, longest: float) -> Lengths:
    """Return a lognormal distribution clipped to `longest`. `mean` is the mean after clipping. `cv` is the ratio of the
    standard deviation to the mean before clipping."""
    sigma = math.sqrt(math.log1p(cv * cv))
    normal = NormalDist()
    z = np.array([normal.inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)])
    # bisection finds the location parameter for which the mean after clipping is `mean`
    low, high = math.log(mean) - 10, math.log(mean) + 10
    for _ in range(80):
        middle = (low + high) / 2
        is_below = float(np.mean(np.minimum(np.exp(middle + sigma * z), longest))) < mean
        low, high = (middle, high) if is_below else (low, middle)
    return Lengths(tuple(np.minimum(np.exp(high + sigma * z), longest).tolist()))


def measured(counts: Sequence[int]) -> Lengths:
    """Return the distribution of measured lengths."""
    ordered = np.sort(np.asarray(counts, dtype=float))
    if len(ordered) <= QUANTILES:
        return Lengths(tuple(ordered.tolist()))
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    quantiles = np.quantile(ordered, places, method="linear")
    quantiles[-1] = ordered[-1]
    return Lengths(tuple(quantiles.tolist()))


class Workload(msgspec.Struct, frozen=True):
    """The work of one train step. All train steps have the same work."""

    name: str
    groups: int
    group_size: int
    prompt: Lengths
    output: Lengths
    max_staleness: int = 8
    epochs: int = 1
    minibatches: int = 1
    trained_share: float = 1.0
    """Share of trajectories whose group has unequal rewards. Other trajectories need no backward pass, unless
    `backwards_all` is set."""
    forwards_all: bool = True
    """Whether the trainer also computes a forward pass for trajectories whose advantage is zero."""
    backwards_all: bool = False
    """Whether trajectories of groups with equal rewards also get a gradient, for example from a KL term."""
    shares_prompts: bool = False
    """Whether the trainer computes the prompt of a group once instead of once for each trajectory."""
    has_proximal_forward: bool = True
    has_reference: bool = False
    has_critic: bool = False
    recompute: bool = True
    shard_gradients: bool = False
    """Whether gradients are sharded after each microbatch, so that no rank holds the gradients of all parameters."""
    shard_size: int = 0
    """Number of ranks that share one copy of a stage's parameters (`trainer.shard_size`); 0: all ranks of the stage."""
    microbatch_tokens: int = 0
    """Maximum number of tokens of a microbatch. A trajectory with more tokens forms its own microbatch."""
    trainer: Trainer = "baton"
    reward_latency_s: float = 0.0
    reward_concurrency: int = 1024
    reward_model: ModelSpec | None = None
    """The reward model that the plan places on GPUs; the scoring time then follows from the cost model."""
    reward_batch_tokens: int = 16384
    """Maximum tokens of a batch of a classifier."""
    reward_reply_tokens: float = 0.0
    """Mean tokens of a reply of a generative reward model; 0 for a classifier."""
    reward_calls: int = 32
    """Maximum number of replies that a GPU generates at once."""
    reward_context_tokens: int = 8192
    """Context limit of a generative reward model in tokens, for its input and its reply together."""
    shared_prefill: bool = True
    reprefills: bool = True
    """Whether running trajectories are prefilled again under each new version, because their KV cache is discarded."""
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    max_batch: int = 1024
    engine_context_tokens: int = 0
    """Number of tokens per slot for which the engine allocates KV cache in advance, as the embedded engine does. 0: the
    engine allocates KV cache only for existing tokens (paged KV cache)."""
    max_output_tokens: int = 0
    """Maximum response length in tokens; 0 if unknown."""

    @property
    def num_trajectories(self) -> int:
        return self.groups * self.group_size

    @property
    def output_tokens(self) -> float:
        """Number of tokens generated per train step."""
        return self.num_trajectories * self.output.mean

    @property
    def trained_tokens(self) -> float:
        """Number of prompt and response tokens of a batch."""
        return self.num_trajectories * (self.prompt.mean + self.output.mean)

    @property
    def computed_tokens(self) -> float:
        """Number of tokens of a batch for which the trainer computes a forward pass."""
        num_prompts = self.groups if self.shares_prompts else self.num_trajectories
        return num_prompts * self.prompt.mean + self.output_tokens

    @property
    def longest_tokens(self) -> float:
        """Maximum number of tokens of a prompt and its response together."""
        return self.prompt.longest + self.output.longest

    @property
    def live_context_tokens(self) -> float:
        """Mean number of tokens that a running trajectory has at a random time. Long trajectories run longer, so long
        trajectories have more weight in this average."""
        return self.prompt.mean + self.output.moment(2) / (2 * self.output.mean)

    @property
    def live_context_squared(self) -> float:
        """Mean of the squared token count of a running trajectory at a random time."""
        p, mean = self.prompt.mean, self.output.mean
        position, square = self.output.moment(2) / (2 * mean), self.output.moment(3) / (3 * mean)
        return p * p + 2 * p * position + square

    @property
    def trajectory_squared(self) -> float:
        """Mean of (prompt + output)²."""
        return self.prompt.moment(2) + 2 * self.prompt.mean * self.output.mean + self.output.moment(2)

    @property
    def computed_squared(self) -> float:
        """Sum of (prompt + output)² over a batch; the trainer's attention FLOPs are proportional to this sum. A pair of
        tokens that both belong to a shared prompt counts once per group."""
        repeated = self.num_trajectories - self.groups if self.shares_prompts else 0
        return self.num_trajectories * self.trajectory_squared - repeated * self.prompt.moment(2)

    @property
    def updates(self) -> int:
        """Optimiser updates per train step."""
        return self.epochs * self.minibatches

    @property
    def max_running(self) -> float:
        """Mean number of running trajectories that the staleness bound allows, if the trainer is always busy.

        With staleness bound η and batch size B, at most (η + 1)·B trajectories are running, buffered or in training. B
        trajectories are in training, and B/2 are buffered on average, which leaves (η − ½)·B. A finished trajectory
        counts as running until its group is complete. The share of trajectories that really run is therefore the ratio
        of the mean length to the expected length of a group's longest trajectory. Without overlap (η = 0), all B
        trajectories of a batch may run.
        """
        if self.max_staleness == 0:
            return float(self.num_trajectories)
        held = self.output.mean / self.output.longest_of(self.group_size)
        return (self.max_staleness - 0.5) * self.num_trajectories * held


# ---- the TOML file ---------------------------------------------------------------------------------------------------


class LengthSettings(Settings):
    """A distribution of token counts: `constant`, `lognormal` or `measured`."""

    kind: Literal["constant", "lognormal", "measured"] = "constant"
    """Family of the distribution."""
    mean: float | None = Field(default=None, gt=0)
    """Mean token count, after the cut at `max`."""
    cv: float = Field(default=0.8, gt=0)
    """Coefficient of variation of `lognormal`, which is the ratio of the standard deviation to the mean, before the cut
    at `max`."""
    max: float | None = Field(default=None, gt=0)
    """Maximum token count of `lognormal`. Larger counts are cut to this value."""
    values: tuple[int, ...] = ()
    """Token counts of `measured`."""

    @model_validator(mode="after")
    def _is_whole(self) -> LengthSettings:
        self.build()
        return self

    def build(self) -> Lengths:
        if self.kind == "measured":
            if not self.values or min(self.values) < 1:
                raise ValueError('values: kind = "measured" needs token counts of at least 1')
            return measured(self.values)
        if self.mean is None:
            raise ValueError(f'mean is missing: kind = "{self.kind}" needs it')
        if self.kind == "constant":
            return constant(self.mean)
        if self.max is None or self.max <= self.mean:
            raise ValueError(f"max: got {self.max}, but lognormal needs a maximum above mean = {self.mean:g}")
        return lognormal(self.mean, self.cv, self.max)


class WorkAlgorithmSettings(Settings):
    """[algorithm] of a workload: what a train step computes."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the batch per train step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser updates per pass."""
    trained_share: float = Field(default=1.0, gt=0, le=1)
    """Share of trajectories with a nonzero advantage. Trajectories whose advantage is zero need only a forward pass."""
    proximal_forward: bool = True
    """Compute proximal log-probabilities in a forward pass."""
    reference_model: bool = False
    """Run a forward pass of a frozen reference model, which is kept on the trainer's GPUs."""
    critic: bool = False
    """Also train a value model of the policy's size on the same GPUs."""
    recompute: bool = True
    """Recompute activations in the backward pass to save memory."""
    microbatch_tokens: int = Field(default=8192, ge=0)
    """Maximum tokens of a microbatch (`trainer.max_tokens_per_microbatch`). A trajectory with more tokens forms its own
    microbatch."""


class WorkRewardSettings(Settings):
    """[reward] the time of scoring."""

    latency_s: float = Field(default=0.0, ge=0)
    """Seconds to score one trajectory."""
    concurrency: int = Field(default=1024, ge=1)
    """Maximum number of trajectories scored at once."""
    model: str | None = None
    """Directory or config.json of a reward model on GPUs of the plan. Replaces `latency_s` and `concurrency`."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Maximum tokens of a batch of a classifier (`batch_tokens` of its [[reward]])."""
    reply_tokens: float = Field(default=0.0, ge=0)
    """Mean tokens of a reply, for a generative reward model (`template`). 0: the model is a classifier."""
    calls: int = Field(default=32, ge=1)
    """Maximum number of replies that a GPU generates at once (`concurrency` of the [[reward]] with `template`)."""
    context_tokens: int = Field(default=8192, ge=2)
    """Context limit of a generative reward model in tokens, for its input and its reply together (`context_tokens` of
    the [[reward]] with `template`)."""

    @model_validator(mode="after")
    def _states_the_time_once(self) -> WorkRewardSettings:
        fields = type(self).model_fields  # a workload that was written to a file states defaults too
        if self.model and any(getattr(self, name) != fields[name].default for name in ("latency_s", "concurrency")):
            raise ValueError("with model, the time follows from the cost model: remove latency_s and concurrency")
        return self


class WorkEngineSettings(Settings):
    """[engine] of a workload: settings of the engines that generate rollouts."""

    shared_prefill: bool = True
    """Prefill each prompt once per group."""
    reprefill: bool = True
    """Prefill running trajectories again after each new version."""
    weight_bytes: float = Field(default=2.0, gt=0)
    """Bytes per parameter in the engine and in weight transfers; 2 is bfloat16."""
    kv_bytes: float = Field(default=2.0, gt=0)
    """Bytes per value in the KV cache."""
    max_batch: int = Field(default=1024, ge=1)
    """Maximum number of trajectories that one replica generates at once."""
    context_tokens: int = Field(default=0, ge=0)
    """Number of tokens for which the engine allocates KV cache per slot in advance. 0: the KV cache grows with the
    tokens (paged cache)."""


class WorkloadSettings(Settings):
    """A workload file."""

    name: str = "workload"
    """Name of the workload in plans."""
    groups: int = Field(ge=1)
    """Prompts per batch."""
    group_size: int = Field(ge=1)
    """Trajectories per prompt."""
    max_staleness: int = Field(default=8, ge=0)
    """Maximum staleness of a trained token. With 0, generation and training alternate."""
    prompt_tokens: LengthSettings
    """Prompt lengths."""
    output_tokens: LengthSettings
    """Response lengths."""
    algorithm: WorkAlgorithmSettings = WorkAlgorithmSettings()
    """Computation of a train step."""
    reward: WorkRewardSettings = WorkRewardSettings()
    """Time of scoring."""
    engine: WorkEngineSettings = WorkEngineSettings()
    """Engine that generates."""

    def build(self) -> Workload:
        most = self.algorithm.minibatches
        if most > self.groups:
            raise UserError(f"algorithm.minibatches: got {most}, but a batch has only groups = {self.groups}")
        algorithm, reward, engine = (part.model_dump() for part in (self.algorithm, self.reward, self.engine))
        model = reward.pop("model")
        return Workload(
            name=self.name,
            groups=self.groups,
            group_size=self.group_size,
            prompt=self.prompt_tokens.build(),
            output=self.output_tokens.build(),
            max_output_tokens=int(self.output_tokens.max or 0),
            max_staleness=self.max_staleness,
            has_proximal_forward=algorithm.pop("proximal_forward"),
            has_reference=algorithm.pop("reference_model"),
            has_critic=algorithm.pop("critic"),
            reward_model=None if model is None else read_model(Path(model)),
            reprefills=engine.pop("reprefill"),
            engine_context_tokens=engine.pop("context_tokens"),
            **algorithm,
            **{f"reward_{name}": value for name, value in reward.items()},
            **engine,
        )
