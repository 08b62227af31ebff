"""What is said between this process and an engine process: msgpack frames over a socket pair, never pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import Fault
from baton.frames import FrameSocket
from baton.rollout.engine import EngineSettings, EngineStats
from baton.types import Abort, Lease, PolicyVersion, Report, Retry

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A longer frame is a fault, not a reason to allocate."""


class Start(msgspec.Struct, frozen=True, tag="Start"):
    """The first message: what engine to build."""

    model_path: str
    device: str
    attention: str
    settings: dict[str, Any]
    """`EngineSettings`, as plain values."""
    version: PolicyVersion
    scratch: str = ""
    """Directory through which weights come; the engine removes it when its parent is gone."""

    def engine_settings(self) -> EngineSettings:
        """The settings as their owner declares them."""
        return EngineSettings.model_validate(self.settings)


class LoadWeights(msgspec.Struct, frozen=True, tag="LoadWeights"):
    """Switch to the tensors in a safetensors file."""

    path: str
    version: PolicyVersion


class Progress(msgspec.Struct, frozen=True, tag="Progress"):
    """Reports, with the engine's counters after them."""

    messages: tuple[Report | Retry, ...]
    stats: EngineStats


class Serving(msgspec.Struct, frozen=True, tag="Serving"):
    """The engine is built, or has switched, and serves this version."""

    version: PolicyVersion


ToEngine = Start | LoadWeights | Lease | Abort
FromEngine = Progress | Serving | Fault

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def send_to_engine(engine: FrameSocket, message: ToEngine) -> None:
    """Send one message, or queue what the engine does not read at once. Raises OSError when the engine is gone."""
    engine.send(_encoder.encode(message))


def send_to_parent(parent: FrameSocket, message: FromEngine) -> None:
    """Send one message, however long the parent takes to read it. Raises OSError when the parent is gone."""
    parent.send_all(_encoder.encode(message))


def receive_to_engine(parent: FrameSocket) -> ToEngine:
    """Wait for one message. Raises EOFError or OSError when the parent is gone."""
    return _to_engine.decode(parent.receive_next())


def receive_from_engine(engine: FrameSocket) -> FromEngine | None:
    """Return the next message, or None while it is not whole. Raises EOFError or OSError when the engine is gone."""
    frame = engine.receive()
    return None if frame is None else _from_engine.decode(frame)
