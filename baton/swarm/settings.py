"""[swarm]: workers apart from the trainer."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings
from baton.swarm.lease_rules import LeaseRules


class SwarmSettings(Settings):
    """[swarm] inference apart from training: a hub hands out leases and weights, workers come and go."""

    workers: int = Field(default=0, ge=0)
    """Worker processes started on this machine, with one torch thread each (`--workers`)."""
    serve: str | None = None
    """HOST:PORT where workers from elsewhere join (`--serve`); without it only this machine's own can."""
    token_file: str = "baton-tokens.json"
    """Where the tokens are kept that `baton token create` makes."""
    certificate: str | None = None
    """PEM file with the hub's certificate chain, for TLS."""
    key: str | None = None
    """PEM file with its private key."""
    insecure: bool = False
    """Serve beyond this machine without TLS (`--insecure`): tokens, prompts and weights can then be read on the way."""
    publish_every: int = Field(default=1, ge=1)
    """Publish period: versions of which one is published; at most max_staleness. Above 1 only in `async`."""
    max_lag: int | None = Field(default=None, ge=0)
    """`async`: versions that a worker may be behind the latest published one and still be given leases. The default is
    one publish period where max_staleness leaves room for it, else 0."""
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds without a sign of life after which a worker is taken for dead, and others go on with its leases."""
    progress_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a token after which a worker that holds leases is taken for wedged."""
    no_worker_timeout_s: float = Field(default=3600.0, ge=0)
    """Seconds that a run waits while no worker is there at all, saying so, before it ends; at least
    rollout.stall_timeout_s."""
    backup_lease_factor: float = Field(default=2.0, ge=0)
    """A straggler is given to a second worker when it may take so many times as long as there; 0 is never."""
    report_every_s: float = Field(default=2.0, gt=0)
    """Seconds after which a worker reports what its trajectories have grown by, beside engine.report_every_tokens."""

    @property
    def is_on(self) -> bool:
        """Whether there is a hub at all."""
        return bool(self.workers) or self.serve is not None

    def lease_rules(self, *, restarts: bool) -> LeaseRules:
        """The rules of the lease table. restarts: see `LeaseRules`."""
        return LeaseRules(
            restarts=restarts,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            progress_timeout_s=self.progress_timeout_s,
            backup_lease_factor=self.backup_lease_factor,
        )
