"""Virtual time, which jumps from one scheduled action to the next. Actions with the same time run in the order in which
they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class NoProgress(Exception):
    """Raised if no event is scheduled although the run is incomplete, or if the controller exceeds a deadline or raises
    an `EngineFault`."""


class VirtualClock:
    """The clock of one simulation."""

    __slots__ = ("_heap", "_sequence", "now_s", "num_fired")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_fired = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []

    def at(self, at_s: float, action: Action, *args: Any) -> None:
        """Schedule an action at the time `at_s`, which must not be in the past."""
        assert at_s >= self.now_s, f"an action is scheduled for {at_s} s, but the time is already {self.now_s} s"
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, action, args))

    def after(self, wait_s: float, action: Action, *args: Any) -> None:
        self.at(self.now_s + wait_s, action, *args)

    def fire(self) -> bool:
        """Advance to the next action and run it. Return False if no action is scheduled."""
        if not self._heap:
            return False
        self.now_s, _, action, args = heapq.heappop(self._heap)
        self.num_fired += 1
        action(*args)
        return True

    def wait(self, wait_s: float) -> None:
        """Run the actions of the next `wait_s` seconds."""
        until_s = self.now_s + wait_s
        while self._heap and self._heap[0][0] <= until_s:
            self.fire()
        self.now_s = until_s

    def poll(self, timeout_s: float, is_over: Callable[[], bool]) -> bool:
        """Run the actions of the next `timeout_s` seconds, but stop when `is_over()` is true. Return `is_over()`. If no
        action is scheduled within `timeout_s`, the time advances at once by a multiple of `timeout_s`, but not past the
        next action. This replaces repeated calls in which no action would run. Raises NoProgress if no action is
        scheduled."""
        until_s, before = self.now_s + timeout_s, self.num_fired
        while not is_over():
            if self._heap and self._heap[0][0] <= until_s:
                self.fire()
                continue
            if timeout_s and not self._heap:
                raise NoProgress("no action is scheduled")
            if timeout_s and self.num_fired == before:
                until_s += (self._heap[0][0] - until_s) // timeout_s * timeout_s
            self.now_s = until_s
            return is_over()
        return True
