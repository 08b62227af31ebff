"""How many leases a worker of somebody else's may hold: few at first, and as many as it claims once it has delivered.

Slots are what a worker claims. `TOKENS_PER_LEASE` tokens that were delivered earn one lease more, so a worker that
delivers is at its slots after a few reports. A lease that another worker has to finish, or that brings no token, costs
`LOST_LEASE_TOKENS`: who only claims soon has none, and gets one again after a while. No clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LEASES = 8
"""That are given in advance."""
TOKENS_PER_LEASE = 16
LOST_LEASE_TOKENS = 64
RECOVERED_TOKENS_PER_S = 1.6
"""Up to one lease: a worker that has lost every lease is given one again after 40 to 50 s."""
_ONE_LEASE = -TOKENS_PER_LEASE * (FIRST_LEASES - 1)
_LEAST = _ONE_LEASE - TOKENS_PER_LEASE - LOST_LEASE_TOKENS


@dataclass(slots=True)
class Credit:
    """Of one worker, or of all workers of a token together."""

    slots: int
    """Beyond which nothing is earned."""
    at_s: float
    tokens: float = 0.0
    """Delivered, less what lost leases cost."""

    @property
    def num_leases(self) -> int:
        """That may be held at once."""
        return int(max(0, min(self.slots, FIRST_LEASES + self.tokens // TOKENS_PER_LEASE)))

    def earn(self, num_tokens: int) -> None:
        """Tokens have been delivered."""
        self.tokens = min(TOKENS_PER_LEASE * max(0, self.slots - FIRST_LEASES), self.tokens + num_tokens)

    def resize(self, by: int) -> None:
        """Workers come, or go with what they have earned."""
        self.slots += by
        self.earn(0)

    def lose(self) -> None:
        """A lease has come to nothing."""
        self.tokens = max(_LEAST, self.tokens - LOST_LEASE_TOKENS)

    def recover(self, now_s: float) -> None:
        """Time has passed."""
        if self.tokens < _ONE_LEASE:
            self.tokens = min(_ONE_LEASE, self.tokens + RECOVERED_TOKENS_PER_S * max(0.0, now_s - self.at_s))
        self.at_s = now_s
