"""Code that runs in vLLM's worker processes and receives weights directly from the trainer.

`DirectWorker` registers Baton's engines with vLLM's factory of weight transfer engines:

| name          | how tensors arrive                         | where                                       |
|---------------|--------------------------------------------|---------------------------------------------|
| `baton_gloo`  | Baton's own broadcast over gloo            | CPU                                         |
| `baton_nccl`  | vLLM's engine `nccl`                       | CUDA, GPUs of a cluster; never run          |
| `baton_ipc`   | vLLM's engine `ipc`                        | CUDA, the trainer's own GPU; never run      |

All three engines use the model's own loader. They compare the checksum of each tensor that the loader receives with the
trainer's checksum. If a transfer fails, the model's weights are incomplete, but vLLM's loading state is reset, so the
next transfer can load all weights again.

A whole version is reloaded layer by layer. A difference changes the model's parameters in place
(`load_checkpoint_weight_patches` of vLLM), over gloo or NCCL.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from baton.errors import WeightsFault
from baton.rollout.engines.vllm.worker import WeightsLoader, checked_reload
from baton.weights.direct.gloo import GlooGroup, join_replica
from baton.weights.direct.stream import ABORT, NUM_CHANGED, IncomingVersion


class DirectWorker(WeightsLoader):
    """Methods that Baton adds to vLLM's worker for direct transfers."""

    update_weights: Callable[[dict[str, Any]], None]
    """Method of vLLM's worker."""

    def abort_transfer(self) -> None:
        """End an unfinished transfer: request an update with the key `ABORT`, which makes the update fail."""
        with suppress(RuntimeError, WeightsFault):
            self.update_weights({ABORT: True})


class _CheckedReceiver:
    """Mixin for an engine of vLLM: checks that a version arrives complete, and cleans up after a failure."""

    model: Any
    model_config: Any
    receive_patches: Callable[[dict[str, Any]], None]
    """Receives the changed elements of a bucket's tensors and loads them in place."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._incoming = IncomingVersion()
        self._is_reloading = False

    def start_weight_update(self) -> None:
        self._restore_layers()
        self._incoming.begin()

    def update_weights(self, info: dict[str, Any]) -> None:
        try:
            if ABORT in info:
                raise WeightsFault("the trainer has aborted a direct transfer")
            described = {**info}
            place = described.pop("bucket")
            self._incoming.expect(info["names"], place)
            if place["base"] is None and place["index"] == 0:
                self._is_reloading = True
                _reload().initialize_layerwise_reload(self.model)
            with self._checking():
                if NUM_CHANGED in info:
                    self.receive_patches(described)
                else:
                    super().update_weights(described)  # type: ignore[misc]
            self._incoming.end_bucket()
        except BaseException:
            self._incoming.abandon()
            self._restore_layers()
            raise

    def finish_weight_update(self) -> None:
        self._incoming.finish()
        try:
            if self._is_reloading:
                with checked_reload(self.model):
                    super().finish_weight_update()  # type: ignore[misc]
                self._is_reloading = False
            else:
                check_patched(self.model)
        except BaseException:
            self._incoming.abandon()
            raise

    def _restore_layers(self) -> None:
        """Restore the layers' tensors after a failed transfer. Otherwise vLLM 0.32 would keep the tensors received so
        far, count them in the next transfer and load some of them."""
        if self._is_reloading:
            self._is_reloading = False
            _reload().finalize_layerwise_reload(self.model, self.model_config)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """In this context, check each tensor before the model's loader loads it."""
        model = self.model

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            given = list(weights)
            self._incoming.loaded(given)
            return model.load_weights(given)

        self.model = SimpleNamespace(load_weights=load_weights)
        try:
            yield
        finally:
            self.model = model


def check_patched(model: Any) -> None:
    """Raise WeightsFault if a parameter contains NaN. In a difference, NaN marks an unchanged element, which the loader
    must skip."""
    found = [name for name, tensor in model.named_parameters() if tensor.is_floating_point() and tensor.isnan().any()]
    if found:
        raise WeightsFault(f"vLLM's loader wrote NaN instead of unchanged elements: {', '.join(found[:5])}")


