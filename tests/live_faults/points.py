"""Faults inside a process of a live run, at named points of the package, and the notes from which laws are checked.

A `Point` names a function and one of its calls. The child process replaces the function by one that injects the fault
before or after this call, and first writes the file `reached`, so a fault that no process reaches is known. Everything
here runs in the child, which is forked from a server that has imported this module.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from tests import fork_server

GATE_DEADLINE_S = 120.0
"""A closed gate opens by itself after this time: the test then fails, but leaves no process behind."""

Effect = Literal["kill", "stop", "gate", "power", "files", "room", "clock"]
"""kill: SIGKILL of the process. stop: SIGSTOP. gate: the thread waits until the driver has acted from outside. power:
the process dies, and only what the disk keeps remains. files: no further file descriptor (RLIMIT_NOFILE). room: no file
may grow (RLIMIT_FSIZE). clock: `time.time` jumps."""


_RECORDINGS: list[Any] = []
"""Of `power_cut.recorded`: a recording ends with its object."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call of a function of the package."""

    function: str
    """`module:Class.method` or `module:function`, as the caller looks it up."""
    when: Literal["before", "after"] = "before"
    call: int = 1
    """Number of the call, from 1."""

    def __str__(self) -> str:
        at = f", call {self.call}" if self.call > 1 else ""
        return f"{self.when} `{self.function.removeprefix('baton.')}`{at}"

    def resolve(self) -> tuple[Any, str]:
        """Return the object that holds the function, and the function's name there."""
        module, _, name = self.function.partition(":")
        *outer, last = name.split(".")
        holder: Any = importlib.import_module(module)
        for part in outer:
            holder = getattr(holder, part)
        assert callable(getattr(holder, last))
        return holder, last


@dataclass(frozen=True, slots=True)
class Trap:
    """A fault that the process injects into itself."""

    point: Point
    effect: Effect
    directory: str
    """Directory of the files `reached` and `go`."""
    amount: float = 0.0
    """clock: jump in seconds. room: size in bytes above which no file may grow, more than a log of these runs has."""

    def install(self) -> None:
        calls = 0

        def arrive() -> None:
            nonlocal calls
            calls += 1
            if calls == self.point.call:
                self._spring()

        around(self.point.function, **{self.point.when: lambda *_: arrive()})

    def _spring(self) -> None:
        if self.effect == "power":
            from tests import power_cut

            recorder = power_cut.active()
            recorder.scan()
            Path(self.directory, "disk.log").write_bytes(pickle.dumps(recorder.log))
        reached = Path(self.directory, "reached")
        reached.with_suffix(".new").write_text(str(os.getpid()))
        reached.with_suffix(".new").rename(reached)
        match self.effect:
            case "kill" | "power":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "gate":
                wait_at_gate(Path(self.directory, "go"))
            case "files":
                _limit(resource.RLIMIT_NOFILE, 3)
            case "room":
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (int(self.amount), resource.getrlimit(resource.RLIMIT_FSIZE)[1])
                )
            case "clock":
                now = time.time
                time.time = lambda: now() + self.amount


def _limit(kind: int, soft: int) -> None:
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


@dataclass(frozen=True, slots=True)
class InsideWorker:
    """A worker process on another machine, with a slow engine."""

    trap: Trap | None
    token_delay_s: float

    def apply(self) -> None:
        from tests.swarm.swarm_processes import WorkerFaults

        WorkerFaults(token_delay_s=self.token_delay_s).apply()
        if self.trap is not None:
            self.trap.install()


@dataclass(frozen=True, slots=True)
class InsideController:
    """A training process that notes what it records, trains and violates."""

    directory: str
    """Directory of the notes, and of the file `may_end`, before which the last train step does not begin."""
    life: int
    last_step: int
    trap: Trap | None
    disk: str | None = None
    """Directory whose writes are recorded for a power cut."""
    bugs: tuple[Callable[[], None], ...] = ()
    """Functions that restore fixed defects."""

    def apply(self) -> None:
        for bug in self.bugs:
            bug()
        if self.disk is not None:
            from tests import power_cut

            Path(self.disk).mkdir(exist_ok=True)
            _RECORDINGS.append(power_cut.recorded(Path(self.disk)))
            _RECORDINGS[-1].__enter__()
        if self.trap is not None:
            self.trap.install()
        for module in ("baton.rollout.processes.pool", "baton.trainer.parallel.local_ranks"):
            importlib.import_module(module).start_child = self._start_child
        around("baton.records.metrics:MetricsWriter.write", after=lambda _, writer, step, *__: self._hold(step))
        _take_notes(Path(self.directory, "notes.jsonl"), self.life)

    def _start_child(self, command: str, *, threads: int, max_frame_bytes: int) -> tuple[Any, Any]:
        """Start an engine process or a rank, and note its process id."""
        ours, process = fork_server.start_child(command, threads=threads, max_frame_bytes=max_frame_bytes)
        Path(self.directory, f"{command}-{process.pid}").touch()
        return ours, process

    def _hold(self, step: int) -> None:
        """A run that ended before the fault is over would prove nothing, and a worker would not learn of its end."""
        if step + 1 == self.last_step:
            wait_at_gate(Path(self.directory, "may_end"))


