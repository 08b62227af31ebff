"""Messages between hub and worker: msgpack frames over a WebSocket that the worker opens. Pickle is never used.

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
      ◀────────────────────── HeartbeatAck      shows that the hub is alive; the worker reconnects if messages stop
      ── Leaving · Fault ─────────────────▶

The lease ids in these messages are assigned by the hub. Each id is granted once and never reused. Weights and model
files use HTTP.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from baton.errors import Fault
from baton.rollout.engine import EngineSettings, EngineStats
from baton.swarm.verification.verify import WorkerClass
from baton.types import Abort, Lease, PolicyVersion, Report, Retry, plain

PROTOCOL = 5
"""Protocol version, incremented when the messages change in a way that an older worker could misunderstand."""
MAX_FRAME_BYTES = 2 * 1024 * 1024
"""Maximum bytes of a frame, enough for a report of 100,000 tokens; a longer frame ends the connection."""
SILENT_HEARTBEATS = 12
"""A connection is considered dead if no message arrives for this number of heartbeat periods, even if it is still
open."""
MAX_SLOTS = 4096
MAX_TEXT = 4096
MAX_NAME = 256
"""Maximum number of characters of a name, digest or other short text."""


# ---- from the hub ----------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="Welcome"):
    """The first message from the hub, which describes the engine that the worker must build."""

    protocol: int
    run: str
    incarnation: str
    """Identifier of the hub process. If a worker reconnects and the identifier has changed, its leases are invalid."""
    model_digest: str
    """blake3 digest of the files of the route /model: the model's configuration and tokenizer."""
    is_adapter: bool
    """True if versions are adapters on a base model."""
    base: PolicyVersion | None
    """Version of the base model, which is published like any other version; None without adapters."""
    attention: str
    engine: dict[str, Any]
    """Fields of `EngineSettings` as plain values."""
    on_new_version: str
    """What happens to running trajectories when the worker loads a new version. `resume`: trajectories are aborted and
    prefilled again. `keep`: trajectories continue without a prefill. `drain`: no trajectory runs then."""
    relay_secret: str
    """Secret that authenticates workers at the relays of this hub."""
    heartbeat_s: float
    report_every_s: float

    def engine_settings(self) -> EngineSettings:
        return EngineSettings.model_validate(self.engine)


class Want(msgspec.Struct, frozen=True, tag="Want"):
    """The wanted version, which workers must fetch and then serve."""

    version: PolicyVersion
    shared: str = ""
    """Directory on the hub's machine with the version's file, which workers on that machine map into memory."""
    relays: tuple[str, ...] = ()
    """URLs of relays that forward chunks."""


class Dropped(msgspec.Struct, frozen=True, tag="Dropped"):
    """A lease is no longer valid. The worker may stop generating the lease's tokens and need not report them."""

    lease_id: int


class Ack(msgspec.Struct, frozen=True, tag="Ack"):
    """The hub has received the first `length` tokens of a lease. If `has_ended` is set, the lease has ended, and none
    of its reports needs to be sent again."""

    lease_id: int
    length: int
    has_ended: bool = False


class RunOver(msgspec.Struct, frozen=True, tag="RunOver"):
    """The run is complete, so the worker may exit."""


class Admitted(msgspec.Struct, frozen=True, tag="Admitted"):
    """The reply to the first Hello of a worker."""

    key: str
    """Key that the hub issues. A worker that sends this key after a reconnection keeps its identity."""


class HeartbeatAck(msgspec.Struct, frozen=True, tag="Heard"):
    """The reply to a Heartbeat."""


class Rejected(msgspec.Struct, frozen=True, tag="Rejected"):
    """The hub refuses the worker and closes the connection after this message."""

    reason: str
    is_final: bool
    """True if the worker must not connect again, because another attempt cannot succeed."""


