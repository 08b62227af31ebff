"""`VllmEngine`: an `Engine` whose tokens vLLM generates in its own processes (base class in `../external.py`).

**New version.** New weights are loaded between two vLLM steps. The engine pauses vLLM, records all generated tokens
under the old version, copies the tensors in place, switches the slot table, and resumes. Running requests keep their
keys and values. The salt of the prefix cache changes with the weights, so no prefix of an older version is reused.

**Sleep.** A colocated engine sleeps during a train step: `sleep` (no leases) ─▶ `wake_up`: memory of the weights ─▶
`load_weights`: load, then memory of the KV cache. The weights are loaded before memory is allocated for the KV cache,
so the load can use that memory.

**Routing.** vLLM returns the experts of a mixture of experts only with the last message of a request. With
`report_routing`, the engine therefore keeps the tokens of a request until the request ends, and accepts only leases of
one version (mode `sync`). The tokens of an aborted request are discarded.

**Noise.** The seed of a request depends on (run seed, group, sample, start position). A request that is never batched
with others draws the same tokens each time. The noise of the embedded engine is the same on every machine and after a
resume; the noise of vLLM is not.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import PreTrainedModel

from baton.errors import EngineFault, UserError
from baton.files import memory_directory, writing
from baton.policy.adapters import is_adapter, write_adapter
from baton.policy.load import save_skeleton, torch_device, torch_dtype
from baton.policy.routing import num_bytes, routers_of
from baton.policy.settings import ModelSettings
from baton.policy.tensors import dtype_name
from baton.policy.tokenizer import load_tokenizer
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.client import GeneratedTokens
from baton.rollout.engines.external import ExternalEngine, RunningRequest, joined
from baton.rollout.engines.vllm.client import VllmClient, set_up_environment
from baton.rollout.engines.vllm.direct import DirectLoad, arguments_of
from baton.rollout.engines.vllm.further import VllmWorkers
from baton.rollout.engines.vllm.worker import EndWithParent
from baton.rollout.engines.whole_weights import ModelFiles, ReadBase, Skeleton
from baton.specs.model import read_model
from baton.types import FromWorker, Lease, PolicyVersion, kept_dtype
from baton.weights.direct.settings import DirectTransfer

_CPU_BLOCK = 128
"""Number of tokens per block of vLLM's KV cache on a CPU. Every sequence uses whole blocks."""

_LAYER = re.compile(r"layers\.(\d+)\.")
"""Matches the layer number in a router's name."""

_LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM allows for `max_lora_rank`, beginning with vLLM's default."""


