"""The hub: a server on one port, where workers receive leases and weights and send reports.

    GET /worker                        WebSocket (messages.py); role worker
    all other routes                   http_routes.py

| task       | consumes          | produces                      | waits for       | unblocked by          |
|------------|-------------------|-------------------------------|-----------------|-----------------------|
| connection | a worker's frames | calls of the broker, commands | the worker      | a frame, or a command |
| sender     | a worker's queue  | frames                        | the socket      | its deadline          |
| ticker     | the clock         | ticks                         | the next second | the clock             |

All tasks run in one event loop in a separate thread. They need no locks, and a long train step does not block them. The
controller's thread uses `call`. Delays of the loop do not count against the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import assert_never

import msgspec
from aiohttp import web

from baton.console import visible
from baton.errors import DeadlineExceeded, Fault, UserError
from baton.swarm.auth import AccessGrant, Role
from baton.swarm.hub.access import AccessControl, Unwanted
from baton.swarm.hub.peers import Outgoing, Peer
from baton.swarm.hub.relay import RelayList
from baton.swarm.hub.worker_connection import ReceiveTimeout, WorkerConnection
from baton.swarm.lease_broker import (
    BrokerCommand,
    Disconnect,
    Key,
    LeaseBroker,
    ReportViolation,
    SendToController,
    SendToWorker,
    VerifyTrajectory,
    key_of,
)
from baton.swarm.messages import (
    MAX_FRAME_BYTES,
    SILENT_HEARTBEATS,
    Admitted,
    FromHub,
    FromWorker,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leaving,
    Malformed,
    Rejected,
    RunOver,
    Want,
    Welcome,
)
from baton.swarm.supervisor import WorkerSupervisor
from baton.swarm.verification.policy import QuarantineRecord, SegmentAuthor
from baton.swarm.verification.service import VerificationService
from baton.types import FromPort, PolicyVersion, Report, Retry

TICK_S = 1.0
START_DEADLINE_S = 30.0


@dataclass(slots=True)
class _Counters:
    """Counters since the hub started."""

    bytes_out: int = 0
    malformed: int = 0
    loop_delay_s: float = 0.0
    """Maximum delay of the event loop since the start."""
    by_route: dict[str, int] = field(default_factory=dict)

    def sent(self, route: str, num_bytes: int) -> None:
        """Add sent bytes to a route's counter."""
        self.bytes_out += num_bytes
        self.by_route[route] = self.by_route.get(route, 0) + num_bytes


