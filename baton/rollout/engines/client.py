"""`EngineClient`: sends generation requests to vLLM or an SGLang server, from an event loop in its own thread.

| task / thread     | consumes     | produces                         | waits for          | unblocked by         |
|-------------------|--------------|----------------------------------|--------------------|----------------------|
| caller's thread   | the inbox    | requests, calls                  | tokens, a response | the loop, a deadline |
| loop: per request | its stream   | `GeneratedTokens`, `RequestLost` | the program        | tokens, cancel, exit |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from numpy.typing import NDArray

from baton.errors import BatonError, DeadlineExceeded, EngineFault, first_line
from baton.types import SamplingParams

T = TypeVar("T")
START_TIMEOUT_S = 1800.0
"""Maximum seconds until a program that has just started responds. It may compile the model in this time."""
_HEARTBEAT_S = 0.5
"""Seconds between two checks, during a call, that the program is still running."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to generate the tokens of one lease."""

    key: str
    token_ids: tuple[int, ...]
    """[prompt + L] Token ids of the prompt and of the L tokens after the prompt."""
    max_tokens: int
    sampling: SamplingParams
    """Sampling parameters of the lease. The limit and the stop ids in this object are not used: `max_tokens` and
    `stop_token_ids` of the request replace them."""
    stop_token_ids: tuple[int, ...]
    seed: int
    cache_salt: str
    """Salt of the prefix cache's keys. Only requests with equal salts share cached prefixes."""


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """New tokens of a request, in the order of generation."""

    key: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Behavior logprobs of these tokens, at the sampling temperature."""
    finish: str | None
    """Finish reason that the engine's program gave; None if the request has not ended."""
    prefilled: int
    """Number of prompt tokens that the program prefilled; 0 in all messages of a request except the first."""
    weights: str | None = None
    """Label of the weights that generated the tokens; None if the program does not report the label."""
    by_weights: Mapping[str, int] | None = None
    """Label of weights → number of the request's tokens that these weights generated. None before the last message of a
    request, or if the program does not report the numbers."""
    masks: Sequence[Sequence[int]] | None = None
    """For each new token: ascending ids that top-k and top-p kept. None if the program does not report masks."""
    experts: NDArray[Any] | None = None
    """[T, layers, experts per token] Ids of the experts that computed the logits of the request's T tokens. None before
    the last message of a request, or if the program does not report experts."""
    routing: Sequence[bytes] | None = None
    """`Segment.routing` of the tokens; None if the program does not report experts."""


@dataclass(frozen=True, slots=True)
class RequestLost:
    """Message that the program failed to process a request."""

    key: str
    error: str


class EngineClient(ABC):
    """Base class of clients: sends requests from an event loop in a thread. One thread calls all public methods."""

    def __init__(self, name: str, *, answer_timeout_s: float, close_s: float) -> None:
        """Start the thread of the event loop. `name`: name of the program in messages. `answer_timeout_s`: timeout of
        each call. `close_s`: `close` waits at most this number of seconds for `_stop`, and again at most this number of
        seconds for the thread."""
        self.name = name
        self._answer_timeout_s, self._close_s = answer_timeout_s, close_s
        self._inbox: SimpleQueue[GeneratedTokens | RequestLost] = SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Request key → task that reads the request's stream. Only the loop's thread accesses this dict."""
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run_loop, name="engine client", daemon=True)
        self._thread.start()

    def begin(self, requests: Sequence[EngineRequest]) -> None:
        """Start requests. Later calls to `take` return the generated tokens."""
        self._loop.call_soon_threadsafe(self._submit_requests, list(requests))

    @abstractmethod
    def end(self, keys: Sequence[str]) -> None:
        """Abort requests. `take` may still return some tokens of these requests."""

    def take(self, timeout_s: float) -> list[GeneratedTokens | RequestLost]:
        """Return the received messages. Wait at most `timeout_s` for the first one; if none arrives, call `check`."""
        found: list[GeneratedTokens | RequestLost] = []
        with contextlib.suppress(Empty):
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        if not found:
            self.check()
        return found

    def flush(self) -> bool:
        """Receive the tokens that the program has generated but not sent; the next `take` returns them. Return False if
        the program sends each token immediately."""
        return False

    @abstractmethod
    def pause(self) -> None:
        """Pause or abort all requests. Until `resume`, the program generates no tokens. The next `take` returns all
        tokens that were generated before the pause."""

    @abstractmethod
    def resume(self) -> None:
        """Resume the paused requests."""

    def check(self) -> None:  # noqa: B027  # not abstract: when a server exits, its streams fail
        """Raise EngineFault if the program has exited."""

    def close(self) -> None:
        """Abort all requests, and stop and close the event loop. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(self._close_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._close_s)

    # ---- in the loop's thread ----------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    @abstractmethod
    async def _stop(self) -> None: ...

    @abstractmethod
    async def _generate(self, request: EngineRequest) -> None:
        """Send a request, and put the generated tokens into the inbox."""

    def _submit_requests(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self._tasks[request.key] = self._loop.create_task(self._run_request(request))

    async def _run_request(self, request: EngineRequest) -> None:
        try:
            await self._generate(request)
        except Exception as error:  # noqa: BLE001  # any failure must reach the caller's thread
            self._inbox.put(RequestLost(request.key, f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.pop(request.key, None)

    # ---- in the caller's thread --------------------------------------------------------------------------------------

    def _start_with(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        try:
            self._call(work, timeout_s, "to start")
        except BaseException:
            self.close()
            raise

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Run a coroutine in the event loop and return its result. `what`: continues the message "… failed", such as
        "to start". Raises DeadlineExceeded after `timeout_s`, and EngineFault if the coroutine fails or the program
        exits."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return future.result(_HEARTBEAT_S)
                except TimeoutError as error:
                    if future.done():
                        if future.cancelled() or not isinstance(future.exception(), TimeoutError):
                            continue  # the call has ended after the wait
                        raise EngineFault(f"{self.name} failed {what}: a timeout within the call") from error
                    self.check()
                    if time.monotonic() > deadline_s:
                        raise DeadlineExceeded(f"{self.name} failed {what} within {timeout_s:.0f} s") from error
                except BatonError:
                    raise
                except Exception as error:
                    self.check()
                    said = f"{type(error).__name__}: {first_line(error)}"
                    raise EngineFault(f"{self.name} failed {what}: {said}") from error
        finally:
            future.cancel()  # has no effect on a call that has ended
