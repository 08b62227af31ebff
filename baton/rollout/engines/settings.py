"""What a recipe says to the engines that are not Baton's own. No torch, and none of their packages."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings


class VllmSettings(Settings):
    """[engine.vllm] one vLLM engine. `engine.slots`, `max_context_tokens` and `dtype` hold for it too."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share every layer."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Groups of devices with some of the layers each."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights and KV cache together."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """On a CPU: GiB of the KV cache; by default it holds `slots` trajectories of `max_context_tokens`."""
    enforce_eager: bool = False
    """Run without compilation and CUDA graphs: starts sooner, generates slower."""
    prefix_caching: bool = True
    """Prefill what trajectories have in common once: a group's prompt, and a resumed trajectory's tokens."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one step, prefill and decode together; vLLM's own default where it is left out."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds in which the engine must have started; compilation included."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token, or an answer, after which the engine is taken for dead."""


class SglangSettings(Settings):
    """[engine.sglang] one running SGLang server that nobody else uses. `engine.slots` and `max_context_tokens` hold."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """Where it is, such as http://127.0.0.1:30000."""
    key_variable: str | None = None
    """Environment variable with the key that it was started with (--api-key), where it was."""
    weights_directory: str | None = None
    """Directory that this machine writes new weights to and the server reads them from under the same path; by default
    one in memory, for a server on this machine."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds in which the server must be up."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a token, or an answer, after which the server is taken for dead."""
