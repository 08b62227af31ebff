"""Workers that somebody else looks after, on machines of a cluster: what the hub's side and they need of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.swarm.local_workers import LocalWorkers


@dataclass(frozen=True, slots=True)
class HubAccess:
    """What a crew may ask of its hub, from any thread."""

    url: str
    certificate: str
    """PEM text of the hub's certificate, for workers to trust; empty without TLS."""
    token: Callable[[str], str]
    """Makes the token of a name, for a worker of ours."""
    gone: Callable[[str, str], None]
    """(name of a token, cause): whoever bears it has ended; its leases need not wait for it."""
    weigh: Callable[[str, float], None]
    """(name of a token, weight): its workers are expected to do another share."""


class WorkerSupervisor(Protocol):
    """Workers of one run."""

    def begin(self, hub: HubAccess) -> None:
        """Start them; returns at once."""
        ...

    def weight(self, name: str) -> float:
        """Return what is expected of one slot of the workers of a token: see `WorkerJoined`."""
        ...

    def look_after(self) -> None:
        """Raise what has gone wrong for good, if anything has. Called often; returns at once."""
        ...

    def close(self) -> None:
        """End them all. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class LocalWorkerSupervisor:
    """All workers that a run has started itself: this machine's, and those of a crew where there is one."""

    local: LocalWorkers
    worker_supervisor: WorkerSupervisor | None

    def look_after(self) -> None:
        self.local.look_after()
        if self.worker_supervisor is not None:
            self.worker_supervisor.look_after()

    def close(self) -> None:
        """End them all."""
        self.local.close()
        if self.worker_supervisor is not None:
            self.worker_supervisor.close()
