"""`ReplicaTransport`: a `WorkerTransport` over several engines that receive weights directly from the trainer.

| thread          | consumes              | produces              | waits for               | unblocked by          |
|-----------------|-----------------------|-----------------------|-------------------------|-----------------------|
| caller          | events of replicas    | leases, aborts, loads | an event                | an event, its timeout |
| one per replica | leases, aborts, loads | events                | its engine, or messages | deadlines, messages   |

Each replica loads a version by itself. `load_weights` returns when the replicas that served the last version have
loaded the new version. If the fastest replica takes `first` seconds, `load_weights` returns at the latest after
`first + max(first, GRACE_S)` seconds. A replica that has not loaded the version gets no new leases, and its current
leases are refused, so the controller sends them to other replicas. A newer version never interrupts a load. After such
a load, the replica serves nothing until it has loaded the newest version; it skips the versions in between. A replica
whose engine has failed is started again, and receives the next version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Final, Protocol

from baton.clock import RestartRule, begin, time_left
from baton.errors import EngineFault, WeightsFault, first_line
from baton.records.lease_trace import LeaseTrace
from baton.records.trace import TraceWriter
from baton.rollout.engine import Engine, EngineStats
from baton.rollout.processes.lease_queue import Handover, LeaseQueue
from baton.rollout.transport import WorkerTransport
from baton.types import (
    Abort,
    FromHub,
    FromPort,
    FromWorker,
    Lease,
    PolicyVersion,
    Report,
    Retry,
    WorkLost,
    ends_lease,
    without_replay_data,
)

logger = logging.getLogger(__name__)
GRACE_S: Final = 1.0
_LATE_LOADS: Final = 2
"""Number of late loads in a row after which a warning names the replica."""
_POLL_S: Final = 0.1
_CLOSE_S: Final = 30.0
"""Maximum seconds that `close` waits for the replicas' threads before it closes the engines itself."""


class Versions(Protocol):
    """Sends versions to all replicas. A replica receives a version while its engine's `load_weights` runs."""

    def offer(self, tensors: Mapping[str, Any], version: PolicyVersion) -> Mapping[str, Any]:
        """Begin to send a version; return the tensors for `Engine.load_weights`."""

    def withdraw(self) -> None:
        """End the offer. Replicas that are already receiving the version continue to receive it."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the transfers since the last call."""

    def close(self) -> None:
        """Close all communicators."""


@dataclass(slots=True)
class _Load:
    tensors: Mapping[str, Any] | None
    """None if the load has begun or a newer version has replaced it, so that a late replica keeps no old tensors."""
    version: PolicyVersion


