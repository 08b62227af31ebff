"""The interfaces between the hub and the supervisor of a run's workers on a cluster."""

from __future__ import annotations

from typing import Protocol


class HubAccess(Protocol):
    """The part of the hub that a supervisor uses. All methods may be called from any thread."""

    @property
    def url(self) -> str:
        """URL of the hub."""

    @property
    def certificate(self) -> str:
        """PEM text of the hub's certificate, which workers trust; empty without TLS."""

    def token(self, name: str) -> str:
        """Create an access token with this name for a worker that the run itself starts."""

    def remove_token(self, name: str) -> None:
        """Remove the access token with this name, whose worker has ended and is not started again."""

    def gone(self, name: str, cause: str) -> None:
        """Immediately end all leases of the workers that use the access token `name`: these workers have ended."""

    def weigh(self, name: str, weight: float) -> None:
        """Change the weight of the workers that use the access token `name`."""


class WorkerSupervisor(Protocol):
    """Starts and supervises a run's workers on the machines of a cluster."""

    def begin(self, hub: HubAccess) -> None:
        """Start the workers. Returns without waiting for them."""

    def weight(self, name: str) -> float:
        """Return the `WorkerJoined.weight` of the workers that use the access token `name`."""

    def check_health(self) -> None:
        """Raise an error if a worker has failed and a restart cannot help. Called often, so the method must not
        wait."""

    def close(self) -> None:
        """End all workers. May be called twice."""
