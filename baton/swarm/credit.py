"""Limits how many leases an untrusted worker may hold: few at first, up to its slots after it has delivered tokens.

A worker states its number of slots itself. Every `TOKENS_PER_LEASE` delivered tokens earn one more lease, so a correct
worker reaches its slots after a few reports. A lease that another worker finishes, or that delivers no token, costs
`LOST_LEASE_TOKENS`: a worker that delivers nothing soon has no lease, and gets one again after a while. No clock, no
I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LEASES = 8
"""Granted in advance."""
TOKENS_PER_LEASE = 16
LOST_LEASE_TOKENS = 64
RECOVERED_TOKENS_PER_S = 1.6
"""Up to one lease: a worker that has lost every lease is granted one again after 40 to 50 s."""
_ONE_LEASE = -TOKENS_PER_LEASE * (FIRST_LEASES - 1)
_LEAST = _ONE_LEASE - TOKENS_PER_LEASE - LOST_LEASE_TOKENS


@dataclass(slots=True)
class Credit:
    """Of one worker, or of all workers of a token together."""

    slots: int
    """Maximum number of leases that can be earned."""
    at_s: float
    tokens: float = 0.0
    """Delivered tokens minus the cost of lost leases."""

    @property
    def num_leases(self) -> int:
        """Number of leases that may be held at once."""
        return int(max(0, min(self.slots, FIRST_LEASES + self.tokens // TOKENS_PER_LEASE)))

    def earn(self, num_tokens: int) -> None:
        """Add delivered tokens."""
        self.tokens = min(TOKENS_PER_LEASE * max(0, self.slots - FIRST_LEASES), self.tokens + num_tokens)

    def resize(self, by: int) -> None:
        """Change the slots when workers join or leave; leaving workers take their share of the credit with them."""
        self.slots += by
        self.earn(0)

    def lose(self) -> None:
        """Charge a lease without result."""
        self.tokens = max(_LEAST, self.tokens - LOST_LEASE_TOKENS)

    def recover(self, now_s: float) -> None:
        """Recover credit over time, up to one lease."""
        if self.tokens < _ONE_LEASE:
            self.tokens = min(_ONE_LEASE, self.tokens + RECOVERED_TOKENS_PER_S * max(0.0, now_s - self.at_s))
        self.at_s = now_s
