"""Decides what a worker does with each message of the hub and with each report of its engine.

    hub ──Welcome──▶ Prepare ─▶ driver ──ready──▶ Hello, unconfirmed reports ─▶ hub
    hub ──Lease, Abort, Dropped──▶ engine ──reported──▶ Report, Retry ─▶ hub
    hub ──Want──▶ Fetch, Activate, SetTimer ─▶ driver ──handle──▶ Heartbeat ─▶ hub

`WorkerSession` uses no socket, no thread and no clock, so the live worker and the simulator use the same class.
Commands for the engine and messages to the hub are returned to the caller.

The session survives its connections. Reports are kept until the hub confirms them. A restarted hub has another
incarnation (identifier of the hub process), and the worker discards leases of the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from pydantic import ValidationError

from baton.clock import retry_wait_s
from baton.errors import DeadlineExceeded, UserError
from baton.rollout.engine import EngineStats
from baton.swarm import messages
from baton.swarm import version_sync as vs
from baton.swarm.verification.verify import WorkerClass
from baton.types import Abort, Lease, Report
from baton.types import FromWorker as FromEngine

CONNECT_DEADLINE_S = 30.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Seconds between the first two attempts to connect, and maximum seconds between two attempts."""


class ConnectionLost(Exception):
    """Raised when the connection to the hub has ended. The worker may reconnect."""


class Prepare(msgspec.Struct, frozen=True):
    """Build the engine that the hub describes, unless the engine exists already. Then call `ready`."""

    welcome: messages.Welcome
    is_new_hub: bool
    """True if the engine's leases are from another hub process. The engine must then first discard all leases, because
    the new leases may have the same ids."""


Command = (
    messages.FromWorker | Prepare | Lease | Abort | messages.Dropped | messages.RunOver
    | vs.Fetch | vs.Activate | vs.SetTimer
)  # fmt: skip


class Outbox:
    """Keeps the reports of each lease, in order, until the hub confirms them; returns them after a reconnection."""

    def __init__(self) -> None:
        self._unconfirmed: dict[int, list[Report]] = {}

    @property
    def leases(self) -> tuple[int, ...]:
        """Ids of the running leases, and of the ended leases whose end the hub has not confirmed."""
        return tuple(self._unconfirmed)

    def open(self, lease_id: int) -> None:
        self._unconfirmed.setdefault(lease_id, [])

    def add(self, report: Report) -> None:
        """Add a report of a lease. Has no effect if the lease is not open."""
        if report.lease_id in self._unconfirmed:
            self._unconfirmed[report.lease_id].append(report)

    def confirm(self, lease_id: int, length: int, *, has_ended: bool) -> None:
        """Remove the reports that the hub has confirmed: up to a length, or all reports of an ended lease."""
        if has_ended:
            self.close(lease_id)
        elif lease_id in self._unconfirmed:
            kept = [report for report in self._unconfirmed[lease_id] if not _is_within(report, length)]
            self._unconfirmed[lease_id] = kept

    def close(self, lease_id: int) -> None:
        self._unconfirmed.pop(lease_id, None)

    def clear(self) -> None:
        self._unconfirmed.clear()

    def again(self) -> list[Report]:
        return [report for reports in self._unconfirmed.values() for report in reports]


def _is_within(report: Report, length: int) -> bool:
    """Return whether all tokens of a report are among the first `length` tokens of its lease. Return False for the last
    report of a lease, because a confirmed length does not confirm the end of the lease."""
    if report.finish_reason is not None or report.is_aborted:
        return False
    return report.token_offset + sum(len(segment.token_ids) for segment in report.segments) <= length


def _engine_of(welcome: messages.Welcome) -> tuple[object, ...]:
    """Return everything in a Welcome that the worker's engine and its driver are built from."""
    return welcome.model_digest, welcome.base, welcome.attention, welcome.engine, welcome.on_new_version


