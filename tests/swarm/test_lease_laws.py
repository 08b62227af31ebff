"""Random events for a lease table, checked by the invariants of simulated runs (`tests/simulator/lease_invariants.py`).

The simulator's random days (`tests/simulator/chaos.py`) drive the table as a hub does. Here the events have no cause:
workers come, go, fall silent, refuse and get stuck in any order, tasks continue episodes, workers have owners, ticks
are late, and reports arrive after the end of their lease. `BATON_SCHEDULES=5000 pytest tests/swarm/test_lease_laws.py`
draws 5,000 schedules.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.swarm.lease_events import (
    Command,
    Event,
    GrantLease,
    LeaseFinished,
    LeaseProgressed,
    LeaseReturned,
    LeaseTick,
    RecallLease,
    TaskAborted,
    TaskRevoked,
    TaskSubmitted,
    WorkerJoined,
    WorkerLeft,
    WorkerSeen,
    WorkerWeightChanged,
)
from baton.swarm.leases import LeaseRules, LeaseTable
from tests.simulator.lease_invariants import LeaseInvariants

SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "300"))
MOODS = ("well", "well", "well", "stuck", "silent")
"""A stuck worker sends heartbeats and makes no token; a silent one sends nothing."""


@dataclass(slots=True)
class Known:
    """What a worker knows of one lease."""

    worker: int
    length: int
    """Tokens reported, and those that the trajectory had."""
    end: int
    """Length of the complete trajectory under this lease."""
    is_recalled: bool = False


class Schedule:
    """Sends events to a table. All decisions are `choose(n)`: a number from 0 to n - 1."""

    def __init__(self, rules: LeaseRules, seed: int, *, is_mixed: bool, is_owned: bool) -> None:
        self.seed, self.choose = seed, random.Random(seed).randrange
        self.is_mixed, self.is_owned = is_mixed, is_owned
        self.table = LeaseTable(rules)
        self.laws = LeaseInvariants(self.table, check)
        self.now_s, self.version, self.counter, self.next_task = 0.0, 0, 0, 0
        self.kinds: dict[int, str | None] = {}
        self.moods: dict[int, str] = {}
        """Of the workers, as far as they have not been told that they are gone."""
        self.tokens: dict[int, int] = {}
        """Task → tokens that it has at first."""
        self.leases: dict[int, Known] = {}
        self.seen: set[str] = set()
        """Types of commands, and the first words of their causes."""

    def tell(self, event: Event) -> None:
        self.laws.on_event(event)
        for command in self.table.handle(event):
            self.laws.on_command(command)
            self.seen |= {type(command).__name__, getattr(command, "cause", "").partition(" ")[0]}
            match command:
                case GrantLease(lease=lease, task=task, worker=worker, base=base):
                    self.leases[lease] = Known(worker, base, max(base, self.end(task, worker, lease)))
                case RecallLease(lease=lease):
                    self.leases[lease].is_recalled = True
        self.laws.settled(event)

    def end(self, task: int, worker: int, lease: int) -> int:
        """Leases with equal noise end at the same token: with `restarts`, those of one kind of worker."""
        kind = self.kinds[worker]
        noise = kind if self.table.rules.restarts and kind is not None else lease
        return self.tokens[task] + 1 + random.Random(f"{self.seed}/{task}/{noise}").randrange(30)

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One event; more likely ones stand there more often."""
        self.now_s += self.choose(8) / 8
        steps: Sequence[Callable[[], None]] = (self.report,) * 16 + (self.beat,) * 6 + (self.submit,) * 3
        steps += self.join, self.leave, self.fall_ill, self.abort, self.revoke, self.refuse, self.tick
        steps[self.choose(len(steps))]()

    def join(self, *, is_well: bool = False) -> None:
        number = next(n for n in range(99) if n not in self.table.workers)
        if number >= 6 and not is_well:
            return
        self.kinds[number] = ("", "other", None)[self.choose(3)] if self.is_mixed else ""
        self.moods[number] = "well"
        owner = (None, "a", "b")[self.choose(3)] if self.is_owned and not is_well else None
        slots = (2, 12, 40)[self.choose(3)] if self.is_owned else 1 + self.choose(5)
        self.tell(WorkerJoined(self.now_s, number, slots, (1.0, 3.0)[self.choose(2)], self.kinds[number], owner))

    def leave(self) -> None:
        if self.table.workers and not self.choose(2):
            self.tell(WorkerLeft(self.now_s, self.pick(self.table.workers), "cut"))

    def fall_ill(self) -> None:
        if self.moods:
            self.moods[self.pick(self.moods)] = MOODS[self.choose(len(MOODS))]

    def beat(self) -> None:
        worker = self.pick(self.moods) if self.moods else 0  # perhaps one that is gone
        mood = self.moods.get(worker)
        self.version += not self.choose(12)
        self.counter += mood == "well"
        served = None if not self.choose(12) else max(0, self.version - self.choose(3))
        if mood != "silent":
            self.tell(WorkerSeen(self.now_s, worker, served, self.counter if mood == "well" else -2))
        if not self.choose(12):
            self.tell(WorkerWeightChanged(self.now_s, worker, (0.5, 2.0)[self.choose(2)]))

    def submit(self) -> None:
        if len(self.table.tasks) < 30:
            task, self.next_task = self.next_task, self.next_task + 1
            num = self.tokens[task] = self.choose(4)
            # tokens that were generated before the task was submitted are those of its first lease's kind of worker
            start = num if self.is_mixed else min(num, self.choose(4))
            version, is_exact = max(0, self.version - self.choose(2)), bool(self.choose(2))
            preferred = self.choose(6) if start else None
            self.tell(TaskSubmitted(self.now_s, task, version, is_exact, num, 40, start, preferred))

    def abort(self) -> None:
        self.tell(TaskAborted(self.now_s, self.choose(self.next_task + 1)))

    def revoke(self) -> None:
        self.tell(TaskRevoked(self.now_s, self.choose(self.next_task + 1)))

    def tick(self) -> None:
        delay_s = (0.0, 0.0, 0.25, 10.0)[self.choose(4)]
        self.now_s += delay_s
        self.tell(LeaseTick(self.now_s, delay_s))

    def refuse(self) -> None:
        if self.leases:
            self.tell(LeaseReturned(self.now_s, self.pick(self.leases)))

    def report(self) -> None:
        """A lease grows and may end; at times one that has ended long ago."""
        valid = [n for n, known in self.leases.items() if n in self.table.leases and self.is_well(known)]
        number = self.pick(valid if valid and self.choose(8) else self.leases) if self.leases else 0
        if number in self.leases:
            self.grow(number, self.choose(9))

    def grow(self, number: int, num_tokens: int) -> None:
        known = self.leases[number]
        count = min(known.end - known.length, num_tokens)
        known.length += count
        if count:
            self.tell(LeaseProgressed(self.now_s, number, count, self.version if not self.choose(4) else 0))
        if known.length == known.end:
            self.tell(LeaseFinished(self.now_s, number))
        elif known.is_recalled and self.choose(2):
            self.tell(LeaseReturned(self.now_s, number))

    def is_well(self, known: Known) -> bool:
        return self.moods[known.worker] == "well"

    def pick(self, found):
        return sorted(found)[self.choose(len(found))]

    # ---- the end -----------------------------------------------------------------------------------------------------

    def run(self, limit_s: float) -> None:
        """Go on without new faults until no task is left. Workers that are ill stay so; others without a lease serve
        what is asked for."""
        self.join(is_well=True)
        end_s = self.now_s + limit_s
        while self.table.tasks:
            assert self.now_s < end_s, f"{len(self.table.tasks)} tasks are left"
            self.now_s, self.counter = self.now_s + 0.5, self.counter + 1
            asks = sorted({task.ask[0] for task in self.table.tasks.values() if task.is_waiting})
            for number, worker in list(self.table.workers.items()):
                if self.moods[number] == "well":
                    wanted = asks[self.choose(len(asks))] if asks and not worker.leases else worker.version
                    self.tell(WorkerSeen(self.now_s, number, wanted, self.counter))
            for number, known in list(self.leases.items()):
                if number in self.table.leases and self.is_well(known):
                    self.grow(number, 4)
            self.tell(LeaseTick(self.now_s))


