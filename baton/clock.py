"""Retry delays, and calls in daemon threads, which never keep the process alive even if they hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, wait_exponential

from baton.errors import DeadlineExceeded


def retry_wait_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the delay after `failures` ≥ 1 consecutive failures: `first_s`, doubled each time, at most `longest_s`."""
    state = RetryCallState(Retrying(), fn=None, args=(), kwargs={})
    state.attempt_number = failures
    return float(wait_exponential(multiplier=first_s, max=longest_s)(state))


T = TypeVar("T")


def begin(call: Callable[[], T]) -> Future[T]:
    """Run a call in a new daemon thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # raised again where the future is awaited
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name="call", daemon=True).start()
    return future


def call_within(timeout_s: float, who: str, call: Callable[[], T]) -> T:
    """Return the result of a call. Raises DeadlineExceeded naming `who` after `timeout_s`; the call's thread is
    abandoned."""
    future = begin(call)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # the call itself raised TimeoutError
            raise
        raise DeadlineExceeded(f"{who} did not answer in {timeout_s:.0f} s") from None


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a call in a new daemon thread and await it. If the awaiting task is cancelled, the thread is abandoned."""
    return await asyncio.wrap_future(begin(lambda: call(*arguments)))
