"""Controls the worker processes of a run's reward scorers. `start` starts the first process; further processes start
when they are needed. A process is killed when a call exceeds its deadline.

While a synchronous scorer executes a call, its worker process runs no other call. A hang or crash of the process is
therefore always the fault of the call that it executes. Asynchronous scorers share one worker process. If the shared
process is killed, each unfinished call is repeated in a separate process, which shows which call is at fault. All code
of this file runs in the thread of one event loop.

Pools of libraries lack these properties. In pebble 5.2, the whole pool breaks when an idle worker dies, the cause of a
failed import is lost, and the processes that a killed scorer has started keep running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Protocol

import msgspec

from baton.clock import Clock
from baton.errors import EngineFault, UserError
from baton.rewards import scorer_protocol as protocol
from baton.rewards.isolation import environment
from baton.rewards.scorer_protocol import Calls, Outcomes
from baton.rewards.settings import LOAD_TIMEOUT_S, SERVER_START_S, JudgeSettings
from baton.types import FailureCause

KILL_S = 5.0
"""Seconds in which a supervisor process must kill its scorer before the supervisor is killed too."""
GRACE_S = 1.0
"""Seconds after a call's deadline in which a shared process must report the timeout, before the process is killed."""


class WorkerExited(Exception):
    """A worker process ended before it answered. The error's text is a verb phrase, such as `was killed by SIGKILL`."""


class MachineGone(EngineFault):
    """A process cannot start because its machine has left the cluster. The error's text names process and machine."""


class ScorerProcess(Protocol):
    """A process that executes calls of scorers, on this machine or on another machine."""

    is_alive: bool
    """False after `kill`, and after the process has ended."""

    def set_up(self, setup: protocol.ScorerSetup) -> Awaitable[protocol.ScorerReady]:
        """Send the scorers to load. The awaitable raises WorkerExited if the process ends before it replies."""

    async def ask(self, spec: int, calls: Calls, deadline_s: float, timeout_s: float) -> Outcomes:
        """Make one call. Raises WorkerExited if the process ends, and TimeoutError if no answer arrives within
        `timeout_s`. `deadline_s`: maximum duration of the call, which the process enforces for asynchronous scorers."""

    def kill(self) -> None:
        """Kill the process, without waiting for its end."""

    async def ended(self) -> None:
        """Wait for the end of a killed process."""


Launch = Callable[[], Awaitable[ScorerProcess]]
"""Function that starts a process. Raises UserError if the process cannot start, and MachineGone if its machine is
lost."""


def _unanswered(calls: Calls, error: TimeoutError | WorkerExited, deadline_s: float) -> Outcomes:
    if isinstance(error, WorkerExited):
        return protocol.failed(calls, FailureCause.CRASHED, str(error))
    return protocol.failed(calls, FailureCause.TIMEOUT, f"gave no answer within {deadline_s:g} s and was killed")


class BusyTime:
    """Measures for how long the slots of a process are in use. Its methods may be called in any thread."""

    def __init__(self, num_slots: int, clock: Clock) -> None:
        self._num_slots, self._clock, self._lock = num_slots, clock, threading.Lock()
        self._since_s, self._busy_s = clock(), 0.0
        self.num_calls = 0
        """Number of calls in progress."""

    def change(self, num_calls: int) -> None:
        """Change the number of calls in progress by `num_calls`, which may be negative."""
        with self._lock:
            self._count()
            self.num_calls += num_calls

    def take(self) -> float:
        """Return for how many seconds a slot was in use since the previous `take`, averaged over all slots."""
        with self._lock:
            self._count()
            busy_s, self._busy_s = self._busy_s, 0.0
            return busy_s

    def _count(self) -> None:
        now_s = self._clock()
        self._busy_s += (now_s - self._since_s) * min(1.0, self.num_calls / self._num_slots)
        self._since_s = now_s


