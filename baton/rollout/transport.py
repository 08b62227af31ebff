"""`WorkerTransport`: how the controller sends leases to a worker and receives reports from it.

`LocalTransport` drives an engine in the same process. `processes/pool.py` and `swarm/` implement the protocol for
engine processes and for workers on other machines; the controller is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from baton.records.trace import LeaseTrace, TraceWriter
from baton.rollout.engine import Engine, EngineStats
from baton.types import Abort, FromHub, FromPort, Group, Lease, PolicyVersion


class WorkerTransport(Protocol):
    """One worker, as the controller sees it. A pool or a swarm is one worker too."""

    @property
    def name(self) -> str:
        """What the controller waits for, for error messages."""

    @property
    def slots(self) -> int:
        """Trajectories that it generates concurrently."""

    @property
    def no_worker_timeout_s(self) -> float:
        """Seconds without any slots (a swarm without workers) before that is a stall."""
        return 0.0

    def send(self, message: FromHub) -> None:
        """Send a lease or an abort, without waiting."""

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        """Return the messages received, waiting at most `timeout_s` for the first; the list may be empty."""

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to a version. Returns once the worker serves it; a swarm, once workers can fetch it."""

    def stats(self) -> EngineStats:
        """The engine's counters."""

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """Called after a train step has consumed its batch."""
        return

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the worker's own metrics of a train step, whose other metrics are `values`."""
        return {}

    def close(self, *, is_over: bool = False) -> None:
        """Stop the worker. May be called twice. is_over: the run is complete, so remote workers need not reconnect."""


class LocalTransport(WorkerTransport):
    """A worker in this process: `receive` runs one step of the engine."""

    def __init__(self, engine: Engine, trace: LeaseTrace | None = None) -> None:
        self.engine = engine
        self._trace = trace or LeaseTrace(TraceWriter())

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
                self._trace.given(message, "engine", self.engine.slots)
            case Abort():
                self.engine.abort(message.lease_id)

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        """Run one decode step; `timeout_s` is ignored, since a step is much shorter."""
        messages = self.engine.step()
        for message in messages:
            self._trace.on_report(message)
        return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        self.engine.load_weights(tensors, version)

    def stats(self) -> EngineStats:
        return self.engine.stats

    def close(self, *, is_over: bool = False) -> None:
        """Close the engine; one with its own processes ends them."""
        self.engine.close()
