"""The seam between whoever schedules rollouts and whatever generates tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
from pydantic import Field, model_validator

from baton.errors import UserError
from baton.rollout.engines.settings import SglangSettings, VllmSettings
from baton.settings import Settings
from baton.types import FromWorker, Lease, PolicyVersion

EngineKind = Literal["embedded", "vllm", "sglang"]
OWN_NOISE: frozenset[str] = frozenset({"vllm", "sglang"})
"""Kinds that draw with noise of their own. What others draw follows from (seed, group, sample, position), and can be
drawn again by whoever checks it."""


class EngineSettings(Settings):
    """[engine] what generates, and its shape."""

    kind: EngineKind = "embedded"
    """`embedded`: Baton's own, on any device. `vllm`: vLLM in processes of its own (pip install 'baton-rl[vllm]').
    `sglang`: a running SGLang server. A worker may choose another: baton worker --engine."""
    processes: int = Field(default=0, ge=0)
    """Engine processes with one torch thread each, on a CPU; 0 is one engine in the trainer's own process. For the kind
    `embedded` only."""
    slots: int = Field(default=64, ge=8, multiple_of=8)
    """Trajectories that an engine generates at once; a multiple of 8."""
    max_context_tokens: int = 1024
    """Prompt plus response; the KV cache is allocated for slots × max_context_tokens when the engine starts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and KV cache: float32 or bfloat16."""
    report_every_tokens: int = 256
    """A trajectory's new tokens are reported at least this often, so that a dead worker costs no more."""
    report_routing: bool = False
    """Mixtures of experts: whether every token is reported with the experts behind it, for trainer.moe_replay =
    "engine"; a byte for each router and chosen expert. For the kind `embedded` only."""
    cuda_graphs: bool = False
    """On CUDA: decode by CUDA graphs, one for each number of scanned positions, where they give the same bits. For the
    kind `embedded` only. Not tried on a GPU yet."""
    row_attention: bool = False
    """On CUDA, in bfloat16: a decode step attends to each row's own length; by default all rows scan as far as the
    longest. For the kind `embedded` only. Not tried on a GPU yet."""
    vllm: VllmSettings = VllmSettings()
    """Of the kind `vllm`."""
    sglang: SglangSettings = SglangSettings()
    """Of the kind `sglang`."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> EngineSettings:
        if self.kind != "embedded" and self.processes:
            raise ValueError(
                f'processes: got {self.processes}, but with kind = "{self.kind}" the engine has processes of its own: '
                "leave it out; several engines are several workers (baton worker --engine)"
            )
        if self.row_attention and self.dtype != "bfloat16":
            raise ValueError(f'row_attention: got true, but it needs dtype = "bfloat16", not "{self.dtype}"')
        if self.kind != "embedded" and self.report_routing:
            raise ValueError(f'report_routing: got true, but only the kind "embedded" does, not "{self.kind}"')
        return self


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the engine started."""

    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    """Sampled tokens."""
    decode_steps: int = 0
    decode_rows: int = 0
    """Sum of the decode width over steps; decoded_tokens / decode_rows is the occupancy."""


class Engine(Protocol):
    """One engine: leases in, reports out. Single-threaded: the caller drives it with `step`."""

    @property
    def version(self) -> PolicyVersion:
        """The weights that produce the next logits."""

    @property
    def slots(self) -> int:
        """Trajectories generated at once."""

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError for what no engine of this shape can serve (longer than its context)."""

    def abort(self, lease_id: int) -> None:
        """End a lease; the next `step` reports what it has. Harmless for a lease that is unknown or already ended."""

    def step(self) -> list[FromWorker]:
        """Admit what fits, decode one token for every running lease, and return what is to be reported."""

    def flush(self) -> list[FromWorker]:
        """Report what running leases have grown since their last report."""

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights at once; running leases keep their KV cache and go on under the new version.

        Leases that asked for exactly another version are put down (an aborted report) or, where they wait, refused.
        """

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""

    def close(self) -> None:
        """End whatever runs on its behalf. What is still growing is lost. May be called twice."""


def check_room(group_id: int, prompt_ids: Sequence[int], max_context_tokens: int | None) -> None:
    """Raise UserError for a prompt that leaves no room for a response."""
    if max_context_tokens is not None and len(prompt_ids) >= max_context_tokens:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens (group {group_id}) does not fit: engine.max_context_tokens is "
            f"{max_context_tokens} for prompt and response together; raise it, or leave such prompts out"
        )
