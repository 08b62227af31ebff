"""Starts a live run, injects one fault, resumes the run if it ended, and keeps what the laws are checked from."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.records.journal import Journal
from baton.swarm.hub.status import HubStatus
from tests.live_faults.points import InsideController, InsideWorker, Trap
from tests.power_cut import Remains
from tests.swarm.shaping_proxy import ShapingProxy
from tests.swarm.swarm_processes import Child, Swarm, await_, swarm, worker_of

if TYPE_CHECKING:
    from tests.live_faults.faults import Fault

DEADLINE_S = 120.0
STEPS, GROUPS, GROUP_SIZE = 4, 4, 4
MODES: dict[str, dict[str, Any]] = {
    "sync": {"rollout__mode": "sync"},
    "partial": {"rollout__mode": "partial", "rollout__overprovision": 2.0, "rollout__max_staleness": 2},
    "async": {"rollout__mode": "async", "rollout__max_staleness": 2},
}
SHAPE: dict[str, Any] = {
    "run__steps": STEPS,
    "rollout__batch_groups": GROUPS,
    "rollout__group_size": GROUP_SIZE,
    "rollout__max_new_tokens": 16,
    "engine__slots": 8,
    "eval__enabled": False,
    "log__loggers": [],
    "swarm__heartbeat_timeout_s": 2.0,
}
"""The same tiny run for every fault: 4 steps of 16 trajectories, on two workers with 8 slots each."""


@dataclass(slots=True)
class Remembered:
    """The open groups of a journal after the end of its process."""

    life: int
    is_flushed_only: bool
    """The power failed: only what was flushed had to survive."""
    members: dict[tuple[int, int], tuple[int, ...]]
    """(Group id, sample index) → tokens."""


@dataclass(slots=True)
class Case:
    """One run with one fault."""

    fault: Fault
    swarm: Swarm
    marks: Path
    bugs: tuple[Any, ...] = ()
    workers: list[Child] = field(default_factory=list)
    """Workers that must end by themselves with the run."""
    proxy: ShapingProxy | None = None
    journals: list[Remembered] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    """Of the controller's processes."""
    scratch: set[Path] = field(default_factory=set)
    """Temporary directories that a killed controller has left."""
    life: int = 0

    # ---- processes ---------------------------------------------------------------------------------------------------

    @property
    def controller(self) -> Child:
        assert self.swarm.trainer is not None
        return self.swarm.trainer

    @property
    def notes(self) -> Path:
        return self.marks / "notes.jsonl"

    @property
    def may_end(self) -> Path:
        """File that must exist before the last train step begins."""
        return self.marks / "may_end"

    def start(self) -> None:
        """Start the controller and the workers of a first life."""
        self._control(resume=False)
        if self.fault.uses_proxy:
            self.proxy = ShapingProxy(self.swarm.port)
        for number in range(self.fault.num_workers):
            self.worker(number)
            if number == 0 and self.fault.has_joined:
                self.controller.await_said("#0 joined: ")

    def _control(self, *, resume: bool) -> None:
        fault = self.fault
        self.life += 1
        is_faulty = fault.who == "controller" and self.life == fault.life
        disk = str(self.swarm.directory / "r") if fault.effect == "power" and self.life == 1 else None
        trap = self._trap() if is_faulty else None
        inside = InsideController(str(self.marks), self.life, STEPS, trap, disk, self.bugs)
        if fault.num_workers:
            self.swarm.train(resume=resume, faults=inside, local_workers=fault.local_workers)
        else:
            self.swarm.engine_beside_trainer(resume=resume, faults=inside)

    def worker(self, number: int = -1) -> Child:
        """Start a worker. Worker 0 has the fault, if a worker has it."""
        is_first = number == 0
        trap = self._trap() if is_first and self.fault.who == "worker" else None
        url = self.proxy.url if self.proxy is not None and is_first else ""
        child = self.swarm.worker(url=url, faults=InsideWorker(trap, self.fault.token_delay_s))
        self.workers.append(child)
        return child

    def resume(self) -> None:
        """Start the controller again."""
        self._control(resume=True)

    def ended(self) -> int:
        """Wait for the controller's end; keep its exit code and its journal."""
        code = self.controller.end(DEADLINE_S)
        self.exit_codes.append(code)
        scratch = self.swarm.directory / "r/scratch.txt"
        if scratch.exists():
            self.scratch |= set(map(Path, scratch.read_text().split()))
        if self.fault.effect == "power" and self.life == 1:
            self.cut_power()
        self._remember()
        return code

    def _trap(self) -> Trap:
        fault = self.fault
        return Trap(fault.point, fault.effect, str(self.marks), fault.amount)

    def finish(self) -> None:
        """Let the run make its last train step when all workers are connected; wait for the end of every process."""
        from tests.live_faults.laws import check_honest

        if count := len(self.workers):

            def are_back(status: HubStatus) -> bool:
                check_honest(self)
                return sum(worker.state != "cut off" for worker in status.workers) >= count

            self.swarm.await_status("all workers to be connected", are_back, DEADLINE_S)
        self.may_end.touch()
        assert self.ended() == 0, self.controller.said()[-3000:]
        for worker in self.workers:
            assert worker.end(DEADLINE_S) == 0, worker.said()[-3000:]
        children = self.children("engine") + self.children("rank")
        await_("the controller's processes to end", lambda: not any(map(is_alive, children)), DEADLINE_S)

    # ---- the point ---------------------------------------------------------------------------------------------------

    @property
    def is_reached(self) -> bool:
        return (self.marks / "reached").exists()

    def reached(self) -> int:
        """Wait until a process has reached the point of the fault; return its process id."""

        def found() -> int | None:
            with suppress(OSError, ValueError):
                return int((self.marks / "reached").read_text())
            code = self.controller.process.exitcode
            assert code is None, f"the run ended before {self.fault.point}: {self.controller.said()[-3000:]}"
            return None

        return await_(f"{self.fault.name}: {self.fault.point}", found, DEADLINE_S)

    def go(self) -> None:
        """Let the process at the gate go on."""
        (self.marks / "go").touch()

    def stopped(self) -> int:
        """Wait until the process that has reached the point is stopped; return its id."""
        pid = self.reached()
        await_(f"process {pid} to be stopped", lambda: state_of(pid) == "T", DEADLINE_S)
        return pid

    # ---- files -------------------------------------------------------------------------------------------------------

    def cut_power(self) -> None:
        """Replace the run's directory by what the power cut has left of it."""
        log = pickle.loads((self.marks / "disk.log").read_bytes())
        path = self.swarm.directory / "r"
        shutil.rmtree(path)
        kept = self.fault.keeps
        if kept == "early":  # the system had written out everything by half time, and nothing since
            half = len(log) // 2
            nodes = {entry[3]: None for entry in log[:half] if entry[0] == "create"}
            log = [*log[:half], *(("flush", node) for node in (0, *nodes)), *log[half:]]
            kept = "nothing"
        Remains(log, kept, seed=7).write(path)

    def _remember(self) -> None:
        path = self.swarm.directory / "r"
        files = list(path.glob("journal.sqlite*"))
        if not files:
            return
        with tempfile.TemporaryDirectory() as scratch:
            for file in files:
                shutil.copy(file, scratch)
            journal = Journal(Path(scratch, "journal.sqlite"), keeps_partials=True)
            members = {
                (t.group_id, t.sample_index): tuple(t.token_ids)
                for group in journal.open_groups()
                for t in group.members
                if t.num_tokens and (self.fault.mode != "sync" or t.finish_reason is not None)
            }
            journal.close()
        self.journals.append(Remembered(self.life, self.fault.effect == "power" and self.life == 1, members))

    def children(self, command: str) -> list[int]:
        """Process ids of the controllers' engine processes or ranks, in the order of their start."""
        found = sorted(self.marks.glob(f"{command}-*"), key=lambda path: path.stat().st_mtime_ns)
        return [int(path.name.rpartition("-")[2]) for path in found]

    def local_workers(self) -> list[int]:
        """Process ids of the workers that the controller has started."""
        pids = [
            int(pid)
            for tasks in Path(f"/proc/{self.controller.pid}/task").glob("*/children")
            for pid in tasks.read_text().split()
        ]
        return [pid for pid in pids if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]

    def read_notes(self) -> list[dict[str, Any]]:
        lines = self.notes.read_bytes().split(b"\n")[:-1] if self.notes.exists() else []
        return [json.loads(line) for line in lines]

    # ---- limits ------------------------------------------------------------------------------------------------------

    def limit_files(self, pid: int, soft: int) -> None:
        """RLIMIT_NOFILE of another process."""
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    def await_gone(self, number: int) -> None:
        """Wait until the hub has removed a worker."""
        self.swarm.await_status(f"worker {number} to be given up", lambda s: not worker_of(s, number))


@contextmanager
def case_of(fault: Fault, model: Path, directory: Path, bugs: tuple[Any, ...] = ()) -> Iterator[Case]:
    """A run that is started; every process of it ends here."""
    marks = directory / "marks"
    marks.mkdir(parents=True)
    changes = {**SHAPE, **MODES[fault.mode], **fault.changes}
    with ExitStack() as stack:
        if fault.needs_small_disk:
            stack.enter_context(_small_disk(directory / "run"))
        run = stack.enter_context(swarm(directory / "run", model, **changes))
        case = Case(fault, run, marks, bugs)
        try:
            case.start()
            yield case
        finally:
            case.go()
            case.may_end.touch()
            for child in [*case.swarm.workers, case.swarm.trainer]:
                if child is not None and child.is_alive:
                    child.signal(signal.SIGCONT)
            if case.proxy is not None:
                case.proxy.close()


@contextmanager
def _small_disk(path: Path) -> Iterator[None]:
    """A file system of 16 MB."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root and a container that lets it")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=60)


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """Letter of a process's state; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
