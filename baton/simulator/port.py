"""Between the controller and whatever generates: the seam that `WorkerPort` is in the live run, in counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.simulator.rows import Busy


@dataclass(frozen=True, slots=True)
class Wish:
    """A trajectory that is to be grown."""

    lease: int
    group_id: int
    sample_index: int
    prompt: int
    tokens: int
    """What it has already, after its prompt."""
    length: int
    """What it will have."""
    version: int
    is_exact: bool
    newest: int = -1
    """Version of its last token; -1 before the first."""


class Controller(Protocol):
    """Who hears of leases."""

    def grew(self, lease: int, version: int, num_tokens: int) -> None:
        """Tokens are the trajectory's."""
        ...

    def finished(self, lease: int) -> None:
        """A trajectory is complete."""
        ...

    def put_down(self, lease: int) -> None:
        """A lease has ended without finishing its trajectory."""
        ...

    def lost(self, cause: str, num_tokens: int) -> None:
        """Tokens that are part of no trajectory."""
        ...

    def capacity(self, slots: int) -> None:
        """So many trajectories are generated at once from now on."""
        ...

    def serving(self, version: int) -> None:
        """A version that was to be loaded is served, or is on its way to whoever fetches it."""
        ...


class Port(Protocol):
    """Whatever generates."""

    def begin(self) -> None:
        """Start."""
        ...

    def want(self, wish: Wish) -> None:
        """Have a trajectory grown."""
        ...

    def abort(self, lease: int) -> None:
        """Have it put down."""
        ...

    def load(self, version: int) -> None:
        """Have a version served."""
        ...

    def restart(self) -> None:
        """The controller is gone: hang up. `begin` is called when it is back."""
        ...

    def slow(self, factor: float) -> None:
        """Everything takes so many times as long from now on."""
        ...

    def busy(self) -> dict[str, tuple[int, int, Busy]]:
        """Engine → (slots, GPUs, where its time went)."""
        ...
