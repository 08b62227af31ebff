"""The base class of events, retry delays, the rule for restarts of processes, and calls in daemon threads.

A daemon thread never keeps the process alive, even if its call hangs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

import msgspec

from baton.errors import DeadlineExceeded


class TimedEvent(msgspec.Struct, frozen=True, gc=False):
    """Base class of the scheduler's events. The scheduler takes the time from events and reads no clock."""

    at_s: float
    """Time of the event in seconds: on the monotonic clock in a live run, on the virtual clock in the simulator."""


def retry_wait_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the delay in seconds after `failures` ≥ 1 consecutive failures. The delay is `first_s` after the first
    failure, doubles with each further failure, and is at most `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 1000))


@dataclass(frozen=True, slots=True)
class RestartRule:
    """Decides whether and when a process that has ended is restarted."""

    max_failures: int = 5
    """Maximum number of consecutive failures. After one more failure, the process is not restarted."""
    first_wait_s: float = 0.5
    """Delay in seconds before the first restart. The delay doubles with each further failure."""
    longest_wait_s: float = 30.0
    long_life_s: float = 60.0
    """Run time in seconds after which the earlier failures of a process no longer count."""

    def after_end(self, failures: int, lived_s: float | None) -> tuple[int, float | None]:
        """Return two values: the number of consecutive failures, and the seconds until the restart (None if the process
        is not restarted). `failures`: number of consecutive failures before the process ended this time. `lived_s`:
        time in seconds that the process ran; None if it did not start."""
        failures = 1 if lived_s is not None and lived_s >= self.long_life_s else failures + 1
        if failures > self.max_failures:
            return failures, None
        return failures, retry_wait_s(failures, first_s=self.first_wait_s, longest_s=self.longest_wait_s)


Clock = Callable[[], float]
"""Function that returns the time in seconds: monotonic time in a live run, virtual time in the simulator."""


def time_left(seconds: float) -> Clock:
    """Start a timeout of `seconds`. Return a function that returns the seconds left; negative after the timeout."""
    now: Clock = time.monotonic
    end_s = now() + seconds
    return lambda: end_s - now()


T = TypeVar("T")
R = TypeVar("R")
CODERS: Final = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Number of threads that copy, hash and encode the tensors of a policy version. The threads run in parallel, because
numpy, torch, blake3 and zstd release the interpreter's lock."""
_LARGE: Final = 2**18
"""Minimum size in bytes of items that other threads compute. Smaller items take less time in the caller's thread."""
_ALL_PER_LARGE: Final = 4
"""The maximum number of items in progress is this multiple of the maximum number of large items in progress. Small
items are, for example, the norms between the matrices of a model."""
_ITEM_S: Final = 600.0
"""Maximum time in seconds that `in_order` waits for the result of one item."""
_TOO_LATE: Final = f"encoding or storing a part of the weights took longer than {_ITEM_S:.0f} s"


def begin(call: Callable[[], T]) -> Future[T]:
    """Start a call in a new daemon thread; return the future of its result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    Thread(target=run_into, args=(future, call), name="call", daemon=True).start()
    return future


def run_into(future: Future[T], call: Callable[[], T]) -> None:
    """Run a call in this thread, and set the future to the call's result or exception."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # raised again where the future is awaited
        future.set_exception(error)
        del future  # breaks the cycle of future, error, traceback and this frame: the call's objects are freed at once
    else:
        future.set_result(result)


def call_within(timeout_s: float, who: str, call: Callable[[], T]) -> T:
    """Run a call in a daemon thread and return its result. Raises DeadlineExceeded naming `who` after `timeout_s`. The
    thread then continues, and its result is discarded."""
    return _result(begin(call), timeout_s, f"{who} did not answer in {timeout_s:.0f} s")


async def in_thread(call: Callable[..., T], *arguments: Any, timeout_s: float, who: str) -> T:
    """Run a call in a new daemon thread and await it. Raises DeadlineExceeded naming `who` after `timeout_s`. After the
    timeout, or if the awaiting task is cancelled, the thread continues, and its result is discarded."""
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
    """Compute `work(item)` for each item in several threads, and yield the results in the order of the items.

    `num_bytes`: function that returns the size of an item; small items are computed in the caller's thread. `threads`:
    maximum number of large items in progress, which bounds the memory. By default, `CODERS` threads compute while one
    more large item waits in the queue, so that a thread that has finished an item can start the next one immediately.
    The caller's thread reads `items`. The threads exist only during the iteration, because a thread that has computed
    with torch keeps OpenMP's threads alive.
    """
    return _computed(work, items, num_bytes, threads, None)


def in_any_order(work: Callable[[T], R], items: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[R]:
    """Compute like `in_order`, but yield each result as soon as it is computed. An item that takes longer than others
    then does not keep the other threads waiting."""
    return _computed(work, items, num_bytes, None, SimpleQueue())


def _computed(
    work: Callable[[T], R],
    items: Iterable[T],
    num_bytes: Callable[[T], int],
    threads: int | None,
    done: SimpleQueue[int] | None,
) -> Iterator[R]:
    """`done`: queue for the numbers of computed items; None to yield the results in order."""
    most, threads = (CODERS + 1, CODERS) if threads is None else (threads, threads)
    num_started = num_large = 0
    calls: SimpleQueue[tuple[Future[R], Callable[[], R]] | None] = SimpleQueue()
    waiting: dict[int, tuple[Future[R], bool]] = {}
    """Number of an item → future of its result, and whether the item is large."""
    try:
        for number, item in enumerate(items):
            while num_large == most or len(waiting) == _ALL_PER_LARGE * most:
                first = _first(waiting, done)
                num_large -= waiting[first][1]
                yield _result(waiting.pop(first)[0], _ITEM_S, _TOO_LATE)
            call, future, is_large = partial(work, item), Future[R](), num_bytes(item) >= _LARGE
            waiting[number] = future, is_large
            num_large += is_large
            if done is not None:
                future.add_done_callback(partial(_put, done, number))
            if is_large:
                calls.put((future, call))
            else:
                run_into(future, call)
            del future  # as in `run_into`
            if is_large and num_started < threads:
                num_started += 1
                Thread(target=_run_all, args=(calls,), name="coder", daemon=True).start()
        while waiting:
            yield _result(waiting.pop(_first(waiting, done))[0], _ITEM_S, _TOO_LATE)
    finally:
        for _ in range(num_started):
            calls.put(None)


def _put(done: SimpleQueue[int], number: int, _: object) -> None:
    done.put(number)


def _first(waiting: Iterable[int], done: SimpleQueue[int] | None) -> int:
    """Return the number of the item to yield next. Raises DeadlineExceeded if no item is computed in time."""
    try:
        return next(iter(waiting)) if done is None else done.get(timeout=_ITEM_S)
    except Empty:
        raise DeadlineExceeded(_TOO_LATE) from None


def _run_all(calls: SimpleQueue[tuple[Future[R], Callable[[], R]] | None]) -> None:
    while (call := calls.get()) is not None:
        run_into(*call)
        del call  # a result may be large


def _result(future: Future[R], timeout_s: float, too_late: str) -> R:
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # the call itself raised TimeoutError
            raise
        raise DeadlineExceeded(too_late) from None
    finally:
        del future  # as in `run_into`
