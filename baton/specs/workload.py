"""A workload: lengths, batch shape, staleness, algorithm and judges, as far as time and memory depend on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
from pydantic import Field, model_validator

from baton.errors import UserError
from baton.settings import Settings

QUANTILES = 512
"""Equally likely lengths that stand for a distribution."""


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of token counts: equally likely values in ascending order."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return self.moment(1)

    @property
    def longest(self) -> float:
        return self.values[-1]

    def moment(self, order: int) -> float:
        return float(np.mean(np.asarray(self.values) ** order))

    def longest_of(self, count: float) -> float:
        """E[max of `count` independent lengths]."""
        ranks = np.arange(len(self.values) + 1) / len(self.values)
        return float(np.dot(self.values, np.diff(ranks**count)))

    def survival(self, positions: Sequence[float]) -> list[float]:
        shares: list[float] = (1 - np.searchsorted(self.values, positions, side="right") / len(self.values)).tolist()
        return shares


def constant(mean: float) -> Lengths:
    """Every length is the same."""
    return Lengths((float(mean),))


def lognormal(mean: float, cv: float, longest: float) -> Lengths:
    """Lognormal, cut at `longest` (the trajectories that reach it end there); `mean` is that after the cut.

    `cv` is standard deviation over mean before the cut.
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    normal = NormalDist()
    z = np.array([normal.inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES)])
    low, high = math.log(mean) - 10, math.log(mean) + 10
    for _ in range(80):
        middle = (low + high) / 2
        if float(np.mean(np.minimum(np.exp(middle + sigma * z), longest))) < mean:
            low = middle
        else:
            high = middle
    return Lengths(tuple(np.minimum(np.exp(high + sigma * z), longest).tolist()))


def measured(counts: Sequence[int]) -> Lengths:
    """The distribution of lengths that were seen."""
    ordered = np.sort(np.asarray(counts, dtype=float))
    if len(ordered) <= QUANTILES:
        return Lengths(tuple(ordered.tolist()))
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    quantiles = np.quantile(ordered, places, method="linear")
    quantiles[-1] = ordered[-1]
    return Lengths(tuple(quantiles.tolist()))


class Workload(msgspec.Struct, frozen=True):
    """One train step's work, over and over."""

    name: str
    groups: int
    group_size: int
    prompt: Lengths
    output: Lengths
    max_staleness: int = 8
    """Versions that a trained token may be old; 0 takes turns: no generation while the trainer works."""
    epochs: int = 1
    minibatches: int = 1
    trained_share: float = 1.0
    """Of trajectories that have an advantage; the others go forward only (a group of equal rewards teaches nothing)."""
    has_proximal_forward: bool = True
    has_reference: bool = False
    has_critic: bool = False
    recompute: bool = True
    reward_latency_s: float = 0.0
    reward_concurrency: int = 1024
    shared_prefill: bool = True
    reprefills: bool = True
    """Running trajectories are prefilled again after each new version: their KV cache is thrown away."""
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    max_batch: int = 1024
    engine_context_tokens: int = 0
    """Positions an engine has per slot, whatever is in them (the embedded engine's fixed cache); 0: only what is
    used."""

    @property
    def num_trajectories(self) -> int:
        return self.groups * self.group_size

    @property
    def output_tokens(self) -> float:
        """Generated per train step."""
        return self.num_trajectories * self.output.mean

    @property
    def trained_tokens(self) -> float:
        """Prompts and outputs of a batch."""
        return self.num_trajectories * (self.prompt.mean + self.output.mean)

    @property
    def longest_tokens(self) -> float:
        """Of prompt and output together."""
        return self.prompt.longest + self.output.longest

    @property
    def live_context_tokens(self) -> float:
        """Mean length of a running trajectory seen at a random time: long ones run longer."""
        return self.prompt.mean + self.output.moment(2) / (2 * self.output.mean)

    @property
    def live_context_squared(self) -> float:
        """Mean square of the same."""
        p, mean = self.prompt.mean, self.output.mean
        position, square = self.output.moment(2) / (2 * mean), self.output.moment(3) / (3 * mean)
        return p * p + 2 * p * position + square

    @property
    def trajectory_squared(self) -> float:
        """E[(prompt + output)²]."""
        return self.prompt.moment(2) + 2 * self.prompt.mean * self.output.mean + self.output.moment(2)

    @property
    def updates(self) -> int:
        """Optimiser updates of a train step."""
        return self.epochs * self.minibatches

    @property
    def max_running(self) -> float:
        """Trajectories that the staleness gate lets run at once, on average, while the trainer works all the time.

        The gate holds running + buffered + in training ≤ (η + 1)·B. In training is B, buffered grows from 0 to B and is
        B/2 on average; a group whose longest member runs holds its finished ones: (η − ½)·B·E[L]/E[longest of the
        group]. Without overlap (η = 0) it is the batch.
        """
        if self.max_staleness == 0:
            return float(self.num_trajectories)
        held = self.output.mean / self.output.longest_of(self.group_size)
        return (self.max_staleness - 0.5) * self.num_trajectories * held


