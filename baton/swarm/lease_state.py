"""The state of each worker, task and lease in the lease table."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.swarm.credit import Credit

Ask = tuple[int, bool]
"""(version, True if exactly this version is required, False if a later version is also accepted)"""


@dataclass(slots=True, eq=False)
class TokenOwner:
    """The holder of a token, and all workers that use the token."""

    credit: Credit
    workers: set[int] = field(default_factory=set)
    num_held: int = 0
    """Number of leases that the owner's workers hold."""

    @property
    def has_lease(self) -> bool:
        """True if the owner's workers may hold one more lease."""
        return self.num_held < self.credit.num_leases


@dataclass(slots=True, eq=False)
class Worker:
    """A worker in the lease table."""

    number: int
    slots: int
    weight: float
    """Expected speed of one slot, relative to the mean of all workers."""
    heard_s: float
    moved_s: float
    kind: str | None = ""
    """Kind of the worker, as in `WorkerJoined`."""
    version: int | None = None
    """Number of the version that the worker serves; None while it may be granted no lease."""
    decoded_tokens: int = -1
    grown_tokens: float = 0.0
    """Recently generated tokens, with exponential decay."""
    grown_s: float = 0.0
    """Lease-seconds in which these tokens were generated, with the same decay."""
    leases: set[int] = field(default_factory=set)
    credit: Credit | None = None
    """Credit that limits the worker's leases; None for a worker that may fill its slots at once."""
    owner: TokenOwner | None = None
    stamp: int = 0
    """Identifier of the worker's current entry in the worker index; entries with another stamp are outdated."""

    @property
    def speed(self) -> float | None:
        """Recent tokens per second of one lease; None before the first report."""
        return self.grown_tokens / self.grown_s if self.grown_s else None

    @property
    def pace(self) -> float | None:
        """Speed divided by weight; None before the first report."""
        return None if self.speed is None else self.speed / self.weight

    @property
    def room(self) -> int:
        """Maximum number of leases that the worker may hold: its slots, limited by its credit."""
        return self.slots if self.credit is None else min(self.slots, self.credit.num_leases)

    @property
    def has_slot(self) -> bool:
        """True if the worker may be granted one more lease."""
        return len(self.leases) < self.room and self.owner_allows

    @property
    def owner_allows(self) -> bool:
        """True if the workers of this worker's owner may hold one more lease."""
        return self.owner is None or self.owner.has_lease

    def serves(self, version: int, is_exact: bool) -> bool:
        """Return whether the worker's version satisfies a requirement."""
        return self.version is not None and (self.version == version if is_exact else self.version >= version)


@dataclass(slots=True, eq=False)
class TrackedLease:
    """A worker's attempt at a task."""

    number: int
    task: int
    worker: int
    base: int
    length: int
    granted_s: float
    grew_s: float
    stem: str
    """Identifier of the generated tokens: leases with equal stems generate the same tokens."""
    owner: TokenOwner | None = None
    recalled_s: float | None = None
    version: int = 0
    """Version of the lease's last token."""

    def forgive(self, delay_s: float, now_s: float) -> None:
        """Shift all times by a delay of the hub, so that the delay does not count against the lease."""
        self.granted_s = min(now_s, self.granted_s + delay_s)
        self.grew_s = min(now_s, self.grew_s + delay_s)
        if self.recalled_s is not None:
            self.recalled_s = min(now_s, self.recalled_s + delay_s)


@dataclass(slots=True, eq=False)
class TrackedTask:
    """A trajectory to be generated."""

    number: int
    ask: Ask
    committed: int
    max_tokens: int
    leases: list[TrackedLease] = field(default_factory=list)
    """Valid leases: none while the task waits, two while it has a backup lease."""
    stem: str | None = None
    """Stem of the lease that generated the committed tokens; None while no token is committed."""
    rested: list[TrackedLease] = field(default_factory=list)
    """Leases that were returned while another lease of the task was still valid."""
    is_aborting: bool = False

    def commit(self, lease: TrackedLease) -> None:
        """Commit the tokens of a lease. Versions never decrease along a trajectory, so a later lease must serve at
        least the version of the last token."""
        self.committed, self.stem = lease.length, lease.stem
        version, is_exact = self.ask
        if not is_exact:
            self.ask = max(version, lease.version), False

    @property
    def is_waiting(self) -> bool:
        """True if the task has no lease."""
        return not self.leases
