"""What hub and worker say to each other: msgpack frames over one WebSocket that the worker opens, never pickle.

    worker                                   hub
      ── (token in the HTTP header) ──────▶
      ◀────────────────────────── Welcome      what engine to build, under which run
      ◀───────────────────────────── Want      the version to serve
      ── Hello ───────────────────────────▶    ready: places, version, leases held from before a cut
      ◀───────────────────────── Admitted      the key to say Hello with after a cut
      ◀──────────────────── Lease · Abort · Dropped
      ── Report · Retry ──────────────────▶
      ◀─────────────────────────────── Ack      reports up to here need not be said again
      ── Heartbeat ───────────────────────▶
      ◀───────────────────────────── HeartbeatAck      there is a hub: a worker that hears nothing for long connects
      anew ── Leaving · Fault ─────────────────▶

The lease ids here are the hub's; every one is said once and never used again. Weights and model files go over HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import Fault, UserError
from baton.rollout.engine import EngineSettings, EngineStats
from baton.swarm.verification.verify import WorkerClass
from baton.types import Abort, Lease, PolicyVersion, Report, Retry

PROTOCOL = 2
"""Changes when an older worker could misunderstand a newer hub."""
MAX_FRAME_BYTES = 2 * 1024 * 1024
"""A longer frame ends the connection; a report of 100,000 tokens is shorter."""
SILENT_HEARTBEATS = 12
"""After so many without a word the other side is not behind its connection any more, though nobody has hung up."""
MAX_SLOTS = 4096
MAX_TEXT = 4096
MAX_NAME = 256
"""Characters."""


# ---- from the hub ----------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """The first message: what engine to build."""

    protocol: int
    run: str
    incarnation: str
    """Of the hub's process: leases of another one are worth nothing."""
    model_digest: str
    """blake3 over the model's files without weights, which are at /model."""
    is_adapter: bool
    """Whether versions are adapters upon the base model."""
    base: PolicyVersion | None
    """Of an adapter: the version of its base model, published like any other."""
    attention: str
    engine: dict[str, Any]
    """`EngineSettings`, as plain values."""
    on_new_version: str
    """`resume`: running trajectories are put down at a new version and prefilled again; `keep`: they go on in flight;
    `drain`: none run then."""
    relay_secret: str
    """Opens this hub's relays."""
    heartbeat_s: float
    report_every_s: float

    def engine_settings(self) -> EngineSettings:
        """The settings as their owner declares them."""
        return EngineSettings.model_validate(self.engine)


class Want(msgspec.Struct, frozen=True, tag="Want"):
    """The version that workers are to serve as soon as they can."""

    version: PolicyVersion
    shared: str = ""
    """Directory in shared memory where a worker on the hub's machine finds it."""
    relays: tuple[str, ...] = ()
    """URLs of workers that hand on what they have."""


class Dropped(msgspec.Struct, frozen=True, tag="Dropped"):
    """A lease is no longer valid, and nothing need be said of it."""

    lease_id: int


class Ack(msgspec.Struct, frozen=True, tag="Ack"):
    """Everything up to this length has arrived; when the lease has ended, all of it."""

    lease_id: int
    length: int
    has_ended: bool = False


class RunOver(msgspec.Struct, frozen=True, tag="RunOver"):
    """The run is complete: there is nothing more to do, now or later."""


class Admitted(msgspec.Struct, frozen=True, tag="Admitted"):
    """The answer to the first Hello of a worker."""

    key: str
    """Issued by the hub: after a cut the worker presents it and is the same worker."""


class HeartbeatAck(msgspec.Struct, frozen=True, tag="Heard"):
    """The answer to a Heartbeat."""


class Rejected(msgspec.Struct, frozen=True, tag="Rejected"):
    """The worker is not wanted; the connection ends after this."""

    reason: str
    is_final: bool
    """Whether to try again is useless."""


# ---- from the worker -------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="Hello"):
    """The worker is ready."""

    key: str
    """As in `Admitted`; empty at first."""
    worker_class: WorkerClass
    """What decides how it rounds: logprobs are compared within a class."""
    model_digest: str
    """Of the files that its engine was built from."""
    slots: int
    serves: PolicyVersion | None
    leases: tuple[int, ...] = ()
    """Those that it still has from before a cut."""


class Heartbeat(msgspec.Struct, frozen=True, tag="Heartbeat"):
    """A sign of life, with what the worker is doing."""

    serves: PolicyVersion | None
    stats: EngineStats = EngineStats()
    fetching: int | None = None
    """Number of the version that is on its way."""
    fetched_bytes: int = 0
    """Of weights, since it started."""
    fault: str = ""
    """Why the last attempt to fetch came to nothing."""


class Leaving(msgspec.Struct, frozen=True, tag="Leaving"):
    """The worker goes, on purpose; all it had has been reported."""


FromHub = Welcome | Admitted | Want | Lease | Abort | Dropped | Ack | HeartbeatAck | Rejected | RunOver
FromWorker = Hello | Heartbeat | Report | Retry | Fault | Leaving

_from_hub: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()


class Malformed(ValueError):
    """A frame that is no message."""


def encode(message: FromHub | FromWorker) -> bytes:
    """Return a message as a frame."""
    return _encoder.encode(message)


def decode_from_hub(frame: bytes) -> FromHub:
    """Return the message in a frame. Raises Malformed."""
    try:
        return _from_hub.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Malformed(str(error)[:MAX_TEXT]) from error


def decode_from_worker(frame: bytes) -> FromWorker:
    """Return the message in a frame, its texts within bounds. Raises Malformed."""
    try:
        message = _from_worker.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Malformed(str(error)[:MAX_TEXT]) from error
    _check_bounds(message)
    return message


def _check_bounds(message: FromWorker) -> None:
    match message:
        case Hello(slots=slots, leases=leases, worker_class=kind):
            texts = (message.key, kind.device, kind.dtype, kind.engine, message.model_digest)
            if not 1 <= slots <= MAX_SLOTS or len(leases) > 2 * MAX_SLOTS or not all(map(_is_plain, texts)):
                raise Malformed(
                    f"a Hello with {slots} slots and {len(leases)} leases, or with texts that are not plain"
                )
            _check_version(message.serves)
        case Fault(kind=kind_name, text=text):
            if len(kind_name) + len(text) > MAX_TEXT:
                raise Malformed("a Fault with too long a text")
        case Heartbeat(fault=text, fetching=fetching):
            numbers = (*msgspec.structs.astuple(message.stats), message.fetched_bytes, fetching or 0)
            if len(text) > MAX_TEXT or not all(0 <= number < 2**63 for number in numbers):
                raise Malformed("a Heartbeat with too long a text or counters out of range")
            _check_version(message.serves)
        case Report() | Retry() | Leaving():
            pass  # checked by their types, and by the lease broker


def _check_version(version: PolicyVersion | None) -> None:
    if version is not None and not (_is_plain(version.lineage) and _is_plain(version.digest)):
        raise Malformed("a version whose lineage or digest is not plain")


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_NAME and text.isprintable()


def check_protocol(welcome: Welcome) -> None:
    """Raise UserError where the hub speaks another protocol."""
    if welcome.protocol != PROTOCOL:
        raise UserError(
            f"the hub speaks protocol {welcome.protocol} and this worker protocol {PROTOCOL}: install the same Baton"
        )
