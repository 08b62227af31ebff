"""`Engine`: the interface of software that generates tokens, and the recipe section [engine]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec
from pydantic import Field, ValidationInfo, field_validator, model_validator

from baton.cost.memory import SLOT_MULTIPLE
from baton.policy.settings import DTypeChoice
from baton.settings import Settings
from baton.specs.vllm_arguments import refusal_of
from baton.types import FromWorker, Lease, PolicyVersion

EngineKind = Literal["embedded", "vllm", "sglang"]
OWN_NOISE: frozenset[str] = frozenset({"vllm", "sglang"})
"""Engine kinds that sample with their own random numbers. In the other engine kinds, the random numbers are a function
of (seed, group, sample, position), so verification can repeat each draw."""

SENT_BY_RUN = "sent by run"
"""Validation context of the settings that a run sends to its own processes. The run has already validated the user's
vLLM arguments, and may have added arguments that are refused in a recipe."""


class VllmSettings(Settings):
    """[engine.vllm] one vLLM engine. `slots`, `max_context_tokens` and `dtype` of [engine] also apply."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Number of tensor-parallel devices. Every layer is sharded over these devices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of pipeline stages. The layers are divided between the stages."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Number of vLLM engines that the run starts, each on devices of its own. Above 1, requires weights.transport
    `direct` or `sparse`."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and KV cache together, 0 to 1."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs. Without them, the engine starts faster and generates more slowly."""
    return_sampling_mask: bool = False
    """Let vLLM report, for each generated token, the ids that top-k and top-p kept (requires vLLM's Model Runner V2).
    Must be true if rollout.top_p or rollout.top_k is used. With this option, the engine accepts only rollouts that use
    top-p or top-k, so eval.enabled must be false. Not tested with vLLM."""
    quantization: Literal["fp8"] | None = None
    """Quantise the weights when they are loaded. Requires algorithm.correction, because engine and trainer then compute
    different probabilities. Not tested on a GPU."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Dtype of the KV cache; `auto` is engine.dtype. Values other than `auto` require algorithm.correction. Not tested
    on a GPU."""
    batch_invariant: bool = False
    """Use vLLM's batch-invariant kernels (VLLM_BATCH_INVARIANT). With these kernels, the result of a row does not
    depend on the other rows of its batch. The kernels are slower. Not tested on a GPU."""
    lora_rank: int = Field(default=0, ge=0, le=512)
    """Maximum rank of a [lora] adapter that vLLM applies without merging it into the base weights. Above 0, a new
    version is sent as the adapter alone. With 0, each adapter is merged into the base weights."""
    stream_interval: int = Field(default=1, ge=1, le=1024)
    """Number of tokens after which vLLM sends a trajectory's new tokens to Baton. Larger values cost less processor
    time, but a stop string is found only when its tokens arrive. Before a new version is loaded and before an abort,
    Baton receives the tokens that vLLM has not sent yet."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, such as {max_num_batched_tokens = 8192}. Some of these arguments can
    run code (trust_remote_code), so a worker accepts arguments only from its command line, or from the run that started
    the worker."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token or a response after which the engine is considered dead."""

    @field_validator("arguments")
    @classmethod
    def _leaves_the_others(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name in arguments if info.context != SENT_BY_RUN else ():
            if refusal := refusal_of("engine", name):
                raise ValueError(f"{name}: {refusal}")
        if not isinstance(given := arguments.get("additional_config", {}), dict):
            raise ValueError(f"additional_config: got {given!r}, allowed is a table of keys and values")
        return arguments

    @property
    def is_quantized(self) -> bool:
        """Whether the weights or the KV cache are quantised to fewer bits than engine.dtype has."""
        return self.quantization is not None or self.kv_cache_dtype != "auto"


class SglangSettings(Settings):
    """[engine.sglang] a running SGLang server that only this run uses. `slots` and `max_context_tokens` of [engine]
    apply."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """URL of the server, such as http://127.0.0.1:30000."""
    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")], ...] = ()
    """URLs of the servers for `baton train --plan --ray`, which uses them instead of `url`. Each replica of the plan
    needs one server; the URLs have the order of the replicas in the plan."""
    key_variable: str | None = None
    """Name of the environment variable with the server's API key (--api-key), if the server has one."""
    weights_directory: str | None = None
    """Directory in which Baton writes new weights; the server reads them under the same path. The default is a
    directory in memory, which only a server on the same machine can read."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token or a response after which the server is considered dead."""

    @field_validator("url", "urls")
    @classmethod
    def _are_addresses(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """Refuse a URL to which the HTTP client could not connect. Otherwise the run would wait for the server."""
        for url in (value,) if isinstance(value, str) else value or ():
            urlsplit(url).port  # noqa: B018  # raises ValueError
        return value


class EngineSettings(Settings):
    """[engine] the kind and size of the engine that generates tokens."""

    kind: EngineKind = "embedded"
    """`embedded`: Baton's own engine, on any device. `vllm`: vLLM in its own processes (pip install
    'baton-rl[vllm]'). `sglang`: a running SGLang server. A worker can override the kind: baton worker --engine."""
    processes: int = Field(default=0, ge=0)
    """Number of `embedded` engine processes on a CPU, with one torch thread each; 0: one engine in the trainer's
    process."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs for the engines that the run starts on this machine, such as [2, 3], as indices among the visible GPUs. By
    default, the GPUs that no trainer rank uses; if no GPU is free, engines share the trainer's GPUs."""
    slots: int = Field(default=64, ge=SLOT_MULTIPLE, multiple_of=SLOT_MULTIPLE)
    """Number of trajectories that an engine generates concurrently; a multiple of 8."""
    max_context_tokens: int = 1024
    """Maximum tokens of prompt and response together. The KV cache has room for slots × max_context_tokens tokens."""
    dtype: DTypeChoice = "auto"
    """Dtype of weights and KV cache: bfloat16, float32, or `auto`: bfloat16 if `model.device` is CUDA, else float32."""
    report_every_tokens: int = Field(default=256, ge=1)
    """Maximum tokens between two reports of a trajectory. If a worker dies, each of its trajectories loses at most this
    number of tokens."""
    report_routing: bool = False
    """In a mixture of experts, report which experts the routers selected for each token, for trainer.moe_replay =
    "engine". A report has one byte per token, router and selected expert (two bytes if a router has more than 256
    experts). Kind `vllm` requires rollout.mode = "sync" and vLLM's Model Runner V2, and is not tested on a GPU."""
    row_attention: bool = False
    """Let each row of a decode step attend only over its own length. By default, all rows attend over the length of the
    longest row. On a CPU, the default divides the rows into classes of similar length, and each row attends over the
    length of the longest row in its class. Only for kind `embedded` in bfloat16. Requires a C compiler on a CPU,
    because attention and norms are compiled when the engine starts. Not tested on a GPU."""
    vllm: VllmSettings = VllmSettings()
    """Settings of kind `vllm`."""
    sglang: SglangSettings = SglangSettings()
    """Settings of kind `sglang`."""

    @property
    def vllm_parts(self) -> tuple[str, ...]:
        """Names of the vLLM features that these settings use, such as `fp8`. `support.toml` has the same names on its
        axis `vllm`."""
        own = self.vllm
        has = {
            "devices": own.tensor_parallel * own.pipeline_parallel > 1,
            "replicas": own.replicas > 1,
            "fp8": own.is_quantized,
            "batch_invariant": own.batch_invariant,
            "adapters": own.lora_rank > 0,
            "routing": self.report_routing,
            "stream_interval": own.stream_interval > 1,
            "arguments": bool(own.arguments),
        }
        return tuple(name for name, is_so in has.items() if is_so and self.kind == "vllm") or ("default",)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> EngineSettings:
        if self.kind != "embedded" and self.processes:
            raise ValueError(
                f'processes: got {self.processes}, but an engine of kind = "{self.kind}" starts its own processes; '
                "remove the key; to run several engines, use engine.vllm.replicas, or start a worker for each (baton "
                "worker --engine)"
            )
        if self.row_attention and self.dtype != "bfloat16":
            raise ValueError(f'row_attention: got true, but it requires dtype = "bfloat16", not "{self.dtype}"')
        if self.kind == "sglang" and self.report_routing:
            raise ValueError(
                'report_routing: got true, but it requires kind = "embedded" or "vllm", not "sglang", whose experts '
                "Baton does not read"
            )
        return self


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the engine started."""

    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    """Number of rows, summed over all decode steps. Rows without a lease are included, because a step computes them
    too. Occupancy: `decoded_tokens / decode_rows`."""

    @classmethod
    def total(cls, parts: Iterable[EngineStats]) -> EngineStats:
        """Return the counters summed over `parts`."""
        return cls(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


@runtime_checkable
class Resident(Protocol):
    """A component, such as an engine, that can free its device memory and later move back to the device."""

    def sleep(self) -> None:
        """Free the component's device memory. Has no effect if the component already sleeps."""

    def wake_up(self) -> None:
        """Move the component back to the device. Has no effect if the component is already awake."""

    @property
    def held_bytes(self) -> int:
        """Device memory that the component uses now, in bytes."""


class Engine(Protocol):
    """Generates the trajectories of leases. An engine has no thread: the caller calls `step` in a loop."""

    @property
    def version(self) -> PolicyVersion:
        """Version of the current weights."""

    @property
    def slots(self) -> int:
        """Number of trajectories that the engine generates concurrently."""

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError if the trajectory does not fit into the engine's context."""

    def abort(self, lease_id: int) -> None:
        """End a lease; a later `step` reports its tokens. Has no effect on a lease that is unknown or has ended."""

    def step(self) -> list[FromWorker]:
        """Admit waiting leases to free slots, decode one token per running lease, and return reports and refusals."""

    def flush(self) -> list[FromWorker]:
        """Return reports of all tokens that running leases have generated since their last report."""

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights immediately. Running leases continue under the new version. A lease with `is_exact`
        requires one version. If the new version is another one, such a lease is aborted if it is running, and refused
        with `Retry` if it is waiting."""

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine started."""

    def metrics(self) -> dict[str, float]:
        """Return the engine's own metrics since the last call."""

    def close(self) -> None:
        """Stop the engine and its processes. Unreported tokens are lost. May be called twice."""
