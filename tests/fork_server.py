"""Child processes of tests, forked from a server that has imported everything and run nothing.

A child costs what it does and not what its imports take, which is five seconds of a core. A test process itself must
not be forked to train: its libraries may have started threads by then, which a child does not have and may wait for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from baton import frames

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "baton.cli.main",
        "baton.rollout.processes.engine_process",
        "baton.run.assemble",
        "baton.swarm.worker.worker",
        "baton.trainer.parallel.rank_process",
        "baton.views.pages",
        "tests.run.test_resume",
        "tests.small_reward",
        "tests.swarm.swarm_processes",
    ]
)
_OF_ONE_TEST = {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES"}

start_new_child = frames.start_child
"""Baton's own function, which starts a new interpreter."""


def start_process(function: Callable[..., None], *arguments: Any, name: str | None = None) -> BaseProcess:
    """Start `function(*arguments)` in a child process.

    function: by its name in a module.
    arguments: whatever can be pickled.
    """
    process = _CONTEXT.Process(target=function, args=arguments, name=name)
    process.start()
    multiprocessing.process._children.discard(process)  # a child that a failed test has left is not waited for at exit
    return process


def exit_code_of(process: BaseProcess, deadline_s: float = 120.0) -> int:
    """Wait for the end of a process; minus the number of the signal if one has killed it.

    Raises AssertionError after the deadline.
    """
    process.join(deadline_s)
    assert process.exitcode is not None, f"process {process.pid} has not ended in {deadline_s:.0f} s"
    return process.exitcode


def stop_process(pid: int, deadline_s: float = 120.0) -> None:
    """SIGSTOP, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + deadline_s
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until_s, f"process {pid} has not stopped in {deadline_s:.0f} s"
        time.sleep(0.005)


# ---- engine processes and trainer ranks ------------------------------------------------------------------------------


class ForkedChild:
    """The part of `subprocess.Popen` that the parents of engine processes and ranks use."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class _Descriptor:
    """A file descriptor that a child receives."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


def _as_child(command: str, theirs: int, out: int, err: int, threads: int, directory: str) -> None:
    import torch

    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(directory)
    torch.set_num_threads(threads)
    sys.argv = ["baton", command, str(theirs)]
    from baton.cli.main import main

    main()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_ONE_TEST}


_ENVIRONMENT = _environment()


def start_child(command: str, *, threads: int, max_frame_bytes: int) -> tuple[Any, Any]:
    """Start an engine process or a rank as Baton does, but forked; not if a test has changed environment variables."""
    if _environment() != _ENVIRONMENT:
        return start_new_child(command, threads=threads, max_frame_bytes=max_frame_bytes)
    ours, theirs = frames.frame_sockets(max_frame_bytes)
    with theirs:
        ends = (_Descriptor(theirs.fileno()), _Descriptor(1), _Descriptor(2))
        process = start_process(_as_child, command, *ends, threads, os.getcwd())  # noqa: PTH109
    return ours, ForkedChild(process)