class VllmEngine(ExternalEngine[VllmClient]):
    """An engine on vLLM."""

    direct: DirectLoad | None = None
    """Loads versions directly from the memory of the trainer's process; None if vLLM reads them from `/dev/shm`."""
    _freed: tuple[str, ...] = ()
    """vLLM's names for the parts of device memory that are currently freed."""
    # vLLM normalises logprobs over the tokens that top-p and top-k keep, but a trajectory without masks needs logprobs
    # over all tokens.
    _only_temperature = (
        "vLLM returns logprobs after top-p and top-k: only temperature is allowed, or, for training, "
        "engine.vllm.return_sampling_mask = true"
    )

    @property
    def mask_dtype(self) -> str | None:
        vocabulary = self._skeleton.model.config.get_text_config().vocab_size
        return kept_dtype(vocabulary) if self._settings.vllm.return_sampling_mask else None

    def _loadable(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.direct is not None and self.direct.is_shared:
            return tensors  # `DirectVersions.offer` has converted them, once for all replicas
        return self._converted(tensors)

    def _converted(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        if not (self._settings.vllm.lora_rank and is_adapter(tensors)):
            return super()._loadable(tensors)
        self._weights.check_adapter(tensors)
        return tensors

    def _load_tensors(self, tensors: Mapping[str, Any], version: PolicyVersion, label: str) -> None:
        """Send the tensors to vLLM's workers, or write them to one file in memory, which all workers load. If the
        transfer fails, the weights may be incomplete, and vLLM stays paused until a load succeeds."""
        assert "weights" not in self._freed, "weights cannot be loaded into a sleeping engine: call wake_up first"
        self._load_paused(tensors, version, label)
        if self._freed:
            self.client.wake_up("kv_cache")
            self._freed = ()

    def _load_paused(self, tensors: Mapping[str, Any], version: PolicyVersion, label: str) -> None:
        if self.direct is not None and not is_adapter(tensors):
            self.direct.load(tensors, version)
            self.client.set_label(label)
            return
        with TemporaryDirectory(prefix="baton-", dir=memory_directory(), ignore_cleanup_errors=True) as directory:
            if is_adapter(tensors):
                with writing(Path(directory)):
                    write_adapter(tensors, Path(directory))
                self.client.load_adapter(directory, label)
                return
            path = Path(directory) / "weights.safetensors"
            with writing(path):
                save_file(dict(tensors), path)
            taken = self.client.load(str(path), label)
        if taken != len(tensors):
            raise EngineFault(f"vLLM loaded only {taken} of the {len(tensors)} tensors of a version")

    def load_base(self) -> None:
        """Load the base weights on which adapters act; the engine still serves no version."""
        self.client.pause()
        self._load_tensors(self._weights.whole(self._weights.base_tensors), self.version, "base")
        self.client.resume()

    def sleep(self) -> None:
        """Free the device memory of weights and KV cache. No lease may be waiting or running. May be called twice."""
        left = self._table.num_running + len(self._table.waiting())
        assert not left, f"the engine cannot sleep with {left} leases"
        if "weights" not in self._freed:
            # keep the base weights for vLLM's own LoRA; without LoRA, the next load replaces all weights
            self.client.sleep(1 if self._settings.vllm.lora_rank else 2)
            self._freed = ("weights", "kv_cache")

    def wake_up(self) -> None:
        """Allocate the memory of the weights again. The caller must then call `load_weights`, which allocates the KV
        cache. May be called twice."""
        if "weights" in self._freed:
            self.client.wake_up("weights")
            self._freed = ("kv_cache",)

    @property
    def held_bytes(self) -> int:
        """Device memory that vLLM uses, in bytes, on the GPU with the largest value; 0 on a CPU."""
        timeout_s = self._settings.vllm.answer_timeout_s
        return max(map(int, self.client.call_workers("held_bytes", None, timeout_s)))

    def _fill_slots(self) -> None:
        assert not (self._freed and self._table.waiting()), "an engine that has slept needs weights to generate"
        super()._fill_slots()

    def close(self) -> None:
        try:
            if self.direct is not None:
                self.direct.close()
        finally:
            super().close()

    def metrics(self) -> dict[str, float]:
        return {} if self.direct is None else self.direct.metrics()

    def use_direct(self, direct: DirectTransfer) -> None:
        """Load all later versions by direct transfers."""
        own = self._settings.vllm
        world_size = own.tensor_parallel * own.pipeline_parallel
        self.direct = DirectLoad(self.client, direct, world_size, timeout_s=own.answer_timeout_s)
        self._weights.on_host = direct.backend == "gloo"
        if direct.versions is not None:
            direct.versions.prepare = self._converted
            self.client.detect_stops()

    def _collect_tokens(self, timeout_s: float) -> list[FromWorker]:
        reports = super()._collect_tokens(timeout_s)
        timeout_s = self._settings.vllm.answer_timeout_s
        if self.running and not self._is_paused and self._clock() - self._active_s > timeout_s:
            raise EngineFault(
                f"vLLM has generated no token for {timeout_s:.0f} s, with {len(self.running)} trajectories "
                "running (engine.vllm.answer_timeout_s)"
            )
        return reports

    def submit(self, lease: Lease) -> None:
        if self._settings.report_routing and not lease.is_exact:
            raise UserError(
                f"trajectory {lease.trajectory.name}: vLLM returns the experts of a response only when it is complete, "
                'so engine.report_routing requires rollout.mode = "sync"'
            )
        super().submit(lease)

    def _append_tokens(self, said: GeneratedTokens, running: RunningRequest) -> list[FromWorker]:
        if self._settings.report_routing:
            running.unrouted.append(said)
            if said.finish is None:
                return []
            said = joined(running.unrouted)
            said = replace(said, routing=routing_of(said.experts, self._skeleton.model, len(said.token_ids)))
        reports = super()._append_tokens(said, running)
        if said.finish is not None:
            self._check_account(said, running)
        return reports

    def _check_account(self, said: GeneratedTokens, running: RunningRequest) -> None:
        """Raise EngineFault if vLLM attributes tokens to other weights than this engine has recorded."""
        account = said.by_weights
        if account is None or "" in running.by_weights or sum(account.values()) != running.by_weights.total():
            return  # there is nothing to compare, or vLLM has generated tokens after the end of the trajectory
        if account != running.by_weights:
            raise EngineFault(
                f"trajectory {running.row.lease.trajectory.name}: for the weights that generated its tokens, this "
                f"engine counted {running.by_weights}, but vLLM counted {said.by_weights}"
            )


def vllm_of_model(
    model: ModelSettings,
    settings: EngineSettings,
    version: PolicyVersion,
    *,
    direct: DirectTransfer | None = None,
    sleeps: bool = False,
) -> VllmEngine:
    """Build an engine as `factory.engine_of_model` does. If the model is an adapter, it is merged into its base model.
    A CPU build of vLLM does not support `sleeps`, because it cannot free its memory."""
    with _whole_model(model, settings) as (directory, read_base):
        return _engine(directory, settings, version, read_base, "auto", model.head_dtype, direct, sleeps)


def vllm_workers_of_model(model: ModelSettings, settings: EngineSettings, direct: DirectTransfer) -> VllmWorkers:
    """Start the workers of an engine that spans several machines, on a machine other than the first. The parameters are
    those of `vllm_of_model` on the first machine, with another `node_rank` in `settings.vllm.arguments`. Waits until
    the other machines have started. Raises the errors of `vllm_of_model`."""
    with _whole_model(model, settings) as (directory, _):
        return VllmWorkers(_arguments(directory, settings, "auto", model.head_dtype, direct, sleeps=False))


@contextmanager
def _whole_model(source: ModelSettings, settings: EngineSettings) -> Iterator[tuple[Path, ReadBase]]:
    """Yield a directory with the whole model (an adapter is merged), and a function that reads the base tensors."""
    _check_vllm(settings, source.device)
    files, path = ModelFiles(source, settings), source.path
    if files.base_path != path and settings.vllm.lora_rank:
        raise UserError(
            f"engine.vllm.lora_rank: got {settings.vllm.lora_rank}, but {path} is an adapter, which is merged at the "
            "start; use lora_rank = 0, or a model that is no adapter"
        )
    if files.base_path == path:
        yield files.base_directory(), files.read_base
        return
    with TemporaryDirectory(prefix="baton-model-") as scratch:
        model = files.load()
        save_skeleton(model, load_tokenizer(path), Path(scratch))
        model.save_pretrained(scratch)
        yield Path(scratch), files.read_base


def vllm_from_skeleton(
    directory: Path, read_base: ReadBase | None, settings: EngineSettings, *, device: str, sleeps: bool = False
) -> VllmEngine:
    """Build an engine as `factory.engine_from_skeleton` does. `read_base`: reads the tensors of the base model;
    required if versions are adapters."""
    _check_vllm(settings, device)
    return _engine(directory, settings, PolicyVersion("", -1), read_base, "dummy", sleeps=sleeps)


def routing_of(experts: NDArray[Any] | None, model: PreTrainedModel, num_tokens: int) -> list[bytes]:
    """Convert the experts that vLLM returned for the tokens of a request to `Segment.routing`. `experts`: [num_tokens,
    layers, experts per token]; `layers` includes layers without a router. Raises EngineFault for any other shape."""
    routers = routers_of(model)
    layers = [int(found[1]) for name in routers if (found := _LAYER.search(name))]
    if (
        experts is None
        or len(layers) != len(routers)
        or experts.ndim != 3
        or len(experts) != num_tokens
        or experts.shape[1] <= max(layers, default=0)
        or experts[:1, layers].nbytes != num_bytes(routers)
    ):
        shape = None if experts is None else experts.shape
        raise EngineFault(
            f"vLLM returned experts of shape {shape} for {num_tokens} tokens of a model with {len(routers)} routers "
            f"and {num_bytes(routers)} bytes of routing per token"
        )
    return [row.tobytes() for row in experts[:, layers]]


def _engine(
    directory: Path,
    settings: EngineSettings,
    version: PolicyVersion,
    read_base: ReadBase | None,
    load_format: str,
    head_dtype: str = "auto",
    direct: DirectTransfer | None = None,
    sleeps: bool = False,
) -> VllmEngine:
    skeleton = Skeleton(directory, settings)
    if direct is not None and direct.is_sparse and read_model(directory).num_experts > 1:
        raise UserError(
            f'weights.transport: got "sparse", but {directory} has experts, whose weights vLLM may rearrange, so '
            'single elements cannot be changed in place; use "direct"'
        )
    vllm = settings.vllm
    client = VllmClient(
        _arguments(directory, settings, load_format, head_dtype, direct, sleeps=sleeps),
        answer_timeout_s=vllm.answer_timeout_s,
        stream_interval=vllm.stream_interval,
        reports_routing=settings.report_routing,
    )
    engine = VllmEngine(client, skeleton, read_base, settings, version)
    try:
        if load_format == "dummy" and vllm.lora_rank and read_base is not None:
            engine.load_base()
        if direct is not None and not direct.is_remote:
            engine.use_direct(direct)
    except BaseException:
        engine.close()
        raise
    return engine


def _arguments(
    directory: Path,
    settings: EngineSettings,
    load_format: str,
    head_dtype: str,
    direct: DirectTransfer | None,
    *,
    sleeps: bool,
) -> dict[str, Any]:
    """Return all arguments of vLLM's `AsyncEngineArgs` by name, including the user's arguments."""
    own = settings.vllm
    return {
        "model": str(directory),
        "load_format": load_format,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # ignore the model's generation_config.json, because leases define the sampling
        # vLLM's "auto" would round a float32 checkpoint to bfloat16
        "dtype": dtype_name(torch_dtype(settings.dtype, torch_device("auto"))),
        "max_model_len": settings.max_context_tokens,
        "max_num_seqs": settings.slots,
        "tensor_parallel_size": own.tensor_parallel,
        "pipeline_parallel_size": own.pipeline_parallel,
        "gpu_memory_utilization": own.gpu_memory_utilization,
        "enforce_eager": own.enforce_eager,
        "quantization": own.quantization,
        "kv_cache_dtype": own.kv_cache_dtype,
        "enable_lora": own.lora_rank > 0,
        "max_lora_rank": next((rank for rank in _LORA_RANKS if rank >= own.lora_rank), _LORA_RANKS[-1]),
        "max_loras": 1,
        "enable_prefix_caching": True,  # prefill the prompt of a group once
        "logprobs_mode": "processed_logprobs",  # logprobs at the sampling temperature
        **({"return_sampling_mask": True} if own.return_sampling_mask else {}),
        **({"enable_return_routed_experts": True} if settings.report_routing else {}),
        "disable_log_stats": True,
        # if `head_dtype` is not overridden, vLLM reads this key from the model's configuration
        "hf_overrides": {} if head_dtype == "auto" else {"head_dtype": head_dtype},
        **arguments_of(direct),
        **_memory_arguments(directory, settings, sleeps=sleeps),
        **own.arguments,
        "additional_config": {**own.arguments.get("additional_config", {}), "baton": EndWithParent()},
    }


def _memory_arguments(directory: Path, settings: EngineSettings, *, sleeps: bool) -> dict[str, Any]:
    """Return vLLM's arguments for memory. On a GPU, they enable or disable sleep mode. On a CPU, which has no sleep
    mode, they set the size of the KV cache: about 1.25 times the size that all slots need at full length."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {"enable_sleep_mode": sleeps}
    blocks = settings.slots * (settings.max_context_tokens // _CPU_BLOCK + 1)
    bytes_per_value = torch_dtype(settings.dtype, torch_device("cpu")).itemsize
    num_bytes = int(1.25 * blocks * _CPU_BLOCK * read_model(directory).kv_bytes_per_token(bytes_per_value)) + 2**24
    return {"kv_cache_memory_bytes": num_bytes}


def _check_vllm(settings: EngineSettings, device: str) -> None:
    """Prepare vLLM's environment. Raises UserError if vLLM is not installed or not built for `device`."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "engine.kind: got 'vllm', but vLLM is not installed; run `pip install 'baton-rl[vllm]'` on a machine with "
            "a GPU; docs/engines.md describes the installation for a CPU"
        )
    set_up_environment()
    from vllm.platforms import current_platform

    has = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda_alike() else "another device"
    if device not in ("auto", has):
        raise UserError(
            f"model.device (--device): got {device!r}, but this vLLM is built for {has}: allowed are auto and {has}; "
            "CUDA_VISIBLE_DEVICES selects the GPUs"
        )
    if settings.vllm.batch_invariant:
        if has == "cpu":
            raise UserError(
                "engine.vllm.batch_invariant: got true, but this vLLM is built for a CPU, which has no such kernels; "
                "use false"
            )
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
