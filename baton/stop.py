"""A request to stop, made by a signal, and the two ways in which a wait ends because of it.

A wait that holds state which is used afterwards calls `check` about once a second. A wait that may be cut at any point
(the start of a run, the loading of a version) stands in `with stop.interrupting()`, in which the signal itself raises.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(BaseException):
    """Somebody has asked to stop. Not an error, and not to be caught as one: see KeyboardInterrupt."""


class StopRequest:
    """Ctrl-C or SIGTERM once asks for a clean stop; a second Ctrl-C leaves at once.

    A cluster's scheduler sends SIGTERM before it takes the machine away, perhaps more than once. As a context it
    handles both signals.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        """say: receives a line for people when the request comes."""
        self.signal: int | None = None
        """The first that came."""
        self._say = say
        self._interrupts = False
        self._before: dict[int, Any] = {}

    @property
    def is_requested(self) -> bool:
        """Whether to stop."""
        return self.signal is not None

    def check(self) -> None:
        """Raise Stopped if it is time to stop."""
        if self.is_requested:
            raise Stopped

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise Stopped in the middle of what this encloses, whatever it waits for."""
        self._interrupts = True
        try:
            self.check()
            yield
        finally:
            self._interrupts = False

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask to stop, as a signal of this number does."""
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
