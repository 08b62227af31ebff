"""Time limits and options of the lease table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Time limits are in seconds."""

    restarts: bool = False
    """Whether the lease after a lost one starts at the prompt (`sync`) instead of at the last reported token."""
    heartbeat_timeout_s: float = 30.0
    """A worker that sends no message for this time is considered dead."""
    progress_timeout_s: float = 60.0
    """A worker that holds leases while its engine's token counter does not change for this time is considered stuck."""
    starve_s: float = 600.0
    """A lease that does not grow for this time is granted to another worker, even if its worker is active."""
    backup_lease_factor: float = 2.0
    """Start a backup lease when the expected remaining time exceeds this multiple of a free worker's; 0 disables."""
    backup_lease_after_s: float = 5.0
    """Minimum age of a lease before it can get a backup lease."""
    prefetch: float = 0.25
    """Leases granted beyond a worker's slots, as a fraction of its slots, when no worker has a free slot. They are
    queued on the worker."""
