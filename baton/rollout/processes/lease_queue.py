"""Decides which engine of a pool gets which lease. Uses no socket and no clock, so `EnginePool` and the simulator use
the same class.

A lease is sent to an engine only when the engine has a free slot, so engines whose responses are short receive more
leases. Trajectories that already have tokens (further turns, resumed trajectories) are sent before new trajectories. A
trajectory with tokens returns to its last engine, because that engine may have kept the trajectory's keys and values.
If the last engine is much busier than another engine, the trajectory is sent to the least busy engine instead
(`returns_home`).
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.types import Abort, FromHub, FromWorker, Lease, ends_lease

HOMES_PER_SLOT = 8
"""Maximum number of trajectories, per slot of the pool, whose last engine the queue remembers."""
Handover = tuple[int, FromHub]
"""Index of an engine, and the message to send to it."""


def returns_home(num_home: int, num_least: int, slots: int) -> bool:
    """Return whether a trajectory is sent back to its last engine, which has `num_home` leases. The engine must have a
    free slot, and at most `slots / 4` leases more than the least busy engine, which has `num_least` leases."""
    return num_home < slots and num_home - num_least <= slots // 4


class LeaseQueue:
    """The waiting leases of a pool, and the leases of each engine."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.leases: list[set[int]] = [set() for _ in slots]
        self._slots = slots
        self._begun: dict[int, Lease] = {}
        self._new: dict[int, Lease] = {}
        self._homes: dict[str, int] = {}
        """Name of a trajectory → index of its last engine, in the order in which the trajectories were last sent."""

    def add(self, lease: Lease) -> None:
        (self._begun if lease.trajectory.num_tokens else self._new)[lease.lease_id] = lease

    def abort(self, abort: Abort) -> list[Handover]:
        """Return the messages that abort a lease. A waiting lease is first sent to an engine, because the scheduler
        expects a report of each abort and only engines send reports."""
        number = abort.lease_id
        found: list[Handover] = []
        if (waiting := self._begun.pop(number, None) or self._new.pop(number, None)) is not None:
            found.append(self._hand_over(0, waiting))
        return [*found, *((engine, abort) for engine, leases in enumerate(self.leases) if number in leases)]

    def assign(self) -> list[Handover]:
        """Return the waiting leases for which there are free slots, each with its engine. Leases of one group are sent
        to one engine while it has free slots, because one engine prefills the group's prompt only once."""
        found: list[Handover] = []
        group_id = least = -1
        while waiting := self._begun or self._new:
            number, lease = next(iter(waiting.items()))
            if lease.trajectory.group_id != group_id or self._num_free(least) <= 0:
                group_id, least = lease.trajectory.group_id, max(range(len(self._slots)), key=self._num_free)
                if self._num_free(least) <= 0:
                    break
            del waiting[number]
            found.append(self._hand_over(self._home(lease, least), lease))
        return found

    def _home(self, lease: Lease, least: int) -> int:
        """Return the engine that gets a lease. `least`: the least busy engine."""
        name, is_begun = lease.trajectory.name, lease.trajectory.num_tokens > 0
        home = self._homes.pop(name, least) if is_begun else least
        if not returns_home(len(self.leases[home]), len(self.leases[least]), self._slots[home]):
            home = least
        self._homes[name] = home
        if len(self._homes) > HOMES_PER_SLOT * sum(self._slots):
            del self._homes[next(iter(self._homes))]
        return home

    def _num_free(self, engine: int) -> int:
        """Return the number of free slots of an engine. It can be negative: to abort a waiting lease, the queue sends
        the lease to an engine even if the engine has no free slot."""
        return self._slots[engine] - len(self.leases[engine])

    def _hand_over(self, engine: int, lease: Lease) -> Handover:
        self.leases[engine].add(lease.lease_id)
        return engine, lease

    def ended(self, engine: int, reports: Sequence[FromWorker]) -> None:
        """Free the slots of the leases that end with these reports of an engine."""
        self.leases[engine].difference_update(report.lease_id for report in reports if ends_lease(report))
