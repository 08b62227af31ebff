"""Background work is done in order by a thread that is gone when there is none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from baton.swarm.serial_executor import SerialExecutor

pytestmark = pytest.mark.timing


def alive(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_things_are_done_in_order_and_the_thread_ends() -> None:
    executor, done = SerialExecutor("errands of a test"), []
    futures = [executor.submit(done.append, number) for number in range(50)]
    for future in futures:
        future.result(60)
    assert done == list(range(50))
    until_s = time.monotonic() + 60
    while alive("errands of a test"):
        assert time.monotonic() < until_s, "the thread stays"
        time.sleep(0.001)
    executor.submit(done.append, 50).result(60)
    assert done[-1] == 50, "it begins again"


def test_a_fault_is_its_callers_and_the_next_thing_is_done() -> None:
    executor, done = SerialExecutor("faults of a test"), []

    def fail() -> None:
        raise KeyError("lost")

    fault, after = executor.submit(fail), executor.submit(done.append, 1)
    with pytest.raises(KeyError, match="lost"):
        fault.result(60)
    after.result(60)
    assert done == [1]


def test_closing_waits_for_what_has_begun_and_leaves_the_rest() -> None:
    executor, may_end, done = SerialExecutor("end of a test"), threading.Event(), []
    begun = threading.Event()

    def first() -> None:
        begun.set()
        assert may_end.wait(60)
        done.append("first")

    running, waiting = executor.submit(first), executor.submit(done.append, "second")
    waiting.add_done_callback(lambda _: may_end.set())  # by close, which then has to wait
    assert begun.wait(60)
    executor.close(60)
    assert running.done()
    assert waiting.cancelled()
    assert executor.submit(done.append, "third").cancelled()
    assert done == ["first"]


def test_closing_gives_up_on_a_call_that_never_returns() -> None:
    executor, may_end, begun = SerialExecutor("hang of a test"), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        may_end.wait(300)

    running, waiting = executor.submit(hang), executor.submit(print)
    assert begun.wait(60)
    executor.close(0.05)
    assert not running.done(), "close did not wait for it"
    assert waiting.cancelled()
    may_end.set()
    running.result(60)


def test_a_process_ends_while_a_call_never_returns() -> None:
    code = """
import threading
from baton.swarm.serial_executor import SerialExecutor
executor, begun = SerialExecutor("hang"), threading.Event()
executor.submit(lambda: begun.set() or threading.Event().wait(3600))
assert begun.wait(60)
executor.close(0.05)
print("closed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "closed\n"
