"""The interface between controller and engines: the simulated counterpart of `WorkerTransport`. It passes the messages
of a live run, with counted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.types import FromHub


@dataclass(slots=True)
class EngineTime:
    """Seconds that an engine spent on each activity, and the number of tokens that it computed."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0
    row_s: float = 0.0
    """Seconds of decoding, multiplied by the number of slots in use."""
    decoded: int = 0
    prefilled: int = 0
    reprefilled: int = 0
    """Number of response tokens that were prefilled again."""
    preemptions: int = 0

    def plus(self, other: EngineTime) -> EngineTime:
        return EngineTime(*(getattr(self, name) + getattr(other, name) for name in EngineTime.__slots__))


class SimulatedTransport(Protocol):
    """A pool of engines or a swarm, which generates trajectories."""

    def begin(self) -> None:
        """Start the engines. The controller calls this method again when it resumes after `restart`."""

    def send(self, message: FromHub) -> None:
        """Send a lease or an abort."""

    def load(self, version: int) -> None:
        """Load a version into the engines."""

    def restart(self) -> None:
        """Stop or disconnect the engines because the controller has stopped. `begin` follows when the controller
        resumes."""

    def slow(self, factor: float) -> None:
        """Multiply all times of the engines by `factor` from now on."""

    def busy(self) -> dict[str, tuple[int, int, EngineTime]]:
        """Return name of an engine → (slots, GPUs, use of time)."""
