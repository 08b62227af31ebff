"""Assigns trajectories to workers, and decides when a lease ends and which worker then continues the trajectory.

`LeaseTable` receives events and returns commands. The table reads no clock, does no I/O and contains no tokens, so the
live hub and the simulator use the same class. A task is a trajectory that the controller has requested. A lease is one
worker's attempt at a task:

    TaskSubmitted ─▶ waiting ──GrantLease──▶ leased ──LeaseFinished──▶ FinishTask
                        ▲                       │ LeaseProgressed ─▶ CommitTokens
                        └───── lease ends ◀─────┤ worker lost, refused, starved
                                                └─ TaskAborted ─▶ RecallLease ─▶ LeaseReturned ─▶ ReturnTask

Reported tokens stay in the trajectory when the worker leaves, and the next lease starts after these tokens. With
`restarts` (mode `sync`), the next lease starts at the prompt and generates the same tokens again, because sampling is
deterministic. In a multi-turn episode, the next lease starts at the current turn (`TaskSubmitted.start`), because an
observation cannot be generated again. Thus the next lease may generate committed tokens again, and only the tokens
after them are new.

If the lease of a task is slow, the task gets a second lease, the backup lease. Without `restarts`, the two leases of a
task generate different tokens from the same prefix, so no more tokens are committed while both leases run. If one lease
finishes, the tokens of the other lease are discarded.

With `restarts`, workers of different kinds (`WorkerJoined.kind`) generate different tokens from the same noise. The
tokens of a lease may then differ from the tokens that a worker of another kind has committed. Such a lease commits no
tokens before it finishes. The lease that finishes first determines the trajectory. If a worker of another kind
generated the committed tokens, the tokens of the finished lease replace them (`ReplaceTokens`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.swarm import lease_events as ev
from baton.swarm.lease_credit import LeaseCredit
from baton.swarm.worker_index import TokenOwner, Worker, WorkerIndex

Ask = tuple[int, bool]
"""Version that a task requires: (number, is_exact). If is_exact is False, a later version is also accepted."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Options and time limits of the lease table. Time limits are in seconds. `heartbeat_timeout_s`,
    `progress_timeout_s` and `backup_lease_factor` have the meaning of the keys of the recipe's section [swarm]."""

    restarts: bool = False
    """True (mode `sync`): after a lost lease, the task's next lease starts at the current turn (in a single-turn task,
    at the prompt). False: the next lease starts after the last reported token."""
    heartbeat_timeout_s: float = 30.0
    progress_timeout_s: float = 60.0
    starve_s: float = 600.0
    """If an active worker reports no new token of a lease for this number of seconds, the lease ends, and its task is
    granted again."""
    backup_lease_factor: float = 2.0
    backup_lease_after_s: float = 5.0
    """Minimum age, in seconds, of a lease whose task may get a backup lease."""
    prefetch: float = 0.25
    """If no worker has a free slot, a worker may hold more leases than it has slots, and queues the additional leases.
    The maximum number of additional leases is this fraction of the worker's slots."""


@dataclass(slots=True, eq=False)
class TrackedLease:
    """The table's record of a lease: one worker's attempt at a task."""

    number: int
    task: int
    worker: int
    base: int
    length: int
    granted_s: float
    grew_s: float
    origin: str
    """Identifies the source of the tokens. If two leases of a task have equal origins, they generate the same
    tokens."""
    owner: TokenOwner | None = None
    recalled_s: float | None = None
    version: int = 0
    """Policy version of the lease's last token."""

    def forgive(self, delay_s: float, now_s: float) -> None:
        """Shift all times by a delay of the hub, so that the delay does not count towards the lease's time limits."""
        self.granted_s = min(now_s, self.granted_s + delay_s)
        self.grew_s = min(now_s, self.grew_s + delay_s)
        if self.recalled_s is not None:
            self.recalled_s = min(now_s, self.recalled_s + delay_s)


