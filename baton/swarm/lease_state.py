"""What the lease table keeps of each worker, task and lease."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.swarm.credit import Credit

Ask = tuple[int, bool]
"""(version, whether exactly that one is wanted)"""


@dataclass(slots=True, eq=False)
class TokenOwner:
    """The holder of a token, with all workers that use it."""

    credit: Credit
    workers: set[int] = field(default_factory=set)
    num_held: int = 0
    """Leases."""

    @property
    def has_lease(self) -> bool:
        """Whether they may hold one more."""
        return self.num_held < self.credit.num_leases


@dataclass(slots=True, eq=False)
class Worker:
    """One worker as the lease table sees it."""

    number: int
    slots: int
    weight: float
    """What is expected of one of its slots, against the others'."""
    heard_s: float
    moved_s: float
    kind: str | None = ""
    """See `WorkerJoined`."""
    version: int | None = None
    """None while it is given nothing."""
    decoded_tokens: int = -1
    grown_tokens: float = 0.0
    """Of late …"""
    grown_s: float = 0.0
    """… and the time that its leases took for them, all together."""
    leases: set[int] = field(default_factory=set)
    credit: Credit | None = None
    """None: it may fill its slots at once."""
    owner: TokenOwner | None = None
    stamp: int = 0
    """Of its latest note among the places; notes of other stamps are out of date."""

    @property
    def speed(self) -> float | None:
        """Tokens a second of one lease, of late; None before the first were seen."""
        return self.grown_tokens / self.grown_s if self.grown_s else None

    @property
    def pace(self) -> float | None:
        """Its speed by what was expected of it; None before that was seen."""
        return None if self.speed is None else self.speed / self.weight

    @property
    def room(self) -> int:
        """Its slots, as far as it has earned them."""
        return self.slots if self.credit is None else min(self.slots, self.credit.num_leases)

    @property
    def has_slot(self) -> bool:
        """Whether one of its slots is free."""
        return len(self.leases) < self.room and self.owner_allows

    @property
    def owner_allows(self) -> bool:
        """Whether the workers of its owner may hold one more lease."""
        return self.owner is None or self.owner.has_lease

    def serves(self, version: int, is_exact: bool) -> bool:
        """Whether it may grow what asks for exactly, or at least, a version."""
        return self.version is not None and (self.version == version if is_exact else self.version >= version)


@dataclass(slots=True, eq=False)
class TrackedLease:
    """One worker's attempt at a task."""

    number: int
    task: int
    worker: int
    base: int
    length: int
    granted_s: float
    grew_s: float
    stem: str
    """Leases of one stem make the same tokens."""
    owner: TokenOwner | None = None
    recalled_s: float | None = None
    version: int = 0
    """Of its last token."""

    def forgive(self, delay_s: float, now_s: float) -> None:
        """Let no time have passed for as long as nobody listened."""
        self.granted_s = min(now_s, self.granted_s + delay_s)
        self.grew_s = min(now_s, self.grew_s + delay_s)
        if self.recalled_s is not None:
            self.recalled_s = min(now_s, self.recalled_s + delay_s)


@dataclass(slots=True, eq=False)
class TrackedTask:
    """A trajectory that somebody wants grown."""

    number: int
    ask: Ask
    committed: int
    max_tokens: int
    leases: list[TrackedLease] = field(default_factory=list)
    """That workers hold: none while it waits, two while it is relieved."""
    stem: str | None = None
    """Of the lease that made what is committed; None while nobody has made any."""
    rested: list[TrackedLease] = field(default_factory=list)
    """Put down while another is still out."""
    is_aborting: bool = False

    def commit(self, lease: TrackedLease) -> None:
        """Take over what a lease has. Versions never go back: who goes on must serve at least its last."""
        self.committed, self.stem = lease.length, lease.stem
        version, is_exact = self.ask
        if not is_exact:
            self.ask = max(version, lease.version), False

    @property
    def is_waiting(self) -> bool:
        """Whether nobody holds it."""
        return not self.leases
