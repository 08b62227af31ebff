"""Which worker grows which trajectory, for how long it is believed, and who takes over. Events in, commands out.

No clock, no I/O, no tokens: the live hub and a simulator drive the same object. A task is a trajectory that the
scheduler wants grown; a lease is one worker's attempt at it:

    TaskWanted ─▶ waiting ──Grant──▶ leased ──LeaseFinished──▶ Finish
                    ▲                  │ LeaseGrew ─▶ Commit
                    └── lease ends ◀───┤ worker lost, refused, starved
                                       └─ TaskAborted ─▶ Recall ─▶ LeasePutDown ─▶ PutDown

What a lease reported stays the trajectory's when its worker goes: the next lease begins where it ended. With
`restarts` (mode `sync`) it begins at the prompt, makes the same tokens again (law 5), and only what is beyond the known
ones is new. A straggler is relieved by a second lease. Without `restarts` both then grow branches of their own from the
same prefix, nothing is committed until one finishes, and the tokens of the other are wasted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.swarm.lease_events import (
    Command,
    Commit,
    Drop,
    Event,
    Expel,
    Finish,
    Grant,
    LeaseFinished,
    LeaseGrew,
    LeasePutDown,
    PutDown,
    Recall,
    TaskAborted,
    TaskRevoked,
    TaskWanted,
    Tick,
    Waste,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
)

_SPEED_MEMORY = 0.9
"""Weight of what was known of a worker's speed before each report."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """What the table goes by; times in seconds."""

    restarts: bool = False
    """Whether a lost lease's successor begins at the prompt (`sync`) instead of the last reported token."""
    silence_s: float = 30.0
    """A worker that is not heard of for so long is taken for dead."""
    wedge_s: float = 60.0
    """… and one that holds leases while its engine's counter stands still for so long."""
    starve_s: float = 600.0
    """A lease that does not grow for so long goes to somebody else, though its worker is busy."""
    relief: float = 2.0
    """A lease is relieved when it may take so many times as long as a free worker would; 0 is never."""
    relief_after_s: float = 5.0
    """No lease is relieved before it is so old."""
    prefetch: float = 0.25
    """Leases given beyond a worker's slots, by slot, when no slot is free anywhere: they wait there for the next."""


@dataclass(slots=True)
class Worker:
    """One worker as the table sees it."""

    number: int
    slots: int
    weight: float
    heard_s: float
    moved_s: float
    version: int | None = None
    decoded_tokens: int = -1
    speed: float | None = None
    """Tokens a second of one lease."""
    leases: set[int] = field(default_factory=set)
    stamp: int = 0
    """Of its latest note among the places."""


@dataclass(slots=True)
class _Lease:
    number: int
    task: int
    worker: int
    base: int
    length: int
    granted_s: float
    grew_s: float
    recalled_s: float | None = None


