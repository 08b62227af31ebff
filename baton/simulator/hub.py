"""The hub in virtual time. It uses the lease table of a live run, with numbers of tokens in place of tokens.

The hub handles messages like `swarm/hub/hub.py` and `swarm/lease_broker.py`. A report counts only if its lease is still
valid and its offset equals the number of tokens that the hub has for the lease. A disconnected worker keeps its leases
until its heartbeat timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from baton.simulator.clock import VirtualClock
from baton.simulator.network import Segments, SimulatedHello, SimulatedReport
from baton.simulator.simulation import Simulation
from baton.simulator.transport import GenerationRequest
from baton.simulator.worker import SimWorker
from baton.swarm import lease_events as ev
from baton.swarm.leases import LeaseTable
from baton.swarm.messages import Ack, Dropped, Heartbeat, Leaving, Want
from baton.types import Abort, PolicyVersion, Retry

MAX_REFUSALS = 64
"""Number of consecutive refusals after which a worker is disconnected, as in the live lease broker."""


class LeaseTableObserver(Protocol):
    """An observer of every event and command of the lease table."""

    def on_lease_event(self, event: ev.Event) -> None:
        """Called after the table has handled an event, before its commands are applied."""

    def on_lease_command(self, command: ev.Command) -> None:
        """Called before a command is applied."""

    def settled_lease(self, event: ev.Event) -> None:
        """Called after all commands of an event have been applied."""


@dataclass(slots=True, eq=False)
class SimulatedTask:
    """A trajectory to generate."""

    request: GenerationRequest
    committed: int
    newest: int
    """Version of the last committed token; -1 before the first token."""
    branches: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimulatedProgress:
    """Progress of one lease of a task."""

    worker: int
    task: int
    base: int
    length: int
    newest: int
    """Version of the last token; -1 before the first token."""
    segments: Segments = field(default_factory=list)
    """Segments of the tokens after the first `base` tokens."""


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    """The hub's record of a worker."""

    worker: SimWorker
    is_connected: bool = True
    serves: int | None = None
    decoded: int = -1
    refusals: int = 0


