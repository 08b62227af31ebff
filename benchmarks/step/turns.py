"""How the two sides take turns: each is a process that steps when it is told to, and sleeps otherwise.

The driver writes a number of steps on a line; the side makes them and answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent.parent
SPIN = "10000"
"""How long an idle thread of either side spins before it sleeps: both are fastest so."""


class Turns:
    """A side's end: `ready` once, then `stepped` after every step."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._left = 0
        self._steps: list[dict[str, float]] = []
        self._begin = 0.0

    def ready(self) -> None:
        """Say that set-up is done, and wait for the first turn."""
        self._answer({"ready": True})
        self._wait()

    def stepped(self, values: dict[str, float]) -> None:
        """Count a step; at the end of a turn answer with its times and wait for the next."""
        self._steps.append(values)
        self._left -= 1
        if not self._left:
            self._answer({"wall_s": time.perf_counter() - self._begin, "steps": self._steps})
            self._wait()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line.strip():
            self._out.flush()
            os._exit(0)  # the benchmark is over; nothing here is to be kept
        self._left, self._steps, self._begin = int(line), [], time.perf_counter()

    def _answer(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


def own_stdout() -> TextIO:
    """Return stdout for answers, and send whatever else is printed to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


class Side:
    """The driver's end."""

    def __init__(self, name: str, command: Sequence[str], threads: int, log: Path) -> None:
        self.name = name
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": SPIN}
        environment.pop("OMP_WAIT_POLICY", None)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        self._hear()

    def turn(self, steps: int) -> dict[str, Any]:
        """Have it make some steps, everything else asleep; return its answer with the processor time it took."""
        before = cpu_s(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._hear()
        return {**answer, "cpu_s": cpu_s(self._process.pid) - before, "load_average": os.getloadavg()[0]}

    def close(self) -> None:
        """Hang up; the process ends, and with it its children."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text()[-2000:]
            raise RuntimeError(f"{self.name} has ended with {self._process.wait()}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def cpu_s(pid: int) -> float:
    """Processor time so far of a process and its living children, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children)
