"""Four times as many groups or leases need about four times as many operations.

Operations are comparisons and lookups of ids, so the counts are equal on every machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from baton.rollout import events as ev
from baton.rollout.buffer import Buffer
from baton.rollout.engine import EngineSettings, EngineStats
from baton.rollout.engines.slot_table import SlotTable
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.scheduler_state import TrackedGroup
from baton.rollout.settings import Rules
from baton.rollout.worker_client import WorkerClient
from baton.swarm import lease_events as lease_ev
from baton.swarm.lease_credit import FIRST_LEASES
from baton.swarm.leases import LeaseRules, LeaseTable
from baton.types import FromPort, Lease, PolicyVersion, SamplingParams, Trajectory, WorkLost


class CountedId(int):
    """An id that counts how often any id is looked up or compared."""

    operations = 0

    def __hash__(self) -> int:
        CountedId.operations += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedId.operations += 1
        return super().__eq__(other)

    def __lt__(self, other: int) -> bool:
        CountedId.operations += 1
        return super().__lt__(other)


def count(work: Callable[[int], object], size: int) -> int:
    CountedId.operations = 0
    work(size)
    return CountedId.operations


def wait_for_the_last_group(size: int) -> None:
    """Ask after every event for a batch whose last group in the order of submission is incomplete."""
    buffer = Buffer(size, 0, consume="submission", stale="mask")
    ids = [CountedId(number) for number in range(2 * size)]
    for group_id in ids:
        buffer.opened(group_id)
    for group_id in [*ids[: size - 1], *ids[size:]]:
        buffer.completed(group_id, 0)
        assert buffer.take(0).group_ids == ()
    for _ in range(10 * size):
        assert buffer.take(0).group_ids == ()
    buffer.completed(ids[size - 1], 0)
    assert buffer.take(0).group_ids == tuple(range(size))


def revoke_all(size: int) -> None:
    """Revoke all trajectories while they wait for a lease."""
    scheduler = RolloutScheduler(Rules(batch_groups=size), next_group_id=10**6)
    scheduler.restore([TrackedGroup.new(CountedId(number), 1, opened_at=0) for number in range(size)])
    for number in range(size):
        assert ev.Restart(number, 0) in scheduler.handle(ev.Revoked(0.0, number, 0, "test"))


def submit_and_abort(size: int) -> None:
    """Fill all slots and as many places of the queue, then abort all leases."""
    table = SlotTable(EngineSettings(slots=size, max_context_tokens=16), PolicyVersion("a", 0), (), str)
    ids = [CountedId(number) for number in range(2 * size)]
    for lease_id in ids:
        table.submit(Lease(lease_id, Trajectory(0, lease_id, (1, 2)), SamplingParams(4), 1, 0))
        table.admit()
    for lease_id in ids:
        table.abort(lease_id)
    assert len(table.open_step()) == 2 * size


def finish_at_the_limit_of_a_token(size: int) -> None:
    """Finish leases while the workers of one token hold as many leases as the token may hold, so that each lease that
    ends allows one more."""
    table = LeaseTable(LeaseRules(prefetch=0.0, backup_lease_factor=0.0))
    said: deque[lease_ev.Command] = deque()
    for number in range(size):
        worker = CountedId(number)
        table.handle(lease_ev.WorkerJoined(0.0, worker, 1, owner="somebody"))
        table.handle(lease_ev.WorkerSeen(0.0, worker, 0, 0))
    for task in range(size):
        said += table.handle(lease_ev.TaskSubmitted(0.0, task, 0, True, 0, 100))
    assert len(said) == FIRST_LEASES
    for _ in range(size):
        grant = said.popleft()
        assert isinstance(grant, lease_ev.GrantLease)
        _, *granted = table.handle(lease_ev.LeaseFinished(0.0, grant.lease))
        said += granted
    assert not said


@pytest.mark.parametrize(
    "work", [wait_for_the_last_group, revoke_all, submit_and_abort, finish_at_the_limit_of_a_token]
)
def test_operations_grow_no_faster_than_the_work(work: Callable[[int], None]) -> None:
    """Quadratic work would need 16 times as many operations; a heap adds a logarithm to the factor 4."""
    assert count(work, 512) < 7 * count(work, 128)


def test_each_trajectory_that_was_revoked_while_it_waited_is_leased_once() -> None:
    scheduler = RolloutScheduler(Rules(batch_groups=4), next_group_id=4)
    groups = [TrackedGroup.new(number, 1, opened_at=0) for number in range(4)]
    groups[2].members[0].grow(0, 5)
    scheduler.restore(groups)
    for number in (1, 2, 2):
        scheduler.handle(ev.Revoked(0.0, number, 0, "test"))
    said: list[ev.Command] = []
    for event in (ev.Capacity(0.0, 8), ev.VersionServed(0.0, 0), ev.BatchRequested(0.0)):
        said += scheduler.handle(event)
    assert [command.group_id for command in said if isinstance(command, ev.Assign)] == [0, 1, 2, 3]


class Busy:
    """A transport with a message at every look, which counts how often its counters are read."""

    name, slots, sockets, num_reads = "the worker", 8, (), 0

    def stats(self) -> EngineStats:
        self.num_reads += 1
        return EngineStats()

    def receive(self, timeout_s: float) -> Sequence[FromPort]:
        return [WorkLost("lost", 1)]


def test_the_counters_of_all_workers_are_not_added_for_every_message() -> None:
    worker = Busy()
    client = WorkerClient(worker)  # type: ignore[arg-type]
    for _ in range(100):
        client.receive(1.0, 1, ())
    assert worker.num_reads == 1, "when the wait began"
