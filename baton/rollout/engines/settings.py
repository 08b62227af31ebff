"""[engine.vllm] and [engine.sglang]. Imports neither torch nor these packages."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings


class VllmSettings(Settings):
    """[engine.vllm] one vLLM engine. `slots`, `max_context_tokens` and `dtype` of [engine] apply too."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Tensor-parallel devices, over which every layer is sharded."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline stages, each with some of the layers."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights and KV cache together, 0 to 1."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """On a CPU: size of the KV cache, GiB; by default it holds `slots` trajectories of `max_context_tokens`, plus a
    quarter for shared prefixes."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs: starts faster, generates slower."""
    prefix_caching: bool = True
    """Prefill common prefixes once: a group's prompt, and the tokens of a resumed trajectory."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one step, prefill and decode together; the default is vLLM's."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds within which the engine must start, compilation included."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token or a response after which the engine is considered dead."""


class SglangSettings(Settings):
    """[engine.sglang] a running SGLang server for this engine alone. `slots` and `max_context_tokens` apply too."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """URL of the server, such as http://127.0.0.1:30000."""
    key_variable: str | None = None
    """Environment variable that holds the server's API key (--api-key), if it has one."""
    weights_directory: str | None = None
    """Directory to which this machine writes new weights and from which the server reads them, under the same path; by
    default in memory, for a server on this machine."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds within which the server must respond."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token or a response after which the server is considered dead."""
