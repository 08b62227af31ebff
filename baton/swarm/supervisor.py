"""Workers that a run starts: the interfaces between the hub and the supervisors of these workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.swarm.local_workers import LocalWorkers


class HubAccess(Protocol):
    """The hub's interface for a supervisor; may be used from any thread."""

    @property
    def url(self) -> str:
        """URL of the hub."""
        ...

    @property
    def certificate(self) -> str:
        """PEM text of the hub's certificate, for workers to trust; empty without TLS."""
        ...

    def token(self, name: str) -> str:
        """Make a token with this name for one of the run's own workers."""
        ...

    def gone(self, name: str, cause: str) -> None:
        """Report that the workers of a token have ended, so that their leases end at once."""
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
        """Return the expected speed of one slot of the workers of a token, as in `WorkerJoined`."""
        ...

    def check_health(self) -> None:
        """Raise an error that no restart can fix, if there is one. Called often; returns at once."""
        ...

    def close(self) -> None:
        """End all workers. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class LocalWorkerSupervisor:
    """All workers that a run has started: local processes, and those of a cluster's supervisor if there is one."""

    local: LocalWorkers | None = None
    worker_supervisor: WorkerSupervisor | None = None

    def check_health(self) -> None:
        """Restart workers that have ended. Raises errors that no restart can fix."""
        if self.local is not None:
            self.local.check_health()
        if self.worker_supervisor is not None:
            self.worker_supervisor.check_health()

    def close(self) -> None:
        """End all workers. May be called twice."""
        if self.local is not None:
            self.local.close()
        if self.worker_supervisor is not None:
            self.worker_supervisor.close()
