"""`Engine`, the protocol of what generates tokens, and its settings ([engine])."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec
from pydantic import Field, model_validator

from baton.rollout.engines.settings import SglangSettings, VllmSettings
from baton.settings import Settings
from baton.types import FromWorker, Lease, PolicyVersion

EngineKind = Literal["embedded", "vllm", "sglang"]
OWN_NOISE: frozenset[str] = frozenset({"vllm", "sglang"})
"""Kinds that sample with their own noise. Others draw by (seed, group, sample, position), so that verification can
repeat each draw."""


class EngineSettings(Settings):
    """[engine] the engine that generates tokens, and its shape."""

    kind: EngineKind = "embedded"
    """`embedded`: Baton's own engine, on any device. `vllm`: vLLM in its own processes (pip install
    'baton-rl[vllm]'). `sglang`: a running SGLang server. A worker can override it: baton worker --engine."""
    processes: int = Field(default=0, ge=0)
    """Engine processes with one torch thread each, on a CPU; 0 is one engine in the trainer's process. Only for kind
    `embedded`."""
    slots: int = Field(default=64, ge=8, multiple_of=8)
    """Trajectories that an engine generates concurrently; a multiple of 8."""
    max_context_tokens: int = 1024
    """Longest prompt plus response, tokens. The KV cache is allocated for slots × max_context_tokens at start."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and KV cache."""
    report_every_tokens: int = 256
    """A trajectory's new tokens are reported at least every so many tokens: what a dead worker loses per trajectory."""
    report_routing: bool = False
    """Mixtures of experts: report the chosen experts of every token, for trainer.moe_replay = "engine". Takes one byte
    per router and chosen expert. Only for kind `embedded`."""
    cuda_graphs: bool = False
    """On CUDA: decode with CUDA graphs, one per width and number of scanned positions, where they compute identical
    bits. Only for kind `embedded`. Not tried on a GPU yet."""
    row_attention: bool = False
    """On CUDA, in bfloat16: a decode step attends over each row's own length; by default all rows attend over the
    longest row's. Only for kind `embedded`. Not tried on a GPU yet."""
    vllm: VllmSettings = VllmSettings()
    """Settings of kind `vllm`."""
    sglang: SglangSettings = SglangSettings()
    """Settings of kind `sglang`."""

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
    """One engine: leases in, reports out. Single-threaded: the caller drives it by calling `step`."""

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights that produce the next logits."""

    @property
    def slots(self) -> int:
        """Trajectories generated concurrently."""

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError for one that this engine's shape cannot serve (longer than its context)."""

    def abort(self, lease_id: int) -> None:
        """End a lease; a later `step` reports its tokens. Does nothing for a lease that is unknown or has ended."""

    def step(self) -> list[FromWorker]:
        """Admit waiting leases to free slots, decode one token per running lease, and return the messages to send."""

    def flush(self) -> list[FromWorker]:
        """Report the tokens that running leases have generated since their last report."""

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights at once; running leases continue under the new version.

        A lease that requires exactly another version is aborted (an aborted report) or, if it still waits, refused (a
        Retry).
        """

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine started."""

    def close(self) -> None:
        """Stop the engine and its processes. Tokens not reported yet are lost. May be called twice."""
