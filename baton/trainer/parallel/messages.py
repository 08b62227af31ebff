"""What is said between the controller and the ranks of a sharded trainer, whatever carries it. Needs no torch.

    RankedTrainer ── ask ──▶ Ranks (processes of this machine, or actors of a cluster) ──▶ RankServer.handle in each
        ▲                                                                                          │
        └────────────────────────── an answer from each, in their order ◀──────────────────────────┘

A transport starts the processes, makes a `RankServer` of a `RankInfo` in each, and hands messages on: it knows nothing
of training. All ranks are asked the same at the same time, for they meet in collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from baton.errors import BatonError, EngineFault, Fault, RankLost, TrainingDiverged, UserError
from baton.types import Batch, PolicyVersion


class TrainerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer is made of, as plain values."""

    model_path: str
    device: str
    """As in [model]; with several ranks on a machine `cuda` is one GPU for each."""
    attention: str
    trainer: dict[str, Any]
    """`TrainerSettings`, `AlgorithmSettings` and `LoraSettings` (None without adapters) as they are dumped."""
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
    """Which rank a process is, and where; told by the transport before anything else."""

    rank: int
    size: int
    host: str = "127.0.0.1"
    """Address of this process' machine, as the other ranks reach it; nothing is listened to on any other."""
    interface: str = "lo"
    """Network interface with that address, for gloo and NCCL; empty lets them choose."""
    threads: int = 1
    """torch threads."""
    device_index: int | None = None
    """Which of the GPUs that the process sees; None for rank modulo their count."""
    scratch: str = ""
    """Directory, in memory where there is one, for the tensors of a published version."""


class Listen(msgspec.Struct, frozen=True, tag="Listen"):
    """Rank 0: open the store in which the ranks will meet. The others have nothing to do."""


class RankSetup(msgspec.Struct, frozen=True, tag="Setup"):
    """Meet at rank 0's store and build the trainer."""

    trainer: TrainerSetup
    host: str
    port: int
    timeout_s: float
    """After which a collective gives up."""


class TrainStep(msgspec.Struct, frozen=True, tag="Step"):
    """Run a train step. Every rank is given the whole batch."""

    batch: Batch


class Publish(msgspec.Struct, frozen=True, tag="Publish"):
    """Rank 0: write the weights as engines load them."""


class Save(msgspec.Struct, frozen=True, tag="Save"):
    """Write each one's part of a checkpoint into a directory that is there, and that all ranks see."""

    directory: str


class Restore(msgspec.Struct, frozen=True, tag="Restore"):
    """Continue from a checkpoint, by however many ranks it was written."""

    directory: str


class Listening(msgspec.Struct, frozen=True, tag="Listening"):
    """Answer to Listen; port 0 from any but rank 0."""

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
    """A safetensors file on the rank's machine; empty from any but rank 0."""


ToRank = RankInfo | Listen | RankSetup | TrainStep | Publish | Save | Restore
FromRank = Listening | Ready | Stepped | Published | Fault

_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToRank | FromRank) -> bytes:
    """Return a message as msgpack, for transports that carry bytes."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Read what a rank is told. Raises msgspec.DecodeError."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """Read what a rank says. Raises msgspec.DecodeError."""
    return _from_rank.decode(data)


def error_of(answers: Mapping[int, FromRank]) -> BatonError | OSError | None:
    """Return the error that the Faults among answers by rank stand for, or None where there is none.

    Errors of ours, and then a file that could not be written, are what they were, before all others: a rank that fails
    takes others with it, whose collectives then break. Anything else is RankLost.
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
    """Return the named error that another rank had answered with, else the loss itself."""
    error = error_of(answers)
    return lost if error is None or isinstance(error, RankLost) else error


HOW_TO_GO_ON = "go on from the last checkpoint with --resume, by as many ranks or another number of them"
"""For the end of a RankLost's sentence."""


FAULT_GRACE_S = 10.0
"""What ranks have to say that they failed as well, once one of them has."""


class Ranks(Protocol):
    """Carries messages to all ranks, and their answers back."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
        """Ask all ranks at once and return their answers in their order, Faults included.

        When one answers with a Fault the others have `FAULT_GRACE_S` more: in a collective without it they would wait
        for ever. When one has ended (noticed at once), or has not answered in time, all are ended and RankLost is
        raised, naming it; or, where another had answered with a named error, that one (`error_of`).
        """
        ...

    def bring(self, path: str) -> Path:
        """Return where a file that rank 0 wrote can be read here; who asks removes it afterwards."""
        ...

    def close(self) -> None:
        """End all ranks and see them end. May be called twice."""
        ...
