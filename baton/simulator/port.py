"""Between the controller and whatever generates: the seam that `WorkerTransport` is in the live run, in counts."""

from __future__ import annotations

from typing import Protocol

from baton.simulator.rows import EngineTime, GenerationRequest


class SimulatedTransport(Protocol):
    """Whatever generates."""

    def begin(self) -> None:
        """Start."""

    def want(self, generation_request: GenerationRequest) -> None:
        """Have a trajectory grown."""

    def abort(self, lease: int) -> None:
        """Have it put down."""

    def load(self, version: int) -> None:
        """Have a version served."""

    def restart(self) -> None:
        """The controller is gone: hang up. `begin` is called when it is back."""

    def slow(self, factor: float) -> None:
        """Everything takes so many times as long from now on."""

    def busy(self) -> dict[str, tuple[int, int, EngineTime]]:
        """Engine → (slots, GPUs, where its time went)."""