@dataclass(slots=True)
class _Replica:
    name: str
    index: int
    engine: Engine
    inbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """Messages to the current engine. A restarted engine has a new inbox."""
    load: _Load | None = None
    """The last load in the inbox."""
    is_running: bool = True
    """Whether the engine runs: False from its failure to its restart."""
    is_serving: bool = True
    is_loading: bool = False
    cause: str = ""
    """Reason why the replica serves no version, if it serves none."""
    stats: EngineStats = field(default_factory=EngineStats)
    before: EngineStats = field(default_factory=EngineStats)
    """Counters of the replica's earlier engines."""
    version: int = 0
    """Number of the last version that the replica served."""
    busy_s: float = 0.0
    """Seconds spent in steps of the engine. Steps run only while the replica has leases."""
    late_loads: int = 0
    """Number of loads, since the replica last served a version, that ended only after a newer version was offered."""
    has_warned: bool = False
    """Whether a warning has named the replica because its loads are always late."""
    lease_s: float = 0.0
    """Lease-seconds: duration of each step times the number of leases, summed over the steps."""
    counted: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Decoded tokens, `busy_s` and `lease_s` at the last call to `take_metrics`."""
    thread: Future[None] | None = None

    def take_metrics(self) -> dict[str, float]:
        now = float(self.stats.decoded_tokens + self.before.decoded_tokens), self.busy_s, self.lease_s
        tokens, busy_s, lease_s = (new - old for new, old in zip(now, self.counted, strict=True))
        self.counted, name = now, f"replicas/{self.index}"
        rates = {f"{name}/tokens_per_s": tokens / busy_s, f"{name}/running": lease_s / busy_s} if busy_s else {}
        return {f"{name}/version": float(self.version), **rates}


class ReplicaTransport(WorkerTransport):
    """One worker that consists of several engines, each with its own thread."""

    def __init__(
        self,
        count: int,
        build: Callable[[int], Engine],
        versions: Versions,
        version: PolicyVersion,
        *,
        trace: LeaseTrace | None = None,
        restart: RestartRule | None = None,
    ) -> None:
        """`build`: starts the engine of a replica. At the start of the run, the engine must serve `version`; after a
        failure, `build` starts another engine. Raises the errors of `build`."""
        self._build, self._versions, self._version = build, versions, version
        self._trace, self._rule = trace or LeaseTrace(TraceWriter()), restart or RestartRule()
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """Events of replicas, as calls that the caller's thread makes."""
        self._outbox: list[FromPort] = []
        self._closing = Event()
        self._age_s = time_left(0.0)
        """Returns minus the number of seconds since the last offer of a version."""
        self._interval_s = 0.0
        """Seconds between the last two offers."""
        self.replicas: list[_Replica] = []
        try:
            for index in range(count):
                self.replicas.append(_Replica(f"replica {index}", index, build(index), version=version.number))
        except BaseException:
            self.close()
            raise
        self._slots = [replica.engine.slots for replica in self.replicas]
        self._free = list(self._slots)
        """Number of slots that the queue may use, per replica; 0 for a replica that does not serve."""
        self._queue = LeaseQueue(self._free)
        for replica in self.replicas:
            replica.thread = begin(partial(self._live, replica))

    @property
    def name(self) -> str:
        return f"the {len(self.replicas)} replicas"

    @property
    def slots(self) -> int:
        return sum(self._free)

    def send(self, message: FromHub) -> None:
        if isinstance(message, Lease):
            self._queue.add(message)
        else:
            self._deliver(self._queue.abort(message))

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        """Raises EngineFault if no replica serves, and none is loading a version."""
        self._deliver(self._queue.assign())
        self._take(0.0 if self._outbox else timeout_s)
        self._deliver(self._queue.assign())
        messages, self._outbox = self._outbox, []
        if not messages:
            self._check_any()
        return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Raises EngineFault if no replica has loaded the version."""
        self._take(0.0)
        loadable, self._version = self._versions.offer(tensors, version), version
        self._interval_s, self._age_s = -self._age_s(), time_left(0.0)
        awaited = [replica for replica in self.replicas if replica.is_serving]
        for replica in self.replicas:
            if replica.is_running:
                self._suspend(replica, "it is loading a version")
                replica.is_loading, replica.load = True, _Load(loadable, version)
                replica.inbox.put(replica.load)
        left_s, first_s = time_left(0.0), 0.0  # `-left_s()` is the time since the offer
        try:
            while not self.slots or any(replica.is_loading for replica in awaited):
                self._take(_POLL_S)
                self._check_any()
                took_s = -left_s()
                if self.slots:
                    first_s = first_s or took_s
                    if took_s > first_s + max(first_s, GRACE_S):
                        break
        finally:
            self._versions.withdraw()
        for replica in self.replicas:
            if not replica.is_serving:
                self._release(replica)

    def stats(self) -> EngineStats:
        return EngineStats.total(stats for replica in self.replicas for stats in (replica.stats, replica.before))

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        found = self._versions.metrics()
        for replica in self.replicas:
            found |= replica.take_metrics()
        return found

    def close(self, *, is_over: bool = False) -> None:
        if self._closing.is_set():  # otherwise a thread that hangs would delay the second call, too
            return
        self._closing.set()
        with ExitStack() as closing:
            for replica in self.replicas:
                closing.callback(lambda own: own.engine.close(), replica)  # idempotent; the thread may hang
            self._versions.close()
            for replica in self.replicas:
                replica.inbox.put(None)
            left_s = time_left(_CLOSE_S)
            for replica in self.replicas:
                if replica.thread is not None:
                    with suppress(Exception):
                        replica.thread.result(max(0.0, left_s()))

    # ---- events of replicas ------------------------------------------------------------------------------------------

    def _take(self, timeout_s: float) -> None:
        """Process the events that have arrived; wait at most `timeout_s` for the first one."""
        with suppress(Empty):
            event = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            while True:
                event()
                event = self._events.get_nowait()

    def _on_loaded(self, replica: _Replica, version: PolicyVersion, cause: str, took_s: float) -> None:
        """The replica has loaded a version in `took_s` seconds or, if `cause` is not empty, has failed to load it. A
        replica serves only the newest version, because leases require this version."""
        if version != self._version:
            replica.late_loads += not cause
            if replica.late_loads >= _LATE_LOADS and not replica.has_warned:
                replica.has_warned = True
                logger.warning(
                    "%s serves no version: its last load took %.0f s, but versions follow each other in %.0f s, and a "
                    "replica serves only the newest one. Give it a faster connection or more devices, make train steps "
                    "longer (rollout.batch_groups), or remove it (engine.vllm.replicas, or the plan)",
                    replica.name, took_s, self._interval_s,
                )  # fmt: skip
            return
        replica.late_loads = replica.late_loads if cause else 0
        replica.is_loading, replica.cause, replica.is_serving = False, cause, not cause
        self._free[replica.index] = 0 if cause else self._slots[replica.index]
        if cause:
            logger.warning("%s has not loaded version %d: %s", replica.name, version.number, cause)
        else:
            replica.version = version.number

    def _on_ended(self, replica: _Replica, cause: str) -> None:
        logger.warning("%s has failed: %s", replica.name, cause)
        self._suspend(replica, cause)
        replica.is_running = replica.is_loading = False
        self._release(replica)
        replica.before, replica.stats = EngineStats.total((replica.before, replica.stats)), EngineStats()

    def _on_restarted(self, replica: _Replica, inbox: SimpleQueue[Any]) -> None:
        replica.inbox, replica.is_running = inbox, True
        replica.cause = "it has started again and has not received a version"

    def _on_reports(self, replica: _Replica, reports: Sequence[FromWorker]) -> None:
        """Put the reports of the replica's leases into the outbox. Tokens of leases that were taken from the replica
        are counted as lost."""
        own = self._queue.leases[replica.index]
        for report in reports:
            if report.lease_id in own:
                self._trace.on_report(report)
                self._outbox.append(report)
            elif isinstance(report, Report) and (num := sum(len(one.token_ids) for one in report.segments)):
                self._outbox.append(WorkLost("replica_failed", num))
        self._queue.ended(replica.index, reports)

    def _suspend(self, replica: _Replica, cause: str) -> None:
        replica.is_serving, replica.cause, self._free[replica.index] = False, cause, 0
        if replica.load is not None:
            replica.load.tensors = None

    def _release(self, replica: _Replica) -> None:
        """Refuse the leases of a replica that does not serve, so that the controller sends them to another replica."""
        for lease_id in sorted(self._queue.leases[replica.index]):
            self._refuse(replica, lease_id)
            replica.inbox.put(Abort(lease_id))

    def _refuse(self, replica: _Replica, lease_id: int) -> None:
        retry = Retry(lease_id, self._version.number)
        self._queue.ended(replica.index, [retry])
        self._trace.on_report(retry)
        self._outbox.append(retry)

    def _deliver(self, messages: Sequence[Handover]) -> None:
        for index, message in messages:
            replica = self.replicas[index]
            if not isinstance(message, Lease):
                replica.inbox.put(message)
                continue
            self._trace.on_lease(message, replica.name, self._slots[index])
            if replica.is_serving:
                replica.inbox.put(without_replay_data(message))
            else:  # the queue sends a waiting lease here only to abort it
                self._refuse(replica, message.lease_id)

    def _check_any(self) -> None:
        if not any(replica.is_serving or replica.is_loading for replica in self.replicas):
            causes = "; ".join(f"{replica.name}: {replica.cause}" for replica in self.replicas)
            raise EngineFault(
                f"no replica serves version {self._version.number} ({causes}); finished trajectories are in the "
                "journal: continue with --resume"
            )

    # ---- in the replica's thread -------------------------------------------------------------------------------------

    def _live(self, replica: _Replica) -> None:
        """Serve with one engine after another, until the transport is closed or the engine fails too often."""
        inbox, failures = replica.inbox, 0
        while True:
            left_s = time_left(0.0)
            try:
                self._serve(replica, inbox)
                return
            except Exception as error:  # noqa: BLE001  # an error ends only this engine
                self._events.put(partial(self._on_ended, replica, first_line(error)))
            finally:
                replica.engine.close()
            failures, wait_s = self._rule.after_end(failures, -left_s())
            while True:
                if wait_s is None or self._closing.wait(wait_s):
                    return
                try:
                    replica.engine = self._build(replica.index)
                    break
                except Exception as error:  # noqa: BLE001  # counted as a failure of the engine
                    self._events.put(partial(self._on_ended, replica, f"it does not start: {first_line(error)}"))
                    failures, wait_s = self._rule.after_end(failures, None)
            inbox = SimpleQueue()
            self._events.put(partial(self._on_restarted, replica, inbox))
            if self._closing.is_set():
                inbox.put(None)

    def _serve(self, replica: _Replica, inbox: SimpleQueue[Any]) -> None:
        engine, running = replica.engine, set[int]()
        while True:
            while not running or not inbox.empty():
                try:
                    message = inbox.get(timeout=_POLL_S)
                except Empty:
                    if self._closing.is_set():
                        return
                    continue
                match message:
                    case None:
                        return
                    case Lease():
                        engine.submit(message)
                        running.add(message.lease_id)
                    case Abort(lease_id=lease_id):
                        engine.abort(lease_id)
                    case _Load():
                        self._begin_load(replica, message)
                    case other:
                        raise AssertionError(f"unexpected message {type(other).__name__}")
            left_s = time_left(0.0)
            reports = engine.step()
            took_s = -left_s()
            replica.stats = engine.stats
            replica.busy_s, replica.lease_s = replica.busy_s + took_s, replica.lease_s + took_s * len(running)
            if reports:
                self._events.put(partial(self._on_reports, replica, list(reports)))
                running.difference_update(report.lease_id for report in reports if ends_lease(report))

    def _begin_load(self, replica: _Replica, load: _Load) -> None:
        tensors, load.tensors = load.tensors, None
        if tensors is None:
            return
        cause, left_s = "", time_left(0.0)
        try:
            replica.engine.load_weights(tensors, load.version)
        except WeightsFault as error:  # the engine waits for the next version
            cause = first_line(error)
        self._events.put(partial(self._on_loaded, replica, load.version, cause, -left_s()))
