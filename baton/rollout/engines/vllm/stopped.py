"""Detects that a signal has stopped a process of vLLM.

A process that does not answer may only be slow. The state `T` in Linux's /proc is reliable: a process in this state
runs no instruction until it receives SIGCONT. Slow and hanging processes never have this state, nor does a process
under a debugger, whose state is `t`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from baton.clock import time_left
from baton.errors import EngineFault

_LOOKS = 10
"""Number of consecutive checks that must find a stopped process. A process that is stopped for a few seconds, or
together with this process (Ctrl-Z), is not reported."""


class StopDetector:
    """Checks the states of processes and of all their children."""

    def __init__(self, pids: Iterable[int], interval_s: float = 1.0) -> None:
        """`interval_s`: minimum number of seconds between two checks."""
        self._pids, self._interval_s = tuple(pids), interval_s
        self._found, self._left_s = 0, time_left(0.0)

    def check(self) -> None:
        """Check the states if `interval_s` has passed since the last check. Raise EngineFault if the last `_LOOKS`
        checks have found a stopped process."""
        if self._left_s() > 0:
            return
        self._left_s, pid = time_left(self._interval_s), _stopped_among(self._pids)
        self._found = 0 if pid is None else self._found + 1
        if self._found >= _LOOKS:
            raise EngineFault(f"a signal has stopped process {pid} of vLLM (state T in /proc/{pid}/stat)")


def _stopped_among(pids: Iterable[int]) -> int | None:
    """Return a stopped process among `pids` and their children; None if none is stopped, or without /proc."""
    for pid in pids:
        with suppress(OSError):  # the process has ended
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return pid
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                if (found := _stopped_among(map(int, path.read_text().split()))) is not None:
                    return found
    return None
