"""Messages between the controller and the ranks of a sharded trainer, for any transport. Does not import torch.

    RankedTrainer ── ask ──▶ Ranks (processes of this machine, or actors of a cluster) ──▶ RankServer.handle in each
        ▲                                                                                          │
        └────────────────────────── one answer per rank, in rank order  ◀──────────────────────────┘

A transport starts the processes, constructs a `RankServer` from a `RankInfo` in each process, and forwards messages.
All ranks receive the same request at the same time, because they take part in collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from baton.errors import BatonError, EngineFault, Fault, RankLost, TrainingDiverged, UserError
from baton.types import Batch, PolicyVersion, plain
from baton.weights.direct.protocol import DirectRules


class TrainerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a trainer as plain values."""

    model_path: str
    device: str
    """Value of the key `model.device`. With several ranks on a machine, `cuda` means one GPU per rank."""
    attention: str
    head_dtype: str = "auto"
    trainer: dict[str, Any]
    """Keys and values of [trainer]. `algorithm` and `lora` have the keys and values of [algorithm] and [lora]; `lora`
    is None without adapters."""
    algorithm: dict[str, Any]
    lora: dict[str, Any] | None
    temperature: float
    total_steps: int
    max_new_tokens: int
    max_staleness: int | None
    publish_dtype: str
    """Data type of published weights: "float32" or "bfloat16"."""
    version: PolicyVersion
    seed: int
    deterministic: bool | None = None
    """Whether ranks use deterministic algorithms. None: ranks use these algorithms only without CUDA."""


class RankInfo(msgspec.Struct, frozen=True, tag="Place", kw_only=True):
    """The first message to a rank process: its rank, address and devices."""

    rank: int
    size: int
    host: str = "127.0.0.1"
    """Address at which the other ranks reach this rank's machine. The rank listens only on this address."""
    interface: str = "lo"
    """Network interface of `host`, for gloo and NCCL. If empty, gloo and NCCL choose an interface."""
    threads: int = 1
    device_index: int | None = None
    """Index of the rank's GPU among the GPUs that its process sees. If None, the index is the rank modulo the number of
    these GPUs."""
    scratch: str = ""
    """Directory for the files of published versions. If empty, rank 0 creates a temporary directory."""


class Listen(msgspec.Struct, frozen=True, tag="Listen"):
    """Request to rank 0 to open the rendezvous store. Other ranks do nothing."""


class RankSetup(msgspec.Struct, frozen=True, tag="Setup"):
    """Request to join the process group through rank 0's store and to construct the trainer."""

    trainer: TrainerSetup
    host: str
    port: int
    timeout_s: float
    """Timeout of the controller's requests in seconds. The timeout of collectives is derived from this number."""


class TrainStep(msgspec.Struct, frozen=True, tag="Step"):
    """Request to run a train step. Every rank receives the whole batch."""

    batch: Batch


class Publish(msgspec.Struct, frozen=True, tag="Publish"):
    """Request to gather the weights in the form that engines load. Rank 0 writes the weights to a file."""


class Save(msgspec.Struct, frozen=True, tag="Save"):
    """Request to write each rank's part of a checkpoint into an existing directory that all ranks can access."""

    directory: str


class Restore(msgspec.Struct, frozen=True, tag="Restore"):
    """Request to load a checkpoint, which any number of ranks may have written."""

    directory: str


class UseDevice(msgspec.Struct, frozen=True, tag="UseDevice"):
    """Request to move all tensors to the host, so that an engine can use the device, or back to the device."""

    is_awake: bool | None
    """False: move all tensors to the host. True: move all tensors back to the device. None: only report the memory."""


class Describe(msgspec.Struct, frozen=True, tag="Describe"):
    """Request to describe the current weights before direct transfers of these weights."""

    bucket_bytes: int
    """Maximum bytes of a bucket, unless a tensor is larger."""


class ConnectReplica(msgspec.Struct, frozen=True, tag="ConnectReplica"):
    """Request to rank 0 to start building a communicator with an engine, for direct transfers."""

    name: str
    """Name of the communicator. A name is used once."""
    world_size: int
    """Number of devices of the engine."""
    backend: Literal["gloo", "nccl"]
    rules: DirectRules


class SendBucket(msgspec.Struct, frozen=True, tag="SendBucket"):
    """Request to gather a bucket of the current weights. Rank 0 starts to send the bucket to an engine."""

    name: str
    index: int
    place: dict[str, Any]
    """Index of the bucket, number of buckets, and version. The engine checks these values."""


class CloseReplica(msgspec.Struct, frozen=True, tag="CloseReplica"):
    """Request to rank 0 to abort a communicator."""

    name: str


