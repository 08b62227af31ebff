"""Limits how many leases an untrusted worker may hold: few at first, up to its slots after it has delivered tokens.

A worker reports its own number of slots, which may be false. Every `TOKENS_PER_LEASE` delivered tokens earn one more
lease, so a correct worker reaches its slots after a few reports. A lease that another worker finishes, or that delivers
no token, costs `LOST_LEASE_TOKENS`. A worker that delivers no tokens therefore soon has no lease, and gets one again
after 40 to 50 s. The class uses no clock and no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LEASES = 8
"""Number of leases that a new worker may hold before it has delivered a token."""
TOKENS_PER_LEASE = 16
LOST_LEASE_TOKENS = 64
RECOVERED_TOKENS_PER_S = 1.6
"""Credit recovered per second, up to one lease. A worker that has lost every lease is granted one again after 40 to
50 s."""
_ONE_LEASE = -TOKENS_PER_LEASE * (FIRST_LEASES - 1)
_LEAST = _ONE_LEASE - TOKENS_PER_LEASE - LOST_LEASE_TOKENS


@dataclass(slots=True)
class LeaseCredit:
    """The credit of one worker, or of all workers of one token together."""

    slots: int
    """Maximum number of leases that can be earned."""
    at_s: float
    tokens: float = 0.0
    """Number of delivered tokens minus the cost of lost leases."""

    @property
    def num_leases(self) -> int:
        """Maximum number of leases held at once."""
        return int(max(0, min(self.slots, FIRST_LEASES + self.tokens // TOKENS_PER_LEASE)))

    def earn(self, num_tokens: int) -> None:
        """Add delivered tokens."""
        self.tokens = min(TOKENS_PER_LEASE * max(0, self.slots - FIRST_LEASES), self.tokens + num_tokens)

    def resize(self, by: int) -> None:
        """Change the number of slots when workers join or leave. Leaving workers take their share of the credit with
        them."""
        self.slots += by
        self.earn(0)

    def lose(self) -> None:
        """Charge for a lease without result."""
        self.tokens = max(_LEAST, self.tokens - LOST_LEASE_TOKENS)

    def recover(self, now_s: float) -> None:
        """Recover credit for the time since the last call, up to one lease."""
        if self.tokens < _ONE_LEASE:
            self.tokens = min(_ONE_LEASE, self.tokens + RECOVERED_TOKENS_PER_S * max(0.0, now_s - self.at_s))
        self.at_s = now_s
