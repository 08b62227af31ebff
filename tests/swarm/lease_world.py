"""A world for the lease table: workers and wires that do what random choices say, and every law checked.

Tokens are real here. With `restarts` a token is (task, position): the noise is keyed, so every attempt makes the same
ones. Without `restarts` a token is (position, lease), so a mixture of the tokens of two leases is detected. Tokens
before the turn of a task belong to no lease, so generating them again is detected. The world acts as the hub: it keeps
the reported tokens of each lease, applies the commands of the table, and counts independently.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.swarm.lease_credit import FIRST_LEASES, TOKENS_PER_LEASE
from baton.swarm.lease_events import (
    Command,
    CommitTokens,
    DiscardTokens,
    DisconnectWorker,
    DropLease,
    Event,
    FinishTask,
    GrantLease,
    LeaseFinished,
    LeaseProgressed,
    LeaseReturned,
    LeaseTick,
    RecallLease,
    ReplaceTokens,
    ReturnTask,
    TaskAborted,
    TaskSubmitted,
    WorkerJoined,
    WorkerLeft,
    WorkerSeen,
)
from baton.swarm.leases import LeaseRules, LeaseTable

Token = tuple[int, int]


@dataclass
class Message:
    lease: int
    offset: int
    tokens: list[Token]
    is_finished: bool = False
    is_put_down: bool = False


@dataclass
class Attempt:
    """One lease as its worker has it."""

    lease: int
    task: int
    tokens: list[Token]
    length: int
    is_recalled: bool = False
    is_stuck: bool = False


@dataclass
class SimWorker:
    number: int
    slots: int
    speed: float
    """Tokens a second of one lease."""
    version: int
    kind: str | None = ""
    owner: str | None = None
    delivered: int = 0
    counter: int = 0
    is_hung: bool = False
    is_wedged: bool = False
    is_refusing: bool = False
    attempts: dict[int, Attempt] = field(default_factory=dict)
    wire: deque[Message] = field(default_factory=deque)
    """On their way to the hub, in order."""
    # as the table was told
    told_version: int | None = None
    told_counter: int = -1
    heard_s: float = 0.0
    moved_s: float = 0.0
    held: set[int] = field(default_factory=set)

    @property
    def is_healthy(self) -> bool:
        return not (self.is_hung or self.is_wedged or self.is_refusing)


@dataclass
class SimTask:
    number: int
    version: int
    is_exact: bool
    committed: list[Token]
    start: int = 0
    preferred: int | None = None
    """Until its first lease."""
    aborted_s: float | None = None
    live: list[int] = field(default_factory=list)
    rested: list[int] = field(default_factory=list)
    """Leases that were put down while another is out, and may yet be the one that is kept."""

    def suits(self, version: int | None) -> bool:
        return version is not None and (version == self.version if self.is_exact else version >= self.version)

    @property
    def is_waiting(self) -> bool:
        return not self.live


@dataclass
class World:
    """`choose(n)` gives a number below n; `length(task, lease)` scripts how long a trajectory becomes."""

    rules: LeaseRules
    choose: Callable[[int], int]
    length: Callable[[int, int], int]
    is_mixed: bool = False
    """Whether workers are of several kinds, some with noise of their own."""
    is_owned: bool = False
    """Whether some workers are somebody else's, and earn what they may hold."""
    table: LeaseTable = field(init=False)

    def __post_init__(self) -> None:
        self.table = LeaseTable(self.rules)
        self.now_s = 0.0
        self.workers: dict[int, SimWorker] = {}
        self.tasks: dict[int, SimTask] = {}
        self.holder: dict[int, SimWorker] = {}
        """Valid lease → worker."""
        self.task_of: dict[int, int] = {}
        self.base: dict[int, int] = {}
        self.branches: dict[int, list[Token]] = {}
        """Lease → what it was given and has reported, as the hub keeps it."""
        self.delivered: Counter[str] = Counter()
        """Owner → tokens, of workers that are gone too."""
        self.stems: dict[int, str] = {}
        """Lease → what its tokens depend on beside their place, with `restarts`."""
        self.gone: list[Message] = []
        """Of workers that are no more; may still come in."""
        self.spare_numbers: list[int] = []
        self.spare_tasks: list[int] = []
        self.next_worker = self.next_task = self.version = 0
        self.reported = self.committed = 0
        self.wasted: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.grants: list[GrantLease] = []
        self.finished_by: Counter[int] = Counter()
        """Worker → trajectories whose finish was taken from it."""
        self.reliefs: list[GrantLease] = []
        self.expelled: list[DisconnectWorker] = []
        self.log: list[Event | Command] = []
        self.finishing: int | None = None

    # ---- the table's side --------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Give the table an event, do what it says, and check the laws."""
        self.log.append(event)
        for command in self.table.handle(event):
            self.log.append(command)
            self.obey(command)
        self.check(event)

    def obey(self, command: Command) -> None:
        match command:
            case GrantLease():
                self._granted(command)
            case RecallLease(worker=w, lease=n):
                assert self.holder[n] is self.workers[w]
                assert self.tasks[self.task_of[n]].aborted_s is not None, "only what was aborted is recalled"
                if n in self.workers[w].attempts:
                    self.workers[w].attempts[n].is_recalled = True
            case DropLease(worker=w, lease=n):
                if self.task_of[n] in self.tasks:
                    assert self.holder[n] is self.workers[w]
                    self._end(n)
                if self.choose(2):  # it hears of it soon, or after some more tokens
                    self.workers[w].attempts.pop(n, None)
            case CommitTokens(task=t, lease=n, length=length):
                task, branch = self.tasks[t], self.branches[n]
                assert self.task_of[n] == t
                assert n in task.live + task.rested or not task.live, "only of leases that are, or were the last"
                assert len(task.committed) < length <= len(branch), "committed tokens only grow"
                assert branch[: len(task.committed)] == task.committed, "append only, and no branches are mixed"
                self.committed += length - len(task.committed)
                task.committed = branch[:length]
            case FinishTask(task=t, lease=n):
                assert n == self.finishing, "finished by whoever said so"
                task = self.tasks[t]
                assert task.committed == self.branches[n], "all of it is committed"
                assert len(task.committed) == max(self.base[n], self.length(t, n))
                self.finished_by[self.holder[n].number] += 1
                self.outcomes["finished"] += 1
                self._close(task)
            case ReplaceTokens(task=t, lease=n):
                assert n == self.finishing, "finished by whoever said so"
                assert self.is_mixed
                assert self.rules.restarts
                task, branch = self.tasks[t], self.branches[n]
                assert len(task.committed) > task.start, "else there is nothing to replace"
                assert task.committed[: task.start] == branch[: task.start], "the turns before are the same"
                assert task.committed[task.start] != branch[task.start], "by other tokens"
                assert len(branch) == self.length(t, n)
                self.committed += len(branch) - task.start  # what it replaces was reported too, and its owner counts it
                self.finished_by[self.holder[n].number] += 1
                self.outcomes["replaced"] += 1
                self._close(task)
            case ReturnTask(task=t):
                task = self.tasks[t]
                assert task.aborted_s is not None
                assert not task.live
                self.outcomes["put down"] += 1
                self._close(task)
                self.spare_tasks.append(t)
            case DiscardTokens(cause=cause, num_tokens=num):
                assert num > 0
                self.wasted[cause] += num
            case DisconnectWorker(worker=w):
                worker = self.workers[w]
                silent = self.now_s - worker.heard_s > self.rules.heartbeat_timeout_s
                wedged = worker.held and self.now_s - worker.moved_s > self.rules.progress_timeout_s
                assert silent or wedged, "nobody is expelled for nothing"
                self.expelled.append(command)
                self._gone(worker)

    def _granted(self, grant: GrantLease) -> None:
        worker, task = self.workers[grant.worker], self.tasks[grant.task]
        assert grant.lease not in self.branches, "lease numbers are never used again"
        assert task.aborted_s is None
        assert len(task.live) < 2
        assert task.suits(worker.told_version), f"{task} to {worker}"
        assert grant.base == (task.start if self.rules.restarts else len(task.committed))
        if task.live:  # relief
            assert len(worker.held) < self.room(worker), "relief is for a free slot"
            waiting = [t for t in self.tasks.values() if t.is_waiting]
            assert not any(t.suits(worker.told_version) for t in waiting), "what waits comes before relief"
            assert not any(self.holder[n] is worker for n in task.live)
            self.reliefs.append(grant)
        else:
            wanted = self.workers.get(-1 if task.preferred is None else task.preferred)
            if wanted is not None and task.suits(wanted.told_version) and self.owner_allows(wanted):
                assert worker is wanted or len(wanted.held) >= self.room(wanted), "it goes to whom it prefers"
            task.preferred = None
            eligible = [w for w in self.workers.values() if task.suits(w.told_version)]
            if len(worker.held) >= self.room(worker):
                full = [len(w.held) >= self.room(w) or not self.owner_allows(w) for w in eligible]
                assert all(full), "prefetch, though a slot is free elsewhere"
            order = (not task.start, task.number)
            earlier = [t for t in self.tasks.values() if t.is_waiting and (not t.start, t.number) < order]
            assert not any(t.suits(worker.told_version) for t in earlier), "next turns first, then the oldest"
        if not worker.held:
            worker.moved_s = self.now_s
        worker.held.add(grant.lease)
        assert len(worker.held) <= self.places(worker)
        assert len(worker.held) <= worker.slots + int(self.rules.prefetch * worker.slots)
        if worker.owner is not None:
            earned = FIRST_LEASES + worker.delivered // TOKENS_PER_LEASE
            assert len(worker.held) <= earned + int(self.rules.prefetch * earned), "what is claimed is only a bound"
            held = sum(len(w.held) for w in self.workers.values() if w.owner == worker.owner)
            assert held <= FIRST_LEASES + self.delivered[worker.owner] // TOKENS_PER_LEASE, "of all its workers"
        task.live.append(grant.lease)
        self.holder[grant.lease] = worker
        self.task_of[grant.lease], self.base[grant.lease] = grant.task, grant.base
        self.stems[grant.lease] = str(grant.lease) if worker.kind is None else f"of {worker.kind}"
        given = list(task.committed[: grant.base])
        self.branches[grant.lease] = given
        length = max(grant.base, self.length(grant.task, grant.lease))
        worker.attempts[grant.lease] = Attempt(grant.lease, grant.task, list(given), length)
        self.grants.append(grant)

    def places(self, worker: SimWorker) -> int:
        room = self.room(worker)
        return room + int(self.rules.prefetch * room)

    def room(self, worker: SimWorker) -> int:
        """Slots that the table takes as earned; how many that are at most is a law of `_granted`."""
        known = self.table.workers.get(worker.number)
        return worker.slots if known is None else known.room

    def owner_allows(self, worker: SimWorker) -> bool:
        return self.table.workers[worker.number].owner_allows

    def _end(self, lease: int) -> None:
        """A lease is not valid any more, and its task goes on."""
        worker, task = self.holder.pop(lease), self.tasks[self.task_of[lease]]
        worker.held.discard(lease)
        task.live.remove(lease)
        if task.aborted_s is not None:
            task.rested.append(lease)

    def _close(self, task: SimTask) -> None:
        for lease in task.live:
            self.holder.pop(lease).held.discard(lease)
        del self.tasks[task.number]

    def _gone(self, worker: SimWorker) -> None:
        del self.workers[worker.number]
        self.spare_numbers.append(worker.number)
        self.gone += worker.wire
        for lease in sorted(worker.held):
            self._end(lease)

    def check(self, event: Event) -> None:
        """The laws, after every event."""
        table = self.table
        assert table.num_tasks == len(self.tasks), "one state each"
        assert table.num_waiting == sum(task.is_waiting for task in self.tasks.values())
        assert set(table.workers) == set(self.workers)
        assert table.wasted == self.wasted
        live = {task.number: sorted(lease.number for lease in task.leases) for task in table.tasks()}
        lengths = {lease.number: lease.length for task in table.tasks() for lease in task.leases}
        for task in self.tasks.values():
            assert live.get(task.number, []) == sorted(task.live)
            assert len(task.live) <= 2
            assert task.aborted_s is None or task.live, "an aborted task that nobody holds is put down at once"
        uncommitted = 0
        for task in self.tasks.values():
            for lease in task.live + task.rested:
                branch = self.branches[lease]
                assert lease in task.rested or lengths[lease] == len(branch)
                begin = slice(task.start, task.start + 1)
                if self.rules.restarts and branch[begin] and task.committed[begin] != branch[begin]:
                    assert task.committed[begin], "what came first is committed at once"
                    uncommitted += len(branch) - task.start
                elif self.rules.restarts:
                    assert branch == task.committed[: len(branch)], "known at once, and the same from everybody"
                else:
                    assert branch[: len(task.committed)] == task.committed or len(task.live + task.rested) == 1
                    uncommitted += len(branch) - len(task.committed)
        assert self.reported == self.committed + self.wasted.total() + uncommitted, "conservation, to the token"
        for task in self.tasks.values():
            if task.is_waiting:
                for worker in self.workers.values():
                    full = len(worker.held) >= self.places(worker) or not self.owner_allows(worker)
                    assert full or not task.suits(worker.told_version), "who has a place is given what waits"
        if isinstance(event, LeaseTick):
            for task in self.tasks.values():
                if task.aborted_s is not None:
                    assert self.now_s - task.aborted_s <= self.rules.heartbeat_timeout_s, (
                        "an aborted task is returned in time, also if no worker answers"
                    )
            for worker in self.workers.values():
                assert self.now_s - worker.heard_s <= self.rules.heartbeat_timeout_s

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        """What a hub does with a report: nothing for a lease that is over, nothing twice, nothing out of order."""
        lease = message.lease
        if not self.table.knows(lease):
            before = len(self.log)
            # a careless hub: nothing comes of it
            self.tell(LeaseProgressed(self.now_s, lease, 1 + len(message.tokens)))
            self.tell(LeaseReturned(self.now_s, lease))
            self.tell(LeaseFinished(self.now_s, lease))
            assert len(self.log) == before + 3, "after the end nothing comes for it"
            return
        branch = self.branches[lease]
        if message.offset + len(message.tokens) < len(branch):
            return
        worker = self.holder[lease]
        new = message.tokens[len(branch) - message.offset :]
        if new:
            branch += new
            self.reported += len(new)
            worker.delivered += len(new)
            self.delivered[worker.owner or ""] += len(new)
            worker.moved_s = worker.heard_s = self.now_s
            self.tell(LeaseProgressed(self.now_s, lease, len(new)))
        if not self.table.knows(lease):
            return
        if message.is_finished:
            self.finishing = lease
            self.tell(LeaseFinished(self.now_s, lease))
            self.finishing = None
        elif message.is_put_down:
            task = self.tasks[self.task_of[lease]]
            if task.aborted_s is None and task.suits(worker.told_version):
                worker.told_version = None  # a refusal: it is given nothing before it has been heard of again
            self._end(lease)
            self.tell(LeaseReturned(self.now_s, lease))
            assert task.number not in self.tasks or task.aborted_s is None or task.live

    def beat(self, worker: SimWorker) -> None:
        worker.heard_s = self.now_s
        if worker.counter != worker.told_counter:
            worker.told_counter, worker.moved_s = worker.counter, self.now_s
        worker.told_version = worker.version
        self.tell(WorkerSeen(self.now_s, worker.number, worker.version, worker.counter))

    def tick(self, delay_s: float = 0.0) -> None:
        for worker in self.workers.values():
            worker.heard_s = min(self.now_s, worker.heard_s + delay_s)
            worker.moved_s = min(self.now_s, worker.moved_s + delay_s)
        for task in self.tasks.values():
            if task.aborted_s is not None:
                task.aborted_s = min(self.now_s, task.aborted_s + delay_s)
        self.tell(LeaseTick(self.now_s, delay_s))

    # ---- what workers do ---------------------------------------------------------------------------------------------

    def work(self, worker: SimWorker, seconds: float) -> None:
        """Let the leases in its slots grow, and put what is new on the wire."""
        if worker.is_hung:
            return
        for attempt in list(worker.attempts.values())[: worker.slots]:
            offset = len(attempt.tokens)
            if worker.is_refusing and offset == self.base[attempt.lease]:
                worker.wire.append(Message(attempt.lease, offset, [], is_put_down=True))
                del worker.attempts[attempt.lease]
                continue
            made = 0 if worker.is_wedged or attempt.is_stuck else round(worker.speed * seconds)
            made = min(made, attempt.length - offset)
            stem = self.stems[attempt.lease]
            new = [
                (attempt.task, p, stem) if self.rules.restarts else (p, attempt.lease)
                for p in range(offset, offset + made)
            ]
            attempt.tokens += new
            worker.counter += made
            is_finished = len(attempt.tokens) == attempt.length and not worker.is_wedged and not attempt.is_stuck
            if new or is_finished:
                worker.wire.append(Message(attempt.lease, offset, new, is_finished=is_finished))
            if is_finished:
                del worker.attempts[attempt.lease]
        if worker.is_wedged:
            return
        for attempt in [one for one in worker.attempts.values() if one.is_recalled]:
            worker.wire.append(Message(attempt.lease, len(attempt.tokens), [], is_put_down=True))
            del worker.attempts[attempt.lease]

    def join(
        self, slots: int, speed: float, version: int | None = None, *, weight: float = 1.0, owner: str | None = None
    ) -> SimWorker:
        if self.spare_numbers and self.choose(2):
            number = self.spare_numbers.pop()  # the same one, come back
        else:
            number, self.next_worker = self.next_worker, self.next_worker + 1
        version = self.version if version is None else version
        kind = ["", "other", None][self.choose(3)] if self.is_mixed else ""
        worker = SimWorker(number, slots, speed, version, kind, owner, heard_s=self.now_s, moved_s=self.now_s)
        self.workers[number] = worker
        self.tell(WorkerJoined(self.now_s, number, slots, weight, kind, owner))
        if self.choose(4):
            self.beat(worker)
        return worker

    def leave(self, worker: SimWorker) -> None:
        self._gone(worker)
        self.tell(WorkerLeft(self.now_s, worker.number, "the connection was cut"))

    def want(self, *, is_exact: bool, version: int | None = None, num_tokens: int = 0, start: int = 0) -> SimTask:
        if self.spare_tasks and self.choose(2):
            number = self.spare_tasks.pop()  # put down, and wanted again
        else:
            number, self.next_task = self.next_task, self.next_task + 1
        num_tokens = min(num_tokens, self.length(number, -1) - 1)
        start = num_tokens if self.is_mixed else min(start, num_tokens)
        kept = [(number, p, "of ") if self.rules.restarts else (p, -1) for p in range(num_tokens)]
        kept[:start] = [(p, -2) for p in range(start)]
        preferred = self._pick(self.workers).number if start and self.workers else None
        task = SimTask(number, self.version if version is None else version, is_exact, kept, start, preferred)
        self.tasks[number] = task
        self.tell(TaskSubmitted(self.now_s, number, task.version, is_exact, num_tokens, 40, start, preferred))
        return task

    def abort(self, task: SimTask) -> None:
        if task.aborted_s is None:
            task.aborted_s = self.now_s
        self.tell(TaskAborted(self.now_s, task.number))

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let one thing happen; more likely things stand there more often."""
        self.now_s += self.choose(8) / 8
        found: list[Callable[[], None]] = [self._tick_late, self._some_join] + [self._some_want] * 3
        if self.workers:
            found += [self._some_work] * 8 + [self._some_wire] * 8 + [self._some_beat] * 6 + [self._some_fault] * 2
        if self.tasks:
            found.append(lambda: self.abort(self._pick(self.tasks)))
        if self.gone:
            found.append(lambda: self.deliver(self.gone.pop(self.choose(len(self.gone)))))
        found[self.choose(len(found))]()

    def _pick(self, found):
        return found[sorted(found)[self.choose(len(found))]]

    def _tick_late(self) -> None:
        delay_s = [0.0, 0.0, 0.25, 10.0][self.choose(4)]
        self.now_s += delay_s
        self.tick(delay_s)

    def _some_join(self) -> None:
        if len(self.workers) < 6:
            slots = 1 + self.choose(5) if not self.is_owned else [2, 12, 40][self.choose(3)]
            owner = [None, "a", "b"][self.choose(3)] if self.is_owned else None
            speed, version = [0.5, 2.0, 8.0][self.choose(3)], max(0, self.version - self.choose(2))
            self.join(slots, speed, version, owner=owner)

    def _some_want(self) -> None:
        if len(self.tasks) < 30:
            version = max(0, self.version - self.choose(2))
            self.want(is_exact=bool(self.choose(2)), version=version, num_tokens=self.choose(4), start=self.choose(4))

    def _some_work(self) -> None:
        self.work(self._pick(self.workers), (1 + self.choose(8)) / 2)

    def _some_wire(self) -> None:
        worker = self._pick(self.workers)
        if worker.wire and not worker.is_hung:
            message = worker.wire[0]
            if self.choose(4):  # else it comes again
                worker.wire.popleft()
            self.deliver(message)

    def _some_beat(self) -> None:
        worker = self._pick(self.workers)
        if not worker.is_hung:
            self.beat(worker)

    def _some_fault(self) -> None:
        worker = self._pick(self.workers)
        kind = self.choose(8)
        if kind == 0:
            self.leave(worker)
        elif kind == 1:
            worker.is_hung = True
        elif kind == 2:
            worker.is_wedged = True
        elif kind == 3:
            worker.speed = [0.25, 1.0, 4.0][self.choose(3)]
        elif kind == 4:
            self.version += 1
        elif kind == 5:
            worker.version = max(worker.version, self.version)
        elif kind == 6:
            worker.is_refusing = not worker.is_refusing
        elif worker.attempts:
            self._pick(worker.attempts).is_stuck = True

    def run(self, limit_s: float, *, step_s: float = 0.5, beat_s: float = 1.0, heal: bool = True) -> None:
        """Go on without new faults until nothing is wanted any more; who is ill stays so."""
        if heal:
            for version in {self.version, *(task.version for task in self.tasks.values())}:
                self.beat(self.join(2, 4.0, version))
        end_s, beaten_s = self.now_s + limit_s, self.now_s
        while self.tasks:
            assert self.now_s < end_s, f"a hang: {list(self.tasks.values())[:3]}"
            self.now_s += step_s
            is_beat = self.now_s - beaten_s >= beat_s
            beaten_s = self.now_s if is_beat else beaten_s
            for number in sorted(self.workers):
                worker = self.workers[number]
                if worker.is_hung:
                    continue
                self.work(worker, step_s)
                if is_beat:
                    self.beat(worker)
                while worker.wire:
                    self.deliver(worker.wire.popleft())
            self.tick()
