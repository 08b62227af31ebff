"""[rollout]: the mode, the sizes of batches and groups, sampling, and the staleness bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from baton.rollout.buffer import Consume, Stale
from baton.settings import Settings
from baton.types import SamplingParams

Mode = Literal["sync", "partial", "async"]
OnNewVersion = Literal["drain", "resume", "keep"]

DEFAULT_OVERPROVISION = 2.0
DEFAULT_MAX_STALENESS = 4
MAX_AUTO_OVERPROVISION = 4.0
FILTERED_LIMIT = 20
"""The run stops when dynamic sampling filters this many groups per group of one batch."""


@dataclass(frozen=True, slots=True)
class Rules:
    """`RolloutSettings` with every default filled in, for the scheduler."""

    mode: Mode = "sync"
    batch_groups: int = 32
    group_size: int = 8
    overprovision: float = 1.0
    """Open groups per group that a batch needs; infinite where only `max_concurrency` bounds them."""
    is_adaptive: bool = False
    """Whether `overprovision` is the initial value and adapts to measurements."""
    most_overprovision: float = MAX_AUTO_OVERPROVISION
    """Upper bound of an adaptive `overprovision`."""
    max_concurrency: int | None = None
    max_staleness: int = 0
    on_new_version: OnNewVersion = "drain"
    consume: Consume = "submission"
    stale: Stale = "mask"
    max_requeues: int = 2
    dynamic_sampling: bool = False
    is_swarm: bool = False
    """Whether each worker loads a new version by itself, once it has fetched it."""
    max_lag: int = 0
    """Versions that a swarm worker may be behind the latest published one and still receive leases."""

    @property
    def is_in_flight(self) -> bool:
        """Whether trajectories stay leased while workers load a version."""
        return self.on_new_version == "keep" or (self.is_swarm and self.mode == "async")

    def max_outstanding(self, overprovision: float) -> float:
        """Return the most groups that may be open at once in mode `partial`."""
        return (
            max(self.batch_groups, math.floor(overprovision * self.batch_groups + 1e-9))
            if (math.isfinite(overprovision))
            else math.inf
        )


class RolloutSettings(Settings):
    """[rollout] what is generated, and how far generation may run ahead of training."""

    mode: Mode = "sync"
    """`sync`: generate a batch, train it, publish. `partial` (APRIL): start more groups than a batch needs, stop when
    enough are complete, resume the others under the next version. `async` (AReaL): generate while the trainer steps,
    as far ahead as max_staleness allows."""
    placement: Literal["separate", "colocated"] = "separate"
    """`colocated`: engine and trainer use one device alternately. While the trainer is active the engine frees weights
    and KV cache; while the engine is active the trainer frees gradients and moves weights and moments to the host."""
    batch_groups: int = Field(default=32, ge=1)
    """Groups per train step."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per group: samples of one prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, tokens, summed over all resumes."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer computes logprobs at the same one."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the model's end-of-sequence ids."""
    overprovision: float | Literal["auto"] | None = None
    """`partial`: groups open at once per group that a batch needs, at least 1; `auto` adapts to measured slot
    occupancy. The default is 2, or no bound if max_concurrency is set."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Most trajectories generated concurrently, over all workers. A free place goes to a waiting sibling or the next
    prompt."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Most versions that a trained token may be behind the trainer. The default is 0 for `sync`, else 4."""
    on_new_version: OnNewVersion | None = None
    """What happens to running trajectories: `drain` (they finish first; only `sync`), `resume` (aborted, and resumed
    from their ids under the new weights; default of `partial` and `async`), `keep` (`async`: they continue in flight
    with the keys and values of the old weights)."""
    consume: Consume | None = None
    """Order in which complete groups enter batches: `completion` (default of `partial`), `submission` (`sync`), or
    `stalest` first (default of `async`)."""
    stale: Stale = "mask"
    """What happens to tokens beyond max_staleness: `mask` keeps them as context without a gradient, and the reward
    includes them; `drop` discards the group and tries its prompt again."""
    max_requeues: int = Field(default=2, ge=0)
    """`drop`: attempts after the first before a prompt is discarded."""
    dynamic_sampling: bool = False
    """DAPO: replace groups whose rewards are all equal by newly generated ones."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without progress after which the run stops and names the worker."""

    @field_validator("overprovision")
    @classmethod
    def _is_enough(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and not (1 <= value < math.inf):
            raise ValueError('allowed is a number of at least 1, or "auto": a batch cannot be made from fewer groups')
        return value

    @model_validator(mode="after")
    def _fits_its_mode(self) -> RolloutSettings:
        for complaint in (*self._complaints_of_mode(), *self._complaints_of_staleness()):
            raise ValueError(complaint)
        return self

    def _complaints_of_mode(self) -> list[str]:
        rules, mode = self.rules(), self.mode
        found = []
        if mode != "partial" and self.overprovision not in (None, 1.0):
            instead = "max_staleness bounds how far it runs ahead" if mode == "async" else 'use mode = "partial"'
            found.append(f'overprovision: got {self.overprovision!r}, but it is of mode = "partial"; {instead}')
        allowed = {"sync": ("drain",), "partial": ("resume",), "async": ("resume", "keep")}[mode]
        if rules.on_new_version not in allowed:
            found.append(
                f'on_new_version: got {rules.on_new_version!r}, but mode = "{mode}" allows {" or ".join(allowed)}; '
                f"change it, or leave it out"
            )
        if mode == "sync" and rules.consume != "submission":
            found.append(f'consume: got {rules.consume!r}, but mode = "sync" consumes in the order of submission')
        return found

    def _complaints_of_staleness(self) -> list[str]:
        rules = self.rules()
        found = []
        if self.mode == "sync" and rules.max_staleness:
            found.append(f'max_staleness: got {rules.max_staleness}, but mode = "sync" has 0; use "partial" or "async"')
        if rules.stale != "mask" and self.mode == "partial" and rules.overprovision > rules.max_staleness + 1:
            found.append(
                f"overprovision: got {rules.overprovision:g} with max_staleness = {rules.max_staleness} and stale = "
                f'"{rules.stale}", allowed at most max_staleness + 1 = {rules.max_staleness + 1}: what is carried gets '
                'too old otherwise; lower it, raise max_staleness, or take stale = "mask"'
            )
        return found

    def rules(self) -> Rules:
        """Fill in the defaults of the mode."""
        is_adaptive = self.overprovision == "auto"
        staleness = self.max_staleness
        if staleness is None:
            staleness = 0 if self.mode == "sync" else DEFAULT_MAX_STALENESS
        most = MAX_AUTO_OVERPROVISION if self.stale == "mask" else min(MAX_AUTO_OVERPROVISION, staleness + 1)
        if self.mode != "partial":
            overprovision = 1.0
        elif isinstance(self.overprovision, float):
            overprovision = self.overprovision
        elif is_adaptive:
            overprovision = min(DEFAULT_OVERPROVISION, most)
        else:
            overprovision = DEFAULT_OVERPROVISION if self.max_concurrency is None else math.inf
        order: dict[Mode, Consume] = {"sync": "submission", "partial": "completion", "async": "stalest"}
        return Rules(
            mode=self.mode,
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            overprovision=overprovision,
            is_adaptive=is_adaptive,
            most_overprovision=most,
            max_concurrency=self.max_concurrency,
            max_staleness=staleness,
            on_new_version=self.on_new_version or ("drain" if self.mode == "sync" else "resume"),
            consume=self.consume or order[self.mode],
            stale=self.stale,
            max_requeues=self.max_requeues,
            dynamic_sampling=self.dynamic_sampling,
        )

    @property
    def is_colocated(self) -> bool:
        """Whether engine and trainer share one device."""
        return self.placement == "colocated"

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of training rollouts."""
        return SamplingParams(self.max_new_tokens, temperature=self.temperature, stop=self.stop)
