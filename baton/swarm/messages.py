"""Messages between hub and worker: msgpack frames over one WebSocket that the worker opens; never pickle.

    worker                                   hub
      ── (token in the HTTP header) ──────▶
      ◀────────────────────────── Welcome      which engine to build, for which run
      ◀───────────────────────────── Want      the version to serve
      ── Hello ───────────────────────────▶    ready: slots, version, leases kept across a reconnection
      ◀───────────────────────── Admitted      the key to present after a reconnection
      ◀──────────────────── Lease · Abort · Dropped
      ── Report · Retry ──────────────────▶
      ◀─────────────────────────────── Ack      reports up to this length need not be sent again
      ── Heartbeat ───────────────────────▶
      ◀────────────────────── HeartbeatAck      the hub is alive; a worker that receives nothing for long reconnects
      ── Leaving · Fault ─────────────────▶

Lease ids in these messages are the hub's; each is granted once and never reused. Weights and model files go over HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import Fault, UserError
from baton.rollout.engine import EngineSettings, EngineStats
from baton.swarm.verification.verify import WorkerClass
from baton.types import Abort, Lease, PolicyVersion, Report, Retry

PROTOCOL = 2
"""Incremented when an older worker could misunderstand a newer hub."""
MAX_FRAME_BYTES = 2 * 1024 * 1024
"""A longer frame ends the connection; a report of 100,000 tokens is shorter."""
SILENT_HEARTBEATS = 12
"""After this many heartbeat periods without a message, the connection is considered dead even if it is still open."""
MAX_SLOTS = 4096
MAX_TEXT = 4096
MAX_NAME = 256
"""Characters."""


# ---- from the hub ----------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """The first message: which engine to build."""

    protocol: int
    run: str
    incarnation: str
    """Identifies the hub's process; leases of an earlier process are invalid."""
    model_digest: str
    """blake3 of the model's files without weights, which /model serves."""
    is_adapter: bool
    """Whether versions are adapters on the base model."""
    base: PolicyVersion | None
    """For adapters: the version of the base model, published like any other."""
    attention: str
    engine: dict[str, Any]
    """`EngineSettings` as plain values."""
    on_new_version: str
    """`resume`: running trajectories are aborted at a new version and prefilled again; `keep`: they continue in flight;
    `drain`: none run at that time.
    """
    relay_secret: str
    """Authenticates workers at the relays of this hub."""
    heartbeat_s: float
    report_every_s: float

    def engine_settings(self) -> EngineSettings:
        """Return `engine` validated as EngineSettings."""
        return EngineSettings.model_validate(self.engine)


class Want(msgspec.Struct, frozen=True, tag="Want"):
    """The version that workers must serve as soon as they have fetched it."""

    version: PolicyVersion
    shared: str = ""
    """Directory in shared memory that holds the version for workers on the hub's machine."""
    relays: tuple[str, ...] = ()
    """URLs of relays that forward chunks."""


class Dropped(msgspec.Struct, frozen=True, tag="Dropped"):
    """A lease is no longer valid; the worker need not report on it."""

    lease_id: int


class Ack(msgspec.Struct, frozen=True, tag="Ack"):
    """All tokens up to this length have arrived; after the end of the lease, all of them."""

    lease_id: int
    length: int
    has_ended: bool = False


class RunOver(msgspec.Struct, frozen=True, tag="RunOver"):
    """The run is complete; the worker may exit."""


class Admitted(msgspec.Struct, frozen=True, tag="Admitted"):
    """The reply to the first Hello of a worker."""

    key: str
    """Issued by the hub. A worker that presents it after a reconnection keeps its identity."""


class HeartbeatAck(msgspec.Struct, frozen=True, tag="Heard"):
    """The reply to a Heartbeat."""


class Rejected(msgspec.Struct, frozen=True, tag="Rejected"):
    """The hub refuses the worker; the connection ends after this message."""

    reason: str
    is_final: bool
    """Whether another attempt cannot succeed."""


# ---- from the worker -------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="Hello"):
    """The worker is ready."""

    key: str
    """As in `Admitted`; empty in the first Hello."""
    worker_class: WorkerClass
    """Determines rounding: logprobs are compared within a class."""
    model_digest: str
    """Of the files from which the worker built its engine."""
    slots: int
    serves: PolicyVersion | None
    leases: tuple[int, ...] = ()
    """Leases kept across a reconnection."""


class Heartbeat(msgspec.Struct, frozen=True, tag="Heartbeat"):
    """A periodic message that shows that the worker is alive, with its state."""

    serves: PolicyVersion | None
    stats: EngineStats = EngineStats()
    fetching: int | None = None
    """Number of the version being fetched."""
    fetched_bytes: int = 0
    """Bytes of weights fetched since the worker started."""
    fault: str = ""
    """Why the last fetch failed; empty if it succeeded."""


class Leaving(msgspec.Struct, frozen=True, tag="Leaving"):
    """The worker disconnects on purpose and has reported all its tokens."""


FromHub = Welcome | Admitted | Want | Lease | Abort | Dropped | Ack | HeartbeatAck | Rejected | RunOver
FromWorker = Hello | Heartbeat | Report | Retry | Fault | Leaving

_from_hub: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()


class Malformed(ValueError):
    """A frame that does not decode to a valid message."""


def encode(message: FromHub | FromWorker) -> bytes:
    """Return a message as a frame."""
    return _encoder.encode(message)


def decode_from_hub(frame: bytes) -> FromHub:
    """Decode a frame. Raises Malformed."""
    try:
        return _from_hub.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Malformed(str(error)[:MAX_TEXT]) from error


def decode_from_worker(frame: bytes) -> FromWorker:
    """Decode a frame and check that its texts and numbers are within bounds. Raises Malformed."""
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
    """Raise UserError if the hub uses another protocol version."""
    if welcome.protocol != PROTOCOL:
        raise UserError(
            f"the hub speaks protocol {welcome.protocol} and this worker protocol {PROTOCOL}: install the same Baton"
        )