class _NcclPatches:
    """Mixin for vLLM's engine `nccl`: receives changed elements as vLLM's engine `sparse_nccl` does."""

    def receive_patches(self, info: dict[str, Any]) -> None:
        sparse = importlib.import_module("vllm.distributed.weight_transfer.sparse_nccl_engine")
        described = sparse.SparseNCCLWeightTransferUpdateInfo(**info)
        sparse.SparseNCCLWeightTransferEngine.receive_weights(self, described)
        torch.accelerator.synchronize()


@dataclass
class GlooInitInfo:
    """Where and how a replica joins the communicator (`baton/weights/direct/gloo.py`)."""

    host: str
    port: int
    name: str
    timeout_s: float
    world_size: int


@dataclass
class GlooUpdateInfo:
    """The tensors of a bucket (`baton/weights/direct/stream.py`)."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class _GlooEngine:
    """Mixin for the base class of vLLM's engines: receives tensors in host memory by broadcasts over gloo."""

    model: Any
    model_config: Any
    parallel_config: Any
    parse_update_info: Callable[[dict[str, Any]], GlooUpdateInfo]

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        place = {name: getattr(init_info, name) for name in ("host", "port", "name", "timeout_s")}
        own = self.parallel_config
        rank = 1 + own.data_parallel_index * own.world_size + own.rank
        self._group = join_replica(place, rank, init_info.world_size)

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(dict(update_info)))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        with self._receiving() as group:
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
                group.broadcast(tensor)
                self.model.load_weights([(name, tensor)])

    def receive_patches(self, info: Mapping[str, Any]) -> None:
        patch = importlib.import_module("vllm.model_executor.model_loader.checkpoint_weight_patch")
        with self._receiving() as group:
            patches = []
            for name, dtype_name, shape, count in zip(
                info["names"], info["dtype_names"], info["shapes"], info[NUM_CHANGED], strict=True
            ):
                dtype = getattr(torch, dtype_name)
                indices, values = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=dtype)
                group.broadcast(indices)
                group.broadcast(values)
                patches.append(patch.CheckpointWeightPatch(name, tuple(shape), dtype, values, indices))
            patch.load_checkpoint_weight_patches(self.model, patches)

    @contextmanager
    def _receiving(self) -> Iterator[GlooGroup]:
        if self._group is None:
            raise WeightsFault("weights were announced to a replica that has no communicator")
        try:
            yield self._group
        except BaseException:
            self.shutdown()  # the sender's pending broadcast then fails at once
            raise

    def finish_weight_update(self) -> None:
        _reload().finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


_ENGINES = {
    "gloo": ("base", "WeightTransferEngine", (_CheckedReceiver, _GlooEngine)),
    "nccl": ("nccl_engine", "NCCLWeightTransferEngine", (_CheckedReceiver, _NcclPatches)),
    "ipc": ("ipc_engine", "IPCWeightTransferEngine", (_CheckedReceiver,)),
}
"""Backend → module and name of vLLM's engine class, and Baton's mixins for this class."""


def __getattr__(name: str) -> type:
    """Return the engine class `name`, built on access, because some modules of vLLM cannot be imported without CUDA."""
    if name not in _ENGINES:
        raise AttributeError(name)
    module, base, mixins = _ENGINES[name]
    of_vllm = getattr(importlib.import_module(f"vllm.distributed.weight_transfer.{module}"), base)
    return type(f"Checked{base}", (*mixins, of_vllm), {})


def _reload() -> Any:
    """Return the module of vLLM that reloads a model layer by layer."""
    return importlib.import_module("vllm.model_executor.model_loader.reload")


if importlib.util.find_spec("vllm") is not None:
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    for backend in _ENGINES:
        factory.WeightTransferEngineFactory.register_engine(f"baton_{backend}", __name__, backend)
