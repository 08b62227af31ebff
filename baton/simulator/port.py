"""The interface between controller and engines: the simulated counterpart of `WorkerTransport`, with token counts."""

from __future__ import annotations

from typing import Protocol

from baton.simulator.rows import EngineTime, GenerationRequest


class SimulatedTransport(Protocol):
    """Generates trajectories: a pool of engines or a swarm."""

    def begin(self) -> None:
        """Start, or start again after `restart`."""

    def want(self, generation_request: GenerationRequest) -> None:
        """Submit a trajectory to generate."""

    def abort(self, lease: int) -> None:
        """Abort a lease."""

    def load(self, version: int) -> None:
        """Load a version into the engines."""

    def restart(self) -> None:
        """Disconnect because the controller has stopped. `begin` is called when it is back."""

    def slow(self, factor: float) -> None:
        """From now on, everything takes this many times as long."""

    def busy(self) -> dict[str, tuple[int, int, EngineTime]]:
        """Return engine → (slots, GPUs, use of its time)."""
