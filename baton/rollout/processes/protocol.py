"""Messages between the controller's process and its engine processes: msgpack frames on a socket pair, without
pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import Fault
from baton.policy.settings import ModelSettings
from baton.rollout.engine import SENT_BY_RUN, EngineSettings, EngineStats
from baton.types import Abort, Lease, PolicyVersion, Report, Retry, plain

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Maximum length of a frame in bytes. The receiver refuses a longer frame before it allocates memory for the frame."""


class Start(msgspec.Struct, frozen=True, tag="Start"):
    """The first message to a process, which describes the engine to build."""

    model_path: str
    device: str
    attention: str
    settings: dict[str, Any]
    """The values of `EngineSettings` as a plain dict."""
    version: PolicyVersion
    scratch: str = ""
    """Directory into which the parent writes new weights. The engine process removes it after the parent has exited."""
    head_dtype: str = "auto"
    is_sparse: bool = False
    """For vLLM with direct transfers: whether differences between versions are sent."""

    def model(self) -> ModelSettings:
        known = {"device": self.device, "attention": self.attention, "head_dtype": self.head_dtype}
        return ModelSettings.model_validate({"path": self.model_path, **known})

    def engine_settings(self) -> EngineSettings:
        return EngineSettings.model_validate(self.settings, context=SENT_BY_RUN)


class LoadWeights(msgspec.Struct, frozen=True, tag="LoadWeights"):
    """Request to load the tensors of a safetensors file as `version`."""

    path: str
    version: PolicyVersion


class Progress(msgspec.Struct, frozen=True, tag="Progress"):
    """New reports, and the engine's counters at the time of the message."""

    messages: tuple[Report | Retry, ...]
    stats: EngineStats


class Serving(msgspec.Struct, frozen=True, tag="Serving"):
    """Confirmation, after the engine's start and after each LoadWeights, that the engine serves a version."""

    version: PolicyVersion


ToEngine = Start | LoadWeights | Lease | Abort
FromEngine = Progress | Serving | Fault

encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
decode_to_engine = msgspec.msgpack.Decoder[ToEngine](ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine).decode
