"""Times of events, retry delays, the rule for restarts of processes, and calls in daemon threads.

A daemon thread never keeps the process alive, even if its call hangs.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, Final, TypeVar

import msgspec
from tenacity import RetryCallState, Retrying, wait_exponential

from baton.errors import DeadlineExceeded


class TimedEvent(msgspec.Struct, frozen=True, gc=False):
    """Base class of the events that decisions receive. Decisions read no clock."""

    at_s: float
    """Time of the event in seconds: on the monotonic clock in a live run, on the virtual clock in the simulator."""


def retry_wait_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the delay after `failures` ≥ 1 consecutive failures: `first_s`, doubled each time, at most `longest_s`."""
    state = RetryCallState(Retrying(), fn=None, args=(), kwargs={})
    state.attempt_number = failures
    return float(wait_exponential(multiplier=first_s, max=longest_s)(state))


@dataclass(frozen=True, slots=True)
class RestartRule:
    """Decides whether and when a process that has ended is restarted."""

    max_failures: int = 5
    """Number of consecutive failures up to which a process is restarted."""
    first_wait_s: float = 0.5
    """Delay before the first restart. It doubles with each further failure."""
    longest_wait_s: float = 30.0
    long_life_s: float = 60.0
    """Run time of a process after which its earlier failures no longer count."""

    def after_end(self, failures: int, lived_s: float | None) -> tuple[int, float | None]:
        """Return the number of consecutive failures, and the seconds until the restart (None: no more restarts).

        failures: number of failures before this one. lived_s: seconds that the process ran; None if it did not start.
        """
        failures = 1 if lived_s is not None and lived_s >= self.long_life_s else failures + 1
        if failures > self.max_failures:
            return failures, None
        return failures, retry_wait_s(failures, first_s=self.first_wait_s, longest_s=self.longest_wait_s)


Clock = Callable[[], float]
"""Returns the time in seconds: monotonic in a live run, virtual in the simulator."""
T = TypeVar("T")
R = TypeVar("R")
CODERS: Final = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Number of threads that copy, hash and code the tensors of a version. numpy, torch, blake3 and zstd release the
interpreter's lock."""
_LARGE: Final = 2**18
"""Bytes of an item below which a thread costs more than it saves."""
_ITEM_S: Final = 600.0
"""Maximum number of seconds for one item."""


def begin(call: Callable[[], T]) -> Future[T]:
    """Start a call in a new daemon thread; return the future of its result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    Thread(target=_run, args=(call, future), name="call", daemon=True).start()
    return future


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # raised again where the future is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def call_within(timeout_s: float, who: str, call: Callable[[], T]) -> T:
    """Run a call in a daemon thread and return its result.

    Raises DeadlineExceeded naming `who` after `timeout_s`. The thread then continues, and its result is discarded.
    """
    future = begin(call)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # the call itself raised TimeoutError
            raise
        raise DeadlineExceeded(f"{who} did not answer in {timeout_s:.0f} s") from None


async def in_thread(call: Callable[..., T], *arguments: Any, timeout_s: float, who: str) -> T:
    """Run a call in a new daemon thread and await it.

    Raises DeadlineExceeded naming `who` after `timeout_s`. Then, or if the awaiting task is cancelled, the thread
    continues, and its result is discarded.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await asyncio.wrap_future(begin(lambda: call(*arguments)))
    except TimeoutError:
        if not limit.expired():  # the call itself raised TimeoutError
            raise
        raise DeadlineExceeded(f"{who} did not answer in {timeout_s:.0f} s") from None


def in_order(
    work: Callable[[T], R], items: Iterable[T], num_bytes: Callable[[T], int], *, threads: int | None = None
) -> Iterator[R]:
    """Yield `work(item)` of each item, in the order of the items, computed by several threads.

    num_bytes: size of an item; small items are computed in the caller's thread. threads: `CODERS` by default. At most
    this number of items is taken before their results are yielded, which bounds the memory. The caller's thread takes
    the items. The threads end with their items, because a thread that has computed with torch keeps OpenMP's threads.
    """
    threads = CODERS if threads is None else threads
    waiting: deque[Future[R]] = deque()
    for item in items:
        if len(waiting) == threads:
            yield _result(waiting.popleft())
        call = partial(work, item)
        if num_bytes(item) < _LARGE:
            waiting.append(Future())
            _run(call, waiting[-1])
        else:
            waiting.append(begin(call))
    while waiting:
        yield _result(waiting.popleft())


def _result(future: Future[R]) -> R:
    try:
        return future.result(timeout=_ITEM_S)
    except TimeoutError as error:
        if future.done():
            raise
        raise DeadlineExceeded(f"encoding or storing a part of the weights took longer than {_ITEM_S:.0f} s") from error
