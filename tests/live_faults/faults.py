"""The faults: where each is injected, how, and what the driver does until the run may end.

`python -m tests.live_faults.faults` writes them to docs/reliability.md.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.live_faults.driver import STEPS, Case, state_of
from tests.live_faults.points import Effect, Point
from tests.swarm.swarm_processes import await_

Who = Literal["controller", "worker"]
JOURNAL = "baton.records.journal:Journal"
SESSION, UPDATER = "baton.swarm.worker.session:WorkerSession", "baton.swarm.worker.weights_updater:WeightsUpdater"
PAUSE_S = 4.5
"""More than 12 heartbeats, after which a connection counts as silent; workers send one every third of a second."""
SOON: dict[str, Any] = {"checkpoint__every": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the list."""

    name: str
    who: Who
    """The process with the point."""
    point: Point
    effect: Effect
    how: str
    """How the fault is injected, for the documentation."""
    inject: Callable[[Case], None]
    mode: Literal["sync", "partial", "async"] = "sync"
    is_real: bool = True
    """False: a part of the system is replaced by an imitation."""
    is_quick: bool = False
    """The quick tests make this one too."""
    changes: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 2
    local_workers: int = 0
    has_joined: bool = True
    """Worker 0 joins before the fault, as number 0."""
    token_delay_s: float = 0.0
    amount: float = 0.0
    """Of `Trap`."""
    keeps: str = ""
    """What a power cut keeps of the writes that were not flushed; see `tests/power_cut.py`."""
    life: int = 1
    """Process of the controller that has the fault, from 1."""
    uses_proxy: bool = False
    needs_small_disk: bool = False

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


# ---- what the driver does --------------------------------------------------------------------------------------------


def killed_worker(case: Case) -> None:
    case.reached()
    victim = case.workers.pop(0)
    assert victim.end() == -signal.SIGKILL
    case.worker()


def worker_that_ends(said: str) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        case.reached()
        victim = case.workers.pop(0)
        assert victim.end() == 1
        assert said in victim.said()
        case.worker()

    return inject


def stopped_worker(case: Case) -> None:
    pid = case.stopped()
    case.await_gone(0)
    os.kill(pid, signal.SIGCONT)


def stopped_workers(case: Case) -> None:
    case.stopped()
    case.workers[1].stop()
    case.swarm.await_status("both workers to be given up", lambda s: not s.workers)
    for worker in case.workers:
        worker.go_on()


def paused_controller(case: Case) -> None:
    pid = case.stopped()
    time.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)


def paused_hub(case: Case) -> None:
    """The hub waits for messages of both workers when it is stopped."""
    pid = case.reached()
    case.swarm.await_status("both workers", lambda s: len(s.workers) == 2)
    os.kill(pid, signal.SIGSTOP)
    case.stopped()
    time.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)
    case.go()


def paused_thread(case: Case) -> None:
    case.reached()
    time.sleep(PAUSE_S)
    case.go()


def killed_controller(case: Case) -> None:
    case.reached()
    assert case.ended() == -signal.SIGKILL
    case.resume()


def killed_resume(case: Case) -> None:
    """The first process is killed before its last step, the second at the point, which is in this step."""
    case.swarm.await_step(STEPS - 1)
    case.controller.kill()
    case.ended()
    case.may_end.touch()
    case.resume()
    case.reached()
    assert case.ended() == -signal.SIGKILL
    case.may_end.unlink()
    case.resume()


def stopped_run(case: Case) -> None:
    case.reached()
    case.controller.signal(signal.SIGTERM)
    case.go()
    assert case.ended() == 128 + signal.SIGTERM
    case.resume()


def failed_controller(said: str) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        case.reached()
        assert case.ended() == 1
        assert re.search(said, case.controller.said()), case.controller.said()[-3000:]
        case.resume()

    return inject


def cut(case: Case) -> None:
    assert case.proxy is not None
    case.reached()
    case.proxy.up.delay_s = case.proxy.down.delay_s = 0.02
    case.proxy.up.jitter_s = case.proxy.down.jitter_s = 0.02
    case.proxy.cut()
    case.go()
    case.workers[0].await_said("no connection to ")
    case.proxy.mend()


def half_open(way: str) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        assert case.proxy is not None
        case.reached()
        case.proxy.swallow(way)
        case.go()
        case.workers[0].await_said("no connection to ")
        case.proxy.mend()

    return inject


