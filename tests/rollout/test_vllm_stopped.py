"""A process of vLLM that a signal has stopped is detected by its state. A slow one is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import EngineFault
from baton.rollout.engines.vllm.stopped import StopDetector

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
LOOKS = 10

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


def children(pid: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process that waits, and its child, which computes without an end and answers nobody."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    until_s = time.monotonic() + 60
    while not (found := children(parent.pid)):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    yield parent.pid, found[0]
    for pid in (found[0], parent.pid):
        os.kill(pid, signal.SIGKILL)
    parent.wait(60)


def send(pid: int, number: int) -> None:
    os.kill(pid, number)
    until_s = time.monotonic() + 60
    while (state(pid) == "T") != (number == signal.SIGSTOP):
        assert time.monotonic() < until_s
        time.sleep(0.001)


def look(detector: StopDetector) -> str:
    """Return what a check says; empty if it has found no stopped process."""
    try:
        detector.check()
    except EngineFault as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", [0, 1])
def test_a_stopped_process_or_child_is_detected_after_several_looks(family: tuple[int, int], place: int) -> None:
    detector = StopDetector([family[0]], interval_s=0.0)
    send(family[place], signal.SIGSTOP)
    *before, last = [look(detector) for _ in range(LOOKS)]
    assert not any(before)
    assert last == f"a signal has stopped process {family[place]} of vLLM (state T in /proc/{family[place]}/stat)"


def test_a_process_that_only_does_not_answer_or_goes_on_is_never_reported(family: tuple[int, int]) -> None:
    detector = StopDetector([family[0]], interval_s=0.0)
    assert not any(look(detector) for _ in range(5 * LOOKS))
    for _ in range(3):
        send(family[1], signal.SIGSTOP)
        assert not any(look(detector) for _ in range(LOOKS - 1))
        send(family[1], signal.SIGCONT)
        assert not look(detector)


def test_looks_have_a_minimum_distance_and_processes_that_have_ended_are_not_stopped(family: tuple[int, int]) -> None:
    send(family[0], signal.SIGSTOP)
    rare = StopDetector([family[0]], interval_s=3600.0)
    assert not any(look(rare) for _ in range(3 * LOOKS))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    detector = StopDetector([ended.pid], interval_s=0.0)
    assert not any(look(detector) for _ in range(2 * LOOKS))