class Hub:
    """The server: its event loop, its thread and its connections."""

    def __init__(
        self,
        access: AccessControl,
        welcome: Welcome,
        broker: LeaseBroker,
        verifier: VerificationService,
        say: Callable[[str], None],
        worker_supervisor: WorkerSupervisor | None = None,
    ) -> None:
        """worker_supervisor: provides the weights of the workers that it has started."""
        self.access, self.welcome, self.broker, self.verifier = access, welcome, broker, verifier
        self.say, self._worker_supervisor = say, worker_supervisor
        self.listen = access.listener.listen
        self.inbox: SimpleQueue[FromPort] = SimpleQueue()
        """Messages for the controller."""
        self.peers: dict[int, Peer] = {}
        self._authors: dict[int, SegmentAuthor] = {}
        """Author records by worker number, including workers that have left."""
        self._commands: deque[BrokerCommand] = deque()
        self._is_executing = False
        self.counters = _Counters()
        self.want: Want | None = None
        self.relays = RelayList()
        self.versions: dict[int, PolicyVersion] = {}
        """Published versions that workers may still serve, by number."""
        self.slots = 0
        """Number of slots of all connected workers; read by the controller's thread."""
        self._by_worker: dict[str, int] = {}
        """Number of each worker, by worker id."""
        self._next_worker = 0
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._port: int | None = None
        self._started = Event()
        self._fault: Exception | None = None
        self._app = web.Application(client_max_size=MAX_FRAME_BYTES)
        self._app.router.add_get("/worker", self._worker)
        self._thread = Thread(target=self._run_loop, name="hub", daemon=True)
        verifier.attach(self)

    # ---- from other threads ------------------------------------------------------------------------------------------

    def start(self, routes: Iterable[web.RouteDef] = ()) -> int:
        """Start to listen and return the port. routes: plain HTTP routes. Raises UserError if the address is not
        available."""
        self._app.add_routes(routes)
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise DeadlineExceeded(f"the hub did not listen at {self.listen.host} within {START_DEADLINE_S:.0f} s")
        if self._fault is not None or self._port is None:
            at = f"{self.listen.host}:{self.listen.port}"
            raise UserError(f"--serve {at}: the hub cannot listen there: {self._fault}") from self._fault
        return self._port

    @property
    def port(self) -> int | None:
        """Port that the hub listens on; None before it listens."""
        return self._port

    def call(self, action: Callable[[], None]) -> None:
        """Run an action in the hub's thread, in the order of the calls. An error of the action ends the hub.

        Raises the error that ended the hub, if any.
        """
        self.check()
        self._loop.call_soon_threadsafe(self._do, action)

    def check(self) -> None:
        """Raise the error that ended the hub, if any."""
        if self._fault is not None:
            raise self._fault

    def stop(self, *, is_over: bool = False) -> None:
        """Disconnect all workers and end the thread. May be called twice. is_over: as in `WorkerTransport.close`."""
        with suppress(RuntimeError):  # the loop has already ended
            if is_over:
                self._loop.call_soon_threadsafe(self._do, self._dismiss)
            self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.is_alive():
            self._thread.join(START_DEADLINE_S)

    def gone(self, name: str, cause: str) -> None:
        """End the leases of the run's own workers with a token, because these workers have ended. May be called from
        any thread."""

        def action() -> None:
            for worker in self._own_workers(name):
                self.disconnect(worker, cause)
                self.execute(self.broker.leave(worker, cause))

        self.call(action)

    def weigh(self, name: str, weight: float) -> None:
        """Change the weight of the run's own workers with a token. May be called from any thread."""

        def action() -> None:
            for worker in self._own_workers(name):
                self.execute(self.broker.weigh(worker, weight))

        self.call(action)

    # ---- in the hub's thread -----------------------------------------------------------------------------------------

    def execute(self, commands: Iterable[BrokerCommand]) -> None:
        """Execute the broker's commands in order.

        A command can result in further commands, such as a disconnection because a queue is full. They are executed
        after the waiting commands.
        """
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
            case Disconnect(worker=worker, cause=cause):
                self.disconnect(worker, cause)
            case ReportViolation(worker=worker, sentence=sentence):
                self._violated(worker, sentence)
            case VerifyTrajectory(lease=lease, trajectory=trajectory, spans=spans):
                parts = [(self._authors[worker], first, end) for worker, first, end in spans]
                if not self.verifier.finished(lease, trajectory, parts):
                    for released in self.broker.release(key_of(lease)):
                        self._execute(released)
            case _:
                assert_never(command)

    def release(self, key: Key) -> None:
        """Release a held trajectory for training."""
        self.execute(self.broker.release(key))

    def remake(self, key: Key) -> None:
        """Revoke a held trajectory, so that it is generated again."""
        self.execute(self.broker.remake(key))

    def quarantined(self, quarantine_record: QuarantineRecord) -> None:
        """Disconnect a quarantined worker, or all workers of a quarantined token, and revoke their untrained
        trajectories."""
        self.say(f"worker {quarantine_record.shown} is in quarantine: {quarantine_record.verdict.reason}")
        reasons = {n: self.access.quarantine.reason(a.grant, a.worker) for n, a in self._authors.items()}
        workers = [number for number, reason in reasons.items() if reason is not None]
        for number in workers:
            self.disconnect(number, reasons[number] or "", is_final=True)
            self.execute(self.broker.leave(number, "in quarantine"))
        self.execute(self.broker.revoke(frozenset(workers), "quarantine"))

    def relay_announced(self, url: str) -> None:
        """Add a relay, and announce a new relay to the workers at once."""
        if self.relays.announce(url):
            self.say(f"relay {url} joined")
            if self.want is not None:
                self.announce(self.want)

    def announce(self, want: Want) -> None:
        """Send a published version to all workers."""
        self.want = want = msgspec.structs.replace(want, relays=self.relays.urls())
        self.versions[want.version.number] = want.version
        self.broker.newest_version = max(self.versions)
        for peer in self.peers.values():
            self.send(peer.number, want)

    def send(self, worker: int, message: FromHub) -> None:
        """Queue a message for a worker. No effect if the worker is not connected. A worker whose queue is full is
        disconnected."""
        peer = self.peers.get(worker)
        if peer is not None and peer.outgoing is not None and not peer.outgoing.put(message):
            self.disconnect(worker, "does not read its messages")
            self.execute(self.broker.leave(worker, "too slow a connection"))

    def disconnect(self, worker: int, cause: str, *, is_final: bool = False) -> None:
        """End a worker's connection. Unless `is_final`, it may join again as a new worker."""
        peer = self.peers.pop(worker, None)
        if peer is None:
            return
        self._by_worker.pop(peer.worker, None)
        self.say(f"worker {peer.name}: {cause}")
        if peer.outgoing is not None:
            peer.outgoing.put(Rejected(cause, is_final))
            peer.outgoing.close()
        self._count_slots()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # noqa: BLE001  # any error must reach the controller's thread
            self._fault = self._fault or error
        finally:
            self._started.set()
            self._loop.close()

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # any error must reach the controller's thread
            self._fault = self._fault or error
            self._stopping.set()

    async def _main(self) -> None:
        try:
            self._port = await self.access.listener.open(self._app)
            self._started.set()
            await self._tick()
        finally:
            await self.access.listener.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _dismiss(self) -> None:
        for peer in self.peers.values():
            self.send(peer.number, RunOver())

    async def _tick(self) -> None:
        last_s = time.monotonic()
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()
            now_s = time.monotonic()
            delay_s = max(0.0, now_s - last_s - TICK_S)
            self.counters.loop_delay_s = max(self.counters.loop_delay_s, delay_s)
            last_s = now_s
            for peer in list(self.peers.values()):
                self._recheck(peer)
            self.execute(self.broker.tick(delay_s))
            self.verifier.tick(delay_s)

    def _recheck(self, peer: Peer) -> None:
        """Disconnect a worker if its token has expired or was revoked, or if the worker is quarantined."""
        reason = self.access.recheck(peer.grant, peer.worker, peer.address)
        if reason is not None:
            self.disconnect(peer.number, reason, is_final=True)
            self.execute(self.broker.leave(peer.number, "token"))

    def _violated(self, worker: int, sentence: str) -> None:
        """Quarantine the author of a report that a correct worker cannot send."""
        if self.verifier.violated(self._authors[worker], sentence, f"a report of worker {worker}") is None:
            self.disconnect(worker, sentence, is_final=True)
            self.execute(self.broker.leave(worker, "in quarantine"))

    def _own_workers(self, name: str) -> list[int]:
        """Return the numbers of the run's own workers with a token. Tokens of other owners may have the same name."""
        grants = ((peer.number, peer.grant) for peer in self.peers.values())
        return [number for number, grant in grants if grant.is_own and grant.name == name]

    # ---- workers -----------------------------------------------------------------------------------------------------

    async def _worker(self, request: web.Request) -> web.WebSocketResponse:
        grant = self.access.admit(request, {Role.WORKER})
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, timeout=1.0, compress=False)
        await socket.prepare(request)
        outgoing = Outgoing()
        outgoing.put(self.welcome)
        line = WorkerConnection(
            socket,
            request.transport,
            outgoing,
            lambda size: self.counters.sent("messages", size),
            lambda: self.access.delay_s(grant),
        )
        await line.hold(self._converse(line, grant, request.remote or "", outgoing))
        return socket

    async def _converse(self, line: WorkerConnection, grant: AccessGrant, address: str, outgoing: Outgoing) -> None:
        """Process a worker's messages until the worker leaves or is disconnected."""
        peer: Peer | None = None
        try:
            hello = await line.read_hello(self.say)
            if hello is None:
                return
            peer = self._seat(hello, grant, address, outgoing)
            if self.want is not None:
                outgoing.put(self.want)
            heartbeat_timeout_s = SILENT_HEARTBEATS * self.welcome.heartbeat_s
            while self.peers.get(peer.number) is peer and peer.outgoing is outgoing:
                message = await line.read_unless_silent(heartbeat_timeout_s)
                if message is None:
                    return
                self._on_message(peer, message)
        except ReceiveTimeout as error:  # no evidence of a faulty worker: it may join again at once
            self._complain("silent", error, grant, address)
            outgoing.put(Rejected(str(error), is_final=False))
            if peer is not None and peer.outgoing is outgoing:
                self.disconnect(peer.number, str(error))
                self.execute(self.broker.leave(peer.number, "silent"))
        except Malformed as error:
            self._complain("malformed", error, grant, address)
            self.counters.malformed += 1
            outgoing.put(Rejected(f"malformed: {str(error)[:300]}", is_final=False))
            if peer is not None and self.peers.get(peer.number) is peer:
                self._violated(peer.number, f"malformed: {str(error)[:300]}")
        except Unwanted as error:
            self._complain("unwanted", error, grant, address)
            outgoing.put(Rejected(str(error), is_final=True))
        except Exception as error:  # noqa: BLE001  # an invalid message may end only its sender's connection
            cause = f"its message cannot be processed: {type(error).__name__}: {error}"
            self._complain("fault", error, grant, address)
            if peer is not None:
                self.disconnect(peer.number, cause)
                self.execute(self.broker.leave(peer.number, "fault"))
        finally:
            if peer is not None and peer.outgoing is outgoing:
                self._cut(peer)

    def _complain(self, event: str, error: Exception, grant: AccessGrant, address: str) -> None:
        status = {"silent": 0, "malformed": 400, "unwanted": 403}.get(event, 500)
        self.access.audit.record(event, status, f"{error}"[:300], address, "/worker", grant.label)

    def _seat(self, hello: Hello, grant: AccessGrant, address: str, outgoing: Outgoing) -> Peer:
        """Register a worker, or restore its registration after a reconnection."""
        if hello.model_digest != self.welcome.model_digest:
            raise Malformed(f"the worker was built for another model ({hello.model_digest[:12]})")
        worker, key = self.access.identify(hello, grant)
        if key != hello.key:
            outgoing.put(Admitted(key))
        banned = self.access.quarantine.reason(grant, worker)
        if banned is not None:
            raise Unwanted(banned)
        known = self.peers.get(self._by_worker.get(worker, -1))
        if known is not None:
            if known.outgoing is not None:
                known.outgoing.close()  # the old connection has ended, but the hub has not detected the end yet
            known.outgoing, known.hello, known.address = outgoing, hello, address
            peer = known
        else:
            number, self._next_worker = self._next_worker, self._next_worker + 1
            peer = Peer(number, grant, hello, address, time.monotonic(), outgoing, worker, key)
            self.peers[number] = peer
            self._by_worker[worker] = number
            self._authors[number] = SegmentAuthor(worker, grant, peer.name, hello.worker_class)
            owner = None if grant.is_own else grant.digest
            weight = (
                self._worker_supervisor.weight(grant.name)
                if self._worker_supervisor is not None and grant.is_own
                else 1.0
            )
            self.execute(self.broker.join(number, hello.slots, weight, hello.worker_class.noise, owner, name=peer.name))
            self.say(f"worker {peer.name} joined: {hello.worker_class}, {hello.slots} slots, {address}")
        self._count_slots()
        self.execute(self.broker.held(peer.number, hello.leases))
        self._on_message(peer, Heartbeat(hello.serves, peer.stats))
        return peer

    def _cut(self, peer: Peer) -> None:
        """Handle the end of a connection. The worker gets no new leases, and keeps its leases until its heartbeat
        timeout."""
        peer.outgoing = None
        self._count_slots()
        # otherwise the end has already been reported
        if self.peers.get(peer.number) is peer and not self._stopping.is_set():
            count = self.broker.num_leases(peer.number)
            its = f"its {count} leases go to other workers unless it reconnects" if count else "it held no leases"
            self.say(f"worker {peer.name}: connection lost; {its}")
        self.execute(self.broker.heartbeat(peer.number, None, peer.stats.decoded_tokens))

    def _on_message(self, peer: Peer, message: FromWorker) -> None:
        match message:
            case Report():
                self._alive(peer)
                self.execute(self.broker.report(peer.number, message))
            case Retry():
                self.execute(self.broker.refuse(peer.number, message))
            case Heartbeat():
                now_s = time.monotonic()
                peer.beat(message, now_s)
                before, peer.served = peer.served, self._number_of(message.serves)
                self._alive(peer)
                self.send(peer.number, HeartbeatAck())
                if peer.served != before:
                    self.broker.pace.serve(now_s, (p.served for p in self.peers.values() if p.is_connected))
            case Leaving():
                self.disconnect(peer.number, "left")
                self.execute(self.broker.leave(peer.number, "left"))
            case Fault(kind=kind, text=text):
                self.disconnect(peer.number, visible(f"{kind}: {text[:500]}", keep=""))
                self.execute(self.broker.leave(peer.number, "fault"))
            case Hello():
                raise Malformed("a second Hello")

    def _alive(self, peer: Peer) -> None:
        self.execute(self.broker.heartbeat(peer.number, peer.served, peer.stats.decoded_tokens))

    def _number_of(self, version: PolicyVersion | None) -> int | None:
        """Return the number of a version that this process has published with the same digest; None for any other
        version."""
        return version.number if version is not None and self.versions.get(version.number) == version else None

    def _count_slots(self) -> None:
        self.slots = sum(peer.hello.slots for peer in self.peers.values() if peer.is_connected)