def slow_line(case: Case) -> None:
    assert case.proxy is not None
    case.reached()
    case.proxy.down.bytes_per_s = 100_000
    case.go()


def clients_that_do_not_read(case: Case) -> None:
    """Eight requests for the model, of which nobody reads the answers."""
    token = (case.swarm.directory / "worker.token").read_text()
    request = f"GET /model HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {token}\r\n\r\n" * 64
    case.reached()
    with ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(10.0)
            client.connect(("127.0.0.1", case.swarm.port))
            client.sendall(request.encode())
        case.go()
        case.swarm.await_step(3)


def callers_that_say_nothing(case: Case) -> None:
    """A hundred connections, half of them with the beginning of a request."""
    case.reached()
    with ExitStack() as stack:
        for number in range(100):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", case.swarm.port), timeout=10.0))
            if number % 2:
                client.sendall(b"GET /worker HTTP/1.1\r\nHost: h")
        case.go()
        case.swarm.await_step(3)


def hub_without_files(case: Case) -> None:
    """A request gets no answer until the hub may open files again."""
    pid = case.reached()
    # version 0 is then published, so no other thread opens a file
    case.swarm.await_status("two workers", lambda s: sum(w.version == 0 for w in s.workers) == 2)
    case.limit_files(pid, 3)
    late = case.worker()
    with socket.create_connection(("127.0.0.1", case.swarm.port), timeout=10.0) as caller:
        caller.sendall(b"GET /health HTTP/1.1\r\nHost: hub\r\n\r\n")
        caller.settimeout(1.0)
        try:
            answer = caller.recv(1)
        except TimeoutError:
            answer = b""
        assert not answer, "the hub could accept a connection"
        case.limit_files(pid, 4096)
        caller.settimeout(60.0)
        assert caller.recv(1), "the hub accepts connections again"
    case.go()
    assert late.is_alive


def worker_without_files(case: Case) -> None:
    pid = case.reached()
    case.workers[0].await_said("Too many open files")
    case.limit_files(pid, 4096)


def full_disk(case: Case) -> None:
    case.reached()
    filler = case.swarm.directory / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - 20_000)  # for the logs
    case.go()
    assert case.ended() == 1
    assert "the disk is full" in case.controller.said(), case.controller.said()[-3000:]
    filler.unlink()
    case.resume()


def full_device(case: Case) -> None:
    """The metrics go to /dev/full, whose writes fail like those of a full disk."""
    case.reached()
    metrics = case.swarm.directory / "r/metrics.jsonl"
    kept = metrics.rename(case.swarm.directory / "metrics.kept")
    metrics.symlink_to("/dev/full")
    case.go()
    assert case.ended() == 1
    assert "the disk is full" in case.controller.said(), case.controller.said()[-3000:]
    metrics.unlink()
    kept.rename(metrics)
    case.resume()


def killed_child(command: str, said: str) -> Callable[[Case], None]:
    """A child of the controller is killed, which ends the run."""

    def inject(case: Case) -> None:
        case.reached()
        os.kill(case.children(command)[-1], signal.SIGKILL)
        case.go()
        assert case.ended() == 1
        assert re.search(said, case.controller.said()), case.controller.said()[-3000:]
        case.resume()

    return inject


def killed_local_worker(case: Case) -> None:
    case.reached()
    os.kill(case.local_workers()[0], signal.SIGKILL)
    case.go()
    case.controller.await_said("ended with exit code -9 .*starting it again")


def stopped_child(command: str) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        case.reached()
        pid = case.children(command)[-1]
        os.kill(pid, signal.SIGSTOP)
        await_("the child to be stopped", lambda: state_of(pid) == "T")
        case.go()
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    return inject


def jumped_clock(case: Case) -> None:
    case.reached()


# ---- the list --------------------------------------------------------------------------------------------------------

POOL: dict[str, Any] = {"num_workers": 0, "changes": {"engine__processes": 2}}
RANKS: dict[str, Any] = {"changes": {"trainer__ranks": 2, **SOON}}