def wait_at_gate(file: Path) -> None:
    """Wait until a file exists."""
    until_s = time.monotonic() + GATE_DEADLINE_S
    while not file.exists() and time.monotonic() < until_s:
        time.sleep(0.01)


def around(
    function: str, before: Callable[..., None] = lambda *_: None, after: Callable[..., None] = lambda *_: None
) -> None:
    """Call `before(arguments)` and `after(result, arguments)` at each call of a function."""
    holder, name = Point(function).resolve()
    inner = inspect.getattr_static(holder, name)
    is_async = inspect.iscoroutinefunction(inner)

    @wraps(inner)
    def outer(*arguments: Any, **more: Any) -> Any:
        before(*arguments)
        result = inner(*arguments, **more)
        after(result, *arguments)
        return result

    @wraps(inner)
    async def async_outer(*arguments: Any, **more: Any) -> Any:
        before(*arguments)
        result = await inner(*arguments, **more)
        after(result, *arguments)
        return result

    setattr(holder, name, async_outer if is_async else outer)


# ---- notes -----------------------------------------------------------------------------------------------------------


def _take_notes(path: Path, life: int) -> None:
    """Note what the laws need and no file of the run says: each line survives a kill of the process."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(kind: str, **content: Any) -> None:
        os.write(file, json.dumps({"kind": kind, "life": life, **content}).encode() + b"\n")

    def key(trajectory: Any) -> list[int]:
        return [trajectory.group_id, trajectory.sample_index]

    around("baton.run.loop:Loop.train", before=lambda loop: note("began", step=loop.state.step))
    for trainer in ("baton.trainer.local_trainer:LocalTrainer", "baton.trainer.parallel.ranked_trainer:RankedTrainer"):
        around(
            f"{trainer}.step",
            after=lambda _, trainer, batch: note("trained", step=batch.step, groups=[g.group_id for g in batch.groups]),
        )
    around(
        "baton.records.journal:Journal.finished",
        after=lambda _, journal, trajectory, *__: note(
            "finished", key=key(trajectory), tokens=digest_of(trajectory.token_ids)
        ),
    )
    around("baton.records.journal:Journal.revoked", after=lambda _, journal, g, s: note("revoked", key=[g, s]))
    around("baton.records.journal:Journal.discarded", after=lambda _, journal, g, cause: note("discarded", group=g))
    for name in ("commit", "settle"):
        around(f"baton.records.journal:Journal.{name}", after=lambda *_, name=name: note(name))
    around("baton.rollout.controller:RolloutController.next_batch", after=lambda _, c, *__: _balance(c.scheduler, note))
    _watch_leases(note)


def digest_of(token_ids: Iterable[int]) -> str:
    """Of the tokens after a prompt."""
    return blake3(json.dumps([*map(int, token_ids)]).encode()).hexdigest()[:16]


def _balance(scheduler: Any, note: Callable[..., None]) -> None:
    """Every token of the scheduler is in one account."""
    ledger = scheduler.ledger
    carried = sum(group.num_tokens for group in scheduler.groups())
    if ledger.generated != ledger.settled + carried:
        note("violation", law="conservation", what=f"{ledger.generated} ≠ {ledger.settled} + {carried} carried")


def _watch_leases(note: Callable[..., None]) -> None:
    """Check the invariants of the simulator on the lease table of the live hub."""
    from baton.swarm.leases import LeaseTable
    from tests.simulator.lease_invariants import LeaseInvariants

    handle, watched = LeaseTable.handle, {}

    def check(holds: bool, law: str, what: Any = "") -> None:
        if not holds:
            note("violation", law=law, what=str(what() if callable(what) else what))

    def watching(self: Any, event: Any) -> Any:
        laws = watched.get(id(self)) or watched.setdefault(id(self), LeaseInvariants(self, check))
        laws.on_event(event)
        commands = handle(self, event)
        for command in commands:
            laws.on_command(command)
        laws.settled(event)
        return commands

    LeaseTable.handle = watching  # type: ignore[method-assign]