# ---- from the worker -------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="Hello"):
    """The worker is ready."""

    key: str
    """Key from `Admitted`; empty in the first Hello."""
    worker_class: WorkerClass
    """Class of the worker, which determines its rounding errors and tolerances."""
    model_digest: str
    """Digest of the model files from which the worker built its engine, as in `Welcome.model_digest`."""
    slots: int
    serves: PolicyVersion | None
    leases: tuple[int, ...] = ()
    """Ids of the leases that the worker kept across a reconnection."""


class Heartbeat(msgspec.Struct, frozen=True, tag="Heartbeat"):
    """A periodic message with the worker's state, which shows that the worker is alive."""

    serves: PolicyVersion | None
    stats: EngineStats = EngineStats()
    fetching: int | None = None
    """Number of the version that the worker is fetching; None if it is not fetching."""
    fetched_bytes: int = 0
    """Number of bytes of weights that the worker has fetched since its start."""
    fault: str = ""
    """Error message of the last fetch; empty if the last fetch succeeded."""


class Leaving(msgspec.Struct, frozen=True, tag="Leaving"):
    """The worker has reported all its tokens and is about to disconnect intentionally."""


FromHub = Welcome | Admitted | Want | Lease | Abort | Dropped | Ack | HeartbeatAck | Rejected | RunOver
FromWorker = Hello | Heartbeat | Report | Retry | Fault | Leaving


def max_report_tokens(routing_bytes: int, max_kept: int) -> int:
    """Return the maximum number of tokens in a report that fits in a frame. `routing_bytes`: bytes of `Segment.routing`
    per token. `max_kept`: maximum number of ids in `Segment.kept` per token."""
    # 2^14 bytes: the names of the fields in 64 segments. 20 bytes: id, logprob, and the lengths of routing and kept
    return (MAX_FRAME_BYTES - 2**14) // (20 + routing_bytes + 4 * max_kept)


T = TypeVar("T")
_from_hub: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder(enc_hook=plain)


class Malformed(ValueError):
    """Raised for a frame that does not decode to a valid message."""


def encode(message: FromHub | FromWorker) -> bytes:
    """Return a message as a frame."""
    return _encoder.encode(message)


def decode_from_hub(frame: bytes) -> FromHub:
    """Decode a frame. Raises Malformed."""
    return _decode(_from_hub, frame)


def decode_from_worker(frame: bytes) -> FromWorker:
    """Decode a frame and check that its texts and numbers are within bounds. Raises Malformed."""
    message = _decode(_from_worker, frame)
    _check_bounds(message)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Malformed(str(error)[:MAX_TEXT]) from error


def _check_bounds(message: FromWorker) -> None:
    match message:
        case Hello(slots=slots, leases=leases, worker_class=kind):
            texts = (message.key, kind.device, kind.dtype, kind.engine, message.model_digest)
            if not 1 <= slots <= MAX_SLOTS or len(leases) > 2 * MAX_SLOTS or not all(map(_is_plain, texts)):
                raise Malformed(
                    f"a Hello with {slots} slots and {len(leases)} leases; allowed are 1 to {MAX_SLOTS} slots, "
                    f"twice as many leases, and printable texts of at most {MAX_NAME} characters"
                )
            _check_version(message.serves)
        case Fault(kind=kind_name, text=text):
            if len(kind_name) + len(text) > MAX_TEXT:
                raise Malformed(f"a Fault with a string of more than {MAX_TEXT} characters")
        case Heartbeat(fault=text, fetching=fetching):
            numbers = (*msgspec.structs.astuple(message.stats), message.fetched_bytes, fetching or 0)
            if len(text) > MAX_TEXT or not all(0 <= number < 2**63 for number in numbers):
                raise Malformed(
                    f"a Heartbeat with a string of more than {MAX_TEXT} characters, or with counters outside 0 … 2^63"
                )
            _check_version(message.serves)
        case Report() | Retry() | Leaving():
            pass  # the types of these messages and the lease broker check them


def _check_version(version: PolicyVersion | None) -> None:
    if version is not None and not (_is_plain(version.lineage) and _is_plain(version.digest)):
        raise Malformed(f"a version whose lineage or digest is not a printable text of at most {MAX_NAME} characters")


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_NAME and text.isprintable()
