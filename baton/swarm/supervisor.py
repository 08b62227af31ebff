"""The interfaces between the hub and the supervisor of the workers that a run starts on a cluster."""

from __future__ import annotations

from typing import Protocol


class HubAccess(Protocol):
    """Interface of the hub for a supervisor; may be used from any thread."""

    @property
    def url(self) -> str:
        """URL of the hub."""
        ...

    @property
    def certificate(self) -> str:
        """PEM text of the hub's certificate, which workers trust; empty without TLS."""
        ...

    def token(self, name: str) -> str:
        """Create a token with this name for one of the run's own workers."""
        ...

    def gone(self, name: str, cause: str) -> None:
        """End the leases of the workers of a token at once, because these workers have ended."""
        ...

    def weigh(self, name: str, weight: float) -> None:
        """Change the weight of the workers of a token."""
        ...


class WorkerSupervisor(Protocol):
    """Starts and supervises a run's workers on the machines of a cluster."""

    def begin(self, hub: HubAccess) -> None:
        """Start the workers; returns at once."""
        ...

    def weight(self, name: str) -> float:
        """Return the expected speed of one slot of the workers of a token, as in `WorkerJoined.weight`."""
        ...

    def check_health(self) -> None:
        """Raise an error that no restart can fix, if one has occurred. Called often; returns at once."""
        ...

    def close(self) -> None:
        """End all workers. May be called twice."""
        ...
