"""Time: waits between retries, and calls that may hang in threads that never keep the process from ending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, wait_exponential

from baton.errors import DeadlineExceeded


def retry_wait_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the wait after `failures` ≥ 1 failures in a row: `first_s`, doubled each time, at most `longest_s`."""
    state = RetryCallState(Retrying(), fn=None, args=(), kwargs={})
    state.attempt_number = failures
    return float(wait_exponential(multiplier=first_s, max=longest_s)(state))


T = TypeVar("T")


def begin(call: Callable[[], T]) -> Future[T]:
    """Make a call in a daemon thread of its own."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # it is whoever waits for the future who deals with it
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name="call", daemon=True).start()
    return future


def call_within(timeout_s: float, who: str, call: Callable[[], T]) -> T:
    """Return what a call returns. Raises DeadlineExceeded naming `who` where it takes longer; it is then abandoned."""
    future = begin(call)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # its own
            raise
        raise DeadlineExceeded(f"{who} did not answer in {timeout_s:.0f} s") from None


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Make a call in a daemon thread of its own and wait for it; when the waiting task is cancelled it is abandoned."""
    return await asyncio.wrap_future(begin(lambda: call(*arguments)))
