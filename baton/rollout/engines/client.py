"""Asks another program to generate, from one thread: an event loop in a thread of its own carries the requests.

| task / thread      | consumes           | produces        | waits for          | unblocked by            |
|--------------------|--------------------|-----------------|--------------------|-------------------------|
| caller's thread    | the inbox          | requests, calls | tokens, an answer  | the loop, its deadline  |
| loop: one per row  | the row's stream   | `GeneratedTokens`, `RequestLost` | the program        | tokens, cancel,
death   |
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
"""Between two checks that the program lives, during a call."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One row to be grown."""

    key: str
    """Never used twice."""
    token_ids: tuple[int, ...]
    """[prompt + L] all ids so far."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]
    seed: int
    cache_salt: str
    """Prefixes are shared by requests of one salt only."""


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """New tokens of a request, in order."""

    key: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of these tokens, at the sampling temperature."""
    finish: str | None
    """The program's reason to end, where this is the end."""
    prefilled: int
    """Prompt tokens that were computed for it, reported with its first tokens."""
    weights: str | None = None
    """The label of the weights that the program held."""
    by_weights: Mapping[str, int] | None = None
    """At the end: the program's own count of tokens by the label of their weights."""


@dataclass(frozen=True, slots=True)
class RequestLost:
    """A request that the program gave up."""

    key: str
    error: str


class EngineClient(ABC):
    """The thread, its loop, and the requests in it. Used from one thread."""

    def __init__(self, name: str, *, answer_timeout_s: float, close_s: float) -> None:
        """name: of the program, for messages. close_s: for `_stop`, and for the thread to end."""
        self.name = name
        self._answer_timeout_s, self._close_s = answer_timeout_s, close_s
        self._inbox: SimpleQueue[GeneratedTokens | RequestLost] = SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """In the loop's thread."""
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="engine client", daemon=True)
        self._thread.start()

    def begin(self, requests: Sequence[EngineRequest]) -> None:
        """Have rows grown; their tokens come by `take`."""
        self._loop.call_soon_threadsafe(self._begin, list(requests))

    @abstractmethod
    def end(self, keys: Sequence[str]) -> None:
        """Have the program let go of requests. What it has sent of them may still come by `take`."""

    def take(self, timeout_s: float) -> list[GeneratedTokens | RequestLost]:
        """Return what has come in, waiting at most `timeout_s` for the first. Raises what `check` does."""
        found: list[GeneratedTokens | RequestLost] = []
        with contextlib.suppress(Empty):
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        if not found:
            self.check()
        return found

    def check(self) -> None:  # noqa: B027  # of a server, its streams say it
        """Raise EngineFault when the program is known to be dead."""

    def close(self) -> None:
        """Let go of all requests, and end the loop. May be called twice."""
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
    async def _grow(self, request: EngineRequest) -> None: ...

    def _begin(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self._tasks[request.key] = self._loop.create_task(self._grow(request))

    # ---- in the caller's thread --------------------------------------------------------------------------------------

    def _start_with(self, work: Coroutine[Any, Any, None], timeout_s: float, what: str) -> None:
        """Do the first call; close where it fails."""
        try:
            self._call(work, timeout_s, what)
        except BaseException:
            self.close()
            raise

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Have something done in the loop. Raises DeadlineExceeded, and EngineFault when the program dies meanwhile."""
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
