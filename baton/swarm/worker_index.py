"""Index of the workers that may be granted one more lease, by version and load."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from baton.swarm.lease_credit import LeaseCredit

_SPEED_MEMORY = 0.9
"""For each report, `Worker.grown_tokens` and `Worker.grown_s` are first multiplied by this factor. Then the report's
values are added."""


@dataclass(slots=True, eq=False)
class TokenOwner:
    """All workers that use one access token, and the credit that they share."""

    credit: LeaseCredit
    num_held: int = 0
    """Total number of leases that the owner's workers hold."""
    entries: dict[int, list[_Entry]] = field(default_factory=dict)
    """Version → heap of the `WorkerIndex` entries of the owner's workers."""

    @property
    def has_lease(self) -> bool:
        """True if the owner's workers may hold one more lease."""
        return self.num_held < self.credit.num_leases


@dataclass(slots=True, eq=False)
class Worker:
    """The lease table's record of a worker."""

    number: int
    slots: int
    weight: float
    """Expected speed of one slot of the worker, relative to the mean over all workers."""
    last_seen_s: float
    last_progress_s: float
    kind: str | None = ""
    version: int | None = None
    """Number of the version that the worker serves; None while the worker must not be granted leases."""
    decoded_tokens: int = -1
    grown_tokens: float = 0.0
    """Number of recently generated tokens, with exponential decay."""
    grown_s: float = 0.0
    """Seconds in which `grown_tokens` were generated, summed over leases, with the same decay."""
    leases: set[int] = field(default_factory=set)
    credit: LeaseCredit | None = None
    """Credit that limits the worker's leases; None if the worker may fill all its slots immediately."""
    owner: TokenOwner | None = None
    stamp: int = 0
    """Identifier of the worker's current entry in the index. Entries of the worker with another stamp are outdated."""

    @property
    def speed(self) -> float | None:
        """Recent tokens per second of one lease; None before the first report."""
        return self.grown_tokens / self.grown_s if self.grown_s else None

    @property
    def pace(self) -> float | None:
        """Ratio of the measured `speed` to the expected relative speed `weight`; None before the first report."""
        return None if self.speed is None else self.speed / self.weight

    @property
    def room(self) -> int:
        """Number of slots that the worker may use: all, or fewer if its credit allows fewer leases."""
        return self.slots if self.credit is None else min(self.slots, self.credit.num_leases)

    @property
    def num_returned(self) -> int:
        """`LeaseCredit.returned` of the worker, or of its owner if that is larger; 0 for a worker without an owner."""
        return 0 if self.credit is None or self.owner is None else max(self.credit.returned, self.owner.credit.returned)

    @property
    def has_slot(self) -> bool:
        """True if the worker may be granted one more lease."""
        return len(self.leases) < self.room and self.owner_allows

    @property
    def owner_allows(self) -> bool:
        """True if the workers of this worker's owner may hold one more lease."""
        return self.owner is None or self.owner.has_lease

    def serves(self, version: int, is_exact: bool) -> bool:
        """Return whether the worker serves exactly this version or, if not `is_exact`, this or a later version."""
        return self.version is not None and (self.version == version if is_exact else self.version >= version)


_Entry = tuple[bool, float, int, Worker]
"""Entry of a heap. Its four elements are: whether the worker has no free slot, its load after one more lease, its
stamp, and the worker."""


