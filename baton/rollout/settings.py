"""[rollout]: mode, sizes of batches and groups, sampling, and the staleness bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from baton.rollout.buffer import Consume, Stale
from baton.settings import Settings
from baton.types import MAX_KEPT, SamplingParams

Mode = Literal["sync", "partial", "async"]
OnNewVersion = Literal["drain", "resume", "keep"]

DEFAULT_OVERPROVISION = 2.0
DEFAULT_MAX_STALENESS = 4
MAX_AUTO_OVERPROVISION = 4.0
FILTERED_LIMIT = 20
"""Limit of dynamic sampling, as a multiple of batch_groups. When the number of groups filtered for one batch reaches
the limit, the run stops."""


@dataclass(frozen=True, slots=True)
class Rules:
    """`RolloutSettings` with all defaults resolved, for the scheduler."""

    mode: Mode = "sync"
    batch_groups: int = 32
    group_size: int = 8
    overprovision: float = 1.0
    """Number of open groups divided by batch_groups; infinite if only `max_concurrency` limits the open groups."""
    is_adaptive: bool = False
    """Whether `overprovision` is only the initial value, which measurements then change."""
    most_overprovision: float = MAX_AUTO_OVERPROVISION
    max_concurrency: int | None = None
    max_staleness: int = 0
    on_new_version: OnNewVersion = "drain"
    consume: Consume = "submission"
    stale: Stale = "mask"
    max_requeues: int = 2
    dynamic_sampling: bool = False
    is_swarm: bool = False
    """Whether the workers are a swarm: each worker loads a new version as soon as it has fetched the weights."""
    max_lag: int = 0
    """A swarm worker receives leases only if its version is at most this number of published versions behind the
    latest."""
    may_pause: bool = False
    """Whether the workers pause while the controller does not wait for their messages. Running trajectories keep their
    state during a pause."""

    @property
    def is_in_flight(self) -> bool:
        """Whether trajectories stay leased while workers load a version."""
        return self.on_new_version == "keep" or (self.is_swarm and self.mode == "async")

    @property
    def pauses(self) -> bool:
        """Whether workers pause, in mode `partial`, while no batch is requested. During a pause, trajectories stay
        leased, but no tokens are generated."""
        return self.may_pause and self.mode == "partial" and self.on_new_version == "keep"

    def max_outstanding(self, overprovision: float) -> float:
        """Return the maximum number of open groups in mode `partial`."""
        if math.isinf(overprovision):
            return math.inf
        return max(self.batch_groups, math.floor(overprovision * self.batch_groups + 1e-9))


class RolloutSettings(Settings):
    """[rollout] generation of training trajectories, and how far it may run ahead of training."""

    mode: Mode = "sync"
    """`sync`: generate a batch, train on it, publish. `partial` (APRIL): start more groups than a batch needs, stop
    when enough are complete, and resume the others under the next version. `async` (AReaL): generate during train
    steps, as far ahead as max_staleness allows."""
    placement: Literal["separate", "colocated"] = "separate"
    """`colocated`: engine and trainer use one device alternately. During a train step the engine frees its weights and
    KV cache. During generation the trainer frees gradients and moves weights and moments to the host."""
    batch_groups: int = Field(default=32, ge=1)
    """Number of groups per train step."""
    group_size: int = Field(default=8, ge=1)
    """Number of trajectories per group, all for one prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of a response, summed over all resumes."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. The trainer computes logprobs at the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the most likely tokens whose probabilities sum to this value, and sample among these tokens. Below 1, at
    most 512 tokens are kept (top_k = 0 then means 512). The trainer computes logprobs over the kept tokens."""
    top_k: int = Field(default=0, ge=0, le=MAX_KEPT)
    """Sample only among this number of most likely tokens, before top_p applies; 0 samples among all tokens. The
    trainer computes logprobs over the kept tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the model's end-of-sequence ids."""
    overprovision: float | Literal["auto"] | None = None
    """Number of open groups divided by batch_groups in mode `partial`, at least 1; `auto` adapts this number to the
    measured rate of useful tokens. The default is 2, or no bound if max_concurrency is set."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Maximum number of trajectories generated concurrently by all workers together."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum staleness of a trained token, in versions. Default: 0 in `sync`, else 4."""
    on_new_version: OnNewVersion | None = None
    """What happens to running trajectories when a new version is loaded. `drain` (only `sync`): the trajectories finish
    first. `resume` (default of `partial` and `async`): the trajectories are aborted, and resume from their token ids
    under the new weights. `keep` (`partial` and `async`): the trajectories continue with the keys and values of the old
    weights. In `partial`, only an embedded engine in the trainer's process supports `keep`; other engines abort and
    resume the trajectories."""
    consume: Consume | None = None
    """Order in which complete groups enter batches: `completion` (default of `partial`), `submission` (`sync`), or
    `stalest` first (default of `async`)."""
    stale: Stale = "mask"
    """Treatment of tokens older than max_staleness: `mask` keeps them as context without a gradient, and the reward
    still scores the whole response. `drop` discards the group and tries its prompt again."""
    max_requeues: int = Field(default=2, ge=0)
    """Number of further attempts at a dropped prompt before the prompt is discarded (stale = "drop")."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by new groups (DAPO)."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without progress after which the run stops with an error that names the worker."""

    @field_validator("overprovision")
    @classmethod
    def _is_enough(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and value < 1:
            raise ValueError(
                'allowed is "auto" or a number of at least 1, because a batch needs batch_groups complete groups'
            )
        return value

    @field_validator("stop")
    @classmethod
    def _are_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError('got "", which would end every response at its first token; allowed are non-empty strings')
        return value

    @model_validator(mode="after")
    def _fits_its_mode(self) -> RolloutSettings:
        rules, mode = self.rules(), self.mode
        if mode != "partial" and self.overprovision not in (None, 1.0):
            instead = "in async, use max_staleness" if mode == "async" else 'use mode = "partial"'
            raise ValueError(f'overprovision: got {self.overprovision!r}, but only mode = "partial" uses it; {instead}')
        allowed = {"sync": ("drain",), "partial": ("resume", "keep"), "async": ("resume", "keep")}[mode]
        if rules.on_new_version not in allowed:
            raise ValueError(
                f'on_new_version: got {rules.on_new_version!r}, but mode = "{mode}" allows {" or ".join(allowed)}; '
                f"change or remove the key"
            )
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                f"dynamic_sampling: got true with group_size = {self.group_size}, but it compares the rewards of a "
                "group; use group_size = 2 or more, or dynamic_sampling = false"
            )
        if mode == "sync" and rules.consume != "submission":
            raise ValueError(
                f'consume: got {rules.consume!r}, but mode = "sync" always consumes groups in the order of submission; '
                "remove the key"
            )
        if mode == "sync" and rules.max_staleness:
            raise ValueError(
                f'max_staleness: got {rules.max_staleness}, but mode = "sync" allows only 0; use "partial" or "async"'
            )
        if rules.stale != "mask" and mode == "partial" and rules.overprovision > rules.max_staleness + 1:
            raise ValueError(
                f"overprovision: got {rules.overprovision:g} with max_staleness = {rules.max_staleness} and stale = "
                f'"{rules.stale}", but at most max_staleness + 1 = {rules.max_staleness + 1} is allowed, because '
                'carried groups would become too old; lower overprovision, raise max_staleness, or use stale = "mask"'
            )
        return self

    def rules(self) -> Rules:
        """Resolve the defaults, which depend on the mode."""
        is_adaptive, staleness = self.overprovision == "auto", self.max_staleness
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
        return self.placement == "colocated"

    @property
    def max_kept(self) -> int:
        """Maximum number of tokens that top-k and top-p keep; 0 if neither is used."""
        return self.top_k or (MAX_KEPT if self.top_p < 1 else 0)

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.max_kept,
            stop=self.stop,
            reports_kept=self.max_kept > 0,
        )
