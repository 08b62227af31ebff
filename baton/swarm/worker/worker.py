"""A worker: one engine, and one connection to the hub that the worker opens.

| task / thread | consumes             | produces               | waits for            | unblocked by           |
|---------------|----------------------|------------------------|----------------------|------------------------|
| reader        | the WebSocket        | actions for the engine | the hub              | a message, its timeout |
| sender        | the queue to the hub | frames                 | the socket           | its deadline           |
| heartbeat     | the clock            | Heartbeat              | the next heartbeat   | the clock              |
| fetch thread  | manifests, chunks    | a verified version     | the sources          | its deadline           |
| engine thread | leases, versions     | reports                | an action, when idle | any task with an action |

The end of a connection ends the first three tasks; the engine continues. `WorkerSession` makes the decisions, and this
module executes its commands.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from typing import Any

import aiohttp

from baton.clock import in_thread
from baton.console import say
from baton.errors import DeadlineExceeded, EngineFault, UserError, fault_of
from baton.policy.load import device_type, dtype_here
from baton.rollout.engine import Engine, EngineStats
from baton.swarm import messages
from baton.swarm import version_sync as vs
from baton.swarm.auth import INVALID_TOKEN
from baton.swarm.transfer import HttpSource, fetch_model, unpack_model
from baton.swarm.verification.verify import WorkerClass
from baton.swarm.worker.engine_driver import EngineDriver, EngineThread
from baton.swarm.worker.hub_connection import LOST, HubConnection
from baton.swarm.worker.session import CONNECT_DEADLINE_S, Command, Prepare, WorkerSession
from baton.swarm.worker.weights_updater import WeightsUpdater
from baton.types import Abort, Lease, PolicyVersion
from baton.types import FromWorker as FromEngine
from baton.weights.store import Store

GOODBYE_S = 10.0
"""Maximum seconds for a leaving worker to report its tokens; its engine then has the same time to close."""

MakeEngine = Callable[[messages.Welcome, Path, Mapping[str, Any] | None], Engine]
"""Function that returns a new engine. Its arguments are the hub's Welcome, the directory with the model's configuration
and tokenizer, and the tensors of the base model if versions are adapters, otherwise None."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker, including the address of the hub."""

    url: str
    token: str
    ssl: SSLContext | aiohttp.Fingerprint | None = None
    """Determines how the hub's certificate is verified: by a certificate authority (SSLContext), or by its
    fingerprint."""
    slots: int | None = None
    """Number of slots; None uses the recipe's key `engine.slots`."""
    store: str | None = None
    """The run's `weights.store` (a directory or a bucket) if this machine can read it directly, otherwise None."""
    device: str = "cpu"
    """Name of the device, which is shown to users and is part of the worker class (`WorkerClass.device`)."""
    engine: str | None = None
    """Kind of engine, which is also part of the worker class; None uses the recipe's key `engine.kind`."""
    reconnect_timeout_s: float | None = None
    """If no hub serves the worker for this number of seconds, it ends with DeadlineExceeded. None: no limit."""
    say: Callable[[str], None] = say


