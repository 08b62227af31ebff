"""Communicators of vLLM's own transfer engines, on the trainer's side. vLLM is imported only when a communicator is
built."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.sender import Communicator, ReplicaLink
from baton.weights.direct.settings import DirectTransfer
from baton.weights.direct.stream import NUM_CHANGED, Bucket


class VllmTransport:
    """Builds communicators of vLLM's own transfer engines. Not tested, because the communicators need GPUs."""

    def __init__(self, direct: DirectTransfer, host: str) -> None:
        """`host`: address at which replicas reach this machine."""
        self._direct, self._host = direct, host

    def connect(self, link: ReplicaLink, name: str, rules: DirectRules) -> Communicator:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        source, world_size = VersionSource(), 1 + link.world_size
        info = (
            IPCTrainerInitInfo(rank=0)
            if self._direct.backend == "ipc"
            else NCCLTrainerInitInfo(self._host, free_port(self._host), world_size, rank=0)
        )
        client, sparse = StreamClient(link, source, rules), None
        with torch.cuda.device(self._direct.gpu):  # vLLM uses the current device of this thread
            engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        if self._direct.is_sparse:
            from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerWeightTransferEngine

            sparse = SparseNCCLTrainerWeightTransferEngine(client=client)
            sparse.model_update_group = engine.model_update_group  # one communicator for both
        return VllmCommunicator(engine, sparse, source, self._direct.gpu)


NOTHING: Final = Bucket((), {"names": []})


class VersionSource:
    """The `WeightSource` of vLLM's trainer engines: the tensors of the bucket that is being sent."""

    def __init__(self) -> None:
        self.bucket = NOTHING

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(zip(self.bucket.info["names"], self.bucket.tensors, strict=True))


@dataclass(frozen=True, slots=True)
class StreamClient:
    """The client of vLLM's trainer engines. Its methods that start and end an update do nothing, because `DirectSync`
    decides when updates start and end."""

    link: ReplicaLink
    source: VersionSource
    rules: DirectRules

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.link.call("init_weight_transfer_engine", init_info, self.rules.connect_s)

    def start_weight_update(self) -> None:
        return

    def update_weights(self, update_info: dict[str, Any]) -> None:
        place = self.source.bucket.info["bucket"]
        self.link.call("update_weights", {**update_info, "bucket": place}, self.rules.stall_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        return


@dataclass(frozen=True, slots=True)
class VllmCommunicator:
    """Sends buckets from the trainer's GPU. While the trainer sleeps, its tensors are in host memory, and are copied to
    the GPU one bucket at a time."""

    engine: Any
    """vLLM's trainer engine for whole tensors."""
    sparse: Any
    """vLLM's trainer engine for changed elements, over the same communicator; None for transfers of whole versions."""
    source: VersionSource
    gpu: int | None

    def send(self, buckets: Sequence[Bucket], progressed: Callable[[], None]) -> None:
        try:
            with torch.cuda.device(self.gpu):
                for bucket in buckets:
                    self.source.bucket = self._on_gpu(bucket)
                    if NUM_CHANGED in bucket.info:
                        self.sparse.send_weight_chunk(patches_of(self.source.bucket))
                    else:
                        self.engine.send_weights()
                    progressed()
        finally:
            self.source.bucket = NOTHING  # frees the copy

    def _on_gpu(self, bucket: Bucket) -> Bucket:
        if self.gpu is None:
            return bucket
        return Bucket(tuple(tensor.to(torch.device("cuda", self.gpu)) for tensor in bucket.tensors), bucket.info)

    def close(self) -> None:
        self.engine.shutdown()


def patches_of(bucket: Bucket) -> list[Any]:
    """Return the changed elements of a bucket as vLLM's patches."""
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

    described = zip(bucket.info["names"], bucket.info["shapes"], strict=True)
    return [
        SparseWeightPatch(name, bucket.tensors[2 * i], bucket.tensors[2 * i + 1], tuple(shape))
        for i, (name, shape) in enumerate(described)
    ]


def free_port(host: str) -> int:
    """Return a free port at an address of this machine."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        return int(found.getsockname()[1])
