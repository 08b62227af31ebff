"""What a plan expects of workers decides who gets what, until they have shown what they can."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.swarm import lease_events as ev
from baton.swarm.leases import LeaseRules, LeaseTable

pytestmark = pytest.mark.timing


class Yard:
    """A table with workers of 100 slots, who grow what they are given at speeds of their own."""

    def __init__(self, weights: list[float]) -> None:
        self.table, self.now_s, self.tasks = LeaseTable(LeaseRules(restarts=True, backup_lease_factor=0)), 0.0, 0
        for worker, weight in enumerate(weights):
            self.table.handle(ev.WorkerJoined(0.0, worker, 100, weight))
            self.table.handle(ev.WorkerSeen(0.0, worker, 0, 0))

    def batch(self, num: int, speeds: list[float]) -> Counter[int]:
        """Have so many trajectories grown by 60 tokens, and return who was given how many."""
        grants = []
        for _ in range(num):
            self.tasks += 1
            grants += self.table.handle(ev.TaskSubmitted(self.now_s, self.tasks, 0, True, 0, 100))
        granted = [grant for grant in grants if isinstance(grant, ev.GrantLease)]
        begin_s = self.now_s
        for grant in sorted(granted, key=lambda grant: 60 / speeds[grant.worker]):
            self.now_s = begin_s + 60 / speeds[grant.worker]
            self.table.handle(ev.LeaseProgressed(self.now_s, grant.lease, 60, 0))
            self.table.handle(ev.LeaseFinished(self.now_s, grant.lease))
        return Counter(grant.worker for grant in granted)


def test_the_first_batch_and_all_others_are_shared_as_planned_where_workers_are_as_planned() -> None:
    yard = Yard([1.5, 1.0, 0.5])
    for _ in range(4):  # the plan's speeds: 30, 20 and 10 tokens a second of one slot
        shares = yard.batch(60, [30.0, 20.0, 10.0])
        assert (shares[0], shares[1], shares[2]) == pytest.approx((30, 20, 10), abs=1)


def test_a_worker_slower_than_planned_gets_less_in_proportion() -> None:
    yard = Yard([1.0, 1.0])
    assert yard.batch(40, [20.0, 5.0]) == {0: 20, 1: 20}  # nothing is known but the plan
    assert yard.batch(40, [20.0, 5.0]) == {0: 32, 1: 8}


def test_another_plan_weighs_workers_anew() -> None:
    yard = Yard([1.0, 1.0])
    yard.table.handle(ev.WorkerWeightChanged(0.0, 0, 3.0))
    yard.table.handle(ev.WorkerWeightChanged(0.0, 7, 3.0))  # of nobody
    assert yard.batch(40, [30.0, 10.0]) == {0: 30, 1: 10}
    assert yard.batch(40, [30.0, 10.0]) == {0: 30, 1: 10}
