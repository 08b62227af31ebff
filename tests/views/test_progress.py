"""Progress of a run on the terminal."""

from __future__ import annotations

import io

from baton.console import Console
from baton.views.terminal.progress import TerminalObserver

STEP = {
    "reward/mean": 0.5,
    "response_length/mean": 20.0,
    "perf/throughput": 100.0,
    "perf/step_time": 2.0,
}


def line(**more: float) -> str:
    file = io.StringIO()
    with TerminalObserver(Console(file=file, width=300), 10) as observer:
        observer.stepped(3, {**STEP, **{name.replace("__", "/"): value for name, value in more.items()}})
    return file.getvalue().rstrip("\n")


def test_a_step_names_the_slowest_replica_and_those_that_serve_an_older_version() -> None:
    assert line().endswith("100 tok/s  2.00 s")
    fast = {"replicas__0__tokens_per_s": 812.0, "replicas__0__version": 7.0, "replicas__0__running": 8.0}
    slow = {"replicas__1__tokens_per_s": 120.0, "replicas__1__version": 7.0}
    assert line(**fast, **slow).endswith("2.00 s  slowest of 2 replicas: 1, 120 tok/s")
    late = {"replicas__2__version": 5.0}  # it had no leases
    assert line(**fast, **slow, **late).endswith("  slowest of 3 replicas: 1, 120 tok/s  late: 2")
