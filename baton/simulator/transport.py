"""The interface between controller and engines: the simulated counterpart of `WorkerTransport`. Messages contain
numbers of tokens in place of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A trajectory to generate."""

    lease: int
    group_id: int
    sample_index: int
    prompt: int
    tokens: int
    """Number of response tokens that the trajectory has already."""
    length: int
    """Number of response tokens of the complete trajectory."""
    version: int
    is_exact: bool
    newest: int = -1
    """Version of the last token; -1 before the first token."""


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

    def want(self, request: GenerationRequest) -> None:
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
        """Return name of an engine → (slots, GPUs, use of time)."""
