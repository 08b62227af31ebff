"""Decides which workers may take part in a run, based on quarantines, the workers' keys, and the run's requirements.
`WorkerAccess` uses no socket and no clock, so the live hub and the simulator use the same class."""

from __future__ import annotations

from dataclasses import dataclass

from baton.swarm.auth import AccessGrant, Denied
from baton.swarm.identity import WorkerKeys
from baton.swarm.messages import Hello
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.verify import Calibration, unseen_draws


class Unwanted(Exception):
    """Raised for a worker that has a valid access token, but is quarantined or does not meet the run's requirements."""


@dataclass(frozen=True, slots=True)
class WorkerRequirements:
    """The requirements that a worker of a run must meet, in addition to a valid access token."""

    dtype: str
    """Dtype of the worker's engine."""
    engine: str
    """Kind of engine that the recipe names."""
    on_new_version: str
    calibration: Calibration

    def refusal(self, hello: Hello, grant: AccessGrant) -> str | None:
        """Return the reason why a worker does not meet the requirements, or None if it does."""
        if self.on_new_version == "keep" and not grant.is_trusted:
            made = "create their token with baton token create --role worker --trusted"
            return f'on_new_version = "keep" is only for trusted workers: {made}'
        if hello.worker_class.dtype != self.dtype:
            return f"the worker generates in {hello.worker_class.dtype}, but this run requires {self.dtype}"
        if grant.is_trusted:
            return None
        return unseen_draws(hello.worker_class, self.engine) or self.calibration.refusal(hello.worker_class)


class WorkerAccess:
    """Decides whether a worker with a valid access token may take part in a run."""

    def __init__(
        self, quarantine: Quarantine, keys: WorkerKeys, requirements: WorkerRequirements | None = None
    ) -> None:
        self.quarantine, self.keys = quarantine, keys
        self._requirements = requirements

    def recheck(self, grant: AccessGrant, worker: str, address: str) -> Denied | None:
        """Return the reason why a connected worker must be disconnected, or None if it may stay connected."""
        reason = self.quarantine.reason(grant, worker)
        return None if reason is None else Denied(403, reason, grant.label)

    def identify(self, hello: Hello, grant: AccessGrant) -> tuple[str, str]:
        """Return a worker's id and key. A worker that presents no known key gets a new key. Raises Unwanted if the
        worker does not meet the requirements."""
        refusal = None if self._requirements is None else self._requirements.refusal(hello, grant)
        if refusal is not None:
            raise Unwanted(refusal)
        key = hello.key
        worker = self.keys.worker(grant.digest, key)
        if worker is None:
            key = self.keys.issue(grant.digest)
            worker = self.keys.worker(grant.digest, key)
            assert worker is not None, "a key that was just issued is known"
        return worker, key
