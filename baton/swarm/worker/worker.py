"""A worker: one engine, and one connection to the hub that the worker opens.

| task / thread | consumes             | produces               | waits for            | unblocked by           |
|---------------|----------------------|------------------------|----------------------|------------------------|
| reader        | the WebSocket        | actions for the engine | the hub              | a message, its timeout |
| sender        | the queue to the hub | frames                 | the socket           | its deadline           |
| heartbeat     | the clock            | Heartbeat              | the next heartbeat   | the clock              |
| fetch thread  | manifests, chunks    | a verified version     | the sources          | its deadline           |
| engine thread | leases, versions     | reports                | an action, when idle | any task with an action |

The end of a connection ends the first three tasks. The engine continues, and its reports are kept until the hub
confirms them. The worker reconnects after increasing delays. A restarted hub has another incarnation, and leases of the
old incarnation are discarded.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from typing import Any

import aiohttp

from baton.clock import in_thread, retry_wait_s
from baton.console import say
from baton.errors import DeadlineExceeded, EngineFault, UserError, fault_of
from baton.policy.load import device_type, dtype_here
from baton.rollout.engine import Engine, EngineStats
from baton.swarm import messages
from baton.swarm.transfer import HttpSource, fetch_model, unpack_model
from baton.swarm.verification.verify import WorkerClass
from baton.swarm.worker.engine_driver import EngineDriver, EngineThread
from baton.swarm.worker.hub_connection import LOST, ConnectionLost, HubConnection
from baton.swarm.worker.outbox import Outbox
from baton.swarm.worker.weights_updater import WeightsUpdater
from baton.types import Abort, Lease, PolicyVersion, Report
from baton.types import FromWorker as FromEngine
from baton.weights.sources import StoreSource
from baton.weights.store import Store

CONNECT_DEADLINE_S = 30.0
LONGEST_WAIT_S = 30.0
"""Maximum seconds between two attempts to connect."""
GOODBYE_S = 10.0
"""Maximum seconds for a leaving worker to report its tokens, and again for its engine to close."""

MakeEngine = Callable[[messages.Welcome, Path, Mapping[str, Any] | None], Engine]
"""Function of (welcome, directory with the model's configuration and tokenizer, tensors of an adapter's base model)
that builds the engine."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The address of the hub and the options of the worker."""

    url: str
    token: str
    ssl: SSLContext | aiohttp.Fingerprint | None = None
    """Verification of the hub's certificate: by an authority, or against one fingerprint."""
    slots: int | None = None
    """Number of slots; None uses the recipe's engine.slots."""
    store: str | None = None
    """The run's weights.store (a directory or a bucket), if this machine can read it directly."""
    device: str = "cpu"
    """Name of the device, shown to users and part of the class within which logprobs are compared."""
    engine: str | None = None
    """Kind of engine, also part of the class; None uses the recipe's."""
    reconnect_timeout_s: float | None = None
    """Seconds without a hub after which the worker ends with DeadlineExceeded; None for no limit."""
    say: Callable[[str], None] = say


