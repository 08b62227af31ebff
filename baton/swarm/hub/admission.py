"""Decides which connections a listening process keeps, and limits the number of connections and the request rate of
each caller. The module uses no socket and no clock.

    accept ──▶ stranger ──valid token──▶ known caller ──▶ closed
                  └──▶ evicted: too many strangers, or no token in time

Connections that have not presented a valid access token ("strangers") have a separate limit. If a connection arrives
when this limit is reached, one stranger is closed: the oldest stranger of the network address that has the most
strangers. A caller that opens many connections therefore loses its own connections, and callers without a token cannot
block callers with a token. All untrusted tokens together may use half of all connections, and one untrusted token at
most a quarter. A further quarter of all connections is reserved for the run's owner (admins, trusted workers).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

MAX_CONNECTIONS = 4096
MAX_RESERVE = 1024
"""Maximum number of file descriptors that are reserved for the process's own files."""
AUTHENTICATE_S = 30.0
"""A connection that presents no valid token within this number of seconds is closed. The TLS handshake and the transfer
of the HTTP headers count towards this time."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Maximum numbers of connections."""

    strangers: int
    untrusted: int
    """Maximum for all connections with a valid token, except those of the run's owner."""
    untrusted_per_token: int
    known: int
    """Maximum for all connections with a valid token."""

    @classmethod
    def of(cls, file_limit: int) -> ConnectionLimits:
        """Return the limits for a process that may open `file_limit` files, of which some are reserved."""
        total = min(MAX_CONNECTIONS, file_limit - min(MAX_RESERVE, file_limit // 2))
        quarter = total // 4
        return cls(quarter, 2 * quarter, quarter, 3 * quarter)


@dataclass(slots=True)
class Admission:
    """The connections of one process, each identified by a number that the caller chooses."""

    places: ConnectionLimits
    _strangers: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Connection of a stranger → (network address, arrival time in seconds). The oldest connection is first."""
    _known: dict[int, str] = field(default_factory=dict)
    """Connection with a valid token → key of this token. The key is empty for connections of the run's owner."""
    _per_token: Counter[str] = field(default_factory=Counter)

    def arrive(self, connection: int, address: str, now_s: float) -> int | None:
        """Add a connection without a token. Return the connection that the caller must close to make room, or None."""
        evicted = None
        if len(self._strangers) >= self.places.strangers:
            # of addresses with equally many strangers, `most_common` returns the one that is first in `_strangers`
            ((crowded, _),) = Counter(known for known, _ in self._strangers.values()).most_common(1)
            evicted = next(one for one, (known, _) in self._strangers.items() if known == crowded)
            self.leave(evicted)
        self._strangers[connection] = (network_of(address), now_s)
        return evicted

    def identify(self, connection: int, key: str, *, is_owner: bool = False) -> str | None:
        """Count a connection towards its token. Return the reason why the connection is refused, or None if it is
        accepted. A refused connection stays a stranger."""
        if connection in self._known:
            return None
        if not is_owner and self._per_token[key] >= self.places.untrusted_per_token:
            return f"this token has reached its limit of {self.places.untrusted_per_token} connections"
        is_full = not is_owner and self._per_token.total() >= self.places.untrusted
        if is_full or len(self._known) >= self.places.known:
            return "all connections for callers with a token are in use: try again"
        self.leave(connection)
        self._known[connection] = "" if is_owner else key
        if not is_owner:
            self._per_token[key] += 1
        return None

    def is_known(self, connection: int) -> bool:
        return connection in self._known

    def leave(self, connection: int) -> None:
        self._strangers.pop(connection, None)
        if key := self._known.pop(connection, None):
            self._per_token[key] -= 1
            if not self._per_token[key]:
                del self._per_token[key]

    def oldest_stranger(self) -> int | None:
        """Return the oldest connection without a valid token, or None if all connections have presented one. The caller
        closes this connection when no file descriptor is left."""
        return next(iter(self._strangers), None)

    def overdue(self, now_s: float) -> list[int]:
        """Return the connections that have presented no valid token within `AUTHENTICATE_S` seconds."""
        return [one for one, (_, at_s) in self._strangers.items() if now_s - at_s > AUTHENTICATE_S]


@dataclass(slots=True)
class RateLimit:
    """A rate limit for each key, implemented as a token bucket. Requests beyond the rate are delayed, not refused."""

    per_s: float
    burst: float
    _full_s: dict[str, float] = field(default_factory=dict)
    """Key → time in seconds at which the key's bucket is full again."""

    def delay_s(self, key: str, now_s: float) -> float:
        """Count one request of a key. Return the number of seconds to wait before the request may proceed."""
        full_s = max(self._full_s.get(key, now_s), now_s) + 1 / self.per_s
        self._full_s[key] = full_s
        return max(0.0, full_s - now_s - self.burst / self.per_s)


def network_of(address: str) -> str:
    """Return the network that counts as one caller: an IPv4 address itself, or the /64 network of an IPv6 address. Text
    that is not an address is returned unchanged."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(found) if found.version == 4 else str(IPv6Address(int(found) >> 64 << 64))
