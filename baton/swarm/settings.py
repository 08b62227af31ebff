"""The section [swarm] of a recipe: workers that run separately from the trainer."""

from __future__ import annotations

from pydantic import Field

from baton.settings import Settings
from baton.swarm.leases import LeaseRules


class SwarmSettings(Settings):
    """[swarm] generation separate from training: a hub grants leases and serves weights; workers may join and leave at
    any time."""

    workers: int = Field(default=0, ge=0)
    """Number of worker processes started on this machine, with one torch thread each (`--workers`)."""
    serve: str | None = None
    """HOST:PORT at which workers on other machines join (`--serve`); without it, only workers of this machine can
    join."""
    token_file: str = "baton-tokens.json"
    """File with the tokens that `baton token create` makes."""
    certificate: str | None = None
    """PEM file with the hub's certificate chain, for TLS."""
    key: str | None = None
    """PEM file with the certificate's private key."""
    insecure: bool = False
    """Serve other machines without TLS (`--insecure`). Tokens, prompts and weights are then readable on the network."""
    publish_every: int = Field(default=1, ge=1)
    """Number of versions of which one is published, at most max_staleness. Above 1 only in `async`."""
    max_lag: int | None = Field(default=None, ge=0)
    """In `async`, the number of versions that a worker may be behind the latest published version and still be granted
    leases. The default is `publish_every` if max_staleness allows it, otherwise 0."""
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds without a message after which a worker is considered dead; its leases are granted to other workers."""
    progress_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a new token after which a worker that holds leases is considered stuck and disconnected."""
    no_worker_timeout_s: float = Field(default=3600.0, ge=0)
    """Seconds that a run waits, with messages on the terminal, if no worker is connected. Then it ends. At least
    rollout.stall_timeout_s."""
    backup_lease_factor: float = Field(default=2.0, ge=0)
    """Start a backup lease when the expected remaining time exceeds this multiple of an idle worker's; 0 disables."""
    report_every_s: float = Field(default=2.0, gt=0)
    """Seconds after which a worker reports new tokens, even if they are fewer than engine.report_every_tokens."""

    @property
    def is_on(self) -> bool:
        """True if the run starts a hub."""
        return bool(self.workers) or self.serve is not None

    def lease_rules(self, *, restarts: bool) -> LeaseRules:
        """Return the rules of the lease table. restarts: as in `LeaseRules`."""
        return LeaseRules(
            restarts=restarts,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            progress_timeout_s=self.progress_timeout_s,
            backup_lease_factor=self.backup_lease_factor,
        )
