"""A request to stop, made by a signal, and the two ways in which it ends a wait.

A wait whose state is used afterwards calls `check` about once a second. A wait that may be cut at any point (the start
of a run, loading a version) runs in `with stop.interrupting()`, where the signal handler itself raises.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(BaseException):
    """A stop was requested. It derives from BaseException, as KeyboardInterrupt does, so that `except Exception` does
    not catch it."""


class StopRequest:
    """Handles SIGINT and SIGTERM as a context manager.

    The first signal requests a clean stop; a second Ctrl-C raises KeyboardInterrupt. Further SIGTERMs are ignored: a
    cluster scheduler may send several before it takes the machine away.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        """say: receives a line for the user when the request arrives."""
        self.signal: int | None = None
        """Number of the first signal."""
        self._say = say
        self._interrupts = False
        self._before: dict[int, Any] = {}

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested."""
        return self.signal is not None

    def check(self) -> None:
        """Raise Stopped if a stop was requested."""
        if self.is_requested:
            raise Stopped

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise Stopped anywhere within the context as soon as a stop is requested."""
        self._interrupts = True
        try:
            self.check()
            yield
        finally:
            self._interrupts = False

    def request(self, number: int = signal.SIGTERM) -> None:
        """Request a stop as a signal of this number does."""
        if self.signal is None:
            self.signal = number
            self._say("stopping, after the train step if one is running; Ctrl-C again leaves at once")
            if self._interrupts:
                raise Stopped
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def __enter__(self) -> StopRequest:
        handler = lambda number, _: self.request(number)  # noqa: E731
        self._before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
