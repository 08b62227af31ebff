"""The recipe section [swarm], for workers that run separately from the trainer."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings
from baton.swarm.leases import LeaseRules


class SwarmSettings(Settings):
    """[swarm] Workers that generate separately from the trainer. A hub grants leases to workers and serves weights.
    Workers may join and leave at any time."""

    workers: int = Field(default=0, ge=0)
    """Number of worker processes started on this machine, with one torch thread each (`--workers`)."""
    serve: str | None = None
    """HOST:PORT for workers on other machines (`--serve`); without this key, only workers on this machine can join."""
    token_file: str = "baton-tokens.json"
    """File that contains the access tokens created by `baton token create`."""
    certificate: str | None = None
    """PEM file with the certificate chain that the hub uses for TLS."""
    key: str | None = None
    """PEM file with the certificate's private key."""
    insecure: bool = False
    """True: other machines may connect without TLS (`--insecure`). Access tokens, prompts and weights are then
    unencrypted."""
    publish_every: int = Field(default=1, ge=1)
    """Number of train steps between two published versions. A value above 1 is allowed only in mode `async`.
    `publish_every` + `max_lag` - 1 must be at most `max_staleness`."""
    max_lag: int | None = Field(default=None, ge=0)
    """In mode `async`, a worker is granted leases only if its version is at most this number of versions behind the
    latest published version. The default is `publish_every` if `max_staleness` allows this, otherwise 0."""
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    """A worker that sends no message for this number of seconds is considered dead, and its leases go to other
    workers."""
    progress_timeout_s: float = Field(default=60.0, gt=0)
    """A worker that holds leases but generates no token for this number of seconds is considered stuck and is
    disconnected."""
    no_worker_timeout_s: float = Field(default=3600.0, ge=0)
    """If no worker is connected for this number of seconds, the run ends with an error. Messages on the terminal show
    that the run waits. Must be at least `rollout.stall_timeout_s`."""
    backup_lease_factor: float = Field(default=2.0, ge=0)
    """Start a backup lease if the ratio of a lease's expected remaining time to the time that an idle worker would need
    exceeds this number. 0 disables backup leases."""
    report_every_s: float = Field(default=2.0, gt=0)
    """Maximum seconds between two reports of a worker that has new tokens. After this time, the worker sends a report
    even if it has fewer than `engine.report_every_tokens` new tokens."""

    @property
    def is_on(self) -> bool:
        """True if the run starts a hub."""
        return bool(self.workers) or self.serve is not None

    @property
    def heartbeat_s(self) -> float:
        """Interval of a worker's heartbeats in seconds. A worker that misses six heartbeats is considered dead."""
        return self.heartbeat_timeout_s / 6

    def lease_rules(self, *, restarts: bool) -> LeaseRules:
        """Return the rules of the lease table. `restarts`: value of `LeaseRules.restarts`."""
        return LeaseRules(
            restarts=restarts,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            progress_timeout_s=self.progress_timeout_s,
            backup_lease_factor=self.backup_lease_factor,
        )
