"""The seam between the runner and a worker: leases go out, reports come in, whatever lies between.

In one process the port drives its engine itself; a subprocess or a network transport is another class with these
methods, and the runner does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from baton.records.trace import LeaseTrace, TraceWriter
from baton.rollout.engine import Engine, EngineStats
from baton.types import Abort, FromHub, FromPort, Group, Lease, PolicyVersion


class WorkerTransport(Protocol):
    """One worker, seen from the runner."""

    @property
    def name(self) -> str:
        """Who is waited for, in error messages."""

    @property
    def slots(self) -> int:
        """Trajectories that it generates at once."""

    @property
    def absence_s(self) -> float:
        """Seconds that it may have no slots at all (a swarm whose workers are all gone) before that is a stall."""
        return 0.0

    def send(self, message: FromHub) -> None:
        """Hand over a lease or an abort; does not wait."""

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        """Return what has come in, waiting at most `timeout_s` for the first message; an empty list is no error."""

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Have the worker switch to a version, and return once it serves it, or a swarm once it can fetch it."""

    def stats(self) -> EngineStats:
        """The engine's counters."""

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """A train step has consumed its batch."""
        return

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the worker's own metrics of a train step that has these."""
        return {}

    def close(self, *, is_over: bool = False) -> None:
        """End the worker. May be called twice. is_over: the run is complete, and workers need not wait for it."""


class LocalTransport(WorkerTransport):
    """A worker in this process: receiving runs the engine for one step."""

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
        """One decode step, so it returns long before any sensible timeout."""
        messages = self.engine.step()
        for message in messages:
            self._trace.heard(message)
        return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        self.engine.load_weights(tensors, version)

    def stats(self) -> EngineStats:
        return self.engine.stats

    def close(self, *, is_over: bool = False) -> None:
        """An engine in this process goes with it, one with processes of its own ends them."""
        self.engine.close()