class WorkerIndex:
    """Index of workers by free capacity. The index consists of heaps, so a grant does not visit all workers."""

    def __init__(self, prefetch: float) -> None:
        self.workers: dict[int, Worker] = {}
        self._prefetch = prefetch
        self._stamp = 0
        self._num_paces, self._sum_paces = 0, 0.0
        """Number of workers whose pace is known, and the sum of their paces (`Worker.pace`)."""
        self._entries: dict[int, list[_Entry]] = {}
        """Version → heap of entries. A worker without an owner has its own entry in this heap. An owner that may hold
        one more lease is represented by the entry of its least loaded worker. Outdated and repeated entries stay in the
        heap and are skipped."""

    def add(self, worker: Worker) -> None:
        """Add a worker that serves no version yet."""
        assert worker.number not in self.workers, f"worker {worker.number} joined twice"
        assert worker.weight > 0, f"worker {worker.number} has the weight {worker.weight}, which must be above 0"
        self.workers[worker.number] = worker

    def remove(self, worker: Worker) -> None:
        del self.workers[worker.number]
        worker.stamp = -1
        if worker.pace is not None:
            self._num_paces, self._sum_paces = self._num_paces - 1, self._sum_paces - worker.pace
        if worker.owner is not None:
            self.offer_owner(worker.owner)

    def weigh(self, worker: Worker, weight: float) -> None:
        assert weight > 0, f"worker {worker.number} is given the weight {weight}, which must be above 0"
        known, worker.weight = worker.pace, weight
        self._sum_paces += (worker.pace or 0.0) - (known or 0.0)
        self.offer(worker)

    def most(self, slots: int) -> int:
        """Return the maximum number of leases, including prefetched leases, of a worker that may use `slots` slots."""
        return slots + int(self._prefetch * slots)

    def offer(self, worker: Worker) -> None:
        """Update a worker's entry after its leases, version or credit have changed."""
        worker.stamp = self._stamp = self._stamp + 1
        num, room, owner = len(worker.leases), worker.room, worker.owner
        if worker.version is not None and num < self.most(room):
            load = (num + 1) / (room * worker.weight * self._relative_pace(worker))
            entries = self._entries if owner is None else owner.entries
            self._enter(entries, worker.version, (num >= room, load, worker.stamp, worker))
        if owner is not None:
            self.offer_owner(owner)

    def offer_owner(self, owner: TokenOwner) -> None:
        """If the owner may hold one more lease, add the owner's least loaded worker of each version to the index. Must
        be called after the owner's limit, leases or workers have changed."""
        for version, entries in list(owner.entries.items()) if owner.has_lease else ():
            top = self._first(entries)
            if top is None:
                del owner.entries[version]
            else:
                self._enter(self._entries, version, top)

    def _enter(self, by_version: dict[int, list[_Entry]], version: int, entry: _Entry) -> None:
        entries = by_version.get(version)
        if entries is None:
            for other in [v for v, old in by_version.items() if not self._first(old)]:
                del by_version[other]
            entries = by_version[version] = []
        heapq.heappush(entries, entry)
        if len(entries) > 8 * len(self.workers) + 64:  # rebuild the heap, because most entries are outdated or repeated
            entries[:] = {e[2]: e for e in entries if e[3].stamp == e[2]}.values()
            heapq.heapify(entries)

    def least_loaded(self, version: int, is_exact: bool) -> Worker | None:
        """Return the least loaded worker with a suitable version. Workers with a free slot come first."""
        if is_exact:
            top = self._top(self._entries.get(version, []))
            return None if top is None else top[3]
        tops = [top for v, entries in self._entries.items() if v >= version and (top := self._top(entries)) is not None]
        return min(tops)[3] if tops else None

    def free(self) -> list[Worker]:
        """Return the workers with a free slot, sorted by speed, the fastest last."""
        if not any(top is not None and not top[0] for top in map(self._top, self._entries.values())):
            return []
        found = [w for w in self.workers.values() if w.version is not None and w.has_slot]
        return sorted(found, key=lambda worker: (self.speed(worker), -worker.number))

    def speed(self, worker: Worker) -> float:
        """Return the tokens per second of one lease of a worker. Until the worker's first report, this is an estimate
        from the worker's weight."""
        return worker.speed or worker.weight * self._sum_paces / max(1, self._num_paces)

    def measure(self, worker: Worker, num_tokens: int, seconds: float) -> None:
        """Update a worker's speed from a report. Speed is the sum of tokens divided by the sum of seconds. A mean of
        rates could be infinite, because late reports arrive in bursts with no time between them."""
        known = worker.pace
        worker.grown_tokens = _SPEED_MEMORY * worker.grown_tokens + num_tokens
        worker.grown_s = _SPEED_MEMORY * worker.grown_s + seconds
        pace = worker.pace
        if pace is not None:
            self._num_paces += known is None
            self._sum_paces += pace - (known or 0.0)

    def _relative_pace(self, worker: Worker) -> float:
        """Return the ratio of a worker's pace to the mean of all known paces, limited to the range from 0.1 to 10. A
        value below 1 means that the worker is slower than expected."""
        if worker.pace is None:
            return 1.0
        return min(10.0, max(0.1, worker.pace * self._num_paces / max(1e-9, self._sum_paces)))

    def _top(self, entries: list[_Entry]) -> _Entry | None:
        """Remove entries from the start of a heap until the first entry's owner may hold one more lease. Return this
        entry, or None if no entry remains."""
        while (top := self._first(entries)) is not None and not top[3].owner_allows:
            heapq.heappop(entries)  # `offer_owner` enters the owner again when it is below its limit
        return top

    def _first(self, entries: list[_Entry]) -> _Entry | None:
        """Remove outdated entries from the start of a heap. Return the first entry that remains, or None. Entries of
        owners that may hold no further lease are not removed."""
        while entries and entries[0][3].stamp != entries[0][2]:
            heapq.heappop(entries)
        return entries[0] if entries else None
