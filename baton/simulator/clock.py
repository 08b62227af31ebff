"""Virtual time, which jumps from one scheduled action to the next. Actions with the same time run in the order in which
they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class VirtualClock:
    """The clock of one simulation. It uses no random numbers and no real time."""

    __slots__ = ("_heap", "_sequence", "now_s", "num_fired")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_fired = 0
        """Number of actions that have run."""
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

    def __len__(self) -> int:
        """Return the number of scheduled actions."""
        return len(self._heap)