class Listening(msgspec.Struct, frozen=True, tag="Listening"):
    """Answer to Listen. Ranks other than 0 answer with port 0."""

    host: str
    port: int


class Ready(msgspec.Struct, frozen=True, tag="Ready"):
    """Answer to RankSetup, Save, Restore and CloseReplica."""

    version: PolicyVersion


class Stepped(msgspec.Struct, frozen=True, tag="Stepped"):
    """Answer to TrainStep."""

    version: PolicyVersion
    metrics: dict[str, float]
    """Metrics of the train step by name; only the last pipeline stage sends metrics."""


class Published(msgspec.Struct, frozen=True, tag="Published"):
    """Answer to Publish."""

    version: PolicyVersion
    path: str
    """Path of a safetensors file with the weights, on the machine of rank 0; empty from ranks other than 0."""
    digests: dict[str, str]
    """Name → digest of the tensor; empty from ranks other than 0."""


class Described(msgspec.Struct, frozen=True, tag="Described"):
    """Answer to Describe. Only rank 0 describes the tensors."""

    version: PolicyVersion
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name in `state_dict` → dtype and shape."""
    bucket_bytes: tuple[int, ...]


class Sending(msgspec.Struct, frozen=True, tag="Sending"):
    """Answer to ConnectReplica and SendBucket. Rank 0 sets either `info` or `error`; other ranks set neither."""

    info: dict[str, Any]
    """Argument for the engine's method that receives the data from rank 0."""
    error: str = ""
    """Why rank 0 sends nothing. The trainer is unaffected."""


class DeviceMemory(msgspec.Struct, frozen=True, tag="DeviceMemory"):
    """Answer to UseDevice."""

    held_bytes: int
    """Bytes of weights, gradients and moments on this rank's device."""
    peak_bytes: int | None
    """Peak bytes of this rank's device memory since the previous UseDevice request; None on a CPU."""


ToRank = (
    RankInfo
    | Listen
    | RankSetup
    | TrainStep
    | Publish
    | Save
    | Restore
    | UseDevice
    | Describe
    | ConnectReplica
    | SendBucket
    | CloseReplica
)
FromRank = Listening | Ready | Stepped | Published | DeviceMemory | Described | Sending | Fault

encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
decode_to_rank = msgspec.msgpack.Decoder[ToRank](ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder[FromRank](FromRank).decode


def error_of(answers: Mapping[int, FromRank]) -> BatonError | OSError | None:
    """Return the error that caused the Faults among `answers` (rank → answer), or None if there is no Fault.

    A failing rank breaks the collectives of other ranks, so other ranks report errors that are only consequences. A
    UserError, TrainingDiverged or EngineFault therefore takes precedence over an OSError. If no rank reported one of
    these errors, the result is a RankLost.
    """
    faults = [(rank, answer, answer.error()) for rank, answer in sorted(answers.items()) if isinstance(answer, Fault)]
    for kind in (UserError, TrainingDiverged, EngineFault):
        for _, _, error in faults:
            if isinstance(error, kind):
                return error
    for rank, fault, error in faults:
        if isinstance(error, OSError):
            return OSError(error.errno, f"trainer rank {rank}: {fault.text}")
    for rank, fault, _ in faults:
        return RankLost(f"trainer rank {rank} failed: {fault.kind}: {fault.text}; {HOW_TO_GO_ON}")
    return None


def cause_of(lost: RankLost, answers: Mapping[int, FromRank]) -> BatonError | OSError:
    """Return the error that a rank reported in `answers`, or `lost` if no rank reported an error."""
    error = error_of(answers)
    return lost if error is None or isinstance(error, RankLost) else error


HOW_TO_GO_ON = "continue from the last checkpoint with --resume, with any number of ranks"
"""Advice at the end of the message of every RankLost."""

FAULT_GRACE_S = 10.0
"""Time in seconds within which the other ranks must answer after one rank has answered with a Fault."""


class Ranks(Protocol):
    """Transport of requests to all ranks, and of their answers."""

    def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
        """Send a request to all ranks and return their answers in rank order, including Faults.

        After one rank's Fault, the other ranks must answer within `FAULT_GRACE_S`, because they may be waiting for the
        failed rank in a collective. If a rank exits or does not answer in time, this method ends all ranks. It then
        raises the error that another rank has reported (`error_of`). If there is no such error, it raises a RankLost
        that names the rank.
        """

    def bring(self, path: str) -> Path:
        """Return a local path of a file that rank 0 wrote. The caller removes the local file."""

    def close(self) -> None:
        """End all ranks and wait until they have exited. Idempotent."""
