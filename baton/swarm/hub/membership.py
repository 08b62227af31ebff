"""The workers of a hub: which workers are connected, and which version each worker serves. Executes the broker's
commands.

    HubSession ─▶ join, on_message, connection_lost ────────┐      ┌─▶ Outgoing queue of a worker
    background_publisher ─▶ announce ───────────────────────┼─▶ Membership ─▶ inbox of the controller
    VerificationService ─▶ release, remake, quarantined ────┘      └─▶ LeaseBroker, VerificationService

All methods must be called in the hub's thread. `Membership` uses no socket and no thread, and its only clock is the
broker's, so the live hub and the simulator use the same class.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec

from baton.console import visible
from baton.errors import Fault
from baton.swarm import messages
from baton.swarm.auth import AccessGrant
from baton.swarm.hub.peers import Outgoing, Peer, RelayList
from baton.swarm.hub.worker_access import Unwanted, WorkerAccess
from baton.swarm.lease_broker import (
    BrokerCommand,
    Key,
    LeaseBroker,
    ReportViolation,
    SendToController,
    SendToWorker,
    VerifyTrajectory,
    key_of,
)
from baton.swarm.lease_events import DisconnectWorker, LeaseTick, WorkerJoined, WorkerWeightChanged
from baton.swarm.verification.policy import QuarantineRecord, SegmentAuthor, name_of
from baton.swarm.verification.service import VerificationService
from baton.types import FromPort, PolicyVersion, Report, Retry


@dataclass(slots=True)
class HubCounters:
    """Counters since the hub started."""

    bytes_out: Counter[str] = field(default_factory=Counter)
    """Route → number of bytes sent."""
    malformed: int = 0
    loop_delay_s: float = 0.0
    """Maximum delay of the event loop since the start, in seconds."""


class Membership:
    """The workers of one hub, and the versions and relays that they may use."""

    def __init__(
        self,
        access: WorkerAccess,
        welcome: messages.Welcome,
        broker: LeaseBroker,
        verifier: VerificationService,
        say: Callable[[str], None],
        weight: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        """`weight`: returns the `WorkerJoined.weight` of the workers that the run itself has started with the access
        token of this name."""
        self.welcome, self.broker, self.verifier = welcome, broker, verifier
        # these lines may quote text that a worker sent; `visible` escapes its control characters
        self.say: Callable[[str], None] = lambda text: say(visible(text[: messages.MAX_TEXT], keep=""))
        self._access, self._weight = access, weight
        self.counters = HubCounters()
        self.inbox: SimpleQueue[FromPort] = SimpleQueue()
        """Messages for the controller."""
        self.peers: dict[int, Peer] = {}
        self.slots = 0
        """Number of slots of all connected workers; read by the controller's thread."""
        self.want: messages.Want | None = None
        self.versions: dict[int, PolicyVersion] = {}
        """Number → published version that workers may still serve."""
        self.relays = RelayList(broker.clock)
        self.authors: dict[int, SegmentAuthor] = {}
        """Worker number → author record of each worker that is connected or has reported tokens."""
        self._next_worker = 0
        self._switched_s: float | None = None
        """Time at which a worker last switched versions; None if no worker has switched since the last tick."""
        self._commands: deque[BrokerCommand] = deque()
        self._is_executing = False

    # ---- commands of the broker --------------------------------------------------------------------------------------

    def execute(self, commands: Iterable[BrokerCommand]) -> None:
        """Execute the broker's commands in order. A command can cause new commands, such as a disconnection because a
        queue is full. New commands are executed after the commands that already wait."""
        self._commands.extend(commands)
        if self._is_executing:
            return
        self._is_executing = True
        try:
            while self._commands:
                self._execute(self._commands.popleft())
        finally:
            self._is_executing = False

    def _execute(self, command: BrokerCommand) -> None:
        match command:
            case SendToWorker(worker=worker, message=message):
                self.send(worker, message)
            case SendToController(message=message):
                self.inbox.put(message)
            case DisconnectWorker(worker=worker, cause=cause):
                self._disconnect(worker, cause)
            case ReportViolation(worker=worker, sentence=sentence):
                self.report_violated(worker, sentence)
            case VerifyTrajectory(lease=lease, trajectory=trajectory, spans=spans):
                parts = [(self.authors[worker], first, end) for worker, first, end in spans]
                if not self.verifier.finished(lease, trajectory, parts):
                    for released in self.broker.release(key_of(lease)):
                        self._execute(released)

    # ---- commands of the verification --------------------------------------------------------------------------------

    def release(self, key: Key) -> None:
        self.execute(self.broker.release(key))

    def remake(self, key: Key) -> None:
        self.execute(self.broker.remake(key))

    def quarantined(self, record: QuarantineRecord) -> None:
        """Remove the workers of a quarantined id or access token. Revoke those of their trajectories that were not
        trained on yet."""
        self.say(f"worker {record.shown} is in quarantine: {record.verdict.reason}")
        reasons = {n: self._access.quarantine.reason(a.grant, a.worker) for n, a in self.authors.items()}
        workers = [number for number, reason in reasons.items() if reason is not None]
        for number in workers:
            self.remove(number, reasons[number] or "", is_final=True)
        self.execute(self.broker.revoke(frozenset(workers), "quarantine"))

    def mistrust(self, tokens: Sequence[tuple[Key, int]], keys: Iterable[Key], reason: str) -> Set[Key]:
        """Quarantine the authors of `tokens`, given as (trajectory, position after the prompt). Return the trajectories
        of `keys` with tokens of quarantined or unknown authors. If an author is trusted, quarantine no worker and
        return an empty set."""
        spans = {key: self.broker.authors(key) for key in keys}
        found = [(key, next((n for n, first, end in spans[key] if first <= at < end), None)) for key, at in tokens]
        known = [(key, self.authors[number]) for key, number in found if number is not None]
        if any(author.grant.is_trusted or author.grant.is_own for _, author in known):
            return frozenset()
        for key, author in known:
            self.verifier.violated(author, reason, name_of(key))
        banned = {n for n, a in self.authors.items() if self._access.quarantine.reason(a.grant, a.worker) is not None}
        theirs = (key for key in spans if banned.intersection(number for number, _, _ in spans[key]))
        return {*theirs, *(key for key, number in found if number is None)}

    # ---- versions and relays -----------------------------------------------------------------------------------------

    def announce(self, want: messages.Want, *, only_near: bool = False) -> None:
        """Announce a published version to all workers. If `only_near` is set, announce it only to the workers on the
        hub's machine, which can read the version's file."""
        want = msgspec.structs.replace(want, relays=self.relays.urls())
        self.want = self.want if only_near else want
        self.versions[want.version.number] = want.version
        self.broker.newest_version = max(self.versions)
        for peer in list(self.peers.values()):  # `send` removes a worker whose queue is full
            if peer.is_near or not only_near:
                self.send(peer.number, want)

    def relay_announced(self, url: str) -> None:
        """Record that a relay has announced itself. If it is a new relay, send its URL to the workers at once."""
        if self.relays.announce(url):
            self.say(f"relay {url} joined")
            if self.want is not None:
                self.announce(self.want)

    # ---- workers that join and leave ---------------------------------------------------------------------------------

    def join(self, hello: messages.Hello, grant: AccessGrant, address: str, outgoing: Outgoing) -> Peer:
        """Register a worker, or restore its registration after a reconnection. Raises Malformed if the worker was built
        for another model, and Unwanted if the worker may not take part in the run."""
        if hello.model_digest != self.welcome.model_digest:
            raise messages.Malformed(f"the worker was built for another model ({hello.model_digest[:12]})")
        worker, key = self._access.identify(hello, grant)
        if key != hello.key:
            outgoing.put(messages.Admitted(key))
        banned = self._access.quarantine.reason(grant, worker)
        if banned is not None:
            raise Unwanted(banned)
        peer = next((peer for peer in self.peers.values() if peer.worker == worker), None)
        if peer is None:
            peer = self._add(Peer(self._next_worker, grant, hello, address, outgoing, worker))
        else:
            if peer.outgoing is not None:
                peer.outgoing.close()  # the old connection has ended, but the hub has not detected the end yet
            peer.outgoing, peer.hello, peer.address = outgoing, hello, address
        self._count_slots()
        self.execute(self.broker.held(peer.number, hello.leases))
        self.on_message(peer, messages.Heartbeat(hello.serves, peer.stats))
        if self.want is not None:
            outgoing.put(msgspec.structs.replace(self.want, relays=self.relays.urls()))
        return peer

    def _add(self, peer: Peer) -> Peer:
        number, grant, hello = peer.number, peer.grant, peer.hello
        self._next_worker += 1
        self.peers[number] = peer
        self.authors[number] = SegmentAuthor(peer.worker, grant, peer.name, hello.worker_class)
        weight = self._weight(grant.name) if grant.is_own else 1.0
        owner = None if grant.is_own else grant.digest
        joined = WorkerJoined(self.broker.clock(), number, hello.slots, weight, hello.worker_class.noise, owner)
        self.execute(self.broker.join(joined, peer.name))
        self.say(f"worker {peer.name} joined: {hello.worker_class}, {hello.slots} slots, {peer.address}")
        return peer

    def connection_lost(self, peer: Peer, *, is_stopping: bool) -> None:
        """Handle the end of a connection: the worker gets no new leases, and its leases end at the heartbeat timeout
        unless the worker reconnects."""
        peer.outgoing = None
        self._count_slots()
        # the removal of a worker has already been reported
        if self.peers.get(peer.number) is peer and not is_stopping:
            count = self.broker.num_leases(peer.number)
            its = f"its {count} leases go to other workers unless it reconnects" if count else "it held no leases"
            self.say(f"worker {peer.name}: connection lost; {its}")
        self.execute(self.broker.heartbeat(peer.number, None, peer.stats.decoded_tokens))

    def remove(self, worker: int, cause: str, *, is_final: bool = False) -> None:
        """Disconnect a worker and end its leases. Unless `is_final`, the worker may join again as a new worker."""
        self._disconnect(worker, cause, is_final=is_final)
        self.execute(self.broker.leave(worker, cause))

    def _disconnect(self, worker: int, cause: str, *, is_final: bool = False) -> None:
        peer = self.peers.pop(worker, None)
        if peer is None:
            return
        self.say(f"worker {peer.name}: {cause}")
        if peer.outgoing is not None:
            peer.outgoing.put(messages.Rejected(cause, is_final))
            peer.outgoing.close()
        self._count_slots()

    def report_violated(self, worker: int, sentence: str) -> None:
        """Quarantine the author of a report that a correct worker cannot send."""
        if self.verifier.violated(self.authors[worker], sentence, f"a report of worker {worker}") is None:
            self.remove(worker, sentence, is_final=True)

    def remove_own(self, name: str, cause: str) -> None:
        """Remove the run's own workers that use the access token `name`, because these workers have ended."""
        for worker in self._own_workers(name):
            self.remove(worker, cause)

    def weigh_own(self, name: str, weight: float) -> None:
        """Change the weight of the run's own workers that use the access token `name`."""
        for worker in self._own_workers(name):
            self.execute(self.broker.handle(WorkerWeightChanged(self.broker.clock(), worker, weight)))

    def _own_workers(self, name: str) -> list[int]:
        """Return the numbers of the run's own workers that use the access token `name`. Workers that the run did not
        start are excluded, even if their token has the same name."""
        grants = ((peer.number, peer.grant) for peer in self.peers.values())
        return [number for number, grant in grants if grant.is_own and grant.name == name]

    def announce_end(self) -> None:
        for peer in list(self.peers.values()):
            self.send(peer.number, messages.RunOver())

    def tick(self, delay_s: float) -> None:
        """Check access tokens, quarantines and time limits of all workers. `delay_s`: delay of this tick in seconds."""
        for peer in list(self.peers.values()):
            denied = self._access.recheck(peer.grant, peer.worker, peer.address)
            if denied is not None:
                self.remove(peer.number, denied.reason, is_final=denied.is_final)
            elif not peer.is_limited and (limit := self.broker.limit_of(peer.number)):
                peer.is_limited = True
                self.say(f"worker {peer.name}: {limit}")
        if self._switched_s is not None:  # once per tick, because all workers are visited
            self.broker.pace.serve(self._switched_s, (p.served for p in self.peers.values() if p.is_connected))
            self._switched_s = None
        # a caller may join and leave any number of times, so workers that reported no token are forgotten
        self.authors = {n: a for n, a in self.authors.items() if n in self.peers or self.broker.is_author(n)}
        self.execute(self.broker.handle(LeaseTick(self.broker.clock(), delay_s)))
        self.verifier.tick(delay_s)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def send(self, worker: int, message: messages.FromHub) -> None:
        """Queue a message for a worker, if it is connected. A worker whose queue is full is removed."""
        peer = self.peers.get(worker)
        if peer is not None and peer.outgoing is not None and not peer.outgoing.put(message):
            self.remove(worker, "does not read its messages")

    def on_message(self, peer: Peer, message: messages.FromWorker) -> None:
        """Handle a worker's message. Raises Malformed for a second Hello."""
        match message:
            case Report():
                self._alive(peer)
                self.execute(self.broker.report(peer.number, message))
            case Retry():
                self.execute(self.broker.refuse(peer.number, message))
            case messages.Heartbeat():
                now_s = self.broker.clock()
                peer.beat(message, now_s)
                before, peer.served = peer.served, self._number_of(message.serves)
                self._alive(peer)
                self.send(peer.number, messages.HeartbeatAck())
                if peer.served != before:
                    self._switched_s = now_s
            case messages.Leaving():
                self.remove(peer.number, "left")
            case Fault(kind=kind, text=text):
                self.remove(peer.number, f"{kind}: {text[:500]}")
            case messages.Hello():
                raise messages.Malformed("a second Hello")

    def _alive(self, peer: Peer) -> None:
        self.execute(self.broker.heartbeat(peer.number, peer.served, peer.stats.decoded_tokens))

    def _number_of(self, version: PolicyVersion | None) -> int | None:
        """Return the number of `version` if this process has published it and workers may still serve it, otherwise
        None."""
        return version.number if version is not None and self.versions.get(version.number) == version else None

    def _count_slots(self) -> None:
        self.slots = sum(peer.hello.slots for peer in self.peers.values() if peer.is_connected)
