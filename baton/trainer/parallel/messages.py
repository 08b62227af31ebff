"""Messages between the controller and the ranks of a sharded trainer, for any transport. Needs no torch.

    RankedTrainer ── ask ──▶ Ranks (processes of this machine, or actors of a cluster) ──▶ RankServer.handle in each
        ▲                                                                                          │
        └────────────────────────── one answer per rank, in rank order  ◀──────────────────────────┘

A transport starts the processes, constructs a `RankServer` from a `RankInfo` in each, and forwards messages; it knows
nothing of training. All ranks receive the same request at the same time, because they take part in collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from baton.errors import BatonError, EngineFault, Fault, RankLost, TrainingDiverged, UserError
from baton.types import Batch, PolicyVersion


class TrainerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a trainer as plain values."""

    model_path: str
    device: str
    """As in [model]; with several ranks on a machine, `cuda` means one GPU per rank."""
    attention: str
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
    """float32 or bfloat16"""
    version: PolicyVersion
    seed: int


class RankInfo(msgspec.Struct, frozen=True, tag="Place", kw_only=True):
    """Rank, address and devices of a process; the first message that it receives."""

    rank: int
    size: int
    host: str = "127.0.0.1"
    """Address of this process's machine for the other ranks; the rank listens on no other address."""
    interface: str = "lo"
    """Network interface of that address for gloo and NCCL; empty lets them choose."""
    threads: int = 1
    """torch threads."""
    device_index: int | None = None
    """Index among the GPUs visible to the process; None for rank modulo their count."""
    scratch: str = ""
    """Directory for the tensors of a published version, in memory where possible; empty lets rank 0 create one."""


class Listen(msgspec.Struct, frozen=True, tag="Listen"):
    """Rank 0: open the store for rendezvous. The other ranks do nothing."""


class RankSetup(msgspec.Struct, frozen=True, tag="Setup"):
    """Join the process group through rank 0's store and construct the trainer."""

    trainer: TrainerSetup
    host: str
    port: int
    timeout_s: float
    """Timeout of the controller's requests, from which the timeout of collectives is derived."""


class TrainStep(msgspec.Struct, frozen=True, tag="Step"):
    """Run a train step. Every rank receives the whole batch."""

    batch: Batch


class Publish(msgspec.Struct, frozen=True, tag="Publish"):
    """All ranks: gather the weights as engines load them. Rank 0 writes them to a file."""


class Save(msgspec.Struct, frozen=True, tag="Save"):
    """Write each rank's part of a checkpoint into an existing directory that all ranks can access."""

    directory: str


class Restore(msgspec.Struct, frozen=True, tag="Restore"):
    """Load a checkpoint, however many ranks wrote it."""

    directory: str


class Listening(msgspec.Struct, frozen=True, tag="Listening"):
    """Answer to Listen; port 0 from ranks other than 0."""

    host: str
    port: int


class Ready(msgspec.Struct, frozen=True, tag="Ready"):
    """Answer to RankSetup, Save and Restore."""

    version: PolicyVersion


class Stepped(msgspec.Struct, frozen=True, tag="Stepped"):
    """Answer to TrainStep."""

    version: PolicyVersion
    metrics: dict[str, float]


class Published(msgspec.Struct, frozen=True, tag="Published"):
    """Answer to Publish."""

    version: PolicyVersion
    path: str
    """A safetensors file on the rank's machine; empty from ranks other than 0."""


ToRank = RankInfo | Listen | RankSetup | TrainStep | Publish | Save | Restore
FromRank = Listening | Ready | Stepped | Published | Fault

_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_encoder = msgspec.msgpack.Encoder()


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
    """Return the error that the Faults among `answers` (by rank) represent, or None without any.

    Baton's own errors come first, then OSErrors from writing files, each with its own type: a failing rank breaks the
    collectives of the others, whose errors are consequences. Anything else becomes RankLost.
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
        return RankLost(f"trainer rank {rank} cannot go on: {fault.kind}: {fault.text}; {HOW_TO_GO_ON}")
    return None


def cause_of(lost: RankLost, answers: Mapping[int, FromRank]) -> BatonError | OSError:
    """Return the specific error that a rank answered with, else the loss itself."""
    error = error_of(answers)
    return lost if error is None or isinstance(error, RankLost) else error


HOW_TO_GO_ON = "go on from the last checkpoint with --resume, by as many ranks or another number of them"
"""Advice that ends every RankLost sentence."""


FAULT_GRACE_S = 10.0
"""Time for the other ranks to answer, in seconds, once one has answered with a Fault."""


class Ranks(Protocol):
    """Transport of messages to all ranks, and of their answers."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
        """Send a request to all ranks and return their answers in rank order, Faults included.

        Once a rank answers with a Fault, the others have `FAULT_GRACE_S` left, because they may block in a collective
        without it. When a rank has exited or not answered in time, all ranks are ended. Raises RankLost naming it, or
        the specific error that another rank answered with (`error_of`).
        """
        ...

    def bring(self, path: str) -> Path:
        """Return a local path of a file that rank 0 wrote. The caller removes it afterwards."""
        ...

    def close(self) -> None:
        """End all ranks and wait until they have exited. Idempotent."""
        ...
