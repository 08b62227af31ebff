"""Limits how many leases an untrusted worker may hold. A new worker may hold few leases. After it has delivered tokens,
it may hold as many leases as it has slots.

The number of slots that a worker reports may be false. Every `TOKENS_PER_LEASE` delivered tokens earn one more lease,
so after a few reports a correct worker may hold a lease for each of its slots. A worker loses a credit of
`LOST_LEASE_TOKENS` tokens if another worker finishes the task of its lease, or if the lease delivers no token. A worker
that delivers no tokens is therefore soon granted no further lease. Credit recovers with time, so after at most 50 s a
worker may hold one lease again.

A lease is returned if the worker ends it (aborted, refused, or not listed after a reconnection) although the hub has
not recalled it. A correct worker does so only at a change of version or after a broken connection. The tokens of a
returned lease do not count as delivered. If a worker has returned over `FREE_RETURNS` more leases than it has finished,
each further returned lease also costs `LOST_LEASE_TOKENS`. `LeaseCredit` uses no clock and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_LEASES = 8
"""Number of leases that a new worker may hold before it has delivered a token."""
TOKENS_PER_LEASE = 16
LOST_LEASE_TOKENS = 64
FREE_RETURNS = 32
"""A returned lease is not a lost lease while `LeaseCredit.returned` is at most this number."""
RECOVERED_TOKENS_PER_S = 1.6
"""A worker whose credit allows no lease recovers this credit per second, in tokens, until it may hold one lease. This
takes at most 50 s."""
_ONE_LEASE = -TOKENS_PER_LEASE * (FIRST_LEASES - 1)
_LEAST = _ONE_LEASE - TOKENS_PER_LEASE - LOST_LEASE_TOKENS


@dataclass(slots=True)
class LeaseCredit:
    """The credit of one worker, or of all workers of one access token together."""

    slots: int
    """Maximum number of leases that may be held at the same time, even if the credit allows more."""
    at_s: float
    tokens: float = 0.0
    """Credit: number of delivered tokens minus the cost of lost leases, within limits. It may be negative."""
    returned: int = 0
    """Number of returned leases minus the number of finished leases, at least -4 × slots."""

    @property
    def num_leases(self) -> int:
        return int(max(0, min(self.slots, FIRST_LEASES + self.tokens // TOKENS_PER_LEASE)))

    def earn(self, num_tokens: int) -> None:
        self.tokens = min(TOKENS_PER_LEASE * max(0, self.slots - FIRST_LEASES), self.tokens + num_tokens)

    def resize(self, by: int) -> None:
        """Add `by` to the number of slots, because workers have joined or left. After workers have left, the credit is
        limited to what the remaining slots can use."""
        self.slots += by
        self.earn(0)

    def lose(self) -> None:
        self.tokens = max(_LEAST, self.tokens - LOST_LEASE_TOKENS)

    def give_back(self, num_tokens: int) -> None:
        """Count a returned lease, which has delivered `num_tokens` tokens. While `returned` is at most `FREE_RETURNS`,
        this does not reduce the limit below that of a new worker."""
        self.returned += 1
        least = min(self.tokens, 0.0) if self.returned <= FREE_RETURNS else _LEAST + LOST_LEASE_TOKENS
        self.tokens = max(least, self.tokens - num_tokens)
        if self.returned > FREE_RETURNS:
            self.lose()

    def finish(self) -> None:
        self.returned = max(-4 * self.slots, self.returned - 1)

    def recover(self, now_s: float) -> None:
        """Add the credit that has recovered since the last call, at most until the credit allows one lease."""
        if self.tokens < _ONE_LEASE:
            self.tokens = min(_ONE_LEASE, self.tokens + RECOVERED_TOKENS_PER_S * max(0.0, now_s - self.at_s))
        self.at_s = now_s
