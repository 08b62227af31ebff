"""The interface between controller and engines: the simulated counterpart of `WorkerTransport`. Messages have token
counts in place of tokens."""

from __future__ import annotations

from typing import Protocol

from baton.simulator.rows import EngineTime, GenerationRequest


class SimulatedTransport(Protocol):
    """Generates trajectories: a pool of engines or a swarm."""

    def begin(self) -> None:
        """Start the engines. Called again when the controller resumes after `restart`."""

    def want(self, generation_request: GenerationRequest) -> None:
        """Submit a trajectory to generate."""

    def abort(self, lease: int) -> None:
        """Abort a lease."""

    def load(self, version: int) -> None:
        """Load a version into the engines."""

    def restart(self) -> None:
        """Stop or disconnect the engines because the controller has stopped. `begin` follows when the controller
        resumes."""

    def slow(self, factor: float) -> None:
        """Multiply all times of the engines by `factor` from now on."""

    def busy(self) -> dict[str, tuple[int, int, EngineTime]]:
        """Return (slots, GPUs, use of time) by engine name."""
