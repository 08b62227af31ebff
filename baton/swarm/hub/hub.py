"""The hub: a server on one port, where workers receive leases and weights and send reports.

    GET /worker                        WebSocket (messages.py); role worker
    all other routes                   http_routes.py

| task       | consumes          | produces                     | waits for       | unblocked by          |
|------------|-------------------|------------------------------|-----------------|-----------------------|
| connection | a worker's frames | calls of `HubSession`        | the worker      | a frame, or a command |
| sender     | a worker's queue  | frames                       | the socket      | its deadline          |
| ticker     | the clock         | ticks                        | the next second | the clock             |

All tasks run in one event loop in a separate thread, so they need no locks, and a long train step does not block them.
With `Hub.call`, the controller's thread submits functions that run in the hub's thread. When the event loop is delayed,
the delay does not count towards the workers' time limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Event, Thread

from aiohttp import web

from baton.errors import DeadlineExceeded, UserError
from baton.swarm.auth import Role
from baton.swarm.hub.access import AccessControl
from baton.swarm.hub.membership import Membership
from baton.swarm.hub.peers import FrameQueue
from baton.swarm.hub.session import HubSession
from baton.swarm.hub.worker_connection import WorkerConnection
from baton.swarm.messages import MAX_FRAME_BYTES

TICK_S = 1.0
START_DEADLINE_S = 30.0


class Hub:
    """The server: its event loop, its thread and its connections."""

    def __init__(self, access: AccessControl, members: Membership) -> None:
        self.access, self.members = access, members
        self.listen = access.listener.listen
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self.port: int | None = None
        """Port that the hub listens on; None before it listens."""
        self._started = Event()
        self._fault: Exception | None = None
        self._app = web.Application(client_max_size=MAX_FRAME_BYTES)
        self._app.router.add_get("/worker", self._worker)
        self._thread = Thread(target=self._run_loop, name="hub", daemon=True)
        members.verifier.attach(members, self.call)

    # ---- from other threads ------------------------------------------------------------------------------------------

    def start(self, routes: Iterable[web.RouteDef] = ()) -> int:
        """Start to listen and return the port. `routes`: plain HTTP routes. Raises UserError if this fails."""
        self._app.add_routes(routes)
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise DeadlineExceeded(f"the hub did not listen at {self.listen.host} within {START_DEADLINE_S:.0f} s")
        if self._fault is not None or self.port is None:
            at = f"{self.listen.host}:{self.listen.port}"
            raise UserError(f"--serve {at}: the hub cannot listen on this address: {self._fault}") from self._fault
        return self.port

    def call(self, action: Callable[[], object]) -> None:
        """Submit an action to the hub's thread, which runs all actions in the order of their submission. An error of an
        action ends the hub. If an error has already ended the hub, raise this error."""
        self.check()
        self._loop.call_soon_threadsafe(self._do, action)

    def check(self) -> None:
        """If an error has ended the hub, raise this error."""
        if self._fault is not None:
            raise self._fault

    def stop(self, *, is_over: bool = False) -> None:
        """Disconnect all workers and end the thread. May be called twice. `is_over`: workers must not reconnect."""
        with suppress(RuntimeError):  # the loop has already ended
            if is_over:
                self._loop.call_soon_threadsafe(self._do, self.members.announce_end)
            self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.is_alive():
            self._thread.join(START_DEADLINE_S)

    # ---- in the hub's thread -----------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # noqa: BLE001  # any error must reach the controller's thread
            self._fault = self._fault or error
        finally:
            self._started.set()
            self._loop.close()

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # any error must reach the controller's thread
            self._fault = self._fault or error
            self._stopping.set()

    async def _main(self) -> None:
        try:
            self.port = await self.access.listener.open(self._app)
            self._started.set()
            await self._tick()
        finally:
            await self.access.listener.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _tick(self) -> None:
        counters, last_s = self.members.counters, time.monotonic()
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()
            now_s = time.monotonic()
            delay_s = max(0.0, now_s - last_s - TICK_S)
            counters.loop_delay_s = max(counters.loop_delay_s, delay_s)
            last_s = now_s
            self.members.tick(delay_s)

    async def _worker(self, request: web.Request) -> web.WebSocketResponse:
        grant = self.access.admit(request, {Role.WORKER})
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, timeout=1.0, compress=False)
        await socket.prepare(request)
        outgoing = FrameQueue()
        connection = WorkerConnection(
            socket,
            request.transport,
            outgoing,
            lambda size: self.members.counters.bytes_out.update(messages=size),
            lambda: self.access.delay_s(grant),
        )
        session = HubSession(self.members, grant, request.remote or "", outgoing)
        await connection.hold(self._converse(connection, session))
        return socket

    async def _converse(self, connection: WorkerConnection, session: HubSession) -> None:
        """Pass a worker's messages to its session until the session or the connection ends."""
        try:
            while not session.is_over:
                try:
                    message = await connection.read_unless_silent(session.silence_s)
                    if message is None:
                        return
                    session.receive(message)
                except Exception as error:  # noqa: BLE001  # an invalid message may end only its sender's connection
                    event, status = session.fail(error)
                    label = session.grant.label
                    self.access.audit.record(event, status, f"{error}"[:300], session.address, "/worker", label)
        finally:
            session.close(is_stopping=self._stopping.is_set())