WORKERS = [
    Fault(
        name="a worker is killed while it reports",
        who="worker",
        point=Point(f"{SESSION}.reported", call=4),
        effect="kill",
        how="SIGKILL",
        inject=killed_worker,
        is_quick=True,
    ),
    Fault(
        name="a worker is killed while it loads a version",
        who="worker",
        point=Point("baton.swarm.worker.engine_driver:EngineDriver.switch", call=2),
        effect="kill",
        how="SIGKILL",
        inject=killed_worker,
        mode="async",
    ),
    Fault(
        name="a worker with leases is stopped until the hub has removed it",
        who="worker",
        point=Point(f"{SESSION}.reported", call=3),
        effect="stop",
        how="SIGSTOP, SIGCONT",
        inject=stopped_worker,
    ),
    Fault(
        name="a worker is stopped while it loads a version",
        who="worker",
        point=Point("baton.swarm.worker.engine_driver:EngineDriver.switch", call=2),
        effect="stop",
        how="SIGSTOP, SIGCONT",
        inject=stopped_worker,
        mode="partial",
    ),
    Fault(
        name="all workers are stopped",
        who="worker",
        point=Point(f"{SESSION}.reported", call=3),
        effect="stop",
        how="SIGSTOP, SIGCONT",
        inject=stopped_workers,
        mode="partial",
    ),
    Fault(
        name="a worker has no file descriptor left when it connects",
        who="worker",
        point=Point("baton.swarm.worker.worker:SwarmWorker.run"),
        effect="files",
        how="RLIMIT_NOFILE",
        inject=worker_without_files,
        has_joined=False,
    ),
    Fault(
        name="a worker has no room for the model's files",
        who="worker",
        point=Point("baton.swarm.worker.worker:unpack_model"),
        effect="room",
        how="RLIMIT_FSIZE",
        inject=worker_that_ends("File too large"),
        amount=1024,
        has_joined=False,
    ),
    Fault(
        name="the clock of a worker jumps forward by two hours",
        who="worker",
        point=Point(f"{SESSION}.reported", call=2),
        effect="clock",
        how="`time.time` is replaced",
        is_real=False,
        inject=jumped_clock,
        amount=7200.0,
    ),
    Fault(
        name="a local worker is killed",
        who="controller",
        point=Point(f"{JOURNAL}.counted"),
        effect="gate",
        how="SIGKILL",
        inject=killed_local_worker,
        num_workers=1,
        local_workers=1,
        mode="async",
    ),
]
HUB = [
    Fault(
        name="the hub's process is stopped for longer than a worker may be silent",
        who="controller",
        point=Point(f"{JOURNAL}.finished"),
        effect="gate",
        how="SIGSTOP, SIGCONT",
        inject=paused_hub,
        is_quick=True,
    ),
    Fault(
        name="the hub's process is stopped while a worker joins",
        who="controller",
        point=Point("baton.swarm.hub.membership:Membership.join"),
        effect="stop",
        how="SIGSTOP, SIGCONT",
        inject=paused_controller,
        mode="async",
        has_joined=False,
    ),
    Fault(
        name="the hub's event loop alone is stopped",
        who="controller",
        point=Point("baton.swarm.hub.membership:Membership.on_message", call=12),
        effect="gate",
        how="the thread waits",
        inject=paused_thread,
        mode="partial",
    ),
    Fault(
        name="the hub has no file descriptor left when a worker connects",
        who="controller",
        point=Point("baton.swarm.transport:SwarmTransport.receive"),
        effect="gate",
        how="RLIMIT_NOFILE",
        inject=hub_without_files,
        mode="partial",
        has_joined=False,
    ),
    Fault(
        name="clients of the hub do not read its answers",
        who="controller",
        point=Point(f"{JOURNAL}.counted"),
        effect="gate",
        how="sockets whose answers stay unread",
        inject=clients_that_do_not_read,
    ),
    Fault(
        name="a hundred connections to the hub send no request",
        who="controller",
        point=Point(f"{JOURNAL}.counted"),
        effect="gate",
        how="sockets without a whole request",
        inject=callers_that_say_nothing,
        mode="async",
    ),
]
CONTROLLER = [
    Fault(
        name="the controller is killed after it has counted a batch",
        who="controller",
        point=Point(f"{JOURNAL}.counted", "after", 2),
        effect="kill",
        how="SIGKILL",
        inject=killed_controller,
        mode="partial",
    ),
    Fault(
        name="the controller is killed after it has recorded a batch",
        who="controller",
        point=Point("baton.records.run_directory:RunDirectory.write_groups", "after", 3),
        effect="kill",
        how="SIGKILL",
        inject=killed_controller,
        mode="partial",
        is_quick=True,
    ),
    Fault(
        name="the controller is killed while it trains",
        who="controller",
        point=Point("baton.trainer.local_trainer:LocalTrainer.step", call=3),
        effect="kill",
        how="SIGKILL",
        inject=killed_controller,
        mode="async",
    ),
    Fault(
        name="the controller is killed while it publishes a version",
        who="controller",
        point=Point("baton.weights.publisher:Publisher.publish", "after", 3),
        effect="kill",
        how="SIGKILL",
        inject=killed_controller,
    ),
    Fault(
        name="the controller is killed before its checkpoint has its name",
        who="controller",
        point=Point("baton.run.resume:seal", "after", 2),
        effect="kill",
        how="SIGKILL",
        inject=killed_controller,
        mode="partial",
        changes=SOON,
    ),
    Fault(
        name="the controller is killed before the journal records a checkpoint",
        who="controller",
        point=Point(f"{JOURNAL}.checkpointed"),
        effect="kill",
        how="SIGKILL",
        inject=killed_controller,
        mode="async",
    ),
    Fault(
        name="the controller is killed again while it resumes",
        who="controller",
        point=Point("baton.rollout.controller:RolloutController.resume", "after"),
        effect="kill",
        how="SIGKILL",
        inject=killed_resume,
        mode="partial",
        life=2,
    ),
    Fault(
        name="the controller gets SIGTERM",
        who="controller",
        point=Point("baton.trainer.local_trainer:LocalTrainer.step", call=2),
        effect="gate",
        how="SIGTERM",
        inject=stopped_run,
        mode="async",
    ),
    Fault(
        name="the controller has no file descriptor left when it records a batch",
        who="controller",
        point=Point("baton.records.run_directory:RunDirectory.write_groups", call=2),
        effect="files",
        how="RLIMIT_NOFILE",
        inject=failed_controller("Too many open files"),
        mode="partial",
    ),
    Fault(
        name="the clock of the controller jumps forward by two hours",
        who="controller",
        point=Point("baton.records.metrics:MetricsWriter.write", "after"),
        effect="clock",
        how="`time.time` is replaced",
        is_real=False,
        inject=jumped_clock,
        amount=7200.0,
    ),
    Fault(
        name="the clock of the controller jumps back by two hours",
        who="controller",
        point=Point("baton.records.metrics:MetricsWriter.write", "after"),
        effect="clock",
        how="`time.time` is replaced",
        is_real=False,
        inject=jumped_clock,
        mode="async",
        amount=-7200.0,
    ),
]
NETWORK = [
    Fault(
        name="a connection is cut while the worker reports",
        who="worker",
        point=Point(f"{SESSION}.reported", call=3),
        effect="gate",
        how="TCP proxy: reset, then delay and jitter",
        inject=cut,
        uses_proxy=True,
        is_quick=True,
    ),
    Fault(
        name="a connection is cut while the hub handles a report",
        who="controller",
        point=Point("baton.swarm.lease_broker:LeaseBroker.report", call=4),
        effect="gate",
        how="TCP proxy: reset, then delay and jitter",
        inject=cut,
        mode="async",
        uses_proxy=True,
    ),
    Fault(
        name="a connection is dead in both directions, and neither side gets an error",
        who="worker",
        point=Point(f"{SESSION}.reported", call=3),
        effect="gate",
        how="TCP proxy forwards nothing",
        inject=half_open("both"),
        uses_proxy=True,
    ),
    Fault(
        name="a connection is dead from the hub to the worker",
        who="worker",
        point=Point(f"{SESSION}.reported", call=3),
        effect="gate",
        how="TCP proxy forwards one direction",
        inject=half_open("down"),
        mode="partial",
        uses_proxy=True,
    ),
    Fault(
        name="a connection is dead from the worker to the hub",
        who="worker",
        point=Point(f"{SESSION}.reported", call=3),
        effect="gate",
        how="TCP proxy forwards one direction",
        inject=half_open("up"),
        mode="async",
        uses_proxy=True,
    ),
    Fault(
        name="a worker reads slowly",
        who="worker",
        point=Point(f"{UPDATER}.fetch"),
        effect="gate",
        how="TCP proxy: 100 kB/s",
        inject=slow_line,
        mode="async",
        uses_proxy=True,
        has_joined=False,
    ),
]
DISK = [
    Fault(
        name="the journal may not grow",
        who="controller",
        point=Point(f"{JOURNAL}.counted", call=2),
        effect="room",
        how="RLIMIT_FSIZE",
        inject=failed_controller("StorageFault"),
        amount=8192,
        mode="partial",
    ),
    Fault(
        name="a checkpoint may not grow",
        who="controller",
        point=Point("baton.trainer.local_trainer:LocalTrainer.save", call=2),
        effect="room",
        how="RLIMIT_FSIZE",
        inject=failed_controller("StorageFault.*the last good checkpoint"),
        amount=8192,
        changes=SOON,
    ),
    Fault(
        name="the disk is full at a checkpoint",
        who="controller",
        point=Point("baton.trainer.local_trainer:LocalTrainer.save", call=2),
        effect="gate",
        how="a full tmpfs: ENOSPC",
        inject=full_disk,
        mode="partial",
        changes=SOON,
        needs_small_disk=True,
    ),
    Fault(
        name="the disk is full for the metrics",
        who="controller",
        point=Point("baton.records.metrics:MetricsWriter.write", call=3),
        effect="gate",
        how="`/dev/full`: ENOSPC",
        inject=full_device,
        mode="async",
    ),
    *(
        Fault(
            name=name,
            who="controller",
            point=point,
            effect="power",
            how=how,
            is_real=False,
            inject=killed_controller,
            mode=mode,
            keeps=keeps,
        )
        for name, point, mode, keeps, how in (
            (
                "the power fails after a batch is recorded, and every write that was not flushed is lost",
                Point("baton.records.run_directory:RunDirectory.write_groups", "after", 3),
                "partial",
                "nothing",
                "the files as the flushes left them",
            ),
            (
                "the power fails before the journal records a checkpoint, and writes are torn and reordered",
                Point(f"{JOURNAL}.checkpointed"),
                "partial",
                "dice",
                "each write that was not flushed is kept, torn or lost",
            ),
            (
                "the power fails after a checkpoint, and the last writes are lost",
                Point(f"{JOURNAL}.checkpointed", "after"),
                "partial",
                "early",
                "the files as they were at half of the run, and everything flushed since then",
            ),
            (
                "the power fails while a version is published, and writes are torn and reordered",
                Point("baton.weights.publisher:Publisher.publish", "after", 4),
                "async",
                "dice",
                "each write that was not flushed is kept, torn or lost",
            ),
        )
    ),
]
CHILDREN = [
    Fault(
        name="an engine process is killed while it generates",
        who="controller",
        point=Point("baton.rollout.processes.pool:EnginePool.receive", call=4),
        effect="gate",
        how="SIGKILL",
        inject=killed_child("engine", r"EngineFault: engine process \d .* ended with exit code -9"),
        mode="partial",
        **POOL,
    ),
    Fault(
        name="an engine process is stopped while it loads a version",
        who="controller",
        point=Point("baton.rollout.processes.pool:EnginePool.load_weights", call=2),
        effect="gate",
        how="SIGSTOP, SIGCONT",
        inject=stopped_child("engine"),
        **POOL,
    ),
    Fault(
        name="a trainer rank is killed in a train step",
        who="controller",
        point=Point("baton.trainer.parallel.ranked_trainer:RankedTrainer.step", call=2),
        effect="gate",
        how="SIGKILL",
        inject=killed_child("rank", r"RankLost: trainer rank \d .* ended by SIGKILL"),
        mode="partial",
        **RANKS,
    ),
    Fault(
        name="a trainer rank is stopped in a train step",
        who="controller",
        point=Point("baton.trainer.parallel.ranked_trainer:RankedTrainer.step", call=2),
        effect="gate",
        how="SIGSTOP, SIGCONT",
        inject=stopped_child("rank"),
        mode="async",  # two ranks round otherwise than one process
        **RANKS,
    ),
]
FAULTS = {
    "Workers": WORKERS,
    "Hub": HUB,
    "Controller": CONTROLLER,
    "Network": NETWORK,
    "Disk": DISK,
    "Engine processes and trainer ranks": CHILDREN,
}
"""Heading of the documentation → faults."""
ALL = [fault for faults in FAULTS.values() for fault in faults]
