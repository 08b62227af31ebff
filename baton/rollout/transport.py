"""`WorkerTransport`: the interface through which the controller sends leases to a worker and receives reports.

`LocalTransport` runs an engine in the same process. `processes/pool.py` implements the interface for engine processes,
and `swarm/` for workers on other machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

from baton.clock import time_left
from baton.errors import Suspect
from baton.frames import FrameSocket
from baton.records.lease_trace import LeaseTrace
from baton.records.trace import TraceWriter
from baton.rollout.engine import Engine, EngineStats
from baton.types import Abort, FromHub, FromPort, FromWorker, Group, Lease, PolicyVersion


class WorkerTransport(Protocol):
    """One worker. A pool of engine processes or a swarm is also one worker to the controller."""

    @property
    def name(self) -> str:
        """Name of the worker in error messages."""

    @property
    def slots(self) -> int:
        """Number of trajectories that the worker generates concurrently."""

    @property
    def no_worker_timeout_s(self) -> float:
        """Seconds without any worker after which a run with a swarm stops; values below `rollout.stall_timeout_s` have
        no effect. For other transports, the value is 0."""
        return 0.0

    @property
    def sockets(self) -> Sequence[FrameSocket]:
        """Sockets, one of which is readable when `receive` has messages. Without sockets, the caller can wait for
        messages only in `receive`."""
        return ()

    def send(self, message: FromHub) -> None:
        """Send a lease or an abort. Does not block."""

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        """Return the received messages; wait at most `timeout_s` for the first one. The list may be empty."""

    def flush(self) -> Sequence[FromPort]:
        """Return reports of all tokens that have not been reported yet. Called only with `Rules.pauses`; the worker
        generates nothing until the next `receive`."""
        raise AssertionError(f"{self.name} does not pause")

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to a version; return when the worker serves it. A swarm returns without waiting for its workers."""

    def stats(self) -> EngineStats:
        """Return the engine's counters; for several engines, their sums."""

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """Record that a train step has consumed these groups."""
        return

    def mistrusted(self, suspects: Sequence[Suspect], groups: Sequence[Group], reason: str) -> Set[str]:
        """Called if the trainer computes other logprobs for the tokens of `suspects`. If untrusted workers generated
        all of these tokens, quarantine the workers, and return the names of the trajectories in `groups` that contain
        tokens of these workers."""
        return frozenset()

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the transport's metrics of a train step. `values`: the other metrics of this step."""
        return {}

    def close(self, *, is_over: bool = False) -> None:
        """Stop the worker. May be called twice. `is_over`: the run is complete, so remote workers do not reconnect."""


STEPS = 8
"""Maximum number of decode steps per call to `receive`. Each decode step evicts the controller's data from the CPU
caches, so handling the messages of several steps together is faster."""
STEPS_S = 0.05
"""Seconds after which a call to `receive` starts no further decode step."""


class LocalTransport(WorkerTransport):
    """A worker in this process. The engine runs only during `receive`."""

    def __init__(self, engine: Engine, trace: LeaseTrace | None = None, *, num_steps: int = 1) -> None:
        """`num_steps`: maximum number of engine steps per call to `receive`."""
        self.engine = engine
        self._trace, self._num_steps = trace or LeaseTrace(TraceWriter()), num_steps
        self._is_paused = False

    @property
    def name(self) -> str:
        return "the engine in this process"

    @property
    def slots(self) -> int:
        return self.engine.slots

    def send(self, message: FromHub) -> None:
        match message:
            case Lease():
                self.engine.submit(message)
                self._trace.on_lease(message, "engine", self.engine.slots)
            case Abort():
                self.engine.abort(message.lease_id)

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        """Run at least one step. `timeout_s` has no effect, because a step never waits for messages."""
        if self._is_paused:
            self._trace.continued()
        self._is_paused = False
        left_s, messages = time_left(STEPS_S), [*self.step()]
        for _ in range(self._num_steps - 1):
            if left_s() > 0:
                messages += self.step()
        return self._traced(messages)

    def step(self) -> Sequence[FromWorker]:
        return self.engine.step()

    def flush(self) -> Sequence[FromPort]:
        messages = self._traced(self.engine.flush())
        self._is_paused = True
        self._trace.paused()
        return messages

    def _traced(self, messages: Sequence[FromWorker]) -> Sequence[FromWorker]:
        for message in messages:
            self._trace.on_report(message)
        return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        self.engine.load_weights(tensors, version)

    def stats(self) -> EngineStats:
        return self.engine.stats

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        return self.engine.metrics()

    def close(self, *, is_over: bool = False) -> None:
        """Close the engine and the processes that it started."""
        self.engine.close()
