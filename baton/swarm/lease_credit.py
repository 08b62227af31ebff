"""Limits how many leases an untrusted worker may hold. A new worker may hold few leases. After it has delivered tokens,
it may hold as many leases as it has slots.

A worker reports its own number of slots, which may be false. Every `TOKENS_PER_LEASE` delivered tokens earn one more
lease, so a correct worker reaches its slots after a few reports. A lease that another worker finishes, or that delivers
no token, costs `LOST_LEASE_TOKENS`. A worker that delivers no tokens is therefore soon granted no lease. After 40 to 50
s it is granted one lease again. The class uses no clock and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LEASES = 8
"""Number of leases that a new worker may hold before it has delivered a token."""
TOKENS_PER_LEASE = 16
LOST_LEASE_TOKENS = 64
RECOVERED_TOKENS_PER_S = 1.6
"""Credit that a worker recovers per second, until it may hold one lease. A worker without credit for a lease is granted
one again after 40 to 50 s."""
_ONE_LEASE = -TOKENS_PER_LEASE * (FIRST_LEASES - 1)
_LEAST = _ONE_LEASE - TOKENS_PER_LEASE - LOST_LEASE_TOKENS


@dataclass(slots=True)
class LeaseCredit:
    """The credit of one worker, or of all workers of one token together."""

    slots: int
    """Maximum number of leases that delivered tokens can earn."""
    at_s: float
    tokens: float = 0.0
    """Credit: number of delivered tokens minus the cost of lost leases."""

    @property
    def num_leases(self) -> int:
        """Number of leases that may be held at the same time."""
        return int(max(0, min(self.slots, FIRST_LEASES + self.tokens // TOKENS_PER_LEASE)))

    def earn(self, num_tokens: int) -> None:
        self.tokens = min(TOKENS_PER_LEASE * max(0, self.slots - FIRST_LEASES), self.tokens + num_tokens)

    def resize(self, by: int) -> None:
        """Change the number of slots when workers join or leave. After workers have left, the credit is limited to what
        the remaining slots can use."""
        self.slots += by
        self.earn(0)

    def lose(self) -> None:
        """Subtract the cost of a lease that had no result."""
        self.tokens = max(_LEAST, self.tokens - LOST_LEASE_TOKENS)

    def recover(self, now_s: float) -> None:
        """Add the credit that is recovered in the time since the last call, until the credit allows one lease."""
        if self.tokens < _ONE_LEASE:
            self.tokens = min(_ONE_LEASE, self.tokens + RECOVERED_TOKENS_PER_S * max(0.0, now_s - self.at_s))
        self.at_s = now_s
