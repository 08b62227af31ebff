"""Messages between this process and an engine process: msgpack frames over a socket pair, never pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import Fault
from baton.frames import FrameSocket
from baton.rollout.engine import EngineSettings, EngineStats
from baton.types import Abort, Lease, PolicyVersion, Report, Retry

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A longer frame is refused before any memory is allocated for it."""


class Start(msgspec.Struct, frozen=True, tag="Start"):
    """The first message to a process: the engine to build."""

    model_path: str
    device: str
    attention: str
    settings: dict[str, Any]
    """`EngineSettings`, as plain values."""
    version: PolicyVersion
    scratch: str = ""
    """Directory through which weights are sent; the engine removes it when the parent has exited."""

    def engine_settings(self) -> EngineSettings:
        """Return the validated settings."""
        return EngineSettings.model_validate(self.settings)


class LoadWeights(msgspec.Struct, frozen=True, tag="LoadWeights"):
    """Load the tensors of a safetensors file as `version`."""

    path: str
    version: PolicyVersion


class Progress(msgspec.Struct, frozen=True, tag="Progress"):
    """New reports, and the engine's counters after them."""

    messages: tuple[Report | Retry, ...]
    stats: EngineStats


class Serving(msgspec.Struct, frozen=True, tag="Serving"):
    """The engine serves this version, after its start or a LoadWeights."""

    version: PolicyVersion


ToEngine = Start | LoadWeights | Lease | Abort
FromEngine = Progress | Serving | Fault

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def send_to_engine(engine: FrameSocket, message: ToEngine) -> None:
    """Send one message, or queue it while the socket is full. Raises OSError when the engine has exited."""
    engine.send(_encoder.encode(message))


def send_to_parent(parent: FrameSocket, message: FromEngine) -> None:
    """Send one message and wait until it is written. Raises OSError when the parent has exited."""
    parent.send_all(_encoder.encode(message))


def receive_to_engine(parent: FrameSocket) -> ToEngine:
    """Wait for one message. Raises EOFError or OSError when the parent has exited."""
    return _to_engine.decode(parent.receive_next())


def receive_from_engine(engine: FrameSocket) -> FromEngine | None:
    """Return the next message, or None while it is incomplete. Raises EOFError or OSError if the engine has exited."""
    frame = engine.receive()
    return None if frame is None else _from_engine.decode(frame)