# ---- as TOML ---------------------------------------------------------------------------------------------------------


class LengthSettings(Settings):
    """Token counts: `constant`, `lognormal`, or `measured` ones."""

    kind: Literal["constant", "lognormal", "measured"] = "constant"
    """Family of the distribution."""
    mean: float | None = Field(default=None, gt=0)
    """Mean token count (after the cut at `max`)."""
    cv: float = Field(default=0.8, gt=0)
    """Standard deviation over mean, of `lognormal` before the cut."""
    max: float | None = Field(default=None, gt=0)
    """Longest length of `lognormal`; those that reach it end there."""
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
            raise ValueError(f"max: got {self.max}, but lognormal needs a longest length above mean = {self.mean:g}")
        return lognormal(self.mean, self.cv, self.max)


class WorkAlgorithmSettings(Settings):
    """[algorithm] what a train step computes."""

    epochs: int = Field(default=1, ge=1)
    """Times that a train step goes through its batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser updates in each."""
    trained_share: float = Field(default=1.0, gt=0, le=1)
    """Of trajectories that have an advantage; the others go forward only."""
    proximal_forward: bool = True
    """A forward pass for proximal log-probabilities."""
    reference_model: bool = False
    """A forward pass of a frozen reference model, held by the trainer's GPUs."""
    critic: bool = False
    """A value model of the policy's size is trained too, on the same GPUs."""
    recompute: bool = True
    """Activations are recomputed in the backward pass instead of kept."""


class WorkRewardSettings(Settings):
    """[reward] how long judging takes."""

    latency_s: float = Field(default=0.0, ge=0)
    """Of one trajectory."""
    concurrency: int = Field(default=1024, ge=1)
    """Trajectories judged at once."""


class WorkEngineSettings(Settings):
    """[engine] how generation is done."""

    shared_prefill: bool = True
    """A prompt is prefilled once for its group."""
    reprefill: bool = True
    """Running trajectories are prefilled again after each new version."""
    weight_bytes: float = Field(default=2.0, gt=0)
    """Bytes of a parameter, in the engine and on the wire: 2 is bfloat16."""
    kv_bytes: float = Field(default=2.0, gt=0)
    """Bytes of a value in the KV cache."""
    max_batch: int = Field(default=1024, ge=1)
    """Trajectories that one replica generates at once, at most."""
    context_tokens: int = Field(default=0, ge=0)
    """Positions that a slot of the engine holds whether used or not; 0: memory is taken as tokens come (paged)."""


class WorkloadSettings(Settings):
    """A workload file."""

    name: str = "workload"
    """What plans call it."""
    groups: int = Field(ge=1)
    """Prompts in a batch."""
    group_size: int = Field(ge=1)
    """Trajectories per prompt."""
    max_staleness: int = Field(default=8, ge=0)
    """Versions that a trained token may be old; 0: generation and training take turns."""
    prompt_tokens: LengthSettings
    """Lengths of prompts."""
    output_tokens: LengthSettings
    """Lengths of responses."""
    algorithm: WorkAlgorithmSettings = WorkAlgorithmSettings()
    """What a train step computes."""
    reward: WorkRewardSettings = WorkRewardSettings()
    """How long judging takes."""
    engine: WorkEngineSettings = WorkEngineSettings()
    """How generation is done."""

    def build(self) -> Workload:
        algorithm, engine = self.algorithm, self.engine
        if algorithm.minibatches > self.groups:
            raise UserError(
                f"algorithm.minibatches: got {algorithm.minibatches}, but a batch has only groups = {self.groups}"
            )
        return Workload(
            name=self.name,
            groups=self.groups,
            group_size=self.group_size,
            prompt=self.prompt_tokens.build(),
            output=self.output_tokens.build(),
            max_staleness=self.max_staleness,
            epochs=algorithm.epochs,
            minibatches=algorithm.minibatches,
            trained_share=algorithm.trained_share,
            has_proximal_forward=algorithm.proximal_forward,
            has_reference=algorithm.reference_model,
            has_critic=algorithm.critic,
            recompute=algorithm.recompute,
            reward_latency_s=self.reward.latency_s,
            reward_concurrency=self.reward.concurrency,
            shared_prefill=engine.shared_prefill,
            reprefills=engine.reprefill,
            weight_bytes=engine.weight_bytes,
            kv_bytes=engine.kv_bytes,
            max_batch=engine.max_batch,
            engine_context_tokens=engine.context_tokens,
        )