class SimHub:
    """The hub of one incarnation of the controller: a restart creates a new hub."""

    def __init__(
        self, table: LeaseTable, clock: VirtualClock, controller: Simulation, lineage: str, acks: bool
    ) -> None:
        """acks: whether reports are acknowledged. Only runs with faults need acknowledgements."""
        self.table, self.lineage = table, lineage
        self.peers: dict[int, SimulatedPeer] = {}
        self.versions: dict[int, PolicyVersion] = {}
        self.tasks: dict[int, SimulatedTask] = {}
        self.branches: dict[int, SimulatedProgress] = {}
        self.watches: list[LeaseTableObserver] = []
        self.outcomes: Callable[[str], None] = lambda name: None
        """Function that counts an outcome by its name, such as `worker expelled`."""
        self._clock, self._controller, self._acks = clock, controller, acks
        self._want: Want | None = None
        self._next_worker = 0
        self._to_say: deque[tuple[Any, ...]] = deque()
        """Pending calls to the controller. They wait until the table's commands are applied, because the live
        controller receives them in another thread."""
        self._is_speaking = False

    # ---- from the controller -----------------------------------------------------------------------------------------

    def want(self, request: GenerationRequest) -> None:
        self.tasks[request.lease] = SimulatedTask(request, request.tokens, request.newest)
        now_s = self._clock.now_s
        self._dispatch(
            ev.TaskSubmitted(now_s, request.lease, request.version, request.is_exact, request.tokens, request.length)
        )

    def abort(self, task: int) -> None:
        self._dispatch(ev.TaskAborted(self._clock.now_s, task))

    def announce(self, version: PolicyVersion) -> None:
        """Announce a version that workers can now fetch."""
        self.versions[version.number] = version
        self._want = Want(version)
        for number in list(self.peers):
            self._send_to(number, self._want)

    def tick(self) -> None:
        self._dispatch(ev.LeaseTick(self._clock.now_s))

    # ---- from workers ------------------------------------------------------------------------------------------------

    def on_message(self, worker: SimWorker, message: object) -> None:
        number = worker.number
        if isinstance(message, SimulatedHello):
            self._hello(worker, message)
            return
        peer = self.peers.get(number)
        if peer is None or peer.worker is not worker:
            return
        match message:
            case SimulatedReport():
                self._alive(number, peer)
                self._report(number, peer, message)
            case Heartbeat(serves=serves, stats=stats):
                peer.serves, peer.decoded = self._number_of(serves), stats.decoded_tokens
                self._alive(number, peer)
            case Retry():
                self._refused(number, peer, message)
            case Leaving():
                del self.peers[number]
                self._dispatch(ev.WorkerLeft(self._clock.now_s, number, "left"))
                self._count_slots()
            case _:
                raise AssertionError(f"unexpected message from a worker: {type(message).__name__}")

    def cut(self, worker: SimWorker) -> None:
        """Mark a worker as disconnected. The worker keeps its leases, but gets no new leases."""
        peer = self.peers.get(worker.number)
        if peer is None or peer.worker is not worker:
            return
        peer.is_connected = False
        self._count_slots()
        self._dispatch(ev.WorkerSeen(self._clock.now_s, worker.number, None, peer.decoded))

    def _hello(self, worker: SimWorker, hello: SimulatedHello) -> None:
        known = self.peers.get(worker.number)
        if known is not None and known.worker is worker:
            peer, number = known, worker.number
            peer.is_connected = True
        else:
            number = worker.number = self._next_worker
            self._next_worker += 1
            peer = self.peers[number] = SimulatedPeer(worker)
            spec = worker.spec
            self._dispatch(ev.WorkerJoined(self._clock.now_s, number, spec.slots, spec.weight))
        if self._want is not None:
            self._send_to(number, self._want)
        self._count_slots()
        self._held(number, set(hello.leases))
        peer.serves = self._number_of(hello.serves)
        self._alive(number, peer)

    def _held(self, number: int, claimed: set[int]) -> None:
        """Compare the leases that a worker says it holds with the table. Tasks of leases that the worker lacks are
        queued again; leases that the table does not know are dropped."""
        known = set(self.table.workers[number].leases)
        for lease in sorted(known - claimed):
            self._dispatch(ev.LeaseReturned(self._clock.now_s, lease))
        for lease in sorted(claimed - known):
            self._send_to(number, Dropped(lease))

    def _report(self, number: int, peer: SimulatedPeer, report: SimulatedReport) -> None:
        lease = report.lease
        branch = self.branches.get(lease)
        if branch is None or branch.worker != number or not self.table.knows(lease):
            self._send_to(number, Dropped(lease))
            return
        if report.offset != branch.length:
            self._acknowledge(number, lease, branch)
            return
        if self._is_older(branch, report.segments):
            self.outcomes("correct worker disconnected for a fault")
            self._disconnect(number, "fault")
            return
        peer.refusals = 0
        grown = report.length - report.offset
        branch.segments += report.segments
        branch.length += grown
        if report.segments:
            branch.newest = report.segments[-1][0]
        now_s = self._clock.now_s
        if grown:
            self._dispatch(ev.LeaseProgressed(now_s, lease, grown, branch.newest))
        if report.end == "finished":
            self._dispatch(ev.LeaseFinished(now_s, lease))
        elif report.end:
            self._dispatch(ev.LeaseReturned(now_s, lease))
        self._acknowledge(number, lease, branch)

    def _is_older(self, branch: SimulatedProgress, segments: Segments) -> bool:
        """Return whether a segment has an older version than the tokens before it. The live hub treats this as a
        violation (swarm/verification/checks.py)."""
        return any(version < branch.newest for version, _ in segments)

    def _refused(self, number: int, peer: SimulatedPeer, retry: Retry) -> None:
        branch = self.branches.get(retry.lease_id)
        if branch is None or branch.worker != number or not self.table.knows(retry.lease_id):
            return
        peer.refusals += 1
        if peer.refusals > MAX_REFUSALS:
            self._disconnect(number, "refused too often")
            return
        now_s = self._clock.now_s
        self._dispatch(ev.WorkerSeen(now_s, number, retry.has_version, self.table.workers[number].decoded_tokens))
        self._dispatch(ev.LeaseReturned(now_s, retry.lease_id))

    def _alive(self, number: int, peer: SimulatedPeer) -> None:
        self._dispatch(ev.WorkerSeen(self._clock.now_s, number, peer.serves, peer.decoded))

    def _number_of(self, version: PolicyVersion | None) -> int | None:
        """Return the number of a version, or None if this hub did not announce the version."""
        return version.number if version is not None and self.versions.get(version.number) == version else None

    def _acknowledge(self, number: int, lease: int, branch: SimulatedProgress) -> None:
        if self._acks:
            self._send_to(number, Ack(lease, branch.length, not self.table.knows(lease)))

    def _disconnect(self, number: int, cause: str) -> None:
        peer = self.peers.pop(number, None)
        if peer is None:
            return
        self._dispatch(ev.WorkerLeft(self._clock.now_s, number, cause))
        self._drop_connection(peer)

    def _drop_connection(self, peer: SimulatedPeer) -> None:
        worker = peer.worker
        worker.number = -1
        if peer.is_connected:
            self._clock.at(self._clock.now_s, worker.cut)
        self._count_slots()

    def _send_to(self, number: int, message: object) -> None:
        peer = self.peers.get(number)
        if peer is not None and peer.is_connected:
            peer.worker.down.send(message)

    def _count_slots(self) -> None:
        self._controller.capacity(sum(p.worker.spec.slots for p in self.peers.values() if p.is_connected))

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: ev.Event) -> None:
        commands = self.table.handle(event)
        for watch in self.watches:
            watch.on_lease_event(event)
        for command in commands:
            for watch in self.watches:
                watch.on_lease_command(command)
            self._apply_command(command)
        for watch in self.watches:
            watch.settled_lease(event)
        # a call may dispatch further events; the calls that these cause are appended and follow in order
        if not self._is_speaking:
            self._is_speaking = True
            while self._to_say:
                say, *words = self._to_say.popleft()
                say(*words)
            self._is_speaking = False

    def _apply_command(self, command: ev.Command) -> None:
        match command:
            case ev.CommitTokens(task=task, lease=lease, length=length):
                self._commit(task, self.branches[lease], length)
            case ev.GrantLease():
                self._grant(command)
            case ev.FinishTask(task=task):
                self._forget(task)
                self._to_say.append((self._controller.finished, task))
            case ev.RecallLease(worker=worker, lease=lease):
                self._send_to(worker, Abort(lease))
            case ev.DropLease(worker=worker, lease=lease):
                self._send_to(worker, Dropped(lease))
            case ev.ReturnTask(task=task):
                self._forget(task)
                self._to_say.append((self._controller.put_down, task))
            case ev.DiscardTokens(cause=cause, num_tokens=num_tokens):
                self._to_say.append((self._controller.lost, cause, num_tokens))
            case ev.ReplaceTokens():
                raise AssertionError("tokens are never replaced in a simulation: all workers generate the same tokens")
            case ev.DisconnectWorker(worker=worker):
                peer = self.peers.pop(worker, None)
                if peer is not None:
                    self.outcomes("worker expelled")
                    self._drop_connection(peer)

    def _grant(self, grant: ev.GrantLease) -> None:
        task, base = self.tasks[grant.task], grant.base
        request = task.request
        branch = SimulatedProgress(grant.worker, grant.task, base, base, task.newest if base else -1)
        self.branches[grant.lease] = branch
        task.branches.append(grant.lease)
        if len(task.branches) > 1:
            self.outcomes("trajectory leased again")
        version = request.version if request.is_exact else max(request.version, task.newest)
        self._send_to(grant.worker, replace(request, lease=grant.lease, tokens=base, version=version))

    def _commit(self, number: int, branch: SimulatedProgress, length: int) -> None:
        task = self.tasks[number]
        at, offset = branch.base, task.committed
        task.committed = length
        for version, count in branch.segments:
            first, last = max(offset, at), min(length, at + count)
            if first < last:
                task.newest = version
                self._to_say.append((self._controller.grew, number, version, last - first))
            at += count

    def _forget(self, number: int) -> None:
        for lease in self.tasks.pop(number).branches:
            del self.branches[lease]
