"""Workers that somebody else looks after, on machines of a cluster: what the hub's side and they need of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.swarm.local_workers import LocalWorkers


class HubAccess(Protocol):
    """What a crew may ask of its hub, from any thread."""

    @property
    def url(self) -> str:
        """Of the hub."""
        ...

    @property
    def certificate(self) -> str:
        """PEM text of the hub's certificate, for workers to trust; empty without TLS."""
        ...

    def token(self, name: str) -> str:
        """Make the token of a name, for a worker of ours."""
        ...

    def gone(self, name: str, cause: str) -> None:
        """Whoever bears the token of a name has ended; its leases need not wait for it."""
        ...

    def weigh(self, name: str, weight: float) -> None:
        """The workers of a token are expected to do another share."""
        ...


class WorkerSupervisor(Protocol):
    """Workers of one run."""

    def begin(self, hub: HubAccess) -> None:
        """Start them; returns at once."""
        ...

    def weight(self, name: str) -> float:
        """Return what is expected of one slot of the workers of a token: see `WorkerJoined`."""
        ...

    def check_health(self) -> None:
        """Raise what has gone wrong for good, if anything has. Called often; returns at once."""
        ...

    def close(self) -> None:
        """End them all. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class LocalWorkerSupervisor:
    """All workers that a run has started itself: this machine's, and those of a crew where there is one."""

    local: LocalWorkers | None = None
    worker_supervisor: WorkerSupervisor | None = None

    def check_health(self) -> None:
        """Start again what has ended. Raises what has gone wrong for good."""
        if self.local is not None:
            self.local.check_health()
        if self.worker_supervisor is not None:
            self.worker_supervisor.check_health()

    def close(self) -> None:
        """End them all. May be called twice."""
        if self.local is not None:
            self.local.close()
        if self.worker_supervisor is not None:
            self.worker_supervisor.close()
