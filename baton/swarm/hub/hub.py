"""The hub: one port, where workers take leases and weights and hand in what they have grown.

    GET /worker                        WebSocket (messages.py); role worker
    everything else                    requests.py

| task       | consumes          | produces          | waits for       | unblocked by                |
|------------|-------------------|-------------------|-----------------|-----------------------------|
| connection | a worker's frames | calls of the desk | the worker      | a frame, or the lease table |
| sender     | a worker's queue  | frames            | the socket      | its deadline                |
| ticker     | the clock         | ticks             | the next second | the clock                   |

All in one event loop in a thread of its own, so that nothing here needs a lock and a long train step starves nobody;
`call` is how the runner's thread reaches in. What the loop is late by is not held against the workers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import msgspec
from aiohttp import web

from baton.console import visible
from baton.errors import DeadlineExceeded, Fault, UserError
from baton.swarm.audit import Audit
from baton.swarm.auth import AccessGrant, Authenticator, Denied, Role
from baton.swarm.hub.listener import HubListener
from baton.swarm.hub.peers import Outgoing, Peer
from baton.swarm.hub.relay import RelayList
from baton.swarm.hub.requests import Requests
from baton.swarm.hub.worker_connection import ReceiveTimeout, WorkerConnection
from baton.swarm.identity import WorkerKeys
from baton.swarm.lease_broker import LeaseBroker
from baton.swarm.listen import ListenAddress
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
from baton.types import PolicyVersion, Report, Retry
from baton.weights.store import Store

TICK_S = 1.0
START_DEADLINE_S = 30.0


class WorkerRefused(Exception):
    """A worker that may speak here, but is not of use to this run."""


@dataclass(frozen=True, slots=True)
class HubParts:
    """What a hub works with."""

    broker: LeaseBroker
    authenticators: tuple[Authenticator, ...]
    audit: Audit
    store: Store
    model: bytes
    welcome: Welcome
    status: Callable[[Hub], Any]
    """Gathers what `baton status` shows."""
    prometheus: Callable[[Hub], str]
    on_served: Callable[[Hub], None] = lambda hub: None
    """A worker has come to serve another version."""
    on_joined: Callable[[Peer], None] = lambda peer: None
    on_tick: Callable[[float], None] = lambda delay_s: None
    """delay_s: what the hub was late by."""
    admits: Callable[[Hello, AccessGrant], str | None] = lambda hello, grant: None
    """Why a worker is not wanted, or None."""
    keys: WorkerKeys = field(default_factory=lambda: WorkerKeys(secrets.token_bytes(32)))
    is_banned: Callable[[AccessGrant, str], str | None] = lambda grant, worker: None
    """(token, id of a worker or "") → why the worker, or all of the token's, are in quarantine."""
    weight: Callable[[AccessGrant], float] = lambda grant: 1.0
    """What is expected of one slot of a token's workers: see `WorkerJoined`."""
    on_malformed: Callable[[Peer, str], None] = lambda peer, sentence: None
    """A worker that has its place said what is no message."""
    say: Callable[[str], None] = lambda text: None


@dataclass(slots=True)
class _Counters:
    """Of the hub's life."""

    bytes_out: int = 0
    malformed: int = 0
    denied: int = 0
    loop_delay_s: float = 0.0
    """The longest so far."""
    by_route: dict[str, int] = field(default_factory=dict)

    def sent(self, route: str, num_bytes: int) -> None:
        """Count what goes out."""
        self.bytes_out += num_bytes
        self.by_route[route] = self.by_route.get(route, 0) + num_bytes


