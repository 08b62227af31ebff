"""A world for the scheduler: workers, judges and a trainer that do what random choices say, and every law checked.

Tokens are real here (their versions are listed one by one), so that the scheduler's counts can be held against them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.rollout.events import (
    AbortTrajectory,
    Assign,
    BatchRequested,
    Capacity,
    Command,
    Deliver,
    Discard,
    DispatchPaused,
    DispatchResumed,
    Event,
    Finished,
    LeaseEnded,
    Load,
    Open,
    Restart,
    Revoked,
    Rewarded,
    TokensLost,
    TokensReceived,
    VersionServed,
    VersionTrained,
)
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.settings import Rules

Key = tuple[int, int]


@dataclass
class Running:
    version: int
    is_exact: bool


@dataclass
class World:
    """`length` and `reward` script each trajectory; `choose(n)` gives a number below n."""

    rules: Rules
    choose: Callable[[int], int]
    length: Callable[[int, int], int]
    reward: Callable[[int, int], float | None]
    scheduler: RolloutScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = RolloutScheduler(self.rules)
        self.now_s = 0.0
        self.tokens: dict[Key, list[int]] = {}
        """Versions of each open trajectory's tokens."""
        self.origin: dict[int, int] = {}
        """Open group → the number of its prompt."""
        self.running: dict[Key, Running] = {}
        self.unreported: Counter[Key] = Counter()
        """Tokens that a worker has, but has not reported."""
        self.aborting: set[Key] = set()
        self.judging: list[Key] = []
        self.finished: set[Key] = set()
        self.slots = self.next_prompt = self.generated = self.lost = 0
        self.served: int | None = None
        self.version = self.delivered = 0
        self.batches: list[list[int]] = []
        self.batch_prompts: list[list[int]] = []
        self.batch_tokens: list[list[list[int]]] = []
        self.trained_groups: set[int] = set()
        self.discarded: Counter[str] = Counter()
        self.discarded_tokens: Counter[str] = Counter()
        self.finishes: Counter[Key] = Counter()
        self.is_paused = self.is_training = self.is_wanted = False
        self.log: list[Event] = []
        self.tell(VersionTrained(self.now_s, 0))

    def tell(self, event: Event) -> None:
        """Give the scheduler an event, do what it says, and check the laws."""
        queue = [event]
        while queue:
            event = queue.pop(0)
            self.log.append(event)
            for command in self.scheduler.handle(event):
                queue += self.obey(command)
            self.check()

    def obey(self, command: Command) -> list[Event]:
        match command:
            case Open(group_id=g, again=again):
                assert g not in self.origin
                assert g == max([-1, *self.origin, *self.trained_groups, *self._gone]) + 1, "ids are never used again"
                if again is None:
                    self.origin[g], self.next_prompt = self.next_prompt, self.next_prompt + 1
                else:
                    self.origin[g] = self._gone[again]
                for s in range(self.rules.group_size):
                    self.tokens[g, s] = []
            case Assign(group_id=g, sample_index=s, version=v, is_exact=exact):
                key = (g, s)
                assert key not in self.running, "leased twice"
                assert key not in self.finished, "a finished trajectory is never generated again"
                assert self.served is not None
                assert v == self.served if exact else v <= self.served
                assert not self.is_paused
                if self.rules.mode != "async":
                    assert self.is_wanted
                waiting = [k for k, t in self.tokens.items() if t and k not in self.running and k not in self.finished]
                if not self.tokens[key]:
                    assert not waiting, f"{waiting} were put down and wait longer than {key}"
                self.running[key] = Running(v, exact)
                assert len(self.running) <= self.slots, "more leases than places"
                assert len(self.running) <= (self.rules.max_concurrency or 10**9)
            case AbortTrajectory(group_id=g, sample_index=s):
                if (g, s) in self.running:
                    self.aborting.add((g, s))
            case Restart(group_id=g, sample_index=s):
                self.lost += len(self.tokens[g, s])
                self.tokens[g, s] = []
            case Discard(group_id=g, cause=cause):
                self._gone[g] = self.origin.pop(g)
                self.discarded[cause] += 1
                for s in range(self.rules.group_size):
                    assert (g, s) in self.finished
                    self.discarded_tokens[cause] += len(self.tokens.pop((g, s)))
            case Deliver(step=step, group_ids=ids):
                self._deliver(step, ids)
            case Load(version=v):
                assert v == self.version
                if self.rules.on_new_version != "keep":
                    assert not self.running, "weights are exchanged under running trajectories"
                self.served = v
                return [VersionServed(self.now_s, v)]
        return []

    def _deliver(self, step: int, ids: tuple[int, ...]) -> None:
        assert self.is_wanted
        assert len(ids) == len(set(ids)) == self.rules.batch_groups, "exactly a batch"
        assert not self.trained_groups & set(ids), "no group is trained twice"
        self.delivered += 1
        assert step == self.delivered == self.version + 1
        self.is_wanted, self.is_training = False, True
        self.trained_groups |= set(ids)
        self.batches.append(list(ids))
        self.batch_prompts.append([self.origin.pop(g) for g in ids])
        members = [(g, s) for g in ids for s in range(self.rules.group_size)]
        assert all(key in self.finished and key not in self.judging for key in members), "finished and judged, all"
        self.batch_tokens.append([self.tokens.pop(key) for key in members])
        versions = [v for t in self.batch_tokens[-1] for v in t]
        if self.rules.stale != "mask" or self.rules.mode == "sync":
            assert min(versions) >= self.version - self.rules.max_staleness, "too old to be trained"

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def join(self, slots: int) -> None:
        self.slots += slots
        self.tell(Capacity(self.now_s, self.slots))

    def leave(self) -> None:
        """Places go; what is leased beyond them waits, or is told to be lost."""
        self.slots = self.choose(self.slots + 1)
        self.tell(Capacity(self.now_s, self.slots))

    def lose(self) -> None:
        """A branch came to nothing."""
        count = 1 + self.choose(9)
        self.lost += count
        self.generated += count
        self.tell(TokensLost(self.now_s, "overtaken", count))

    def revoke(self) -> None:
        """What a worker wrote is not to be trusted, whatever has become of it since, short of a batch."""
        key = self._pick(sorted(self.tokens))
        if key in self.running:
            self._end(key)
        if key in self.finished:
            self.finished.remove(key)
            del self.finishes[key]
        if key in self.judging:
            self.judging.remove(key)
        self.tell(Revoked(self.now_s, *key, "revoked"))

    def grow(self) -> None:
        """A trajectory gets a few more tokens, and finishes when its script says so; an abort may come first."""
        key = self._pick(sorted(self.running))
        if key in self.aborting and self.choose(2):
            self._end(key)
            self.tell(LeaseEnded(self.now_s, *key))
            return
        left = self.length(*key) - len(self.tokens[key])
        count = min(left, 1 + self.choose(4))
        assert self.served is not None
        if count:
            self.tokens[key] += [self.served] * count
            self.generated += count
            self.tell(TokensReceived(self.now_s, *key, self.served, count))
        if count == left:
            self._end(key)
            self.finished.add(key)
            self.finishes[key] += 1
            self.judging.append(key)
            self.tell(Finished(self.now_s, *key))

    def judge(self) -> None:
        key = self.judging.pop(self.choose(len(self.judging)))
        self.tell(Rewarded(self.now_s, *key, self.reward(*key)))

    def want(self) -> None:
        self.is_wanted = True
        self.tell(BatchRequested(self.now_s))

    def make_version(self) -> None:
        self.is_training = False
        self.version += 1
        self.tell(VersionTrained(self.now_s, self.version))

    def pause(self) -> None:
        self.is_paused = True
        self.tell(DispatchPaused(self.now_s))

    def resume(self) -> None:
        self.is_paused = False
        self.tell(DispatchResumed(self.now_s))

    def possible(self, *, faults: bool) -> list[Callable[[], None]]:
        """What may happen now; more likely things stand there more often."""
        found: list[Callable[[], None]] = []
        if self.running:
            found += [self.grow] * 8
        if self.judging:
            found += [self.judge] * 4
        if not self.is_wanted and not self.is_training and not self.is_paused and self.served == self.version:
            found += [self.want] * 2
        if self.is_training:
            found.append(self.make_version)
        if self.is_paused and not self.running:
            found += [self.resume] * 4
        if faults:
            found += [lambda: self.join(1 + self.choose(5))]
            if self.slots:
                found += [self.leave, self.lose]
            if self.tokens:
                found.append(self.revoke)
            if not self.is_paused and not self.is_wanted:
                found.append(self.pause)
        return found

    def step(self, *, faults: bool) -> bool:
        """Let one thing happen; False when nothing can."""
        self.now_s += 1.0
        found = self.possible(faults=faults)
        if not found:
            return False
        found[self.choose(len(found))]()
        return True

    def run(self, batches: int, limit: int = 200_000) -> None:
        """Go on without faults until so many batches are delivered: nothing may hang."""
        if not self.slots:
            self.join(4)
        for _ in range(limit):
            if self.delivered >= batches:
                return
            assert self.step(faults=False), "nothing can happen any more: a hang"
        raise AssertionError(f"{self.delivered} batches after {limit} events")

    # ---- laws --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Conservation, at every event."""
        ledger, scheduler = self.scheduler.ledger, self.scheduler
        assert ledger.generated == self.generated
        assert ledger.generated == ledger.settled + scheduler.num_carried_tokens
        assert scheduler.num_carried_tokens == sum(map(len, self.tokens.values()))
        assert ledger.lost.total() == self.lost
        assert (ledger.filtered, ledger.dropped) == (
            self.discarded_tokens["filtered"],
            self.discarded_tokens["dropped"],
        )
        assert scheduler.num_leased == len(self.running)
        assert {g.group_id for g in scheduler.groups()} == set(self.origin)
        for group in scheduler.groups():
            for member in group.members:
                own = self.tokens[member.group_id, member.sample_index]
                assert [v for v, n in member.versions for _ in range(n)] == own
                assert own == sorted(own)
        if self.rules.mode == "partial":
            assert len(self.origin) <= self.rules.max_outstanding(scheduler.overprovision)
        else:
            submitted = self.delivered * self.rules.batch_groups + len(self.origin)
            assert (submitted - 1) // self.rules.batch_groups <= self.version + self.rules.max_staleness

    def _end(self, key: Key) -> None:
        del self.running[key]
        self.aborting.discard(key)

    def _pick(self, found):
        return found[self.choose(len(found))]

    @property
    def _gone(self) -> dict[int, int]:
        return self.__dict__.setdefault("gone", {})
