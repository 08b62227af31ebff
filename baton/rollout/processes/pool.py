"""`EnginePool`: a `WorkerTransport` that assigns leases to several engine processes and sends weights to all of them.

      controller ──lease──▶ queue ──▶ engine process 0 (one torch thread)
          ▲                   └─────▶ engine process 1 …
          └── reports ◀── all processes

`LeaseQueue` decides which process gets which lease. The tokens of a trajectory do not depend on which process generates
them, because all processes have one thread and the same number of slots.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import DeadlineExceeded, EngineFault, Fault, UserError
from baton.files import memory_directory
from baton.frames import FrameSocket, end_children, exit_code, ready, start_child
from baton.records.lease_trace import LeaseTrace
from baton.records.trace import ASIDE, TraceWriter
from baton.rollout.engine import EngineStats
from baton.rollout.processes import protocol
from baton.rollout.processes.lease_queue import Handover, LeaseQueue
from baton.rollout.transport import WorkerTransport
from baton.types import FromHub, FromWorker, Lease, PolicyVersion, without_replay_data

CLOSE_GRACE_S = 2.0
"""Seconds after which processes that have not exited are killed."""
SaveTensors = Callable[[Mapping[str, Any], Path], Path]
"""Function that returns a safetensors file with the tensors. If no such file exists, the function writes the tensors to
the given path and returns this path. `EnginePool` takes the function as an argument, because this module must not
import torch."""


class EngineProcess:
    """A child process, with its leases and the counters from its last message."""

    def __init__(self, index: int, leases: set[int]) -> None:
        self.name = f"engine process {index}"
        self.leases = leases
        self.stats = EngineStats()
        self.socket, self.process = start_child("engine", threads=1, max_frame_bytes=protocol.MAX_FRAME_BYTES)
        self.pid = self.process.pid

    def send(self, message: protocol.ToEngine) -> None:
        """Send a message, or queue it while the socket is full. Raises EngineFault if the process has exited."""
        try:
            self.socket.send(protocol.encode(message))
        except OSError as error:
            raise self._exit_error() from error

    def receive(self) -> protocol.Progress | protocol.Serving | None:
        """Return the next message, or None if no complete message has arrived. Raises UserError if the process failed
        with a UserError, and EngineFault if the process failed otherwise or has exited."""
        try:
            frame = self.socket.receive()
        except (EOFError, OSError) as error:
            raise self._exit_error() from error
        message = None if frame is None else protocol.decode_from_engine(frame)
        if isinstance(message, Fault):
            if isinstance(reason := message.error(), UserError):
                raise reason
            raise EngineFault(f"{self.name} failed: {message.kind}: {message.text}")
        return message

    def _exit_error(self) -> EngineFault:
        code = exit_code(self.process)
        return EngineFault(
            f"{self.name} (pid {self.pid}) ended with exit code {code} while {len(self.leases)} leases were running; "
            "finished trajectories are in the journal: continue with --resume"
        )


class EnginePool(WorkerTransport):
    """A worker transport that consists of several engine processes."""

    def __init__(
        self,
        count: int,
        start: protocol.Start,
        save_tensors: SaveTensors,
        *,
        timeout_s: float,
        trace: LeaseTrace | None = None,
    ) -> None:
        """Start the processes and wait until all of them serve the version that `start` names. `timeout_s`: maximum
        number of seconds until all processes serve a new version. Raises EngineFault or UserError if a process fails,
        and DeadlineExceeded after `timeout_s`."""
        self._slots = start.engine_settings().slots
        self._count = count
        self._inbox: list[FromWorker] = []
        """The reports that have arrived, but that `receive` has not returned yet."""
        self._save_tensors = save_tensors
        self.timeout_s = timeout_s
        self._trace = trace or LeaseTrace(TraceWriter())
        self.directory = Path(tempfile.mkdtemp(prefix="baton-", dir=memory_directory()))
        self._queue = LeaseQueue([self._slots] * count)
        self.processes: list[EngineProcess] = []
        try:
            for index, leases in enumerate(self._queue.leases):
                self.processes.append(EngineProcess(index, leases))
            for process in self.processes:
                process.send(msgspec.structs.replace(start, scratch=str(self.directory)))
            self._await_serving(start.version)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return f"the {self._count} engine processes"

    @property
    def slots(self) -> int:
        return self._count * self._slots

    @property
    def sockets(self) -> Sequence[FrameSocket]:
        return [process.socket for process in self.processes]

    def send(self, message: FromHub) -> None:
        if isinstance(message, Lease):
            self._queue.add(message)
        else:
            self._hand_over(self._queue.abort(message))

    def receive(self, timeout_s: float) -> list[FromWorker]:
        self._hand_over(self._queue.assign())
        for process in self._ready(0.0 if self._inbox else timeout_s):
            heard = process.receive()
            assert not isinstance(heard, protocol.Serving), (
                f"{process.name} sent {type(heard).__name__} without a request"
            )
            if heard is not None:
                self._on_progress(process, heard)
        self._hand_over(self._queue.assign())
        messages, self._inbox = self._inbox, []
        return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch all processes to new weights, which the processes read from one file."""
        path = self.directory / f"{version.lineage}-{version.number}.safetensors"
        saved = self._save_tensors(tensors, path)
        try:
            for process in self.processes:
                process.send(protocol.LoadWeights(str(saved), version))
            self._await_serving(version)
        finally:
            path.unlink(missing_ok=True)

    def stats(self) -> EngineStats:
        """Return the sums, over all processes, of the counters that each process reported last."""
        return EngineStats.total(process.stats for process in self.processes)

    def close(self, *, is_over: bool = False) -> None:
        sockets, processes = [one.socket for one in self.processes], [one.process for one in self.processes]
        end_children(sockets, processes, grace_s=CLOSE_GRACE_S)
        self.processes = []
        shutil.rmtree(self.directory, ignore_errors=True)

    def _hand_over(self, messages: Sequence[Handover]) -> None:
        for index, message in messages:
            process = self.processes[index]
            if isinstance(message, Lease):
                process.send(without_replay_data(message))
                self._trace.on_lease(message, process.name, self._slots)
            else:
                process.send(message)

    def _ready(self, timeout_s: float) -> Sequence[EngineProcess]:
        by_socket = {process.socket: process for process in self.processes}
        return [by_socket[socket] for socket in ready(by_socket, timeout_s)]

    def _await_serving(self, version: PolicyVersion) -> None:
        """Wait until every process serves a version. Keep the reports that arrive while waiting."""
        begin_s = time.monotonic()
        deadline = begin_s + self.timeout_s
        waiting = set(self.processes)
        while waiting:
            if (left_s := deadline - time.monotonic()) <= 0:
                names = ", ".join(sorted(p.name for p in waiting))
                raise DeadlineExceeded(f"{names} did not serve version {version.number} in {self.timeout_s:.0f} s")
            for process in self._ready(left_s):
                heard = process.receive()
                if heard is None:
                    continue
                if heard == protocol.Serving(version):
                    waiting.discard(process)
                    now_s = time.monotonic()
                    self._trace.tracer.span("fetch", process.name, ASIDE, begin_s, now_s, version=version.number)
                else:  # the message has reports of tokens that were generated before the new weights arrived
                    assert isinstance(heard, protocol.Progress), (
                        f"{process.name} sent {heard} instead of Serving {version}"
                    )
                    self._on_progress(process, heard)

    def _on_progress(self, process: EngineProcess, progress: protocol.Progress) -> None:
        process.stats = progress.stats
        self._inbox += progress.messages
        for message in progress.messages:
            self._trace.on_report(message)
        self._queue.ended(self.processes.index(process), progress.messages)
