"""Stop requests by signal, and the two ways in which a stop request ends a wait.

Some waits must end in a consistent state. They call `check` about once a second. Other waits may be interrupted at any
instruction, for example the start of a run. They run inside `with stop.interrupting()`, in which the signal handler
raises Stopped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(BaseException):
    """A stop was requested. Stopped derives from BaseException, so `except Exception` does not catch it."""


class StopRequest:
    """A context manager that handles SIGINT and SIGTERM.

    The first signal requests a clean stop, and a later Ctrl-C raises KeyboardInterrupt. Further SIGTERMs are ignored,
    because a cluster scheduler may send several before it kills the process. Python allows signal handlers only in the
    main thread. In other threads, the context manager installs no handlers, and only `request` can request a stop.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        """`say`: prints a line for the user when a stop is requested."""
        self.signal: int | None = None
        """Number of the first signal; 0 if a callback requested the stop."""
        self._say = say
        self._interrupts = False
        self._before: dict[int, Any] = {}

    @property
    def is_requested(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """Raise Stopped if a stop was requested."""
        if self.is_requested:
            raise Stopped

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Make the signal handler raise Stopped within the context, at any instruction."""
        self._interrupts = True
        try:
            self.check()
            yield
        finally:
            self._interrupts = False

    def request(self, number: int = signal.SIGTERM) -> None:
        """Request a stop. `number`: the signal that requests the stop; 0 for a callback."""
        if self.signal is None:
            self.signal = number
            hint = "; press Ctrl-C again to exit immediately" if number else ""
            self._say(f"stopping after the current train step{hint}")
            if self._interrupts:
                raise Stopped
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        handler = lambda number, _: self.request(number)  # noqa: E731
        self._before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