class SwarmWorker:
    """A worker process."""

    def __init__(self, options: WorkerOptions, make_engine: MakeEngine) -> None:
        self._options, self._make_engine = options, make_engine
        self.key = ""
        """Key that the hub has issued; kept in memory until the process ends."""
        self._outbox = Outbox()
        self._stats = EngineStats()
        self._welcome: messages.Welcome | None = None
        self._connection: HubConnection | None = None
        self._fault: Exception | None = None
        self._was_served = False
        """True if the last connection reached Hello."""
        self._is_leaving = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._engine: EngineThread | None = None

    async def run(self) -> None:
        """Serve the hub until `leave` is called or the hub refuses this worker (UserError).

        Raises EngineFault if the engine has failed, and DeadlineExceeded if no hub is reachable for too long.
        """
        self._loop, self._running = asyncio.get_running_loop(), asyncio.current_task()
        tls = self._options.ssl or True
        # a connection from before an outage may be dead: chunks of one transfer share a connection, later chunks do
        # not
        kept = aiohttp.TCPConnector(ssl=tls, keepalive_timeout=2.0)
        once = aiohttp.TCPConnector(ssl=tls, force_close=True)
        failures, last_served_s = 0, self._loop.time()
        async with (
            aiohttp.ClientSession(connector=kept) as self._http,
            aiohttp.ClientSession(connector=once) as self._websockets,
        ):
            near = [StoreSource(Store(self._options.store))] if self._options.store else []
            self._updater = WeightsUpdater(self._source, near, self._activate, self._options.say)
            try:
                while not self._is_leaving.is_set():
                    self._was_served = False
                    try:
                        await self._serve()
                    except LOST as error:
                        self._check_engine()
                        if self._is_leaving.is_set():
                            return
                        if self._was_served:
                            failures, last_served_s = 0, self._loop.time()
                        self._check_reconnect_timeout(self._loop.time() - last_served_s)
                        failures += 1
                        waiting_s = retry_wait_s(failures, first_s=0.5, longest_s=LONGEST_WAIT_S)
                        waiting_s *= random.uniform(0.5, 1.0)
                        cause = str(error) or type(error).__name__
                        self._options.say(
                            f"no connection to {self._options.url} ({cause}); next attempt in {waiting_s:.1f} s"
                        )
                        with suppress(TimeoutError):
                            async with asyncio.timeout(waiting_s):
                                await self._is_leaving.wait()
            except asyncio.CancelledError:
                if not self._is_leaving.is_set():
                    raise
            finally:
                if self._engine is not None:
                    with suppress(DeadlineExceeded):
                        await in_thread(self._engine.close, GOODBYE_S, timeout_s=3 * GOODBYE_S, who="the engine")

    def _check_reconnect_timeout(self, silent_s: float) -> None:
        timeout_s = self._options.reconnect_timeout_s
        if timeout_s is not None and silent_s >= timeout_s:
            raise DeadlineExceeded(f"no hub has answered at {self._options.url} for {silent_s:.0f} s; the worker ends")

    def leave(self) -> None:
        """Report the tokens of all leases, discard the leases, and end within `GOODBYE_S`. Called from the event
        loop."""
        if self._running is not None and not self._is_leaving.is_set():
            self._loop.call_later(GOODBYE_S if self._connection is not None else 0.0, self._running.cancel)
        self._is_leaving.set()

    # ---- one connection ----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._check_engine()
        headers = {"Authorization": f"Bearer {self._options.token}"}
        url = self._options.url + "/worker"
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                socket = await self._websockets.ws_connect(
                    url, headers=headers, max_msg_size=8 * messages.MAX_FRAME_BYTES
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403) and self._welcome is None:
                raise UserError(
                    f"the hub at {self._options.url} refuses this token ({error.status}): ask its owner for a new one "
                    "(baton token create --role worker)"
                ) from error
            raise
        async with socket:
            connection = HubConnection(socket)
            welcome = await connection.receive(CONNECT_DEADLINE_S)
            if isinstance(welcome, messages.Rejected):
                self._rejected(welcome)
            if not isinstance(welcome, messages.Welcome):
                raise ConnectionLost("the first message of the hub is not Welcome")
            messages.check_protocol(welcome)
            tasks: list[asyncio.Task[Any]] = [
                asyncio.create_task(connection.send_all()),
                asyncio.create_task(self._beat(connection, welcome.heartbeat_s)),
            ]
            self._connection = connection
            tasks.append(asyncio.create_task(self._listen(connection, welcome)))
            leaving: asyncio.Task[Any] = asyncio.create_task(self._is_leaving.wait())
            try:
                await asyncio.wait([*tasks, leaving], return_when=asyncio.FIRST_COMPLETED)
                if self._is_leaving.is_set():
                    await self._leave_hub(connection)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                self._connection = None
                for task in (*tasks, leaving):
                    task.cancel()
                await asyncio.gather(*tasks, leaving, return_exceptions=True)

    def _check_engine(self) -> None:
        """Raise the error that ended the engine, if any; a new connection could not succeed."""
        if self._fault is not None:
            raise EngineFault(f"the engine has failed: {type(self._fault).__name__}: {self._fault}") from self._fault

    async def _listen(self, connection: HubConnection, welcome: messages.Welcome) -> None:
        await self._prepare(welcome)
        slots = self._options.slots or welcome.engine_settings().slots
        connection.send(self._hello(welcome, slots))
        connection.is_open = self._was_served = True
        for report in self._outbox.again():
            connection.send(report)
        while True:
            self._on_hub_message(await connection.receive(welcome.heartbeat_s * messages.SILENT_HEARTBEATS))

    def _hello(self, welcome: messages.Welcome, slots: int) -> messages.Hello:
        settings = welcome.engine_settings()
        dtype = dtype_here(device_type(self._options.device), settings.dtype)
        kind = WorkerClass(self._options.device, dtype, self._options.engine or settings.kind)
        have, leases = self._updater.have, self._outbox.leases
        return messages.Hello(self.key, kind, welcome.model_digest, slots, have, leases)

    async def _beat(self, connection: HubConnection, every_s: float) -> None:
        while True:
            connection.send(self._heartbeat())
            await asyncio.sleep(every_s)

    def _heartbeat(self) -> messages.Heartbeat:
        now = self._updater
        return messages.Heartbeat(now.have, self._stats, now.fetching, now.fetched_bytes, now.fault[:1000])

    async def _leave_hub(self, connection: HubConnection) -> None:
        """Report all tokens, discard all leases, and send everything queued."""
        engine = self._engine
        if engine is not None and engine.driver is not None:
            driver = engine.driver

            def report_and_drop() -> None:
                engine.report(driver.flush())
                driver.drop_all()

            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await self._done_by(engine, report_and_drop)
        connection.send(messages.Leaving())
        await connection.drain()

    # ---- messages from the hub ---------------------------------------------------------------------------------------

    def _source(self, relay: str | None) -> HttpSource:
        """Return the source for a relay's URL, or the hub's source for None."""
        if relay is None:
            return HttpSource(self._http, self._loop, self._options.url, self._options.token)
        secret = "" if self._welcome is None else self._welcome.relay_secret
        return HttpSource(self._http, self._loop, relay, secret, distance=0)

    def _on_hub_message(self, message: messages.FromHub) -> None:
        match message:
            case Lease():
                self._outbox.open(message.lease_id)
                self._act_on_engine(lambda driver: driver.lease(message))
            case Abort(lease_id=lease_id):
                self._act_on_engine(lambda driver: driver.abort(lease_id))
            case messages.Dropped(lease_id=lease_id):
                self._outbox.close(lease_id)
                self._act_on_engine(lambda driver: driver.drop(lease_id))
            case messages.Ack(lease_id=lease_id, length=length, has_ended=has_ended):
                self._outbox.confirm(lease_id, length, has_ended=has_ended)
            case messages.Want():
                self._updater.want(message)
            case messages.Admitted(key=key):
                self.key = key
            case messages.HeartbeatAck():
                pass
            case messages.Rejected():
                self._rejected(message)
            case messages.RunOver():
                self._options.say("the run is complete")
                self.leave()
            case messages.Welcome():
                raise ConnectionLost("the hub sent Welcome twice")

    def _rejected(self, message: messages.Rejected) -> None:
        if message.is_final:
            raise UserError(f"the hub refuses this worker: {message.reason}")
        raise ConnectionLost(message.reason)

    async def _prepare(self, welcome: messages.Welcome) -> None:
        """Build the engine that the hub describes, unless it exists. Discard the leases of another incarnation of the
        hub."""
        known, self._welcome = self._welcome, welcome
        if known is not None and known.incarnation != welcome.incarnation:
            await self._drop_all()
        if known is not None and (known.model_digest, known.engine) != (welcome.model_digest, welcome.engine):
            raise UserError(
                "the hub now serves another model or engine than this worker was built for: restart the worker"
            )
        if self._engine is not None:
            return
        packed = await fetch_model(self._http, self._options.url, self._options.token, welcome.model_digest)
        base = None
        if welcome.base is not None:
            self._options.say("fetching the base model")
            base = await self._updater.fetch_base(welcome.base)
        engine = EngineThread(self._on_reports, self._on_fault, welcome.report_every_s)

        def build() -> None:
            with tempfile.TemporaryDirectory(prefix="baton-model-") as directory:
                unpack_model(packed, Path(directory))
                engine.driver = EngineDriver(self._make_engine(welcome, Path(directory), base), welcome.on_new_version)

        self._engine = engine
        await self._done_by(engine, build)
        self._check_engine()
        self._options.say(f"ready: {welcome.run}")

    async def _drop_all(self) -> None:
        """Discard all leases without a report: leases of another incarnation may have the same ids."""
        engine = self._engine
        if engine is not None:
            await self._done_by(engine, lambda: None if engine.driver is None else engine.driver.drop_all())
        self._outbox.clear()

    async def _done_by(self, engine: EngineThread, action: Callable[[], None]) -> None:
        """Run an action in the engine's thread. Wait until it is done or the engine has failed."""
        done = asyncio.Event()

        def act() -> None:
            action()
            self._loop.call_soon_threadsafe(done.set)

        engine.do(act)
        while not done.is_set() and self._fault is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await done.wait()

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _act_on_engine(self, action: Callable[[EngineDriver], None]) -> None:
        engine = self._engine
        if engine is not None:

            def act() -> None:
                assert engine.driver is not None, "the engine is used before it is built"
                action(engine.driver)

            engine.do(act)

    def _on_reports(self, reports: list[FromEngine], stats: EngineStats) -> None:
        """Pass reports to the event loop. Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._take_reports, reports, stats)

    def _on_fault(self, error: Exception) -> None:
        """Pass the engine's error to the event loop. Called in the engine's thread, which then ends."""
        self._loop.call_soon_threadsafe(self._take_fault, error)

    def _take_reports(self, reports: list[FromEngine], stats: EngineStats) -> None:
        self._stats = stats
        for report in reports:
            if isinstance(report, Report):
                self._outbox.add(report)
            else:
                self._outbox.close(report.lease_id)
            self._send_message(report)

    def _take_fault(self, error: Exception) -> None:
        self._fault = error
        if self._connection is not None:
            self._connection.send(fault_of(error))

    def _send_message(self, message: messages.FromWorker) -> None:
        if self._connection is not None and self._connection.is_open:
            self._connection.send(message)

    def _activate(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        engine = self._engine
        assert engine is not None, "a version is activated before the engine exists"

        def act() -> None:
            assert engine.driver is not None, "a version is activated before the engine is built"
            engine.report(engine.driver.switch(tensors, version))
            self._loop.call_soon_threadsafe(self._activated, version)

        engine.do(act)

    def _activated(self, version: PolicyVersion) -> None:
        self._updater.activated(version)
        self._send_message(self._heartbeat())