class WorkerSession:
    """The state of a worker, without its engine, its weights and its connections."""

    def __init__(
        self, *, url: str = "", reconnect_timeout_s: float | None = None, jitter: Callable[[], float] = lambda: 1.0
    ) -> None:
        """`url`: address of the hub. `reconnect_timeout_s`: as in `WorkerOptions`. `jitter`: function that returns a
        random factor for each delay before an attempt to reconnect."""
        self.key = ""
        """Key that the hub has issued; kept in memory until the process ends."""
        self.welcome: messages.Welcome | None = None
        self.want: messages.Want | None = None
        """The last announcement of a version."""
        self.stats = EngineStats()
        """The engine's counters, set by the driver."""
        self.fetched_bytes = 0
        self.served_s = 0.0
        """Last time at which a hub served this worker; initially, the worker's start."""
        self.is_ready = False
        """Whether Hello has been sent on this connection; before that, reports wait in the outbox."""
        self.is_welcomed = False
        """Whether Welcome has arrived on this connection."""
        self._incarnation: str | None = None
        """`Welcome.incarnation` of the hub process that granted the engine's leases."""
        self._outbox, self._sync, self._failures = Outbox(), vs.VersionSync(), 0
        self._url, self._reconnect_timeout_s, self._jitter = url, reconnect_timeout_s, jitter

    # ---- connections -------------------------------------------------------------------------------------------------

    @property
    def silence_s(self) -> float:
        """Seconds without a message after which the connection is considered dead."""
        if self.welcome is None or not self.is_welcomed:
            return CONNECT_DEADLINE_S
        return self.welcome.heartbeat_s * messages.SILENT_HEARTBEATS

    def lost(self, now_s: float) -> float:
        """Handle the loss of the connection, or a failed attempt to connect. Return the seconds until the next attempt
        to connect. Raises DeadlineExceeded if no hub has served the worker for too long."""
        if self.is_ready:
            self._failures, self.served_s = 0, now_s
        self.is_ready = self.is_welcomed = False
        silent_s = now_s - self.served_s
        if self._reconnect_timeout_s is not None and silent_s >= self._reconnect_timeout_s:
            raise DeadlineExceeded(f"no hub has answered at {self._url} for {silent_s:.0f} s; the worker ends")
        self._failures += 1
        wait_s = retry_wait_s(self._failures, first_s=FIRST_WAIT_S, longest_s=LONGEST_WAIT_S)
        return wait_s * self._jitter()

    def ready(self, worker_class: WorkerClass, slots: int) -> list[messages.FromWorker]:
        """Record that the engine is built. Return the messages to send: Hello, and unconfirmed reports."""
        assert self.welcome is not None, "an engine exists before a hub has described it"
        self.is_ready, self._incarnation = True, self.welcome.incarnation
        leases, digest = self._outbox.leases, self.welcome.model_digest
        return [messages.Hello(self.key, worker_class, digest, slots, self._sync.have, leases), *self._outbox.again()]

    def heartbeat(self) -> messages.Heartbeat:
        sync = self._sync
        fetching = None if sync.fetching is None else sync.fetching.number
        return messages.Heartbeat(sync.have, self.stats, fetching, self.fetched_bytes, sync.last_cause[:1000])

    # ---- events ------------------------------------------------------------------------------------------------------

    def receive(self, message: messages.FromHub, now_s: float) -> Sequence[Command]:
        """Handle a message of the hub. Raises ConnectionLost if the connection cannot be used any more. Raises
        UserError if a new connection cannot succeed either."""
        if isinstance(message, messages.Rejected):
            if message.is_final:
                raise UserError(f"the hub refuses this worker: {message.reason}")
            raise ConnectionLost(message.reason)
        if isinstance(message, messages.Welcome) == self.is_welcomed:
            raise ConnectionLost(f"the hub sent {type(message).__name__} instead of the expected message")
        match message:
            case messages.Welcome():
                return self._welcomed(message)
            case Lease(lease_id=lease_id):
                self._outbox.open(lease_id)
                return (message,)
            case messages.Dropped(lease_id=lease_id):
                self._outbox.close(lease_id)
                return (message,)
            case messages.Ack(lease_id=lease_id, length=length, has_ended=has_ended):
                self._outbox.confirm(lease_id, length, has_ended=has_ended)
            case messages.Want(version=version):
                self.want = message
                return self.handle(vs.VersionWanted(now_s, version))
            case messages.Admitted(key=key):
                self.key = key
            case Abort() | messages.RunOver():
                return (message,)
            case messages.HeartbeatAck():
                pass
        return ()

    def _welcomed(self, welcome: messages.Welcome) -> Sequence[Command]:
        if welcome.protocol != messages.PROTOCOL:
            both = f"the hub uses protocol {welcome.protocol} and this worker {messages.PROTOCOL}"
            raise UserError(f"{both}: install the same version of Baton")
        try:
            welcome.engine_settings()
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(("engine", *map(str, first["loc"])))
            raise UserError(f"{key} of the hub: {first['msg']}: install the same version of Baton") from error
        known, self.welcome, self.is_welcomed = self.welcome, welcome, True
        is_new_hub = self._incarnation not in (None, welcome.incarnation)
        if is_new_hub:
            self._outbox.clear()
        if known is not None and _engine_of(known) != _engine_of(welcome):
            raise UserError(
                "the hub now serves another model or engine than this worker was built for: restart the worker"
            )
        return self.heartbeat(), Prepare(welcome, is_new_hub)

    def reported(self, reports: Sequence[FromEngine]) -> Sequence[FromEngine]:
        """Handle reports of the engine. Return the reports to send now: none before Hello has been sent."""
        for report in reports:
            if isinstance(report, Report):
                self._outbox.add(report)
            else:
                self._outbox.close(report.lease_id)
        return reports if self.is_ready else ()

    def handle(self, event: vs.Event) -> Sequence[Command]:
        """Handle an event of `version_sync`, such as a completed fetch. Return the resulting commands."""
        commands: list[Command] = [*self._sync.handle(event)]
        if isinstance(event, vs.Activated | vs.SleepChanged) and self.is_ready:
            commands.append(self.heartbeat())
        return commands

    @property
    def num_unconfirmed(self) -> int:
        """Number of reported tokens that the hub has not confirmed."""
        return sum(len(segment.token_ids) for report in self._outbox.again() for segment in report.segments)