class WorkerPool:
    """The worker processes of a run, and the calls that they execute."""

    def __init__(
        self,
        setup: protocol.ScorerSetup,
        settings: JudgeSettings,
        *,
        holds_model: bool = False,
        launch: Launch | None = None,
    ) -> None:
        """`holds_model`: whether the shared process holds a reward model. If so, all calls run in this process, because
        only this process has the model. `launch`: starts a process; the default starts it on this machine."""
        self._setup, self._holds_model = setup, holds_model
        servers = [spec for spec in setup.specs if isinstance(spec, protocol.GenerativeModelSpec)]
        self._load_s = SERVER_START_S + GRACE_S if servers else LOAD_TIMEOUT_S
        self.num_slots = max((spec.concurrency for spec in servers), default=1)
        """Maximum concurrent calls of a process with a reward model; 1 for a classifier, which scores one batch at a
        time."""
        self._is_here = launch is None
        self._launch = launch or (lambda: LocalProcess.launch(settings))
        self._slots = asyncio.Semaphore(settings.workers)
        self._idle: list[ScorerProcess] = []
        self._launches: list[asyncio.Future[ScorerProcess]] = []
        self._shared: asyncio.Task[ScorerProcess] | None = None
        self._unloadable: str | None = None
        self._isolation = ""

    async def ask(self, spec: int, calls: Calls, deadline_s: float, *, may_share: bool) -> Outcomes:
        """Make one call of a scorer. Raises UserError if a worker process cannot load its scorers, and MachineGone if
        its machine is lost. `spec`: index in `ScorerSetup.specs`. `may_share`: whether other calls may run in the same
        process at the same time."""
        if may_share:
            worker = await asyncio.shield(self._shared_worker())
            try:
                return await worker.ask(spec, calls, deadline_s, deadline_s + GRACE_S)
            except (WorkerExited, TimeoutError) as error:
                worker.kill()
                if self._holds_model:
                    self._shared_worker()  # begins to load the model again
                    return _unanswered(calls, error, deadline_s)
        return await self._ask_alone(spec, calls, deadline_s)

    async def start(self) -> str:
        """Start a worker process, which loads its scorers; return a line about the isolation of the process. Raises
        UserError if the process cannot load them."""
        if self._holds_model:
            await asyncio.shield(self._shared_worker())
        else:
            self._idle.append(await self._start_worker_process())
        return self._isolation

    async def close(self) -> None:
        """Kill every worker process and wait until all have ended."""
        self._unloadable = self._unloadable or "the run has closed its worker processes"  # no further process starts
        if not self._is_here:  # the start of a process on another machine may wait for the machine
            for launch in self._launches:
                launch.cancel()
        for worker in await asyncio.gather(*self._launches, return_exceptions=True):
            if not isinstance(worker, BaseException):
                worker.kill()
                await worker.ended()
        if self._shared is not None:
            await asyncio.gather(self._shared, return_exceptions=True)

    async def _ask_alone(self, spec: int, calls: Calls, deadline_s: float) -> Outcomes:
        async with self._slots:
            self._idle = [worker for worker in self._idle if worker.is_alive]
            worker = self._idle.pop() if self._idle else await self._start_worker_process()
            try:
                outcomes = await worker.ask(spec, calls, deadline_s, deadline_s)
            except (WorkerExited, TimeoutError) as error:
                worker.kill()
                return _unanswered(calls, error, deadline_s)
            except asyncio.CancelledError:
                worker.kill()
                raise
            self._idle.append(worker)
            return outcomes

    @property
    def is_up(self) -> bool:
        """Whether the shared process runs and has loaded its scorers."""
        started = self._started()
        return started is not None and started.is_alive

    def _started(self) -> ScorerProcess | None:
        """Return the shared process if it has been started, even if it has ended since."""
        shared = self._shared
        return shared.result() if shared is not None and shared.done() and shared.exception() is None else None

    def _shared_worker(self) -> asyncio.Task[ScorerProcess]:
        started = self._started()
        if self._shared is None or (started is not None and not started.is_alive):
            self._shared = asyncio.create_task(self._start_worker_process(started))
        return self._shared

    async def _start_worker_process(self, after: ScorerProcess | None = None) -> ScorerProcess:
        """Start a process. `after`: a killed process. The new process starts only when the memory of the killed process
        is free."""
        if after is not None:
            await after.ended()
        if self._unloadable:
            raise UserError(self._unloadable)
        launch = asyncio.ensure_future(self._launch())
        running = [one for one in self._launches if not one.done() or (not one.exception() and one.result().is_alive)]
        self._launches = [*running, launch]
        # shielded because asyncio may hang if the start of a process is cancelled; `close` waits for the start
        worker = await asyncio.shield(launch)
        names = ", ".join(map(str, self._setup.specs))
        try:
            ready = await asyncio.wait_for(worker.set_up(self._setup), self._load_s)
            self._unloadable, self._isolation = ready.error, ready.isolation
        except TimeoutError:
            self._unloadable = f"a worker process did not load {names} within {self._load_s:g} s"
        except WorkerExited as lost:
            self._unloadable = f"a worker process that loads {names} {lost}"
        if self._unloadable:
            worker.kill()
            raise UserError(self._unloadable)
        return worker


class LocalProcess:
    """Implements `ScorerProcess` with a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.is_alive = True
        self._waiting: dict[int, asyncio.Future[Outcomes]] = {}
        self._ids = count()
        self._ready: asyncio.Future[protocol.ScorerReady] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def launch(cls, settings: JudgeSettings) -> LocalProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton.rewards.worker",
            *(["--network"] if settings.network else []),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(settings.env, os.environ),
            start_new_session=True,
        )
        return cls(process)

    def set_up(self, setup: protocol.ScorerSetup) -> Awaitable[protocol.ScorerReady]:
        self._send(setup)
        return self._ready

    async def ask(self, spec: int, calls: Calls, deadline_s: float, timeout_s: float) -> Outcomes:
        if not self.is_alive:
            raise WorkerExited("has ended")
        call_id = next(self._ids)
        future: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._send(protocol.ScoreRequest(call_id, spec, calls, deadline_s))
            return await asyncio.wait_for(future, timeout_s)
        finally:
            self._waiting.pop(call_id, None)

    def kill(self) -> None:
        """Send SIGTERM to the supervisor process, which kills the scorer and every process that it started."""
        if not self.is_alive:
            return
        self.is_alive = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)  # asyncio's terminate() may lose the exit code
        asyncio.get_running_loop().call_later(KILL_S, self._kill_supervisor)

    def _kill_supervisor(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> None:
        await self._reader

    def _send(self, message: msgspec.Struct) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(protocol.frame(message))

    async def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        try:
            while True:
                header = await stream.readexactly(protocol.HEADER_BYTES)
                body = await stream.readexactly(int.from_bytes(header, "big"))
                message = msgspec.msgpack.decode(body, type=protocol.FromWorker)
                if isinstance(message, protocol.ScorerReady):
                    self._ready.set_result(message)
                elif (future := self._waiting.get(message.call_id)) and not future.done():
                    future.set_result(message.outcomes)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, UnicodeDecodeError):
            pass
        self.kill()
        code = await self.process.wait()
        number = -code if code < 0 else code - 128  # the supervisor reports signal n as exit code 128 + n
        is_signal = number in signal.valid_signals()
        how = f"was killed by {signal.Signals(number).name}" if is_signal else f"ended with exit code {code}"
        unanswered: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
        for future in unanswered:
            if not future.done():
                future.set_exception(WorkerExited(how))
