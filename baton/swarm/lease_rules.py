"""Time limits and options of the lease table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Options and time limits of the lease table; time limits are in seconds."""

    restarts: bool = False
    """True if the lease after a lost one starts at the prompt (`sync`) instead of after the last reported token."""
    heartbeat_timeout_s: float = 30.0
    """Time without a message after which a worker is considered dead."""
    progress_timeout_s: float = 60.0
    """Time without a change of the engine's token counter after which a worker that holds leases is considered
    stuck."""
    starve_s: float = 600.0
    """Time without new tokens after which a lease is granted to another worker, even if its worker is active."""
    backup_lease_factor: float = 2.0
    """Start a backup lease when the expected remaining time exceeds this multiple of a free worker's; 0 disables."""
    backup_lease_after_s: float = 5.0
    """Minimum age of a lease before it can get a backup lease."""
    prefetch: float = 0.25
    """Leases that a worker may hold beyond its slots, as a fraction of its slots, if no worker has a free slot. The
    worker queues these leases."""
