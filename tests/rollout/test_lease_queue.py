"""Which engine of a pool gets which lease."""

from __future__ import annotations

from baton.rollout.processes.lease_queue import LeaseQueue
from baton.types import Abort, FinishReason, Lease, Report, SamplingParams, Segment, Trajectory


def lease(number: int, group: int, num_tokens: int = 0) -> Lease:
    segments = (Segment([1] * num_tokens, [-1.0] * num_tokens, 0),) if num_tokens else ()
    return Lease(number, Trajectory(group, number, [1], segments), SamplingParams(8), 0, 0)


def finished(number: int) -> Report:
    return Report(number, 0, (), FinishReason.LENGTH)


def assigned(queue: LeaseQueue) -> list[tuple[int, int]]:
    """(lease, engine) of what is assigned now."""
    return [(message.lease_id, engine) for engine, message in queue.assign()]


def test_a_group_stays_on_the_engine_with_the_most_free_slots_while_there_are_any() -> None:
    queue = LeaseQueue([2, 4])
    for number in range(8):
        queue.add(lease(number, group=number // 3))
    assert assigned(queue) == [(0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (5, 1)], "groups of three; two leases wait"
    queue.ended(0, [finished(3), Report(4, 0, ())])
    assert assigned(queue) == [(6, 0)], "lease 4 has reported and goes on"
    assert queue.leases == [{4, 6}, {0, 1, 2, 5}]


def test_what_has_begun_goes_first_and_home() -> None:
    queue = LeaseQueue([4, 4])
    for number in range(4):
        queue.add(lease(number, group=number))
    assert assigned(queue) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    queue.ended(1, [finished(1)])
    queue.add(lease(5, group=5))
    queue.add(Lease(4, lease(1, 1, num_tokens=3).trajectory, SamplingParams(8), 0, 0))
    queue.ended(0, [finished(0), finished(2)])
    assert assigned(queue) == [(4, 1), (5, 0)], "engine 1 has one lease more, which is a quarter of its slots"
    queue.ended(1, [finished(4)])
    for number in range(6, 9):
        queue.leases[1].add(number)
    queue.add(Lease(9, lease(1, 1, num_tokens=6).trajectory, SamplingParams(8), 0, 0))
    assert assigned(queue) == [(9, 0)], "engine 1 is full"


def test_an_abort_follows_its_lease_also_while_that_waits() -> None:
    queue = LeaseQueue([1, 1])
    first, second, third = (lease(number, group=number) for number in range(3))
    for one in (first, second, third):
        queue.add(one)
    assert assigned(queue) == [(0, 0), (1, 1)]
    assert queue.abort(Abort(1)) == [(1, Abort(1))]
    assert queue.abort(Abort(2)) == [(0, third), (0, Abort(2))]
    assert queue.abort(Abort(3)) == [], "it has ended"
    assert assigned(queue) == []


def test_an_engine_that_was_sent_an_aborted_lease_beyond_its_slots_gets_no_more() -> None:
    queue = LeaseQueue([1])
    for number in range(4):
        queue.add(lease(number, group=number))
    assert assigned(queue) == [(0, 0)]
    queue.abort(Abort(1))
    assert assigned(queue) == [], "two leases, one slot"
    queue.ended(0, [finished(1)])
    assert assigned(queue) == []
    queue.ended(0, [finished(0)])
    assert assigned(queue) == [(2, 0)]