@dataclass(slots=True)
class _Task:
    number: int
    version: int
    is_exact: bool
    committed: int
    max_tokens: int
    leases: list[_Lease] = field(default_factory=list)
    """That workers hold: none while it waits, two while it is relieved."""
    rested: list[_Lease] = field(default_factory=list)
    """Put down while another is still out."""
    is_aborting: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether nobody holds it."""
        return not self.leases


class LeaseTable:
    """The decisions of a hub about its workers."""

    def __init__(self, rules: LeaseRules) -> None:
        self.rules = rules
        self.workers: dict[int, Worker] = {}
        self.wasted: Counter[str] = Counter()
        """Tokens by cause."""
        self._tasks: dict[int, _Task] = {}
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 0
        self._num_speeds, self._sum_speeds = 0, 0.0
        self._waiting: dict[tuple[int, bool], list[int]] = {}
        """(version, is_exact) → heap of tasks, the oldest first; notes out of date are passed over."""
        self._places: dict[int, list[tuple[bool, float, int, int]]] = {}
        """Version served → heap of (no slot is free, load, worker, stamp); likewise."""
        self._handlers: dict[type[Any], Callable[[Any, list[Command]], None]] = {
            WorkerJoined: self._joined,
            WorkerHeard: self._heard,
            WorkerLeft: self._left,
            TaskWanted: self._wanted,
            TaskAborted: self._aborted,
            TaskRevoked: self._revoked,
            LeaseGrew: self._grew,
            LeaseFinished: self._finished,
            LeasePutDown: self._put_down,
            Tick: self._tick,
        }

    def handle(self, event: Event) -> list[Command]:
        """Take one event; return what is to be done, in order. Events of leases that have ended are ignored."""
        commands: list[Command] = []
        self._handlers[type(event)](event, commands)
        self._grant_all(event.at_s, commands)
        return commands

    @property
    def num_waiting(self) -> int:
        """Tasks that nobody holds."""
        return sum(task.is_waiting for task in self._tasks.values())

    @property
    def num_tasks(self) -> int:
        """Tasks that are neither finished nor put down."""
        return len(self._tasks)

    def knows(self, lease: int) -> bool:
        """Whether a lease is still valid."""
        return lease in self._leases

    def length(self, lease: int) -> int:
        """Tokens after the prompt that a lease has reported, with those it was given."""
        return self._leases[lease].length

    def task_of(self, lease: int) -> int:
        """The task of a valid lease."""
        return self._leases[lease].task

    def leases_of(self, task: int) -> list[int]:
        """The leases under which a task is being grown."""
        return [lease.number for lease in self._tasks[task].leases] if task in self._tasks else []

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _joined(self, event: WorkerJoined, commands: list[Command]) -> None:
        assert event.worker not in self.workers, f"worker {event.worker} joined twice"
        self.workers[event.worker] = Worker(event.worker, event.slots, event.weight, event.at_s, event.at_s)

    def _heard(self, event: WorkerHeard, commands: list[Command]) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            return
        worker.heard_s = event.at_s
        if event.decoded_tokens != worker.decoded_tokens:
            worker.decoded_tokens, worker.moved_s = event.decoded_tokens, event.at_s
        if event.version != worker.version:
            worker.version = event.version
            self._offer(worker)

    def _left(self, event: WorkerLeft, commands: list[Command]) -> None:
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            return
        if worker.speed is not None:
            self._num_speeds, self._sum_speeds = self._num_speeds - 1, self._sum_speeds - worker.speed
        for number in sorted(worker.leases):
            self._end(self._leases[number], commands)

    # ---- tasks and leases --------------------------------------------------------------------------------------------

    def _wanted(self, event: TaskWanted, commands: list[Command]) -> None:
        assert event.task not in self._tasks, f"task {event.task} is wanted twice"
        task = _Task(event.task, event.version, event.is_exact, event.num_tokens, event.max_tokens)
        self._tasks[event.task] = task
        self._queue(task)

    def _aborted(self, event: TaskAborted, commands: list[Command]) -> None:
        task = self._tasks.get(event.task)
        if task is None or task.is_aborting:
            return
        task.is_aborting = True
        if task.is_waiting:
            self._rest(task, commands)
        for lease in task.leases:
            lease.recalled_s = event.at_s
            commands.append(Recall(lease.worker, lease.number))

    def _revoked(self, event: TaskRevoked, commands: list[Command]) -> None:
        """Nothing of it stays; what was committed its owner counts, what was not is wasted."""
        task = self._tasks.pop(event.task, None)
        if task is None:
            return
        for lease in task.leases:
            commands.append(Drop(lease.worker, lease.number))
            self._forget(lease)
        for lease in (*task.leases, *task.rested):
            self._overtaken(lease, task.committed, commands)

    def _grew(self, event: LeaseGrew, commands: list[Command]) -> None:
        lease = self._leases.get(event.lease)
        if lease is None:
            return
        task, worker = self._tasks[lease.task], self.workers[lease.worker]
        if event.at_s > lease.grew_s:
            self._measure(worker, event.num_tokens / (event.at_s - lease.grew_s))
        lease.grew_s = worker.moved_s = event.at_s
        before, lease.length = lease.length, lease.length + event.num_tokens
        if self.rules.restarts:
            self._waste("regenerated", min(lease.length, task.committed) - before, commands)
        if self._commits(task):
            self._commit(task, lease, commands)

    def _finished(self, event: LeaseFinished, commands: list[Command]) -> None:
        lease = self._leases.get(event.lease)
        if lease is None:
            return
        task = self._tasks.pop(lease.task)
        prefix = task.committed
        self._commit(task, lease, commands)
        commands.append(Finish(task.number, lease.number))
        self._forget(lease)
        for other in [one for one in task.leases if one is not lease]:
            commands.append(Drop(other.worker, other.number))
            self._forget(other)
            task.rested.append(other)
        for other in task.rested:
            self._overtaken(other, prefix, commands)

    def _put_down(self, event: LeasePutDown, commands: list[Command]) -> None:
        lease = self._leases.get(event.lease)
        if lease is not None:
            self._end(lease, commands)

    def _end(self, lease: _Lease, commands: list[Command]) -> None:
        """A lease is over, and its task is not finished."""
        task = self._tasks[lease.task]
        self._forget(lease)
        task.leases.remove(lease)
        if task.leases and not task.is_aborting:  # it is relieved: the other goes on alone
            self._overtaken(lease, task.committed, commands)
            self._commit(task, task.leases[0], commands)
        elif task.leases:
            task.rested.append(lease)
        else:
            self._overtake_all(task, lease, commands)
            if task.is_aborting:
                self._rest(task, commands)
            else:
                self._queue(task)

    def _overtake_all(self, task: _Task, lease: _Lease, commands: list[Command]) -> None:
        """Keep the longest of the branches that were put down."""
        longest = max((*task.rested, lease), key=lambda one: (one.length, -one.number))
        prefix = task.committed
        self._commit(task, longest, commands)
        for other in (*task.rested, lease):
            if other is not longest:
                self._overtaken(other, prefix, commands)
        task.rested = []

    def _overtaken(self, lease: _Lease, prefix: int, commands: list[Command]) -> None:
        """Count what a lease made beyond the prefix that all share; with `restarts` that was counted before."""
        if not self.rules.restarts:
            self._waste("overtaken", lease.length - max(prefix, lease.base), commands)

    def _commits(self, task: _Task) -> bool:
        """Whether what a lease reports is the trajectory's at once: it is alone, or makes the same tokens as others."""
        return self.rules.restarts or len(task.leases) + len(task.rested) == 1

    def _commit(self, task: _Task, lease: _Lease, commands: list[Command]) -> None:
        if lease.length > task.committed:
            task.committed = lease.length
            commands.append(Commit(task.number, lease.number, lease.length))

    def _rest(self, task: _Task, commands: list[Command]) -> None:
        del self._tasks[task.number]
        commands.append(PutDown(task.number))

    def _waste(self, cause: str, num_tokens: int, commands: list[Command]) -> None:
        if num_tokens > 0:
            self.wasted[cause] += num_tokens
            commands.append(Waste(cause, num_tokens))

    def _forget(self, lease: _Lease) -> None:
        del self._leases[lease.number]
        worker = self.workers.get(lease.worker)
        if worker is not None:
            worker.leases.discard(lease.number)
            self._offer(worker)

    # ---- granting ----------------------------------------------------------------------------------------------------

    def _queue(self, task: _Task) -> None:
        heapq.heappush(self._waiting.setdefault((task.version, task.is_exact), []), task.number)

    def _grant_all(self, at_s: float, commands: list[Command]) -> None:
        """Give what waits to whoever has a place and the right version, the oldest first."""
        for key in sorted(self._waiting):
            heap = self._waiting[key]
            while heap:
                task = self._tasks.get(heap[0])
                if task is None or not task.is_waiting:
                    heapq.heappop(heap)
                    continue
                worker = self._emptiest(*key)
                if worker is None:
                    break
                heapq.heappop(heap)
                self._grant(task, worker, at_s, commands)
            if not heap:
                del self._waiting[key]

    def _grant(self, task: _Task, worker: Worker, at_s: float, commands: list[Command]) -> None:
        base = 0 if self.rules.restarts else task.committed
        number, self._next_lease = self._next_lease, self._next_lease + 1
        lease = _Lease(number, task.number, worker.number, base, base, at_s, at_s)
        if not worker.leases:
            worker.moved_s = at_s  # it stood still because it had nothing to do
        self._leases[number] = lease
        task.leases.append(lease)
        worker.leases.add(number)
        self._offer(worker)
        commands.append(Grant(worker.number, number, task.number, base))

    def _emptiest(self, version: int, is_exact: bool, *, needs_slot: bool = False) -> Worker | None:
        """Return the least loaded worker that may serve a version."""
        served = (v for v in self._places if (v == version if is_exact else v >= version))
        tops = [top for v in served if (top := self._top(self._places[v])) is not None]
        if not tops:
            return None
        is_full, _, number, _ = min(tops)
        return None if needs_slot and is_full else self.workers[number]

    def _top(self, heap: list[tuple[bool, float, int, int]]) -> tuple[bool, float, int, int] | None:
        while heap:
            worker = self.workers.get(heap[0][2])
            if worker is not None and worker.stamp == heap[0][3]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _offer(self, worker: Worker) -> None:
        """Note how full a worker is, after that has changed, while it has a place."""
        worker.stamp += 1
        num, slots = len(worker.leases), worker.slots
        if worker.version is None or num >= slots + int(self.rules.prefetch * slots):
            return
        load = (num + 1) / (slots * worker.weight * self._relative_speed(worker))
        heap = self._places.setdefault(worker.version, [])
        heapq.heappush(heap, (num >= slots, load, worker.number, worker.stamp))
        if len(heap) > 8 * len(self.workers) + 64:  # mostly out of date
            heap[:] = [note for note in heap if note[2] in self.workers and self.workers[note[2]].stamp == note[3]]
            heapq.heapify(heap)
        for version in [v for v, notes in self._places.items() if not self._top(notes)]:
            del self._places[version]

    def _relative_speed(self, worker: Worker) -> float:
        """Its speed over the mean of all that are known, within reason."""
        if worker.speed is None:
            return 1.0
        return min(10.0, max(0.1, worker.speed * self._num_speeds / max(1e-9, self._sum_speeds)))

    def _measure(self, worker: Worker, speed: float) -> None:
        known = worker.speed
        worker.speed = speed if known is None else _SPEED_MEMORY * known + (1 - _SPEED_MEMORY) * speed
        self._num_speeds += known is None
        self._sum_speeds += worker.speed - (known or 0.0)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick, commands: list[Command]) -> None:
        now_s, rules = event.at_s, self.rules
        for worker in list(self.workers.values()):
            worker.heard_s += event.delay_s
            worker.moved_s += event.delay_s
            if now_s - worker.heard_s > rules.silence_s:
                self._expel(worker, f"was not heard of for {rules.silence_s:.0f} s", now_s, commands)
            elif worker.leases and now_s - worker.moved_s > rules.wedge_s:
                held = f"held {len(worker.leases)} leases"
                self._expel(worker, f"{held} and made no token for {rules.wedge_s:.0f} s", now_s, commands)
        for lease in list(self._leases.values()):
            lease.grew_s += event.delay_s
            is_unanswered = lease.recalled_s is not None and now_s - lease.recalled_s > rules.silence_s
            if is_unanswered or now_s - lease.grew_s > rules.starve_s:
                commands.append(Drop(lease.worker, lease.number))
                self._end(lease, commands)
        if rules.relief and not any(task.is_waiting for task in self._tasks.values()):
            self._relieve(now_s, commands)

    def _expel(self, worker: Worker, cause: str, now_s: float, commands: list[Command]) -> None:
        commands.append(Expel(worker.number, cause))
        self._left(WorkerLeft(now_s, worker.number, cause), commands)

    def _relieve(self, now_s: float, commands: list[Command]) -> None:
        """Give the slowest leases to free workers too, where those may well be through first.

        How long a trajectory becomes nobody knows; both are compared by the time for all that it may still get.
        """
        for here_s, task in sorted(self._stragglers(now_s), key=lambda one: (-one[0], one[1].number)):
            worker = self._emptiest(task.version, task.is_exact, needs_slot=True)
            if worker is None:
                return
            if worker.number == task.leases[0].worker or not worker.speed:
                continue
            start = 0 if self.rules.restarts else task.committed
            if here_s > self.rules.relief * (task.max_tokens - start) / worker.speed:
                self._grant(task, worker, now_s, commands)

    def _stragglers(self, now_s: float) -> list[tuple[float, _Task]]:
        """(seconds that it may still take, task) of the tasks that could be relieved."""
        found = []
        for task in self._tasks.values():
            if task.is_aborting or len(task.leases) != 1:
                continue
            lease = task.leases[0]
            age_s = now_s - lease.granted_s
            if age_s >= self.rules.relief_after_s:
                rate = max(lease.length - lease.base, 1) / age_s
                found.append(((task.max_tokens - lease.length) / rate, task))
        return found
