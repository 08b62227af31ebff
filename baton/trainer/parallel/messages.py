"""Messages between the controller and the ranks of a sharded trainer, for any transport. Needs no torch.

    RankedTrainer ── ask ──▶ Ranks (processes of this machine, or actors of a cluster) ──▶ RankServer.handle in each
        ▲                                                                                          │
        └────────────────────────── one answer per rank, in rank order  ◀──────────────────────────┘

A transport starts the processes, constructs a `RankServer` from a `RankInfo` in each, and forwards messages. All ranks
receive the same request at the same time, because they take part in collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from baton.errors import BatonError, EngineFault, Fault, RankLost, TrainingDiverged, UserError
from baton.types import Batch, PolicyVersion, plain


class TrainerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a trainer as plain values."""

    model_path: str
    device: str
    """Value of `model.device`. With several ranks on a machine, `cuda` means one GPU per rank."""
    attention: str
    head_dtype: str = "auto"
    trainer: dict[str, Any]
    """Dump of `TrainerSettings`; `algorithm` and `lora` are dumps of `AlgorithmSettings` and `LoraSettings` (None
    without adapters)."""
    algorithm: dict[str, Any]
    lora: dict[str, Any] | None
    temperature: float
    total_steps: int
    max_new_tokens: int
    max_staleness: int | None
    publish_dtype: str
    """"float32" or "bfloat16"."""
    version: PolicyVersion
    seed: int
    deterministic: bool | None = None
    """Whether ranks use deterministic algorithms; None means that they do only without CUDA."""


class RankInfo(msgspec.Struct, frozen=True, tag="Place", kw_only=True):
    """The first message to a rank process: its rank, address and devices."""

    rank: int
    size: int
    host: str = "127.0.0.1"
    """Address of this process's machine for the other ranks; the rank listens on no other address."""
    interface: str = "lo"
    """Network interface of that address for gloo and NCCL. Empty: gloo and NCCL choose."""
    threads: int = 1
    device_index: int | None = None
    """Index among the GPUs visible to the process; None means rank modulo the number of GPUs."""
    scratch: str = ""
    """Directory, in memory if possible, for the tensors of a published version. Empty: rank 0 creates one."""


class Listen(msgspec.Struct, frozen=True, tag="Listen"):
    """Request to rank 0 to open the rendezvous store. Other ranks do nothing."""


class RankSetup(msgspec.Struct, frozen=True, tag="Setup"):
    """Request to join the process group through rank 0's store and to construct the trainer."""

    trainer: TrainerSetup
    host: str
    port: int
    timeout_s: float
    """Timeout of the controller's requests, from which the timeout of collectives is derived."""


class TrainStep(msgspec.Struct, frozen=True, tag="Step"):
    """Request to run a train step. Every rank receives the whole batch."""

    batch: Batch


class Publish(msgspec.Struct, frozen=True, tag="Publish"):
    """Request to gather the weights in the form that engines load. Rank 0 writes them to a file."""


class Save(msgspec.Struct, frozen=True, tag="Save"):
    """Request to write each rank's part of a checkpoint into an existing directory that all ranks can access."""

    directory: str


class Restore(msgspec.Struct, frozen=True, tag="Restore"):
    """Request to load a checkpoint, which any number of ranks may have written."""

    directory: str


class Listening(msgspec.Struct, frozen=True, tag="Listening"):
    """Answer to Listen. The port is 0 from ranks other than 0."""

    host: str
    port: int


class Ready(msgspec.Struct, frozen=True, tag="Ready"):
    """Answer to RankSetup, Save and Restore."""

    version: PolicyVersion


class Stepped(msgspec.Struct, frozen=True, tag="Stepped"):
    """Answer to TrainStep."""

    version: PolicyVersion
    metrics: dict[str, float]
    """Empty from ranks before the last pipeline stage."""


class Published(msgspec.Struct, frozen=True, tag="Published"):
    """Answer to Publish."""

    version: PolicyVersion
    path: str
    """Path of a safetensors file on the rank's machine; empty from ranks other than 0."""


ToRank = RankInfo | Listen | RankSetup | TrainStep | Publish | Save | Restore
FromRank = Listening | Ready | Stepped | Published | Fault

_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_encoder = msgspec.msgpack.Encoder(enc_hook=plain)


def encode(message: ToRank | FromRank) -> bytes:
    """Return a message as msgpack, for transports that carry bytes."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Decode a message to a rank. Raises msgspec.DecodeError."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """Decode a message from a rank. Raises msgspec.DecodeError."""
    return _from_rank.decode(data)


def error_of(answers: Mapping[int, FromRank]) -> BatonError | OSError | None:
    """Return the error that caused the Faults among `answers` (by rank), or None without a Fault.

    A failing rank breaks the collectives of the other ranks, whose errors are consequences. Baton's errors therefore
    take precedence, then OSErrors, and both keep their types. Any other error becomes RankLost.
    """
    faults = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, Fault)}
    errors = {rank: fault.error() for rank, fault in faults.items()}
    for kind in (UserError, TrainingDiverged, EngineFault):
        for error in errors.values():
            if isinstance(error, kind):
                return error
    for rank, error in errors.items():
        if isinstance(error, OSError):
            return OSError(error.errno, f"trainer rank {rank}: {faults[rank].text}")
    for rank, fault in faults.items():
        return RankLost(f"trainer rank {rank} failed: {fault.kind}: {fault.text}; {HOW_TO_GO_ON}")
    return None


def cause_of(lost: RankLost, answers: Mapping[int, FromRank]) -> BatonError | OSError:
    """Return the error that a rank answered with, or `lost` if there is none."""
    error = error_of(answers)
    return lost if error is None or isinstance(error, RankLost) else error


HOW_TO_GO_ON = "continue from the last checkpoint with --resume, with any number of ranks"
"""Advice at the end of every RankLost sentence."""

FAULT_GRACE_S = 10.0
"""Seconds within which the other ranks must answer after one has answered with a Fault."""


class Ranks(Protocol):
    """Transport of requests to all ranks, and of their answers."""

    @property
    def size(self) -> int: ...

    def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
        """Send a request to all ranks and return their answers in rank order, Faults included.

        After one rank's Fault, the others have `FAULT_GRACE_S` left, because they may wait for this rank in a
        collective. If a rank exits or does not answer in time, all ranks are ended, and RankLost naming this rank is
        raised, or the error that another rank answered with (`error_of`).
        """
        ...

    def bring(self, path: str) -> Path:
        """Return a local path of a file that rank 0 wrote. The caller removes the local file."""
        ...

    def close(self) -> None:
        """End all ranks and wait until they have exited. Idempotent."""
        ...
