"""[engine.vllm] and [engine.sglang]. This module imports neither torch nor vLLM."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings


class VllmSettings(Settings):
    """[engine.vllm] one vLLM engine. `slots`, `max_context_tokens` and `dtype` of [engine] also apply."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Number of tensor-parallel devices. Every layer is sharded over them."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of pipeline stages. The layers are divided between them."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and KV cache together, 0 to 1."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """Size of the KV cache on a CPU, GiB. The default fits `slots` trajectories of `max_context_tokens`, plus a quarter
    for shared prefixes."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs. The engine then starts faster and generates more slowly."""
    prefix_caching: bool = True
    """Prefill common prefixes only once: the prompt of a group, and the tokens of a resumed trajectory."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of one step, prefill and decode together. The default is that of vLLM."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds within which the engine must start, including compilation."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token or a response after which the engine is considered dead."""


class SglangSettings(Settings):
    """[engine.sglang] a running SGLang server, which no other client may use. `slots` and `max_context_tokens` of
    [engine] also apply."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """URL of the server, such as http://127.0.0.1:30000."""
    key_variable: str | None = None
    """Name of the environment variable with the server's API key (--api-key), if the server has one."""
    weights_directory: str | None = None
    """Directory in which the engine writes new weights and the server reads them under the same path. The default is a
    directory in memory, for a server on the same machine."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds within which the server must respond."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token or a response after which the server is considered dead."""
