"""The thread whose event loop waits for reward scorers while the run generates. The first call starts the thread.

| thread  | consumes              | produces | waits for              | unblocked by                    |
|---------|-----------------------|----------|------------------------|---------------------------------|
| run     | finished trajectories | calls    | rewards, when draining | a reward, or the wait's timeout |
| scoring | calls                 | rewards  | worker processes, HTTP | an answer, or the call deadline |
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_random_exponential

from baton.clock import in_thread
from baton.errors import DeadlineExceeded, EngineFault, UserError
from baton.rewards.chat import ChatFormat
from baton.rewards.functions import RewardFunction, call_sync
from baton.rewards.pool import BusyTime, Launch, MachineGone, WorkerPool
from baton.rewards.remote import call_remote_scorer
from baton.rewards.scorer_protocol import Call, CallFailure, Calls, FunctionSpec, ModelSpecs, Outcomes, ScorerSetup
from baton.rewards.settings import JudgeSettings
from baton.types import FailureCause

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
"""Longest pause before a repeated call, in seconds. Each pause is random. The pause before the first repetition is at
most `FIRST_PAUSE_S`. This maximum doubles with each repetition until it reaches `LONGEST_PAUSE_S`."""
CLOSE_TIMEOUT_S = 60.0

Result = TypeVar("Result")


class ScoringThread:
    """Makes calls of reward scorers in its own thread. Its coroutines must run in this thread's event loop (`run`)."""

    def __init__(
        self,
        setup: ScorerSetup,
        settings: JudgeSettings,
        models: Mapping[str, Sequence[tuple[ModelSpecs, Launch | None]]],
    ) -> None:
        """Start the thread. Worker processes and connections start when a call first needs them. `models`: name of a
        reward part → for each device, the reward model and the function that starts its process; None starts the
        process on this machine."""
        self._settings, self._has_specs = settings, bool(setup.specs)
        self._loop = asyncio.new_event_loop()
        self._pool = WorkerPool(setup, settings)

        def pool_of(spec: ModelSpecs, launch: Launch | None) -> WorkerPool:
            own = ScorerSetup((spec,), setup.sys_path, memory_bytes=0)
            return WorkerPool(own, settings, holds_model=True, launch=launch)

        self._models = {name: [pool_of(*each) for each in placed] for name, placed in models.items()}
        self._busy = {pool: BusyTime(pool.num_slots, self._loop.time) for pool in chain(*self._models.values())}
        self._gone: dict[str, str] = {}
        """Name of a reward part → the latest error about a lost machine of its reward model."""
        self._session: aiohttp.ClientSession | None = None
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scoring", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    async def call_worker(self, spec: int, calls: Calls, deadline_s: float, *, concurrency: int) -> Outcomes:
        """Make a call in a worker process, and repeat the call if the process crashes. `spec`: index in
        `ScorerSetup.specs`. `concurrency`: maximum number of concurrent calls of this scorer in the shared process. 0
        means that the call runs in a process that executes no other call at the same time."""
        call = partial(self._pool.ask, spec, calls, deadline_s, may_share=concurrency > 0)
        return await self._retried(call, {FailureCause.CRASHED}, f"spec {spec}", concurrency)

    async def call_model(self, name: str, calls: Calls, deadline_s: float, *, concurrency: int) -> Outcomes:
        """Call the least busy process of a reward model, and repeat the call if the process crashes or hangs. While a
        process loads the model again, the other processes are called. Raises EngineFault if no machine of the reward
        model is left."""
        pools = self._models[name]

        async def ask() -> Outcomes:
            while pools:
                pool = min(pools, key=lambda each: (not each.is_up, self._busy[each].num_calls))
                self._busy[pool].change(1)
                try:
                    return await pool.ask(0, calls, deadline_s, may_share=True)
                except MachineGone as error:
                    self._gone[name] = str(error)
                    if pool in pools:  # another call may have removed it
                        pools.remove(pool)
                finally:
                    self._busy[pool].change(-1)
            raise EngineFault(f"no process of the reward model of [[reward]] {name!r} is left: {self._gone[name]}")

        causes = {FailureCause.CRASHED, FailureCause.TIMEOUT}
        return await self._retried(ask, causes, f"model {name}", concurrency * len(pools))

    async def call_remote(
        self, url: str, call: Call, deadline_s: float, *, concurrency: int, chat: ChatFormat | None
    ) -> Outcomes:
        """Call a remote scorer, and repeat the call if the scorer cannot be reached."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )  # aiohttp's own limits are off, because `concurrency` and `deadline_s` of each [[reward]] are the limits
        session = self._session

        async def post() -> Outcomes:
            return (await call_remote_scorer(session, url, call, deadline_s, chat),)

        # parts with different templates at one URL have limits of their own
        return await self._retried(post, {FailureCause.UNREACHABLE}, f"{url} {chat}", concurrency)

    async def call_here(
        self, function: RewardFunction, spec: FunctionSpec, calls: Calls, deadline_s: float, *, concurrency: int
    ) -> Outcomes:
        """Call a function in a thread of this process. Raises UserError after the deadline, because a thread cannot be
        killed: the thread keeps running until the process ends."""
        async with self._limits.setdefault(str(spec), asyncio.Semaphore(concurrency)):
            try:
                return await in_thread(call_sync, function, spec.signature, calls, timeout_s=deadline_s, who=str(spec))
            except DeadlineExceeded as error:
                raise UserError(
                    f"{spec} gave no answer within {deadline_s:g} s, and a thread of this process cannot be killed; "
                    "raise its deadline_s (default: judge.deadline_s), or run it in a process that can be killed: with "
                    "an import path such as 'module:name' and isolate = true"
                ) from error

    async def start_workers(self) -> str:
        pools = [self._pool] if self._has_specs else []
        lines = await asyncio.gather(*(pool.start() for pool in [*pools, *chain(*self._models.values())]))
        return lines[0]

    def take_busy_s(self) -> float | None:
        """Return how many seconds reward models scored since the last call of this method, averaged over their
        processes; None without a reward model."""
        found = [busy.take() for busy in self._busy.values()]
        return sum(found) / len(found) if found else None

    def close(self) -> None:
        """Cancel all calls, kill the worker processes and end the thread."""
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_TIMEOUT_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"worker processes of reward scorers did not end within {CLOSE_TIMEOUT_S:.0f} s"
            ) from error
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    async def _tracked(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await work

    async def _close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for pool in (self._pool, *chain(*self._models.values())):
            await pool.close()
        if self._session is not None:
            await self._session.close()

    async def _retried(
        self, call: Callable[[], Awaitable[Outcomes]], causes: Set[FailureCause], key: str, concurrency: int
    ) -> Outcomes:
        """Make a call, and repeat it if it fails with one of `causes`. `concurrency`: maximum number of calls per
        `key`; 0: no limit."""
        limit = self._limits.setdefault(key, asyncio.Semaphore(concurrency)) if concurrency else nullcontext()

        async def attempt() -> Outcomes:
            async with limit:
                return await call()

        def is_worth_a_retry(outcomes: Outcomes) -> bool:
            return any(isinstance(outcome, CallFailure) and outcome.cause in causes for outcome in outcomes)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self._settings.retries),
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            retry=retry_if_result(is_worth_a_retry),
            retry_error_callback=_last_result,
        )
        return await retrying(attempt)


def _last_result(state: RetryCallState) -> Any:
    assert state.outcome is not None
    return state.outcome.result()