def check(holds: bool, law: str, what: object = "") -> None:
    assert holds, f"{law}: {what() if callable(what) else what}"


@st.composite
def all_rules(draw: st.DrawFn) -> LeaseRules:
    return LeaseRules(
        restarts=draw(st.booleans()),
        heartbeat_timeout_s=draw(st.sampled_from([3.0, 6.0])),
        progress_timeout_s=draw(st.sampled_from([3.0, 8.0])),
        starve_s=20.0,
        backup_lease_factor=draw(st.sampled_from([0.0, 1.0, 2.0])),
        backup_lease_after_s=draw(st.sampled_from([0.0, 1.0, 4.0])),
        prefetch=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    )


@settings(max_examples=SCHEDULES, deadline=None)
@given(all_rules(), st.integers(0, 2**32 - 1), st.integers(0, 300), st.booleans(), st.booleans())
@example(LeaseRules(False, 6.0, 8.0, 20.0, 0.0, 0.0, 0.0), 1705, 130, False, True)  # an owner leaves its limit
def test_every_invariant_holds_after_every_event(rules, seed, num_events, is_mixed, is_owned):
    schedule = Schedule(rules, seed, is_mixed=is_mixed, is_owned=is_owned)
    for _ in range(num_events):
        schedule.step()
    schedule.run(limit_s=300.0)


@pytest.mark.parametrize("restarts", [False, True])
def test_the_schedules_reach_every_command_and_every_reason(restarts: bool) -> None:
    seen: set[str] = set()
    for seed in range(30):
        rules = LeaseRules(restarts, 6.0, 3.0, 20.0, backup_lease_factor=1.0, backup_lease_after_s=1.0)
        schedule = Schedule(rules, seed, is_mixed=True, is_owned=bool(seed % 2))
        for _ in range(200):
            schedule.step()
        seen |= schedule.seen
    commands = {kind.__name__ for kind in get_args(Command)}
    if not restarts:
        commands -= {"ReplaceTokens"}
    reasons = {"overtaken", "sent", "held"} | ({"regenerated"} if restarts else set())
    assert commands | reasons <= seen
    assert restarts == ("ReplaceTokens" in seen)
