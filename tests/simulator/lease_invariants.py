"""Checks the invariants of the lease table at every event. All counts are made from the table's events and commands, so
this module needs no simulation: tests check a single `LeaseTable` with it.

* Conservation: the number of reported tokens is exactly committed + discarded + open. Every task is in one state.
* Append only: committed tokens only grow, and the tokens of two leases never mix.
* Leases: a task has at most two leases, and a lease number is used once. A worker that gets a lease serves the required
  version and has a free slot. Tasks are leased in order, and backup leases come last. No task waits while a worker has
  a slot for it. An event of a lease that has ended has no effect.
* Time: a worker is disconnected if and only if it has sent no message, or made no progress, for the respective timeout.
  An aborted task is returned within the heartbeat timeout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.clock import TimedEvent
from baton.swarm import lease_events as ev
from baton.swarm.lease_credit import FIRST_LEASES, TOKENS_PER_LEASE
from baton.swarm.leases import LeaseTable

Check = Callable[[bool, str, Any], None]
"""Raises an error unless its first argument is true. Further arguments: the name of the invariant, and details."""


@dataclass(slots=True)
class _OwnWorker:
    slots: int
    kind: str | None
    owner: str | None
    seen_s: float
    progress_s: float
    version: int | None = None
    counter: int = -1
    delivered: int = 0
    held: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _OwnTask:
    version: int
    is_exact: bool
    length: int
    """Number of committed tokens."""
    start: int
    preferred: int | None
    origin: str | None = None
    last: int = -1
    """Lease that committed the last tokens; -1 before the first commit."""
    aborted_s: float | None = None
    live: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)

    def suits(self, version: int | None) -> bool:
        return version is not None and (version == self.version if self.is_exact else version >= self.version)


@dataclass(slots=True)
class _OwnLease:
    task: int
    worker: int
    base: int
    length: int
    origin: str
    follows: int
    """`_OwnTask.last` when the lease was granted."""
    version: int = 0


class LeaseInvariants:
    """Checks one lease table."""

    def __init__(self, table: LeaseTable, check: Check) -> None:
        self.table, self._check, self._rules = table, check, table.rules
        self._workers: dict[int, _OwnWorker] = {}
        self._tasks: dict[int, _OwnTask] = {}
        self._leases: dict[int, _OwnLease] = {}
        """All leases, including those that have ended."""
        self._reported = self._committed = 0
        self._wasted: Counter[str] = Counter()
        self._delivered: Counter[str] = Counter()
        """Owner → number of tokens that all its workers have delivered."""
        self._finishing: int | None = None
        self._is_void = False
        """Whether the current event belongs to a lease that has ended."""
        self._now_s = 0.0

    def _must(self, holds: bool, what: object, law: str = "leases") -> None:
        self._check(holds, law, what)

    # ---- events ------------------------------------------------------------------------------------------------------

    def on_event(self, event: TimedEvent) -> None:
        now_s = self._now_s = event.at_s
        self._finishing, self._is_void = None, False
        match event:
            case ev.WorkerJoined(worker=number, slots=slots, kind=kind, owner=owner):
                self._workers[number] = _OwnWorker(slots, kind, owner, now_s, now_s)
            case ev.WorkerSeen(worker=number, version=version, decoded_tokens=counter) if number in self._workers:
                worker = self._workers[number]
                worker.seen_s, worker.version = now_s, version
                if counter != worker.counter:
                    worker.counter, worker.progress_s = counter, now_s
            case ev.WorkerLeft(worker=number):
                self._remove(number)
            case ev.TaskSubmitted():
                self._tasks[event.task] = _OwnTask(
                    event.version, event.is_exact, event.num_tokens, event.start, event.preferred
                )
            case ev.TaskAborted(task=number) if number in self._tasks:
                if self._tasks[number].aborted_s is None:
                    self._tasks[number].aborted_s = now_s
            case ev.TaskRevoked(task=number) if number in self._tasks:
                self._close(number)
            case ev.LeaseProgressed(lease=number) | ev.LeaseFinished(lease=number) | ev.LeaseReturned(lease=number):
                self._on_lease_event(event, number)
            case ev.LeaseTick(delay_s=delay_s):
                for worker in self._workers.values():
                    worker.seen_s = min(now_s, worker.seen_s + delay_s)
                    worker.progress_s = min(now_s, worker.progress_s + delay_s)
                for task in self._tasks.values():
                    if task.aborted_s is not None:
                        task.aborted_s = min(now_s, task.aborted_s + delay_s)
            case _:
                pass

    def _on_lease_event(self, event: TimedEvent, number: int) -> None:
        lease = self._leases.get(number)
        task = None if lease is None else self._tasks.get(lease.task)
        if lease is None or task is None or number not in task.live:
            self._is_void = True
            return
        worker = self._workers[lease.worker]
        if isinstance(event, ev.LeaseProgressed):
            count, lease.version = event.num_tokens, max(lease.version, event.version)
            lease.length += count
            worker.delivered += count
            worker.seen_s = worker.progress_s = self._now_s
            self._delivered[worker.owner or ""] += count
            self._reported += count
        elif isinstance(event, ev.LeaseFinished):
            self._finishing = number
        else:
            if task.aborted_s is None and task.suits(worker.version):
                worker.version = None  # a refusal: the worker gets no lease before its next message
            self._end(number)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def on_command(self, command: msgspec.Struct) -> None:
        self._must(not self._is_void, lambda: f"an event of a lease that has ended causes {command}")
        match command:
            case ev.GrantLease():
                self._granted(command)
            case ev.RecallLease(worker=number, lease=lease):
                is_right = self._leases[lease].worker == number and lease in self._workers[number].held
                self._must(is_right, f"lease {lease} is recalled from worker {number}")
                self._must(self._task(lease).aborted_s is not None, f"lease {lease} is recalled without an abort")
            case ev.DropLease(worker=number, lease=lease):
                self._must(self._leases[lease].worker == number, f"lease {lease} is not of worker {number}")
                if self._leases[lease].task in self._tasks:
                    self._end(lease)
            case ev.CommitTokens():
                self._commits(command)
            case ev.FinishTask(task=number, lease=lease) | ev.ReplaceTokens(task=number, lease=lease):
                self._must(
                    lease == self._finishing, f"task {number} is finished by lease {lease}, which has not finished"
                )
                own, task = self._leases[lease], self._tasks[number]
                if isinstance(command, ev.FinishTask):
                    is_whole = own.length == task.length and self._continues(task, lease)
                    self._must(is_whole, f"task {number} finishes with other tokens than lease {lease}", "append only")
                else:
                    is_other = self._rules.restarts and task.origin != own.origin and task.length > task.start
                    self._must(is_other, f"task {number} has no tokens that lease {lease} may replace", "append only")
                    self._committed += own.length - own.base
                self._close(number)
            case ev.ReturnTask(task=number):
                task = self._tasks[number]
                self._must(task.aborted_s is not None and not task.live, f"task {number} is returned")
                self._close(number)
            case ev.DiscardTokens(cause=cause, num_tokens=count):
                self._must(count > 0, f"{count} tokens are discarded", "conservation")
                self._wasted[cause] += count
            case ev.DisconnectWorker(worker=number):
                worker, rules = self._workers[number], self._rules
                is_silent = self._now_s - worker.seen_s > rules.heartbeat_timeout_s
                is_stuck = bool(worker.held) and self._now_s - worker.progress_s > rules.progress_timeout_s
                self._must(is_silent or is_stuck, f"worker {number} is disconnected without a reason")
                self._remove(number)
            case _:
                self._must(False, f"{command} is not known")

    def _granted(self, grant: ev.GrantLease) -> None:
        worker, task, rules = self._workers[grant.worker], self._tasks[grant.task], self._rules
        must, name = self._must, f"lease {grant.lease} of task {grant.task} on worker {grant.worker}"
        must(grant.lease not in self._leases, f"{name}: the number is used again")
        must(task.aborted_s is None, f"{name}: the task is leased after its abort")
        must(len(task.live) < 2, f"{name}: a third lease")
        must(task.suits(worker.version), f"{name}: the worker serves version {worker.version}")
        must(grant.base == (task.start if rules.restarts else task.length), f"{name}: begins at {grant.base}")
        earlier = [t for t in self._waiting() if t != grant.task and self._tasks[t].suits(worker.version)]
        if task.live:
            must(len(worker.held) < self._room(grant.worker), f"{name}: a backup lease without a free slot")
            must(not earlier, f"{name}: a backup lease while tasks {earlier} wait")
            must(not worker.held & {*task.live}, f"{name}: a backup lease on the same worker")
        else:
            self._is_first_choice(grant, task, worker, earlier)
        task.preferred = None
        origin = f"lease {grant.lease}" if worker.kind is None else f"kind {worker.kind}"
        if rules.restarts and task.length > task.start and task.origin is None:
            task.origin = "unknown" if worker.kind is None else origin
        self._leases[grant.lease] = _OwnLease(grant.task, grant.worker, grant.base, grant.base, origin, task.last)
        if not worker.held:
            worker.progress_s = self._now_s
        worker.held.add(grant.lease)
        task.live.append(grant.lease)
        must(len(worker.held) <= self._most(worker.slots), f"{name}: the worker has {worker.slots} slots")
        if worker.owner is not None:
            earned = FIRST_LEASES + worker.delivered // TOKENS_PER_LEASE
            must(len(worker.held) <= self._most(earned), f"{name}: the worker has earned {earned} leases")
            earned = FIRST_LEASES + self._delivered[worker.owner] // TOKENS_PER_LEASE
            held = sum(len(w.held) for w in self._workers.values() if w.owner == worker.owner)
            must(held <= earned, f"{name}: the owner holds {held} leases and has earned {earned}")

    def _is_first_choice(
        self, grant: ev.GrantLease, task: _OwnTask, worker: _OwnWorker, earlier: Iterable[int]
    ) -> None:
        """Check the order of tasks and the choice of the worker."""
        name, is_full = f"task {grant.task} goes to worker {grant.worker}", self._is_full
        order = (not task.start, grant.task)
        before = [t for t in earlier if (not self._tasks[t].start, t) < order]
        self._must(not before, f"{name} before tasks {before}")
        wanted = self._workers.get(-1 if task.preferred is None else task.preferred)
        if wanted is not None and wanted is not worker and task.suits(wanted.version):
            self._must(is_full(task.preferred), f"{name} although worker {task.preferred} has a free slot")
        if len(worker.held) >= self._room(grant.worker):
            others = [n for n, w in self._workers.items() if task.suits(w.version) and not is_full(n)]
            self._must(not others, f"{name}, which has no free slot, although workers {others} have one")

    def _commits(self, commit: ev.CommitTokens) -> None:
        task, own = self._tasks[commit.task], self._leases[commit.lease]
        name = f"lease {commit.lease} commits {commit.length} tokens of task {commit.task}, which has {task.length}"
        is_known = own.task == commit.task and (commit.lease in task.live + task.returned or not task.live)
        self._must(is_known and task.length < commit.length <= own.length, name, "append only")
        self._must(self._continues(task, commit.lease), f"{name} of another lease", "append only")
        self._committed += commit.length - task.length
        task.length, task.last, task.origin = commit.length, commit.lease, own.origin
        if not task.is_exact:
            task.version = max(task.version, own.version)

    # ---- after an event ----------------------------------------------------------------------------------------------

    def settled(self, event: TimedEvent) -> None:
        must, table, rules = self._must, self.table, self._rules
        waiting = [*self._waiting()]
        num_waiting = sum(task.is_waiting for task in table.tasks.values())
        must((len(table.tasks), num_waiting) == (len(self._tasks), len(waiting)), "tasks in the table")
        must(table.workers.keys() == self._workers.keys(), "workers in the table")
        must(table.wasted == self._wasted, lambda: f"discarded: {table.wasted}, own {self._wasted}", "conservation")
        for known in table.tasks.values():
            own = self._tasks[known.number]
            if known.committed != own.length or [lease.number for lease in known.leases] != own.live:
                must(False, f"task {known.number} has leases {own.live} and {own.length} tokens")
        open_ = sum(self._open(number, task) for number, task in self._tasks.items())
        balance = self._reported, self._committed, self._wasted.total(), open_
        must(balance[0] == sum(balance[1:]), ("reported, committed, discarded, open", balance), "conservation")
        for number in [n for n in self._workers if not self._is_full(n, places=True)] if waiting else ():
            idle_for = [t for t in waiting if self._tasks[t].suits(self._workers[number].version)]
            must(not idle_for, f"tasks {idle_for} wait although worker {number} has a place")
        if isinstance(event, ev.LeaseTick):
            least_s = event.at_s - rules.heartbeat_timeout_s
            silent = [number for number, worker in self._workers.items() if worker.seen_s < least_s]
            must(not silent, ("workers that have sent nothing", silent))
            kept = [n for n, task in self._tasks.items() if task.aborted_s is not None and task.aborted_s < least_s]
            must(not kept, ("aborted tasks that are not returned", kept))
            least_s = event.at_s - rules.progress_timeout_s
            stuck = [number for number, worker in self._workers.items() if worker.held and worker.progress_s < least_s]
            must(not stuck, ("workers without progress", stuck))

    def _open(self, number: int, task: _OwnTask) -> int:
        """Check a task's leases; return the number of their tokens that are neither committed nor discarded."""
        leases, open_ = task.live + task.returned, 0
        is_sound = task.aborted_s is None or bool(task.live)  # an aborted task without a lease is returned at once
        for lease in leases:
            own = self._leases[lease]
            if not self._rules.restarts:
                is_sound &= len(leases) == 1 or self._continues(task, lease)
                open_ += own.length - task.length
            elif self._continues(task, lease):
                is_sound &= own.length <= task.length
            else:
                open_ += own.length - own.base
        if not is_sound:
            self._must(False, f"task {number} has leases {leases}: {task}", "append only")
        return open_

    # ---- states ------------------------------------------------------------------------------------------------------

    def _task(self, lease: int) -> _OwnTask:
        return self._tasks[self._leases[lease].task]

    def _waiting(self) -> Iterable[int]:
        return (number for number, task in self._tasks.items() if not task.live)

    def _continues(self, task: _OwnTask, lease: int) -> bool:
        """Return whether the tokens of a lease are consistent with those of its task."""
        own = self._leases[lease]
        if self._rules.restarts:
            return task.origin in (None, own.origin)
        return task.last == lease or (task.last == own.follows and task.length == own.base)

    def _most(self, slots: int) -> int:
        return slots + int(self._rules.prefetch * slots)

    def _room(self, worker: int) -> int:
        """Return the number of slots that a worker may use. It follows from the credit that the table counts;
        `_granted` checks an upper bound of this credit."""
        known = self.table.workers.get(worker)
        return self._workers[worker].slots if known is None else known.room

    def _is_full(self, worker: int | None, *, places: bool = False) -> bool:
        """Return whether all slots of a worker are taken. With `places`: whether its places for waiting leases are
        taken, too."""
        assert worker is not None
        room, known = self._room(worker), self.table.workers.get(worker)
        is_limited = known is not None and not known.owner_allows
        return is_limited or len(self._workers[worker].held) >= (self._most(room) if places else room)

    def _end(self, number: int) -> None:
        """End a lease whose task continues."""
        lease = self._leases[number]
        task = self._tasks[lease.task]
        self._must(number in task.live, f"lease {number} ends twice")
        task.live.remove(number)
        if lease.worker in self._workers:
            self._workers[lease.worker].held.discard(number)
        if task.aborted_s is not None:
            task.returned.append(number)

    def _close(self, number: int) -> None:
        """Remove a task, and end its leases."""
        for lease in self._tasks.pop(number).live:
            self._workers[self._leases[lease].worker].held.discard(lease)

    def _remove(self, number: int) -> None:
        """Remove a worker, and end its leases."""
        worker = self._workers.pop(number, None)
        for lease in sorted(worker.held) if worker is not None else ():
            self._end(lease)
