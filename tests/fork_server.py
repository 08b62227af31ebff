"""Starts the child processes of tests: forks them from a server process that has imported all modules and run nothing.

A forked child does not import PyTorch and transformers again, which takes seconds. A test process itself must not be
forked: its libraries may have started threads, which do not exist in the child, so the child may hang or abort.

An import of this module replaces `baton.frames.start_child`, so that engine processes and trainer ranks are forked too.
The tests of the wheel, of Ray, of local workers and of scripts still start new interpreters.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from baton import frames

ROOT = Path(__file__).parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.fork_server",  # first, because the other modules import `start_child`
        "baton.cli.main",
        "baton.environments.pool",
        "baton.rewards.pool",
        "baton.rollout.processes.engine_process",
        "baton.run.assemble",
        "baton.swarm.worker.worker",
        "baton.trainer.parallel.rank_process",
        "baton.trainer.parallel.rank_server",
        "baton.views.pages",
        "tests.run.test_resume",
        "tests.small_reward",
        "tests.swarm.swarm_processes",
    ]
)
_IGNORED = {
    "CUBLAS_WORKSPACE_CONFIG", "GOMP_SPINCOUNT", "HF_HUB_DISABLE_TELEMETRY", "PYTEST_CURRENT_TEST",
    "TOKENIZERS_PARALLELISM",
}  # fmt: skip
"""Environment variables that pytest and Baton set while tests run. Those of Ray and vLLM are ignored too."""


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _IGNORED and not name.startswith(("RAY_", "VLLM_"))
    }


_ENVIRONMENT = _environment()
_LOCK = threading.Lock()
_start_new_child = frames.start_child


def start_process(function: Callable[..., None], *arguments: Any, name: str | None = None) -> BaseProcess:
    """Start `function(*arguments)` in a child process.

    The child has the environment variables that this process had when it imported this module. `function` must be
    importable by name, and `arguments` must be picklable.
    """
    process = _CONTEXT.Process(target=_run, args=(_address(), function, arguments), name=name)
    process.start()
    return process


@atexit.register  # runs before the exit function of multiprocessing, which waits for all children
def _kill_children() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def exit_code_of(process: BaseProcess, deadline_s: float = 120.0) -> int:
    """Wait until a process exits. Return its exit code, which is the negative signal number if a signal killed it.
    Raises AssertionError after the deadline."""
    process.join(deadline_s)
    assert process.exitcode is not None, f"process {process.pid} has not ended in {deadline_s:.0f} s"
    return process.exitcode


def stop_process(pid: int, deadline_s: float = 120.0) -> None:
    """Send SIGSTOP, and wait until the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + deadline_s
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until_s, f"process {pid} has not stopped in {deadline_s:.0f} s"
        time.sleep(0.005)


def _address() -> dict[str, Any]:
    """Start the server if it is not running. Return the attributes with which a child connects to the same server, to
    start children of its own."""
    server = forkserver._forkserver
    with _LOCK:
        if not vars(server).get("_forkserver_address"):  # the server is not running yet
            with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True):
                server.ensure_running()
    return {name: vars(server)[name] for name in ("_forkserver_address", "_forkserver_authkey") if name in vars(server)}


def _run(address: dict[str, Any], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    vars(forkserver._forkserver).update(address, ensure_running=lambda: None)
    function(*arguments)


# ---- baton -----------------------------------------------------------------------------------------------------------


class Forked:
    """A forked process with the part of the interface of `subprocess.Popen` that Baton and the tests use."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

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

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Descriptor:
    """An argument of `start_process`: a file descriptor. The child gets a duplicate, as an int."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


def run_cli(arguments: list[str], out: int, err: int) -> None:
    """Run the `baton` command in this child process. out, err: file descriptors for stdout and stderr."""
    for number, file in ((1, out), (2, err)):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["baton", *arguments]
    Path("/proc/self/comm").write_text(" ".join(sys.argv[:2])[:15])
    from baton.cli.main import main

    main()


def _run_cli_in(directory: str, arguments: list[str], out: int, err: int) -> None:
    os.chdir(directory)
    run_cli(arguments, out, err)


def start_baton(*arguments: object, out: int = 1, err: int = 2) -> Forked:
    """Start the `baton` command in a child process, in the root of the repository. out, err: file descriptors for
    stdout and stderr."""
    words, files = list(map(str, arguments)), (Descriptor(out), Descriptor(err))
    return Forked(start_process(_run_cli_in, str(ROOT), words, *files))


def run_baton(*arguments: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the `baton` command in a child process, and return its exit code and output. Raises TimeoutExpired."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_baton(*arguments, out=out.fileno(), err=err.fileno())
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, out.read().decode(), err.read().decode())


def child_processes(command: str) -> list[int]:
    """Return the ids of the engine processes (`engine`) or ranks (`rank`) that this test process or its children have
    started."""
    server, found = vars(forkserver._forkserver)["_forkserver_pid"], []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                _, rest = (entry / "stat").read_text().split("(", 1)
            except (FileNotFoundError, ProcessLookupError):
                continue
            comm, _, fields = rest.rpartition(")")
            if comm == f"baton {command}" and int(fields.split()[1]) == server:
                found.append(int(entry.name))
    return sorted(found)


# ---- engine processes and trainer ranks ------------------------------------------------------------------------------


def _as_child(command: str, theirs: int, out: int, err: int, threads: int, directory: str) -> None:
    import torch

    torch.set_num_threads(threads)
    _run_cli_in(directory, [command, str(theirs)], out, err)


def start_child(command: str, *, threads: int, max_frame_bytes: int) -> tuple[Any, Any]:
    """Fork an engine process or a rank. If a test has changed environment variables, start a new interpreter, as Baton
    does, because libraries read some variables when they are imported."""
    if _environment() != _ENVIRONMENT:
        return _start_new_child(command, threads=threads, max_frame_bytes=max_frame_bytes)
    ours, theirs = frames.frame_sockets(max_frame_bytes)
    with theirs:
        files = (Descriptor(theirs.fileno()), Descriptor(1), Descriptor(2))
        process = start_process(_as_child, command, *files, threads, os.getcwd())  # noqa: PTH109
    return ours, Forked(process)


frames.start_child = start_child  # before any module of Baton imports it
