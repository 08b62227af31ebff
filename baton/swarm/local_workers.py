"""Starts worker processes on this machine (`--workers N`) and restarts them when they end.

The standard input of each worker is a pipe from this process. If this process is killed, the pipe closes and the worker
ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.clock import RestartRule
from baton.errors import EngineFault
from baton.frames import end_children
from baton.swarm.listen import ListenAddress

RESTARTS = RestartRule(first_wait_s=0.4, longest_wait_s=10.0)
GRACE_S = 5.0
"""Maximum seconds for the workers to end before they are killed."""


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    since_s: float
    failures: int = 0
    restart_s: float | None = None


class LocalWorkers:
    """The worker processes of this machine. Each process has one torch thread and a log file."""

    def __init__(
        self,
        listen: ListenAddress,
        port: int,
        token_files: Sequence[Path],
        directory: Path,
        *,
        say: Callable[[str], None],
        device: str,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Start a worker for each token file. The token file's name is also the name of the worker and of its log file.
        listen, port: address of the hub. `directory`: directory of the log files. `environments`: environment variables
        of each worker, in the order of the token files, in addition to those of this process."""
        fingerprint = listen.fingerprint()
        secured = ["--insecure"] if fingerprint is None else ["--fingerprint", fingerprint]
        options = ["--threads", "1", "--device", device, "--tied"]
        self._command = [sys.executable, "-m", "baton", "worker", listen.own_url(port), *secured, *options]
        self._directory, self._say = directory, say
        directory.mkdir(parents=True, exist_ok=True)
        self._token_files = {path.name: path for path in token_files}
        self._environments = dict(zip(self._token_files, environments, strict=False))
        self._children: list[_Child] = []
        try:
            for name in self._token_files:
                self._children.append(_Child(name, self._start_worker(name), time.monotonic()))
        except BaseException:
            self.close()
            raise

    def check_health(self) -> None:
        """Restart workers that have ended. Raises EngineFault, with the log's path, if a worker ends repeatedly."""
        now_s = time.monotonic()
        for child in self._children:
            if child.process.poll() is None:
                continue
            if child.restart_s is None:
                log = self._log(child.name)
                child.failures, wait_s = RESTARTS.after_end(child.failures, now_s - child.since_s)
                if wait_s is None:
                    raise EngineFault(f"worker {child.name} ended {child.failures} times in a row: see {log}")
                code = child.process.returncode
                self._say(f"worker {child.name} ended with exit code {code} ({log}); starting it again")
                child.restart_s = now_s + wait_s
            elif now_s >= child.restart_s:
                child.process, child.since_s, child.restart_s = self._start_worker(child.name), now_s, None

    def close(self) -> None:
        """End all workers. May be called twice."""
        for child in self._children:
            child.process.terminate()
        end_children((), [child.process for child in self._children], grace_s=GRACE_S)

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _start_worker(self, name: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment |= self._environments.get(name, {})
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                [*self._command, "--token-file", str(self._token_files[name])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
