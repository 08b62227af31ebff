"""Starts worker processes on this machine (`--workers N`) and restarts them when they end.

The standard input of each worker is a pipe from this process. When this process is killed, the pipe closes and the
worker ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.clock import retry_wait_s
from baton.errors import EngineFault
from baton.swarm.listen import ListenAddress

MAX_RESTARTS = 5
"""Maximum number of consecutive restarts of a worker that ends within `LONG_LIFE_S` each time."""
LONG_LIFE_S = 60.0
GRACE_S = 5.0


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    since_s: float
    failures: int = 0
    restart_s: float | None = None


class LocalWorkers:
    """The worker processes of this machine, each with one torch thread and a log file."""

    def __init__(
        self,
        count: int,
        listen: ListenAddress,
        port: int,
        token_file: Path,
        directory: Path,
        *,
        say: Callable[[str], None],
        device: str,
    ) -> None:
        """Start `count` workers. listen, port: address of the hub. directory: for the log files."""
        fingerprint = listen.fingerprint()
        self._command = [
            sys.executable,
            "-m",
            "baton",
            "worker",
            listen.own_url(port),
            *(["--insecure"] if fingerprint is None else ["--fingerprint", fingerprint]),
            "--token-file",
            str(token_file),
            "--threads",
            "1",
            "--device",
            device,
            "--tied",
        ]
        self._directory, self._say = directory, say
        directory.mkdir(parents=True, exist_ok=True)
        self._children = [_Child(self._start_worker(index), time.monotonic()) for index in range(count)]

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [child.process.pid for child in self._children if child.process.poll() is None]

    def check_health(self) -> None:
        """Restart workers that have ended. Raises EngineFault, which names the log file, for a worker that keeps
        ending."""
        now_s = time.monotonic()
        for index, child in enumerate(self._children):
            if child.process.poll() is None:
                continue
            if child.restart_s is None:
                is_young = now_s - child.since_s < LONG_LIFE_S
                child.failures = child.failures + 1 if is_young else 1
                log = self._log(index)
                if child.failures > MAX_RESTARTS:
                    raise EngineFault(f"local worker {index} ended {child.failures} times in a row: see {log}")
                code = child.process.returncode
                self._say(f"local worker {index} ended with exit code {code} ({log}); starting it again")
                child.restart_s = now_s + retry_wait_s(child.failures, first_s=0.4, longest_s=10.0)
            elif now_s >= child.restart_s:
                child.process, child.since_s, child.restart_s = self._start_worker(index), now_s, None

    def close(self) -> None:
        """End all workers. May be called twice."""
        for child in self._children:
            child.process.terminate()
        deadline_s = time.monotonic() + GRACE_S
        for child in self._children:
            try:
                child.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def _log(self, index: int) -> Path:
        return self._directory / f"worker-{index}.log"

    def _start_worker(self, index: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with self._log(index).open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