class Hub:
    """The event loop, its thread, and every connection."""

    def __init__(self, parts: HubParts, listen: ListenAddress) -> None:
        self.parts, self.listen = parts, listen
        self.peers: dict[int, Peer] = {}
        self.counters = _Counters()
        self.want: Want | None = None
        self.relays = RelayList()
        self.versions: dict[int, PolicyVersion] = {}
        """Published and still of use, by number."""
        self.slots = 0
        """Of all workers that can be spoken to; read by the runner's thread."""
        self._requests, self.door = Requests(self), HubListener()
        self._by_worker: dict[str, int] = {}
        """Id of a worker → its number."""
        self._next_worker = 0
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._port: int | None = None
        self._started = Event()
        self._fault: Exception | None = None
        self._thread = Thread(target=self._run, name="hub", daemon=True)

    # ---- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Listen, and return the port. Raises UserError where the address cannot be had."""
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise DeadlineExceeded(f"the hub did not begin to listen at {self.listen.host} in {START_DEADLINE_S:.0f} s")
        if self._fault is not None or self._port is None:
            at = f"{self.listen.host}:{self.listen.port}"
            raise UserError(f"--serve {at}: the hub cannot listen there: {self._fault}") from self._fault
        return self._port

    @property
    def port(self) -> int | None:
        """Where it listens."""
        return self._port

    def call(self, action: Callable[[], None]) -> None:
        """Have something done in the hub's thread, in order. Raises what has ended the hub; what fails ends it."""
        self.check()
        self._loop.call_soon_threadsafe(self._do, action)

    def check(self) -> None:
        """Raise what has ended the hub, if anything has."""
        if self._fault is not None:
            raise self._fault

    def stop(self, *, is_over: bool = False) -> None:
        """Hang up on everybody and end the thread. May be called twice. is_over: see `WorkerTransport.close`."""
        with suppress(RuntimeError):  # its loop has ended by itself
            if is_over:
                self._loop.call_soon_threadsafe(self._do, self._dismiss)
            self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.is_alive():
            self._thread.join(START_DEADLINE_S)

    # ---- in the hub's thread -----------------------------------------------------------------------------------------

    def relay_announced(self, url: str) -> None:
        """A relay is there; workers are told of a new one at once."""
        if self.relays.announce(url):
            self.parts.say(f"relay {url} joined")
            if self.want is not None:
                self.announce(self.want)

    def announce(self, want: Want) -> None:
        """A version is published: have every worker want it."""
        self.want = want = msgspec.structs.replace(want, relays=self.relays.urls())
        self.versions[want.version.number] = want.version
        for peer in self.peers.values():
            self.send(peer.number, want)

    def send(self, worker: int, message: FromHub) -> None:
        """Queue a message for a worker; nothing for one that is cut off, and the end for one that reads too slowly."""
        peer = self.peers.get(worker)
        if peer is not None and peer.outgoing is not None and not peer.outgoing.put(message):
            self.hang_up(worker, "takes nothing off its connection")
            self.parts.broker.leave(worker, "too slow a connection")

    def hang_up(self, worker: int, cause: str, *, is_final: bool = False) -> None:
        """End a worker's connection; unless it is final it may come again, as a new worker."""
        peer = self.peers.pop(worker, None)
        if peer is None:
            return
        self._by_worker.pop(peer.worker, None)
        self.parts.say(f"worker {peer.name}: {cause}")
        if peer.outgoing is not None:
            peer.outgoing.put(Rejected(cause, is_final))
            peer.outgoing.close()
        self._count_slots()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # noqa: BLE001  # whatever it is, the runner's thread must hear of it
            self._fault = self._fault or error
        finally:
            self._started.set()
            self._loop.close()

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # as above: nobody else would
            self._fault = self._fault or error
            self._stopping.set()

    async def _main(self) -> None:
        app = web.Application(client_max_size=MAX_FRAME_BYTES)
        app.router.add_get("/worker", self._worker)
        self._requests.add_routes(app.router)
        try:
            self._port = await self.door.open(app, self.listen)
            self._started.set()
            await self._tick()
        finally:
            await self.door.close()
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
            self.parts.broker.tick(delay_s)
            self.parts.on_tick(delay_s)

    def _recheck(self, peer: Peer) -> None:
        """A token may expire, be revoked or be put into quarantine while its worker is connected."""
        banned = self.parts.is_banned(peer.grant, peer.worker)
        try:
            if banned is not None:
                raise Denied(403, banned, peer.grant.label)
            for authenticator in self.parts.authenticators:
                with suppress(Denied):
                    authenticator.recheck(peer.grant)
                    return
            raise Denied(401, "the token is no longer valid", peer.grant.label)
        except Denied as denied:
            self.parts.audit.denied(denied, peer.address, "/worker")
            self.hang_up(peer.number, denied.reason, is_final=True)
            self.parts.broker.leave(peer.number, "token")

    # ---- workers -----------------------------------------------------------------------------------------------------

    async def _worker(self, request: web.Request) -> web.WebSocketResponse:
        grant = self._requests.admit(request, {Role.WORKER})
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, timeout=1.0, compress=False)
        await socket.prepare(request)
        outgoing = Outgoing()
        outgoing.put(self.parts.welcome)
        line = WorkerConnection(
            socket,
            request.transport,
            outgoing,
            lambda size: self.counters.sent("messages", size),
            lambda: self._requests.delay_s(grant),
        )
        await line.hold(self._converse(line, grant, request.remote or "", outgoing))
        return socket

    async def _converse(self, line: WorkerConnection, grant: AccessGrant, address: str, outgoing: Outgoing) -> None:
        """Hear a worker out, until it is gone or hung up on."""
        peer: Peer | None = None
        try:
            hello = await line.read_hello(self.parts.say)
            if hello is None:
                return
            peer = self._seat(hello, grant, address, outgoing)
            if self.want is not None:
                outgoing.put(self.want)
            silence_s = SILENT_HEARTBEATS * self.parts.welcome.heartbeat_s
            while self.peers.get(peer.number) is peer and peer.outgoing is outgoing:
                message = await line.read_unless_silent(silence_s)
                if message is None:
                    return
                self._hear(peer, message)
        except ReceiveTimeout as error:  # no evidence against anybody: it may come again at once
            self._complain("silent", error, grant, address)
            outgoing.put(Rejected(str(error), is_final=False))
            if peer is not None and peer.outgoing is outgoing:
                self.hang_up(peer.number, str(error))
                self.parts.broker.leave(peer.number, "silent")
        except Malformed as error:
            self._complain("malformed", error, grant, address)
            self.counters.malformed += 1
            outgoing.put(Rejected(f"malformed: {str(error)[:300]}", is_final=False))
            if peer is not None and self.peers.get(peer.number) is peer:
                self.parts.on_malformed(peer, str(error)[:300])
        except WorkerRefused as error:
            self._complain("unwanted", error, grant, address)
            outgoing.put(Rejected(str(error), is_final=True))
        except Exception as error:  # noqa: BLE001  # no worker's words may end the hub; this worker they do
            cause = f"what it said cannot be dealt with: {type(error).__name__}: {error}"
            self._complain("fault", error, grant, address)
            if peer is not None:
                self.hang_up(peer.number, cause)
                self.parts.broker.leave(peer.number, "fault")
        finally:
            if peer is not None and peer.outgoing is outgoing:
                self._cut(peer)

    def _complain(self, event: str, error: Exception, grant: AccessGrant, address: str) -> None:
        status = {"silent": 0, "malformed": 400, "unwanted": 403}.get(event, 500)
        self.parts.audit.record(event, status, f"{error}"[:300], address, "/worker", grant.label)

    def _seat(self, hello: Hello, grant: AccessGrant, address: str, outgoing: Outgoing) -> Peer:
        """Give a worker its place, or the one it had before a cut."""
        if hello.model_digest != self.parts.welcome.model_digest:
            raise Malformed(f"it was built for another model ({hello.model_digest[:12]})")
        refusal = self.parts.admits(hello, grant)
        if refusal is not None:
            raise WorkerRefused(refusal)
        key, keys = hello.key, self.parts.keys
        worker = keys.worker(grant.digest, key)
        if worker is None:
            key = keys.issue(grant.digest)
            worker = keys.worker(grant.digest, key)
            assert worker is not None, "a key that was just issued is known"
            outgoing.put(Admitted(key))
        banned = self.parts.is_banned(grant, worker)
        if banned is not None:
            raise WorkerRefused(banned)
        known = self.peers.get(self._by_worker.get(worker, -1))
        if known is not None:
            if known.outgoing is not None:
                known.outgoing.close()  # nobody has told the hub yet that this connection is dead
            known.outgoing, known.hello, known.address = outgoing, hello, address
            peer = known
        else:
            number, self._next_worker = self._next_worker, self._next_worker + 1
            peer = Peer(number, grant, hello, address, time.monotonic(), outgoing, worker, key)
            self.peers[number] = peer
            self._by_worker[worker] = number
            self.parts.on_joined(peer)
            owner = None if grant.is_own else grant.digest
            self.parts.broker.join(number, hello.slots, self.parts.weight(grant), hello.worker_class.noise, owner)
            self.parts.say(f"worker {peer.name} joined: {hello.worker_class}, {hello.slots} slots, {address}")
        self._count_slots()
        self.parts.broker.held(peer.number, hello.leases)
        self._hear(peer, Heartbeat(hello.serves, peer.stats))
        return peer

    def _cut(self, peer: Peer) -> None:
        """A connection has ended: nothing new for it, and its leases wait for it until it has been silent too long."""
        peer.outgoing = None
        self._count_slots()
        if self.peers.get(peer.number) is peer and not self._stopping.is_set():  # else its end has been told already
            count = self.parts.broker.num_leases(peer.number)
            its = f"its {count} leases wait for it to come back, then go to others" if count else "it held no leases"
            self.parts.say(f"worker {peer.name}: connection lost; {its}")
        self.parts.broker.hear(peer.number, None, peer.stats.decoded_tokens)

    def _hear(self, peer: Peer, message: FromWorker) -> None:
        broker, now_s = self.parts.broker, time.monotonic()
        match message:
            case Report():
                self._alive(peer)
                broker.report(peer.number, message)
            case Retry():
                broker.refuse(peer.number, message)
            case Heartbeat():
                peer.beat(message, now_s)
                before, peer.served = peer.served, self._number_of(message.serves)
                self._alive(peer)
                self.send(peer.number, HeartbeatAck())
                if peer.served != before:
                    self.parts.on_served(self)
            case Leaving():
                self.hang_up(peer.number, "left")
                broker.leave(peer.number, "left")
            case Fault(kind=kind, text=text):
                self.hang_up(peer.number, visible(f"{kind}: {text[:500]}", keep=""))
                broker.leave(peer.number, "fault")
            case Hello():
                raise Malformed("a second Hello")

    def _alive(self, peer: Peer) -> None:
        self.parts.broker.hear(peer.number, peer.served, peer.stats.decoded_tokens)

    def _number_of(self, version: PolicyVersion | None) -> int | None:
        """The number of a version that was published by this process, digest and all; None for any other."""
        return version.number if version is not None and self.versions.get(version.number) == version else None

    def _count_slots(self) -> None:
        self.slots = sum(peer.hello.slots for peer in self.peers.values() if peer.is_connected)
