"""`SimulatedTransport`: the `WorkerTransport` of simulated engines, with additional methods. The tokens in messages are
`CountedTokens`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.rollout.engine import EngineStats
from baton.rollout.transport import WorkerTransport
from baton.simulator.inputs import EngineSpec


@dataclass
class ControllerStopped(Exception):
    """Raised by the fault `restart` while the controller waits. The controller loses its state, as after a kill."""

    down_s: float
    """Seconds until the controller starts again."""


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


class SimulatedTransport(WorkerTransport, Protocol):
    """A pool of engines or a swarm. While `receive` or `load_weights` waits, the virtual clock advances."""

    def begin(self) -> None:
        """Called at each start of the controller, also after `restart`."""
        return

    def restart(self) -> None:
        """Stop or disconnect the engines, because the controller has stopped."""
        raise AssertionError("faults apply to the workers of a swarm")

    def stats(self) -> EngineStats:
        """Return zero counts, so that only messages count as progress."""
        return EngineStats()

    def close(self, *, is_over: bool = False) -> None:
        """Do nothing: simulated engines have no processes."""
        return

    def slow(self, factor: float) -> None:
        """Multiply all times of the engines by `factor` from now on."""

    def busy(self) -> Iterable[tuple[EngineSpec, EngineTime]]:
        """Return each engine and its use of time."""