@dataclass(slots=True, eq=False)
class TrackedTask:
    """The table's record of a task: a trajectory that must be generated."""

    number: int
    ask: Ask
    committed: int
    max_tokens: int
    start: int
    preferred: int | None
    leases: list[TrackedLease] = field(default_factory=list)
    """Valid leases of the task: none while the task waits, two while it has a backup lease."""
    origin: str | None = None
    """Origin of the lease that generated the committed tokens after `start`; None if there are no such tokens."""
    returned: list[TrackedLease] = field(default_factory=list)
    """Leases that were returned while another lease of the task was still valid."""
    is_aborting: bool = False

    @property
    def is_waiting(self) -> bool:
        return not self.leases

    @property
    def order(self) -> tuple[bool, int]:
        """Sort key of waiting tasks, which are granted in ascending order: tasks that continue an episode come first,
        and older tasks come before newer tasks."""
        return not self.start, self.number


class LeaseTable:
    """Grants tasks to workers, and ends the leases of workers that fail."""

    def __init__(self, rules: LeaseRules) -> None:
        self.rules = rules
        self.wasted: Counter[str] = Counter()
        """Cause → number of discarded tokens."""
        self.tasks: dict[int, TrackedTask] = {}
        """Number → task that is neither finished nor aborted."""
        self.leases: dict[int, TrackedLease] = {}
        """Number → valid lease."""
        self._next_lease = 0
        self._owners: dict[str, TokenOwner] = {}
        self._index = WorkerIndex(rules.prefetch)
        self._waiting: dict[Ask, list[tuple[bool, int]]] = {}
        """Required version → heap of the `order` of waiting tasks. Outdated entries stay in a heap and are skipped."""
        self._may_grant = False
        """True if a task or a slot has become available since the last attempt to grant leases."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Apply one event; return the resulting commands in order. Events of leases that have ended are ignored."""
        return [*self._apply_event(event), *self._grant_all(event.at_s)]

    def _apply_event(self, event: ev.Event) -> Iterator[ev.Command]:
        match event:
            case ev.LeaseProgressed():
                if lease := self.leases.get(event.lease):
                    yield from self._on_lease_progressed(event, lease)
            case ev.WorkerSeen():
                if worker := self.workers.get(event.worker):
                    self._on_worker_seen(event, worker)
            case ev.TaskSubmitted():
                self._on_task_submitted(event)
            case ev.LeaseFinished():
                if lease := self.leases.get(event.lease):
                    yield from self._on_lease_finished(event, lease)
            case ev.LeaseReturned():
                if lease := self.leases.get(event.lease):
                    yield from self._on_lease_returned(lease)
            case ev.TaskAborted():
                if task := self.tasks.get(event.task):
                    yield from self._on_task_aborted(event, task)
            case ev.TaskRevoked():
                if task := self.tasks.get(event.task):
                    yield from self._on_task_revoked(task)
            case ev.LeaseTick():
                yield from self._on_tick(event)
            case ev.WorkerJoined():
                self._on_worker_joined(event)
            case ev.WorkerWeightChanged():
                if worker := self.workers.get(event.worker):
                    self._index.weigh(worker, event.weight)
            case ev.WorkerLeft():
                if worker := self.workers.get(event.worker):
                    yield from self._on_worker_left(worker)

    @property
    def workers(self) -> dict[int, Worker]:
        return self._index.workers

    def is_comparable(self, lease: int) -> bool:
        """Return whether the tokens of a correct worker under this lease must equal the task's committed tokens."""
        return self._is_consistent(self.tasks[self.leases[lease].task], self.leases[lease])

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _on_worker_joined(self, event: ev.WorkerJoined) -> None:
        worker = Worker(event.worker, event.slots, event.weight, event.at_s, event.at_s, event.kind)
        if event.owner is not None:
            worker.credit = LeaseCredit(event.slots, event.at_s)
            worker.owner = self._owners.setdefault(event.owner, TokenOwner(LeaseCredit(0, event.at_s)))
            worker.owner.credit.resize(self._index.most(event.slots))
            worker.owner.credit.recover(event.at_s)
            self._offer_owner(worker.owner)  # a new worker raises the limit for its owner's other workers, too
        self._index.add(worker)

    def _on_worker_seen(self, event: ev.WorkerSeen, worker: Worker) -> None:
        worker.last_seen_s = event.at_s
        if event.decoded_tokens != worker.decoded_tokens:
            worker.decoded_tokens, worker.last_progress_s = event.decoded_tokens, event.at_s
        if event.version != worker.version:
            worker.version = event.version
            self._offer(worker)

    def _on_worker_left(self, worker: Worker) -> Iterator[ev.Command]:
        for lease in [self.leases[number] for number in worker.leases]:
            if lease.length == lease.base:
                self._credit(worker, LeaseCredit.lose)
        yield from self._remove(worker)

    def _remove(self, worker: Worker) -> Iterator[ev.Command]:
        self._index.remove(worker)
        if worker.owner is not None:
            worker.owner.credit.resize(-self._index.most(worker.slots))
        for number in sorted(worker.leases):
            yield from self._end_lease(self.leases[number])

    # ---- tasks and leases --------------------------------------------------------------------------------------------

    def _on_task_submitted(self, event: ev.TaskSubmitted) -> None:
        assert event.task not in self.tasks, f"task {event.task} was submitted twice"
        ask = event.version, event.is_exact
        task = TrackedTask(event.task, ask, event.num_tokens, event.max_tokens, event.start, event.preferred)
        self.tasks[event.task] = task
        self._queue(task)

    def _on_task_aborted(self, event: ev.TaskAborted, task: TrackedTask) -> Iterator[ev.Command]:
        if task.is_aborting:
            return
        task.is_aborting = True
        if task.is_waiting:
            yield from self._return_task(task)
        for lease in task.leases:
            lease.recalled_s = event.at_s
            yield ev.RecallLease(lease.worker, lease.number)

    def _on_task_revoked(self, task: TrackedTask) -> Iterator[ev.Command]:
        """Remove a task, and count its uncommitted tokens as discarded. The caller counts the committed tokens."""
        del self.tasks[task.number]
        for lease in task.leases:
            yield ev.DropLease(lease.worker, lease.number)
            self._remove_lease(lease)
        for lease in (*task.leases, *task.returned):
            yield from self._discard_tokens(task, lease, task.committed)

    def _on_lease_progressed(self, event: ev.LeaseProgressed, lease: TrackedLease) -> Iterator[ev.Command]:
        task, worker = self.tasks[lease.task], self.workers[lease.worker]
        self._index.measure(worker, event.num_tokens, event.at_s - lease.grew_s)
        self._credit(worker, lambda credit: credit.earn(event.num_tokens))
        lease.grew_s = worker.last_progress_s = worker.last_seen_s = event.at_s
        lease.version = max(lease.version, event.version)
        before, lease.length = lease.length, lease.length + event.num_tokens
        if self.rules.restarts and self._is_consistent(task, lease):
            yield from self._count_discarded("regenerated", min(lease.length, task.committed) - before)
        if self._commits(task, lease):
            yield from self._commit(task, lease)

    def _on_lease_finished(self, event: ev.LeaseFinished, lease: TrackedLease) -> Iterator[ev.Command]:
        task = self.tasks.pop(lease.task)
        self._credit(self.workers[lease.worker], LeaseCredit.finish)
        prefix, is_faithful = task.committed, self._is_consistent(task, lease)
        self._remove_lease(lease)
        if is_faithful:
            yield from self._commit(task, lease)
            yield ev.FinishTask(task.number, lease.number)
        else:
            yield ev.ReplaceTokens(task.number, lease.number)
        for other in [one for one in task.leases if one is not lease]:
            if event.at_s - other.granted_s >= self.rules.backup_lease_after_s:
                self._charge(other)
            yield ev.DropLease(other.worker, other.number)
            self._remove_lease(other)
            task.returned.append(other)
        for other in task.returned:
            yield from self._discard_tokens(task, other, prefix)

    def _on_lease_returned(self, lease: TrackedLease) -> Iterator[ev.Command]:
        worker, task = self.workers[lease.worker], self.tasks[lease.task]
        if not task.is_aborting:
            self._credit(worker, lambda credit: credit.give_back(lease.length - lease.base))
            if worker.serves(*task.ask):  # without a version, the worker is not immediately granted the same task again
                worker.version = None
        yield from self._end_lease(lease)

    def _end_lease(self, lease: TrackedLease) -> Iterator[ev.Command]:
        task = self.tasks[lease.task]
        self._remove_lease(lease)
        task.leases.remove(lease)
        if task.leases and not task.is_aborting:  # the task's other lease continues
            yield from self._discard_tokens(task, lease, task.committed)
            if self._commits(task, task.leases[0]):
                yield from self._commit(task, task.leases[0])
        elif task.leases:
            task.returned.append(lease)
        else:
            yield from self._commit_longest(task, lease)
            if task.is_aborting:
                yield from self._return_task(task)
            else:
                self._queue(task)

    def _commit_longest(self, task: TrackedTask, lease: TrackedLease) -> Iterator[ev.Command]:
        """Select the longest lease among `lease` and the task's returned leases. Commit its tokens, and discard the
        tokens of the others."""
        candidates = (*task.returned, lease)
        found = [one for one in candidates if self._is_consistent(task, one)]
        longest = max(found, key=lambda one: (one.length, -one.number), default=None)
        prefix = task.committed
        if longest is not None:
            yield from self._commit(task, longest)
        for other in candidates:
            if other is not longest:
                yield from self._discard_tokens(task, other, prefix)

    def _discard_tokens(self, task: TrackedTask, lease: TrackedLease, prefix: int) -> Iterator[ev.Command]:
        """Count a lease's tokens as discarded, except the first `prefix` tokens of the trajectory, which equal the
        committed tokens. With `restarts`, a lease whose origin differs from that of the committed tokens has no equal
        tokens, so all its tokens are counted."""
        shared = max(prefix, lease.base) if self._is_consistent(task, lease) else lease.base
        yield from self._count_discarded("overtaken", lease.length - shared)

    def _is_consistent(self, task: TrackedTask, lease: TrackedLease) -> bool:
        """Return whether the tokens of a lease equal the committed tokens at all common positions."""
        return not self.rules.restarts or task.origin in (None, lease.origin)

    def _commits(self, task: TrackedTask, lease: TrackedLease) -> bool:
        """Return whether the tokens of a lease are committed as soon as they are reported. With `restarts`, the tokens
        must equal the committed tokens at all common positions. Without `restarts`, the task must have no other lease,
        neither running nor returned."""
        if self.rules.restarts:
            return self._is_consistent(task, lease)
        return len(task.leases) + len(task.returned) == 1

    def _commit(self, task: TrackedTask, lease: TrackedLease) -> Iterator[ev.Command]:
        if lease.length > task.committed:
            task.committed, task.origin = lease.length, lease.origin
            version, is_exact = task.ask
            if not is_exact:  # versions never decrease along a trajectory
                task.ask = max(version, lease.version), False
            yield ev.CommitTokens(task.number, lease.number, lease.length)

    def _return_task(self, task: TrackedTask) -> Iterator[ev.Command]:
        del self.tasks[task.number]
        yield ev.ReturnTask(task.number)

    def _count_discarded(self, cause: str, num_tokens: int) -> Iterator[ev.Command]:
        if num_tokens > 0:
            self.wasted[cause] += num_tokens
            yield ev.DiscardTokens(cause, num_tokens)

    def _remove_lease(self, lease: TrackedLease) -> None:
        del self.leases[lease.number]
        owner = lease.owner
        if owner is not None:
            owner.num_held -= 1
            self._offer_owner(owner)
        worker = self.workers.get(lease.worker)
        if worker is not None:
            worker.leases.discard(lease.number)
            self._offer(worker)

    def _credit(self, worker: Worker, change: Callable[[LeaseCredit], None]) -> None:
        """Change the credit of a worker and its owner; update the index if the number of allowed leases changes."""
        owner = worker.owner
        if worker.credit is None or owner is None:
            return
        before = worker.room, owner.has_lease
        change(worker.credit)
        change(owner.credit)
        if worker.room != before[0]:
            self._offer(worker)
        elif owner.has_lease != before[1]:
            self._offer_owner(owner)

    def _charge(self, lease: TrackedLease) -> None:
        """Subtract the cost of a lost lease from its worker's credit, unless the worker had not started the lease."""
        worker = self.workers[lease.worker]
        # a worker runs its leases in the order of their numbers, so only its first `slots` leases have run
        if sum(number < lease.number for number in worker.leases) < worker.slots:
            self._credit(worker, LeaseCredit.lose)

    # ---- granting ----------------------------------------------------------------------------------------------------

    def _offer(self, worker: Worker) -> None:
        self._index.offer(worker)
        self._may_grant = True

    def _offer_owner(self, owner: TokenOwner) -> None:
        self._index.offer_owner(owner)
        self._may_grant = True

    def _queue(self, task: TrackedTask) -> None:
        self._may_grant = True
        heapq.heappush(self._waiting.setdefault(task.ask, []), task.order)

    def _grant_all(self, at_s: float) -> Iterator[ev.Command]:
        """Grant waiting tasks, in `TrackedTask.order`, to workers with a free slot and a suitable version."""
        if not self._may_grant:
            return
        self._may_grant = False
        unavailable: set[Ask] = set()
        while (task := self._first_waiting(unavailable)) is not None:
            worker = self._preferred(task) or self._index.least_loaded(*task.ask)
            if worker is None:
                unavailable.add(task.ask)
            else:
                heapq.heappop(self._waiting[task.ask])
                yield from self._grant(task, worker, at_s)

    def _first_waiting(self, unavailable: set[Ask]) -> TrackedTask | None:
        """Return the first waiting task, in `TrackedTask.order`, whose required version is not in `unavailable`."""
        first: TrackedTask | None = None
        for ask in [*self._waiting]:
            heap, task = self._waiting[ask], None
            while heap and (
                (task := self.tasks.get(heap[0][1])) is None
                or not task.is_waiting
                or (task.ask, task.order) != (ask, heap[0])
            ):
                heapq.heappop(heap)
            if not heap or task is None:
                del self._waiting[ask]
            elif ask not in unavailable and (first is None or task.order < first.order):
                first = task
        return first

    def _preferred(self, task: TrackedTask) -> Worker | None:
        """Return a task's preferred worker if this worker has a free slot and a suitable version, otherwise None."""
        worker = None if task.preferred is None else self.workers.get(task.preferred)
        return worker if worker is not None and worker.has_slot and worker.serves(*task.ask) else None

    def _base(self, task: TrackedTask) -> int:
        """Return the number of tokens after the prompt at which a task's next lease starts."""
        return task.start if self.rules.restarts else task.committed

    def _grant(self, task: TrackedTask, worker: Worker, at_s: float) -> Iterator[ev.Command]:
        base, task.preferred = self._base(task), None
        number, self._next_lease = self._next_lease, self._next_lease + 1
        origin = f"lease {number}" if worker.kind is None else f"kind {worker.kind}"
        # the trajectory had tokens of this turn before the task was submitted; the kind of the worker that generated
        # these tokens is unknown
        if self.rules.restarts and task.committed > task.start and task.origin is None:
            task.origin = "unknown" if worker.kind is None else origin
        lease = TrackedLease(number, task.number, worker.number, base, base, at_s, at_s, origin, worker.owner)
        if not worker.leases:
            # the time in which the worker had no lease does not count towards the progress timeout
            worker.last_progress_s = at_s
        self.leases[number] = lease
        task.leases.append(lease)
        worker.leases.add(number)
        if worker.owner is not None:
            worker.owner.num_held += 1
        self._index.offer(worker)
        yield ev.GrantLease(worker.number, number, task.number, base)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _on_tick(self, event: ev.LeaseTick) -> Iterator[ev.Command]:
        now_s, rules = event.at_s, self.rules
        for worker in list(self.workers.values()):
            worker.last_seen_s = min(now_s, worker.last_seen_s + event.delay_s)
            worker.last_progress_s = min(now_s, worker.last_progress_s + event.delay_s)
            self._credit(worker, lambda credit: credit.recover(now_s))
            if now_s - worker.last_seen_s > rules.heartbeat_timeout_s:
                yield from self._time_out(worker, f"sent no message for {rules.heartbeat_timeout_s:.0f} s")
            elif worker.leases and now_s - worker.last_progress_s > rules.progress_timeout_s:
                held = f"held {len(worker.leases)} leases"
                for _ in worker.leases:
                    self._credit(worker, LeaseCredit.lose)
                yield from self._time_out(worker, f"{held} and generated no token for {rules.progress_timeout_s:.0f} s")
        for lease in list(self.leases.values()):
            if event.delay_s:
                lease.forgive(event.delay_s, now_s)
            is_unanswered = lease.recalled_s is not None and now_s - lease.recalled_s > rules.heartbeat_timeout_s
            if is_unanswered or now_s - lease.grew_s > rules.starve_s:
                self._charge(lease)
                yield ev.DropLease(lease.worker, lease.number)
                yield from self._end_lease(lease)
        yield from self._grant_all(now_s)
        if rules.backup_lease_factor:
            yield from self._grant_backups(now_s)

    def _time_out(self, worker: Worker, cause: str) -> Iterator[ev.Command]:
        yield ev.DisconnectWorker(worker.number, cause)
        yield from self._remove(worker)

    def _grant_backups(self, now_s: float) -> Iterator[ev.Command]:
        """Start backup leases for the slowest leases. Each backup lease is granted to the fastest free worker that is
        expected to finish sufficiently earlier. The expected times assume the maximum number of tokens, because final
        lengths are unknown. Called after waiting tasks have been granted, so no waiting task could use these slots."""
        free = self._index.free()
        if not free:
            return
        able: dict[Ask, list[Worker]] = {}
        for here_s, task in sorted(self._stragglers(now_s, free[-1]), key=lambda one: (-one[0], one[1].number)):
            if task.ask not in able:
                able[task.ask] = [worker for worker in free if worker.serves(*task.ask)]
            while able[task.ask] and not able[task.ask][-1].has_slot:
                able[task.ask].pop()
            others = (w for w in reversed(able[task.ask]) if w.has_slot and w.number != task.leases[0].worker)
            worker = next(others, None)
            if worker is not None and self._pays_off(task, here_s, worker):
                yield from self._grant(task, worker, now_s)

    def _stragglers(self, now_s: float, fastest: Worker) -> list[tuple[float, TrackedTask]]:
        """Find the tasks that would finish sufficiently earlier with a backup lease on the worker `fastest`. Return
        (expected remaining seconds, task) for each of them."""
        found = []
        for lease in self.leases.values():
            task, age_s = self.tasks[lease.task], now_s - lease.granted_s
            if len(task.leases) == 1 and not task.is_aborting and age_s >= self.rules.backup_lease_after_s:
                here_s = (task.max_tokens - lease.length) * age_s / max(lease.length - lease.base, 1)
                if self._pays_off(task, here_s, fastest):
                    found.append((here_s, task))
        return found

    def _pays_off(self, task: TrackedTask, here_s: float, worker: Worker) -> bool:
        left = task.max_tokens - self._base(task)
        return here_s * self._index.speed(worker) > self.rules.backup_lease_factor * left
