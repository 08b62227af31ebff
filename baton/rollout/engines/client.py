"""`EngineClient`: sends requests to another program's engine from an event loop in its own thread.

| task / thread     | consumes     | produces                         | waits for          | unblocked by         |
|-------------------|--------------|----------------------------------|--------------------|----------------------|
| caller's thread   | the inbox    | requests, calls                  | tokens, a response | the loop, a deadline |
| loop: one per row | row's stream | `GeneratedTokens`, `RequestLost` | the program        | tokens, cancel, exit |
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

from baton.errors import BatonError, DeadlineExceeded, EngineFault, first_line

T = TypeVar("T")
_HEARTBEAT_S = 0.5
"""Interval during a call at which the program is checked to be alive."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to generate tokens for one row."""

    key: str
    """Unique id of the request."""
    token_ids: tuple[int, ...]
    """[prompt + L] all ids so far."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]
    seed: int
    cache_salt: str
    """The prefix cache is shared only by requests with the same salt."""


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """New tokens of a request, in order of generation."""

    key: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Behavior logprobs of these tokens, at the sampling temperature."""
    finish: str | None
    """The program's finish reason; None before the end."""
    prefilled: int
    """Prompt tokens computed for the request; not zero only with its first tokens."""
    weights: str | None = None
    """Label of the weights that the program held; None where it does not report one."""
    by_weights: Mapping[str, int] | None = None
    """At the end: the program's own count of tokens by the label of their weights; None where it reports none."""


@dataclass(frozen=True, slots=True)
class RequestLost:
    """A request that failed in the program."""

    key: str
    error: str


class EngineClient(ABC):
    """Base of clients: the event loop's thread and its requests. All public methods are called from one thread."""

    def __init__(self, name: str, *, answer_timeout_s: float, close_s: float) -> None:
        """Start the loop's thread.

        name: of the program, for messages. answer_timeout_s: deadline of calls. close_s: longest wait for `_stop`, and
        then for the thread.
        """
        self.name = name
        self._answer_timeout_s, self._close_s = answer_timeout_s, close_s
        self._inbox: SimpleQueue[GeneratedTokens | RequestLost] = SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Accessed only in the loop's thread."""
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="engine client", daemon=True)
        self._thread.start()

    def begin(self, requests: Sequence[EngineRequest]) -> None:
        """Start requests; `take` returns their tokens."""
        self._loop.call_soon_threadsafe(self._submit_requests, list(requests))

    @abstractmethod
    def end(self, keys: Sequence[str]) -> None:
        """Abort requests. `take` may still return tokens of them."""

    def take(self, timeout_s: float) -> list[GeneratedTokens | RequestLost]:
        """Return what has arrived, waiting at most `timeout_s` for the first. Raises what `check` does."""
        found: list[GeneratedTokens | RequestLost] = []
        with contextlib.suppress(Empty):
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        if not found:
            self.check()
        return found

    def check(self) -> None:  # noqa: B027  # not abstract: a server's death shows in its streams
        """Raise EngineFault when the program is known to be dead."""

    def close(self) -> None:
        """Abort all requests and end the loop. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(self._close_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._close_s)

    # ---- in the loop's thread ----------------------------------------------------------------------------------------

    @abstractmethod
    async def _stop(self) -> None: ...

    @abstractmethod
    async def _generate(self, request: EngineRequest) -> None: ...

    def _submit_requests(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self._tasks[request.key] = self._loop.create_task(self._generate(request))

    # ---- in the caller's thread --------------------------------------------------------------------------------------

    def _start_with(self, work: Coroutine[Any, Any, None], timeout_s: float, what: str) -> None:
        """Run the first call; close if it fails."""
        try:
            self._call(work, timeout_s, what)
        except BaseException:
            self.close()
            raise

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Run a coroutine in the loop. Raises DeadlineExceeded, and EngineFault when it fails or the program dies."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(_HEARTBEAT_S)
            except TimeoutError as error:
                if future.done():
                    raise EngineFault(f"{self.name} was asked {what} and ran out of its own time") from error
                self.check()
                if time.monotonic() > deadline_s:
                    future.cancel()
                    raise DeadlineExceeded(f"{self.name} was asked {what} and did not in {timeout_s:.0f} s") from error
            except BatonError:
                raise
            except Exception as error:
                self.check()
                said = f"{type(error).__name__}: {first_line(error)}"
                raise EngineFault(f"{self.name} was asked {what}: {said}") from error
