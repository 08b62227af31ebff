"""A request to stop that comes when a condition holds, without a signal."""

from __future__ import annotations

from collections.abc import Callable

from baton.stop import StopRequest


class StopWhen(StopRequest):
    """Requested from the first time that the condition is found to hold."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition

    @property
    def is_requested(self) -> bool:
        if self.signal is None and self._condition():
            self.request()
        return self.signal is not None
