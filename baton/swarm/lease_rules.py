"""What the lease table goes by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """What the table goes by; times in seconds."""

    restarts: bool = False
    """Whether a lost lease's successor begins at the prompt (`sync`) instead of the last reported token."""
    heartbeat_timeout_s: float = 30.0
    """A worker that is not heard of for so long is taken for dead."""
    progress_timeout_s: float = 60.0
    """… and one that holds leases while its engine's counter stands still for so long."""
    starve_s: float = 600.0
    """A lease that does not grow for so long goes to somebody else, though its worker is busy."""
    backup_lease_factor: float = 2.0
    """A lease is relieved when it may take so many times as long as a free worker would; 0 is never."""
    backup_lease_after_s: float = 5.0
    """No lease is relieved before it is so old."""
    prefetch: float = 0.25
    """Leases given beyond a worker's slots, by slot, when no slot is free anywhere: they wait there for the next."""
