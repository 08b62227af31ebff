"""What is sent and written, as bytes: every message of every connection, and every record of every file.

A case is one direction of a connection, or one kind of record. Keys of its golden instances are tags that are in the
bytes already, or say what the record is for; no name of a class is in the golden file.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from baton.frames import FrameSocket
from baton.recipe.keys import RecipeKey
from baton.records.evaluation import Evaluation
from baton.records.journal import IssuedGroup, StreamCursor
from baton.records.run_directory import RecordedEvaluation
from baton.records.run_lock import LockHolder
from baton.records.trace import Span
from baton.rewards import scorer_protocol as calls
from baton.rollout.processes import protocol
from baton.run.loop import LoopState
from baton.run.summary import RunReport
from baton.run.trajectories import Sample
from baton.specs.plan import Plan
from baton.swarm import messages
from baton.swarm.audit_log import AuditLine
from baton.swarm.hub.relay import RelayTicket
from baton.swarm.hub.status import HubStatus
from baton.swarm.verification.policy import QuarantineRecord
from baton.swarm.verification.quarantine import LiftRecord
from baton.trainer.checkpoint import CheckpointState
from baton.trainer.parallel import messages as ranks
from baton.types import Batch, FinishReason, Group, Prompt, RewardResult, ScoredTrajectory, Segment, Trajectory, plain
from tests.golden.canonical import Canonical, members, tag_of

FILE = Path(__file__).parent / "wire.json"


def _group(choice: int, is_least: bool) -> Group:
    """A group's members have its id and their own index, and are finished."""
    reasons = list(FinishReason)
    segment = CANONICAL.make(Segment, choice, is_least)
    grown = [Trajectory(7, i, (1, 2), (segment,), reasons[(choice + i) % len(reasons)]) for i in range(2)]
    judged = tuple(ScoredTrajectory(each, CANONICAL.make(RewardResult, choice, is_least)) for each in grown)
    return Group(7, CANONICAL.make(Prompt, choice, is_least), judged)


CANONICAL = Canonical({Group: _group})


@dataclass(frozen=True)
class Case:
    """One direction of a connection, or one kind of record."""

    kinds: dict[str, Any]
    """Key in the golden file → type."""
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, Any], Any]
    """(bytes, type) → instance."""


def _tagged(union: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Case:
    return Case({tag_of(kind): kind for kind in members(union)}, encode, lambda data, kind: decode(data))


def _frame(message: Any) -> bytes:
    """Return what an engine process or its parent puts on a socket."""
    near, far = socket.socketpair()
    with closing(far), closing(near):
        FrameSocket(near, protocol.MAX_FRAME_BYTES).send(protocol.encode(message))
        return far.recv(1 << 20)


def _received(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """Return what `decode` makes of a frame on a socket."""
    near, far = socket.socketpair()
    with closing(far), closing(near):
        far.sendall(data)
        return decode(FrameSocket(near, protocol.MAX_FRAME_BYTES).receive_next())


def _body(data: bytes) -> bytes:
    assert int.from_bytes(data[: calls.HEADER_BYTES], "big") == len(data) - calls.HEADER_BYTES
    return data[calls.HEADER_BYTES :]


def _records(of: str, **kinds: Any) -> Case:
    coder = msgspec.json if of == "json" else msgspec.msgpack
    return Case(
        {name.replace("_", " "): kind for name, kind in kinds.items()},
        partial(coder.encode, enc_hook=plain),
        lambda data, kind: coder.decode(data, type=kind),
    )


CASES = {
    "hub to worker": _tagged(messages.FromHub, messages.encode, messages.decode_from_hub),
    "worker to hub": _tagged(messages.FromWorker, messages.encode, messages.decode_from_worker),
    "parent to engine": _tagged(
        protocol.ToEngine,
        _frame,
        lambda data: _received(protocol.decode_to_engine, data),
    ),
    "engine to parent": _tagged(
        protocol.FromEngine,
        _frame,
        lambda data: _received(protocol.decode_from_engine, data),
    ),
    "controller to rank": _tagged(ranks.ToRank, ranks.encode, ranks.decode_to_rank),
    "rank to controller": _tagged(ranks.FromRank, ranks.encode, ranks.decode_from_rank),
    "run to scorer process": Case(
        {tag_of(kind): kind for kind in (calls.ScorerSetup, calls.ScoreRequest)},
        calls.frame,
        lambda data, kind: msgspec.msgpack.decode(_body(data), type=kind),
    ),
    "scorer process to run": _tagged(
        calls.FromWorker, calls.frame, lambda data: msgspec.msgpack.decode(_body(data), type=calls.FromWorker)
    ),
    "journal.sqlite": _records(
        "msgpack",
        group=IssuedGroup,
        segments=tuple[Segment, ...],
        finished=Trajectory,
        judged=ScoredTrajectory,
        consumed=int,
        discarded=str,
        batch=dict[str, float],
        place=StreamCursor,
        last_step=int,
    ),
    "a run's directory": _records(
        "json",
        trajectories=Group,
        evaluations=RecordedEvaluation,
        trace=Span,
        holder=LockHolder,
        report=RunReport,
        checkpoint_state=CheckpointState,
        checkpoint_loop=LoopState,
        audit=AuditLine,
        quarantine=QuarantineRecord,
        quarantine_lifted=LiftRecord,
    ),
    "json output": _records(
        "json", status=HubStatus, plan=Plan, relay=RelayTicket, show=Sample, keys=RecipeKey, eval=Evaluation
    ),
    "train step": _records("msgpack", batch=Batch),
}


def text_of(data: bytes) -> str:
    """Return bytes as the golden file has them: JSON as it is, all else in base64."""
    return data.decode() if data[:1] == b"{" else base64.b64encode(data).decode()


def bytes_of(text: str) -> bytes:
    """Return the bytes of a text in the golden file."""
    return text.encode() if text[:1] == "{" else base64.b64decode(text)


def encoded(case: Case) -> dict[str, list[str]]:
    """Return the canonical instances of a case as the golden file has them."""
    return {key: [text_of(case.encode(each)) for each in CANONICAL.instances(kind)] for key, kind in case.kinds.items()}


def make() -> None:
    """Write the golden file."""
    found = {name: encoded(case) for name, case in CASES.items()}
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    make()