class SwarmWorker:
    """A worker process."""

    def __init__(self, options: WorkerOptions, make_engine: MakeEngine) -> None:
        self._options, self._make_engine = options, make_engine
        self.session = WorkerSession(
            url=options.url, reconnect_timeout_s=options.reconnect_timeout_s, jitter=lambda: random.uniform(0.5, 1.0)
        )
        self._connection: HubConnection | None = None
        self._fault: Exception | None = None
        self._is_leaving = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._cancellation: asyncio.TimerHandle | None = None
        """Timer that cancels `run` at most `GOODBYE_S` seconds after `leave`; None before `leave`."""
        self._engine: EngineThread | None = None
        self._is_awake = asyncio.Event()
        """Cleared while the engine must not use its device (`use_device`)."""
        self._is_awake.set()

    async def run(self) -> None:
        """Generate trajectories for the hub until `leave` is called, the run is complete or the hub refuses this worker
        (UserError). Raises EngineFault if the engine fails, and DeadlineExceeded if no hub is reachable for too
        long."""
        self._loop, self._running = asyncio.get_running_loop(), asyncio.current_task()
        tls = self._options.ssl or True
        # an outage may break an idle connection, so a connection is reused only for the next chunk of the same transfer
        kept = aiohttp.TCPConnector(ssl=tls, keepalive_timeout=2.0)
        once = aiohttp.TCPConnector(ssl=tls, force_close=True)
        self.session.served_s = self._loop.time()
        async with (
            aiohttp.ClientSession(connector=kept) as self._http,
            aiohttp.ClientSession(connector=once) as self._websockets,
        ):
            near = [Store(self._options.store)] if self._options.store else []
            self._updater = WeightsUpdater(self._source, near, self._on_weights, self._options.say)
            try:
                while not self._is_leaving.is_set():
                    try:
                        await self._serve()
                    except LOST as error:
                        self._check_engine()
                        if self._is_leaving.is_set():
                            return
                        waiting_s = self.session.lost(self._loop.time())
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
                if self._cancellation is not None:
                    self._cancellation.cancel()
                await self._updater.close()
                if self._engine is not None:
                    with suppress(DeadlineExceeded):
                        await in_thread(self._engine.close, GOODBYE_S, timeout_s=3 * GOODBYE_S, who="the engine")

    def leave(self) -> None:
        """Report and discard all leases, and end the connection within `GOODBYE_S`. Called in the event loop."""
        if self._running is not None and not self._is_leaving.is_set():
            wait_s = GOODBYE_S if self._connection is not None else 0.0
            self._cancellation = self._loop.call_later(wait_s, self._running.cancel)
        self._is_leaving.set()

    async def use_device(self, is_awake: bool | None) -> int:
        """False: free the engine's device memory; True: allocate the memory again; None: change nothing. Return the
        bytes of device memory that the engine then uses. A worker that has slept serves no version before the next
        announcement. Called in the event loop, at the request of the run that has started this worker. The engine must
        have no valid leases. Raises EngineFault."""
        if is_awake is not None:
            (self._is_awake.set if is_awake else self._is_awake.clear)()
            self._on_weights(vs.SleepChanged(self._loop.time(), not is_awake))
        if self._engine is None:  # `_prepare` builds the engine only while the worker is awake
            return 0
        held = [0]
        await self._done_by(self._engine, lambda driver: held.append(driver.use_device(is_awake)))
        self._check_engine()
        return held[-1]

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
            # without this header, the token is not refused: the hub cannot read its token file at the moment
            is_invalid = error.headers is not None and error.headers.get("WWW-Authenticate") == INVALID_TOKEN
            if error.status == 403 or (error.status == 401 and (is_invalid or self.session.welcome is None)):
                raise UserError(
                    f"the hub at {self._options.url} refuses this token ({error.status}): ask its owner for a new one "
                    "(baton token create --role worker)"
                ) from error
            raise
        async with socket:
            connection = HubConnection(socket)
            commands = await self._receive(connection)
            self._connection = connection
            loops = (connection.send_all(), self._beat(connection), self._listen(connection, commands))
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(each) for each in loops]
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
        """If an error has ended the engine, raise this error, because a new connection could not succeed."""
        if self._fault is not None:
            raise EngineFault(f"the engine has failed: {type(self._fault).__name__}: {self._fault}") from self._fault

    async def _receive(self, connection: HubConnection) -> Sequence[Command]:
        message = await connection.receive(self.session.silence_s)
        return self.session.receive(message, self._loop.time())

    async def _listen(self, connection: HubConnection, commands: Sequence[Command]) -> None:
        while True:
            for command in commands:
                if isinstance(command, Prepare):
                    await self._prepare(command)
                    self._run_commands(self.session.ready(*self._worker_class(command.welcome)))
                else:
                    self._run_commands((command,))
            commands = await self._receive(connection)

    def _worker_class(self, welcome: messages.Welcome) -> tuple[WorkerClass, int]:
        settings, options = welcome.engine_settings(), self._options
        dtype = dtype_here(device_type(options.device), settings.dtype)
        return WorkerClass(options.device, dtype, options.engine or settings.kind), options.slots or settings.slots

    async def _beat(self, connection: HubConnection) -> None:
        assert self.session.welcome is not None, "heartbeats begin before Welcome"
        while True:
            await asyncio.sleep(self.session.welcome.heartbeat_s)
            connection.send(self.session.heartbeat())

    async def _leave_hub(self, connection: HubConnection) -> None:
        """Report all tokens, discard all leases, and send everything queued."""
        if self._engine is None or not self.session.is_ready:
            return  # the hub accepts no Leaving before Hello

        def report_and_drop(driver: EngineDriver) -> None:
            self._pass_reports(driver.flush(), driver.stats)
            driver.drop_all()

        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._done_by(self._engine, report_and_drop)
        connection.send(messages.Leaving())
        await connection.drain()

    # ---- commands of the session -------------------------------------------------------------------------------------

    def _source(self, relay: str | None) -> HttpSource:
        """Return the source of the weights at a relay's URL or, for None, at the hub."""
        if relay is None:
            return HttpSource(self._http, self._loop, self._options.url, self._options.token)
        welcome = self.session.welcome
        secret = "" if welcome is None else welcome.relay_secret
        return HttpSource(self._http, self._loop, relay, secret, distance=0)

    def _run_commands(self, commands: Sequence[Command]) -> None:
        """Execute commands of the session, except `Prepare`."""
        for command in commands:
            match command:
                case Lease():
                    self._act_on_engine(EngineDriver.lease, command)
                case Abort(lease_id=lease_id):
                    self._act_on_engine(EngineDriver.abort, lease_id)
                case messages.Dropped(lease_id=lease_id):
                    self._act_on_engine(EngineDriver.drop, lease_id)
                case vs.Fetch(version=version):
                    assert self.session.want is not None, "a version is fetched that was not announced"
                    self._updater.fetch(version, self.session.want)
                case vs.Activate(version=version):
                    self._activate(version, self._updater.take(version))
                case vs.SetTimer(at_s=at_s):
                    self._loop.call_at(at_s, self._on_weights, vs.TimerFired(at_s))
                case messages.RunOver():
                    self._options.say("the run is complete")
                    self.leave()
                case Prepare():
                    raise AssertionError("Prepare is executed by _listen")
                case _:
                    if self._connection is not None:
                        self._connection.send(command)

    def _on_weights(self, event: vs.Event) -> None:
        self.session.fetched_bytes = self._updater.fetched_bytes
        self._run_commands(self.session.handle(event))

    async def _prepare(self, prepare: Prepare) -> None:
        welcome = prepare.welcome
        if self._engine is not None:
            if prepare.is_new_hub:
                await self._done_by(self._engine, EngineDriver.drop_all)
            return
        packed = await fetch_model(self._http, self._options.url, self._options.token, welcome.model_digest)
        base = None
        if welcome.base is not None:
            self._options.say("fetching the base model")
            base = await self._updater.fetch_tensors(welcome.base)
        await self._is_awake.wait()

        def make_driver() -> EngineDriver:
            with tempfile.TemporaryDirectory(prefix="baton-model-") as directory:
                unpack_model(packed, Path(directory))
                return EngineDriver(self._make_engine(welcome, Path(directory), base), welcome.on_new_version)

        self._engine = EngineThread(
            make_driver,
            self._pass_reports,
            lambda error: self._loop.call_soon_threadsafe(self._take_fault, error),
            welcome.report_every_s,
        )
        await self._done_by(self._engine, lambda driver: None)
        self._check_engine()
        self._options.say(f"ready: {welcome.run}")

    async def _done_by(self, engine: EngineThread, action: Callable[[EngineDriver], object]) -> None:
        """Run an action in the engine's thread, and wait until the action is done or the engine has failed."""
        done = asyncio.Event()

        def act(driver: EngineDriver) -> None:
            action(driver)
            self._loop.call_soon_threadsafe(done.set)

        engine.do(act)
        while not done.is_set() and self._fault is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await done.wait()

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _act_on_engine(self, action: Callable[..., None], *arguments: object) -> None:
        if self._engine is not None:
            self._engine.do(lambda driver: action(driver, *arguments))

    def _pass_reports(self, reports: list[FromEngine], stats: EngineStats) -> None:
        """Pass reports to the event loop. Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._take_reports, reports, stats)

    def _take_reports(self, reports: list[FromEngine], stats: EngineStats) -> None:
        self.session.stats = stats
        self._run_commands(self.session.reported(reports))

    def _take_fault(self, error: Exception) -> None:
        self._fault = error
        if self._connection is not None:
            self._connection.send(fault_of(error))

    def _activate(self, version: PolicyVersion, tensors: Mapping[str, Any]) -> None:
        assert self._engine is not None, "a version is activated before the engine exists"

        def switch(driver: EngineDriver) -> None:
            self._pass_reports(driver.switch(tensors, version), driver.stats)
            self._loop.call_soon_threadsafe(lambda: self._on_weights(vs.Activated(self._loop.time(), version)))

        self._engine.do(switch)
