"""The lease table on small schedules worked by hand. Random ones are in test_lease_laws.py."""

from __future__ import annotations

import random

import pytest

from baton.rollout.settings import RolloutSettings
from baton.simulator.inputs import EngineSpec, Setting, SwarmSpec
from baton.simulator.run import simulate
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.workload import constant
from baton.swarm.lease_events import (
    Command,
    CommitTokens,
    DiscardTokens,
    DisconnectWorker,
    DropLease,
    FinishTask,
    GrantLease,
    LeaseFinished,
    LeaseProgressed,
    LeaseReturned,
    LeaseTick,
    RecallLease,
    ReturnTask,
    TaskAborted,
    TaskRevoked,
    TaskSubmitted,
    WorkerJoined,
    WorkerLeft,
    WorkerSeen,
    WorkerWeightChanged,
)
from baton.swarm.leases import LeaseRules, LeaseTable
from baton.swarm.worker_index import TokenOwner


def table_of(*slots: int, weights: tuple[float, ...] = (), **rules: object) -> LeaseTable:
    """A table whose workers all serve version 1 at 0 s."""
    table = LeaseTable(LeaseRules(**rules))  # type: ignore[arg-type]
    for worker, num in enumerate(slots):
        table.handle(WorkerJoined(0.0, worker, num, weights[worker] if weights else 1.0))
        table.handle(WorkerSeen(0.0, worker, 1, 0))
    return table


def num_waiting(table: LeaseTable) -> int:
    return sum(task.is_waiting for task in table.tasks.values())


def want(table: LeaseTable, task: int, at_s: float = 0.0, *, max_tokens: int = 100, version: int = 1) -> list[Command]:
    return table.handle(TaskSubmitted(at_s, task, version, True, 0, max_tokens))


def with_straggler(*, restarts: bool) -> LeaseTable:
    """At 10 s, worker 0 has made 10 tokens of task 0, and worker 1 is through with 100 of task 1."""
    table = table_of(1, 1, restarts=restarts, backup_lease_factor=2.0, backup_lease_after_s=5.0)
    assert want(table, 0) == [GrantLease(0, 0, 0, 0)]
    assert want(table, 1) == [GrantLease(1, 1, 1, 0)]
    assert table.handle(LeaseProgressed(10.0, 0, 10)) == [CommitTokens(0, 0, 10)]
    assert table.handle(LeaseProgressed(10.0, 1, 100)) == [CommitTokens(1, 1, 100)]
    assert table.handle(LeaseFinished(10.0, 1)) == [FinishTask(1, 1)]
    return table


def test_relief_grows_a_branch_of_its_own_and_the_first_finish_commits():
    table = with_straggler(restarts=False)
    # 90 tokens at 1 a second are 90 s here; at 10 a second 9 s there, and 90 > 2 x 9
    assert table.handle(LeaseTick(10.0)) == [GrantLease(1, 2, 0, 10)]
    assert table.handle(LeaseTick(11.0)) == [], "two leases at most"
    assert table.handle(LeaseProgressed(12.0, 0, 2)) == [], "nothing is committed while there are two branches"
    assert table.handle(LeaseProgressed(14.0, 2, 40)) == []
    assert table.handle(LeaseFinished(14.0, 2)) == [
        CommitTokens(0, 2, 50),
        FinishTask(0, 2),
        DropLease(0, 0),
        DiscardTokens("overtaken", 2),
    ]
    assert table.handle(LeaseProgressed(15.0, 0, 3)) == table.handle(LeaseFinished(15.0, 0)) == []
    assert dict(table.wasted) == {"overtaken": 2}


def test_the_straggler_may_finish_first():
    table = with_straggler(restarts=False)
    table.handle(LeaseTick(10.0))
    table.handle(LeaseProgressed(12.0, 2, 20))
    table.handle(LeaseProgressed(13.0, 0, 7))
    assert table.handle(LeaseFinished(13.0, 0)) == [
        CommitTokens(0, 0, 17),
        FinishTask(0, 0),
        DropLease(1, 2),
        DiscardTokens("overtaken", 20),
    ]


def test_relief_in_sync_makes_the_same_tokens_again_and_only_new_ones_are_committed():
    table = with_straggler(restarts=True)
    # from the prompt: 100 tokens at 10 a second are 10 s there, and 90 > 2 x 10
    assert table.handle(LeaseTick(10.0)) == [GrantLease(1, 2, 0, 0)]
    assert table.handle(LeaseProgressed(12.0, 0, 2)) == [CommitTokens(0, 0, 12)]
    assert table.handle(LeaseProgressed(14.0, 2, 40)) == [DiscardTokens("regenerated", 12), CommitTokens(0, 2, 40)]
    assert table.handle(LeaseProgressed(14.0, 0, 1)) == [DiscardTokens("regenerated", 1)]
    assert table.handle(LeaseProgressed(15.0, 2, 10)) == [CommitTokens(0, 2, 50)]
    assert table.handle(LeaseFinished(15.0, 2)) == [FinishTask(0, 2), DropLease(0, 0)]
    assert table.wasted.total() == 10 + 2 + 40 + 1 + 10 - 50  # reported less committed


@pytest.mark.parametrize(("lost", "kept", "committed", "wasted"), [(0, 2, 30, 2), (2, 0, 12, 20)])
def test_when_one_of_two_branches_is_lost_the_other_is_the_trajectory(lost, kept, committed, wasted):
    table = with_straggler(restarts=False)
    table.handle(LeaseTick(10.0))
    table.handle(LeaseProgressed(12.0, 0, 2))
    table.handle(LeaseProgressed(12.0, 2, 20))
    gone = 0 if lost == 0 else 1
    said = table.handle(WorkerLeft(13.0, gone, "cut"))
    assert said == [DiscardTokens("overtaken", wasted), CommitTokens(0, kept, committed)]


def test_of_two_branches_that_are_put_down_the_longer_is_kept():
    table = with_straggler(restarts=False)
    table.handle(LeaseTick(10.0))
    assert table.handle(TaskAborted(11.0, 0)) == [RecallLease(0, 0), RecallLease(1, 2)]
    table.handle(LeaseProgressed(12.0, 2, 20))
    assert table.handle(LeaseReturned(12.0, 2)) == []
    assert table.handle(LeaseProgressed(13.0, 0, 3)) == []
    assert table.handle(LeaseReturned(13.0, 0)) == [
        CommitTokens(0, 2, 30),
        DiscardTokens("overtaken", 3),
        ReturnTask(0),
    ]


def test_a_big_slow_worker_that_is_nearly_idle_does_not_keep_its_straggler():
    """It is the emptiest of all, and no relief for itself; the fast one has three of four slots taken."""
    table = table_of(64, 4, backup_lease_factor=2.0, backup_lease_after_s=5.0, prefetch=0.0)
    for task in range(4):
        want(table, task, max_tokens=1000)
    assert all(table.handle(LeaseProgressed(10.0, lease, 10)) for lease in range(4))
    for lease in range(4):
        table.handle(LeaseReturned(10.0, lease)) if lease else None
    assert len(table.workers[0].leases) == 1, "leases 1 to 3 were refused, so they went to worker 1"
    assert len(table.workers[1].leases) == 3
    assert all(table.handle(LeaseProgressed(11.0, lease, 100)) for lease in (4, 5, 6))
    table.handle(WorkerSeen(11.0, 0, 1, 40))
    assert table.handle(LeaseTick(11.0)) == [GrantLease(1, 7, 0, 10)]


def test_a_newcomer_of_unknown_speed_is_taken_for_an_average_one():
    table = table_of(1, 1, backup_lease_factor=2.0, backup_lease_after_s=5.0, prefetch=0.0)
    want(table, 0)
    want(table, 1)
    table.handle(LeaseProgressed(10.0, 0, 10))
    table.handle(LeaseProgressed(10.0, 1, 90))  # 5 a second on average
    table.handle(WorkerJoined(10.0, 2, 1))
    assert table.handle(WorkerSeen(10.0, 2, 1, 0)) == []
    assert table.handle(LeaseTick(10.0)) == [GrantLease(2, 2, 0, 10)]


def test_the_worst_straggler_is_relieved_first_and_only_what_is_left_is_weighed():
    """Worker 1 makes 20 a second and gets one free slot; worker 0 has made 60 and 50 of 100 in 10 s."""
    table = table_of(2, 1, backup_lease_factor=2.0, backup_lease_after_s=5.0, prefetch=0.0)
    said = [want(table, task)[0] for task in range(3)]
    fast = next(grant for grant in said if grant.worker == 1)
    best, worst = (grant for grant in said if grant.worker == 0)
    table.handle(LeaseProgressed(10.0, best.lease, 60))
    table.handle(LeaseProgressed(10.0, worst.lease, 50))
    table.handle(LeaseProgressed(10.0, fast.lease, 200))
    table.handle(LeaseFinished(10.0, fast.lease))
    # the worst: 50 tokens at 5 a second are 10 s, there 2.5 s; all 100 would be 5 s, and 10 is not above 2 x 5
    assert table.handle(LeaseTick(10.0)) == [GrantLease(1, 3, worst.task, 50)]


def test_a_delay_of_the_hub_makes_no_stragglers():
    table = with_straggler(restarts=True)
    assert table.handle(LeaseTick(10.0, 100.0)) == []


def test_while_there_is_room_the_faster_worker_is_given_more():
    """1 and 3 tokens a second are half and one and a half of the mean."""
    table = table_of(40, 40)
    want(table, 0)
    want(table, 1)
    table.handle(LeaseProgressed(10.0, 0, 10))
    table.handle(LeaseProgressed(10.0, 1, 30))
    table.handle(LeaseFinished(10.0, 0))
    table.handle(LeaseFinished(10.0, 1))
    for task in range(2, 42):
        want(table, task, 10.0)
    assert [len(worker.leases) for worker in table.workers.values()] == [10, 30]


def test_reports_in_a_burst_do_not_make_a_worker_fast():
    table = table_of(1)
    want(table, 0)
    for report in range(10):
        table.handle(LeaseProgressed(10.0 + report * 1e-6, 0, 10))
    speed = table.workers[0].speed
    assert speed is not None
    assert speed < 10 * 2  # 100 tokens in 10 s; the mean of the reports' rates would be millions


def test_a_speed_is_of_the_time_since_the_last_report():
    table = table_of(1)
    want(table, 0)
    table.handle(LeaseProgressed(10.0, 0, 10))
    table.handle(LeaseProgressed(20.0, 0, 10))
    assert table.workers[0].speed == 1.0


def test_a_silent_worker_loses_its_leases_to_the_next_from_the_last_report():
    for restarts, base in ((False, 7), (True, 0)):
        table = table_of(1, heartbeat_timeout_s=30.0, restarts=restarts, backup_lease_factor=0.0)
        want(table, 0)
        table.handle(LeaseProgressed(1.0, 0, 7))
        table.handle(WorkerJoined(20.0, 1, 1))
        table.handle(WorkerSeen(20.0, 1, 1, 0))
        assert not table.handle(LeaseTick(31.0))
        assert table.handle(LeaseTick(31.5)) == [
            DisconnectWorker(0, "sent no message for 30 s"),
            GrantLease(1, 1, 0, base),
        ]
        assert table.handle(LeaseProgressed(32.0, 0, 5)) == [], "what still comes from the dead is ignored"
        new = table.handle(LeaseProgressed(33.0, 1, 9))
        assert new == (
            [DiscardTokens("regenerated", 7), CommitTokens(0, 1, 9)] if restarts else [CommitTokens(0, 1, 16)]
        )


def test_a_hub_that_was_held_up_blames_nobody():
    table = table_of(2, 1, heartbeat_timeout_s=30.0, progress_timeout_s=60.0, starve_s=90.0)
    for task in range(3):
        want(table, task)
    table.handle(LeaseProgressed(1.0, 1, 5))
    table.handle(TaskAborted(2.0, 0))
    assert table.handle(LeaseTick(103.0, 100.0)) == []
    assert table.handle(LeaseTick(103.0, 0.0)) == []
    assert table.handle(WorkerSeen(104.0, 0, 1, 1)) == table.handle(WorkerSeen(104.0, 1, 1, 1)) == []
    lease = next(lease.number for task in table.tasks.values() for lease in task.leases if task.number == 0)
    worker = 0 if lease in table.workers[0].leases else 1
    assert table.handle(LeaseTick(132.5))[:2] == [DropLease(worker, lease), ReturnTask(0)], (
        "2 s, 100 s, and then 30 s unanswered"
    )


def test_a_delay_is_not_forgiven_twice():
    """Who was heard of after the delay is not taken for alive in the future."""
    table = table_of(1, heartbeat_timeout_s=30.0)
    table.handle(WorkerSeen(103.0, 0, 1, 1))
    assert table.handle(LeaseTick(103.0, 100.0)) == []
    assert [type(c) for c in table.handle(LeaseTick(133.5))] == [DisconnectWorker]


def test_a_wedged_worker_is_expelled_though_its_heart_beats():
    table = table_of(1, heartbeat_timeout_s=30.0, progress_timeout_s=60.0)
    for at_s in range(0, 100, 10):
        assert table.handle(WorkerSeen(at_s, 0, 1, 0)) == []
        assert table.handle(LeaseTick(at_s)) == [], "idle is not wedged"
    want(table, 0, 100.0)
    for at_s in range(100, 170, 10):
        table.handle(WorkerSeen(at_s, 0, 1, 0))
        said = table.handle(LeaseTick(at_s + 0.5))
        assert said == ([] if at_s < 160 else [DisconnectWorker(0, "held 1 leases and generated no token for 60 s")])


def test_a_lease_that_starves_goes_elsewhere_though_its_worker_is_busy():
    table = table_of(2, starve_s=50.0, progress_timeout_s=20.0, heartbeat_timeout_s=20.0, backup_lease_factor=0.0)
    want(table, 0)
    want(table, 1)
    for at_s in range(0, 50, 10):
        assert table.handle(LeaseProgressed(at_s + 1.0, 1, 1)) == [CommitTokens(1, 1, at_s // 10 + 1)]
        assert table.handle(LeaseTick(at_s + 2.0)) == []
    table.handle(WorkerSeen(50.0, 0, 1, 5))
    assert table.handle(LeaseTick(50.5)) == [DropLease(0, 0), GrantLease(0, 2, 0, 0)]


def test_a_plan_s_shares_are_honoured_while_there_is_room():
    table = table_of(100, 100, weights=(3.0, 1.0))
    for task in range(100):
        want(table, task)
    assert [len(worker.leases) for worker in table.workers.values()] == [75, 25]


def test_another_plan_changes_the_shares_of_those_that_are_there():
    table = table_of(100, 100)
    assert table.handle(WorkerWeightChanged(0.0, 0, 3.0)) == table.handle(WorkerWeightChanged(0.0, 2, 3.0)) == []
    for task in range(100):
        want(table, task)
    assert [len(worker.leases) for worker in table.workers.values()] == [75, 25]


def test_leases_beyond_the_slots_are_given_last_and_the_oldest_first():
    """Two workers of four slots and a quarter more: ten places, of which eight are slots."""
    table = table_of(4, 4, prefetch=0.25)
    said = [want(table, task) for task in range(12)]
    assert [c[0].worker for c in said[8:10]] == [0, 1]
    assert said[10] == said[11] == []
    assert num_waiting(table) == 2
    lease = said[0][0].lease
    assert table.handle(LeaseFinished(1.0, lease)) == [FinishTask(0, lease), GrantLease(said[0][0].worker, 10, 10, 0)]


def test_who_refuses_is_not_asked_again_before_it_is_heard_of():
    table = table_of(1)
    assert want(table, 0) == [GrantLease(0, 0, 0, 0)]
    assert table.handle(LeaseReturned(1.0, 0)) == []
    assert num_waiting(table) == 1
    assert table.handle(WorkerSeen(2.0, 0, 1, 0)) == [GrantLease(0, 1, 0, 0)]
    table.handle(WorkerSeen(3.0, 0, 2, 0))  # it has moved on: no wonder that it refuses version 1
    want(table, 1, 3.0, version=2)
    assert table.handle(LeaseReturned(3.0, 1)) == [GrantLease(0, 2, 1, 0)]


def test_a_worker_four_times_as_fast_does_four_fifths():
    """In a simulated run, whose workers report every half second."""
    setting = Setting(
        RolloutSettings.model_validate({"batch_groups": 400, "group_size": 1}).rules(),
        tuple(EngineSpec(name, 4, FlatSpeed(step_s)) for name, step_s in (("slow", 0.5), ("fast", 0.125))),
        TrajectoryWork(constant(1), constant(20)),
        TrainSpeed(0.0, 0.0, 0.0),
        num_steps=1,
        swarm=SwarmSpec(LeaseRules(True, prefetch=0.25), fetch_s=0.0, report_every_s=0.5),
    )
    engines = simulate(setting).engines
    decoded = {spec.name: busy.decoded for spec, busy in engines}
    assert decoded["fast"] / sum(decoded.values()) == pytest.approx(0.8, rel=0.1)
    assert decoded["slow"] > 0


def test_an_exact_version_is_never_granted_to_another():
    """10,000 interleavings of publishing, granting, refusing and crashing."""
    num_grants = 0
    for seed in range(10_000):
        rng = random.Random(seed)
        table, serves, asked, held = LeaseTable(LeaseRules()), {}, {}, []
        for number in range(12):
            kind, worker = rng.randrange(5), rng.randrange(3)
            if kind == 0 and worker in serves:
                del serves[worker]
                said = table.handle(WorkerLeft(number, worker, "crash"))
            elif kind <= 1 and worker not in serves:
                serves[worker] = None
                said = table.handle(WorkerJoined(number, worker, 2))
            elif kind <= 2 and worker in serves:
                serves[worker] = rng.choice([None, 0, 1, 2])
                said = table.handle(WorkerSeen(number, worker, serves[worker], 0))
            elif kind == 3 and held:
                lease = held.pop(rng.randrange(len(held)))
                said = table.handle(rng.choice([LeaseReturned, LeaseFinished])(number, lease))
            else:
                asked[number] = rng.randrange(3)
                said = table.handle(TaskSubmitted(number, number, asked[number], True, 0, 9))
            for command in said:
                if isinstance(command, GrantLease):
                    num_grants += 1
                    held.append(command.lease)
                    assert serves[command.worker] == asked[command.task]
    assert num_grants > 10_000


# ---- at the last moment, and just beyond it --------------------------------------------------------------------------


def test_a_worker_is_wedged_after_wedge_s_and_not_before():
    table = table_of(1, heartbeat_timeout_s=99.0, progress_timeout_s=60.0)
    want(table, 0)
    assert table.handle(LeaseTick(60.0)) == []
    assert table.handle(LeaseTick(60.5)) == [DisconnectWorker(0, "held 1 leases and generated no token for 60 s")]


def test_a_lease_starves_after_starve_s_and_not_before():
    table = table_of(2, heartbeat_timeout_s=99.0, progress_timeout_s=99.0, starve_s=50.0, backup_lease_factor=0.0)
    want(table, 0)
    assert table.handle(LeaseTick(50.0)) == []
    assert table.handle(LeaseTick(50.5)) == [DropLease(0, 0), GrantLease(0, 1, 0, 0)]


def test_a_recall_is_unanswered_after_silence_s_and_not_before():
    table = table_of(1, heartbeat_timeout_s=30.0, backup_lease_factor=0.0)
    want(table, 0)
    assert table.handle(TaskAborted(2.0, 0)) == [RecallLease(0, 0)]
    table.handle(WorkerSeen(20.0, 0, 1, 0))
    assert table.handle(LeaseTick(32.0)) == []
    assert table.handle(LeaseTick(32.5)) == [DropLease(0, 0), ReturnTask(0)]


@pytest.mark.parametrize(("at_s", "tokens", "is_relieved"), [(5.0, 11, True), (4.9, 11, False), (5.0, 10, False)])
def test_relief_comes_at_its_age_where_it_takes_more_than_twice_as_long(at_s, tokens, is_relieved):
    """5 tokens in 5 s leave 95 s here; at 10 tokens in 5 s there it would be exactly half of that."""
    table = table_of(1, 1, backup_lease_factor=2.0, backup_lease_after_s=5.0)
    want(table, 0)
    want(table, 1)
    table.handle(LeaseProgressed(at_s, 0, 5))
    table.handle(LeaseProgressed(5.0, 1, tokens))
    table.handle(LeaseFinished(5.0, 1))
    assert table.handle(LeaseTick(at_s)) == ([GrantLease(1, 2, 0, 5)] if is_relieved else [])


def test_a_revoked_task_is_dropped_wherever_it_is_and_what_was_not_committed_is_wasted():
    table = with_straggler(restarts=False)
    table.handle(LeaseTick(10.0))
    table.handle(LeaseProgressed(12.0, 2, 20))
    table.handle(LeaseProgressed(12.0, 0, 3))
    assert table.handle(TaskRevoked(13.0, 0)) == [
        DropLease(0, 0), DropLease(1, 2), DiscardTokens("overtaken", 3), DiscardTokens("overtaken", 20),
    ]  # fmt: skip
    assert not table.tasks
    assert not table.leases
    assert table.handle(TaskRevoked(14.0, 0)) == []
    full = table_of(1, prefetch=0.0)
    want(full, 0)
    assert want(full, 1) == []
    assert num_waiting(full) == 1
    assert full.handle(TaskRevoked(1.0, 1)) == []
    assert num_waiting(full) == 0


def test_of_two_branches_of_one_length_the_first_is_kept():
    table = with_straggler(restarts=False)
    table.handle(LeaseTick(10.0))
    table.handle(TaskAborted(11.0, 0))
    for lease in (2, 0):
        table.handle(LeaseProgressed(12.0, lease, 20))
    assert table.handle(LeaseReturned(12.0, 2)) == []
    assert table.handle(LeaseReturned(13.0, 0)) == [
        CommitTokens(0, 0, 30),
        DiscardTokens("overtaken", 20),
        ReturnTask(0),
    ]


def test_a_lease_without_a_token_is_taken_for_one_that_made_one():
    """100 tokens at one in 5 s are 500 s here; at 3 in 5 s there they are 167 s, and 500 is above 2 x 167."""
    table = table_of(1, 1, backup_lease_factor=2.0, backup_lease_after_s=5.0)
    want(table, 0)
    want(table, 1)
    table.handle(LeaseProgressed(5.0, 1, 3))
    table.handle(LeaseFinished(5.0, 1))
    assert table.handle(LeaseTick(5.0)) == [GrantLease(1, 2, 0, 0)]


@pytest.mark.parametrize(("tokens", "is_relieved"), [(10, False), (11, True)])
def test_a_straggler_s_speed_is_that_of_its_own_tokens(tokens, is_relieved):
    """50 of 100 were known; 5 in 5 s leave 45 s here. At 10 in 5 s there, it would be exactly half of that."""
    table = table_of(1, 1, backup_lease_factor=2.0, backup_lease_after_s=5.0)
    assert table.handle(TaskSubmitted(0.0, 0, 1, True, 50, 100)) == [GrantLease(0, 0, 0, 50)]
    want(table, 1)
    table.handle(LeaseProgressed(5.0, 0, 5))
    table.handle(LeaseProgressed(5.0, 1, tokens))
    table.handle(LeaseFinished(5.0, 1))
    assert table.handle(LeaseTick(5.0)) == ([GrantLease(1, 2, 0, 55)] if is_relieved else [])


@pytest.mark.parametrize(("tokens", "is_relieved"), [(200, False), (201, True)])
def test_relief_in_sync_is_worth_it_where_the_whole_trajectory_takes_less_than_half_as_long(tokens, is_relieved):
    """50 of 100 in 10 s leave 10 s here; at 200 in 10 s there, all 100 would be exactly half of that."""
    table = table_of(1, 1, restarts=True, backup_lease_factor=2.0, backup_lease_after_s=5.0)
    want(table, 0)
    want(table, 1)
    table.handle(LeaseProgressed(10.0, 0, 50))
    table.handle(LeaseProgressed(10.0, 1, tokens))
    table.handle(LeaseFinished(10.0, 1))
    assert table.handle(LeaseTick(10.0)) == ([GrantLease(1, 2, 0, 0)] if is_relieved else [])


def test_the_fastest_relieves_another_when_it_cannot_relieve_itself():
    """Worker 0 makes 20 a second, but no token of task 0, which goes to worker 2; task 2 goes to worker 0."""
    table = table_of(3, backup_lease_factor=2.0, backup_lease_after_s=5.0, prefetch=0.0)
    assert [want(table, 0), want(table, 1)] == [[GrantLease(0, 0, 0, 0)], [GrantLease(0, 1, 1, 0)]]
    for worker in (1, 2):
        table.handle(WorkerSeen(0.0, worker - 1, None, 0))
        table.handle(WorkerJoined(0.0, worker, 1))
        table.handle(WorkerSeen(0.0, worker, 1, 0))
        assert want(table, worker + 1) == [GrantLease(worker, worker + 1, worker + 1, 0)]
    for lease, tokens in ((1, 100), (2, 5), (3, 50)):
        table.handle(LeaseProgressed(5.0, lease, tokens))
    for worker in (0, 1):
        table.handle(WorkerSeen(5.0, worker, 1, 1))
    table.handle(LeaseFinished(5.0, 1))
    table.handle(LeaseFinished(5.0, 3))
    assert table.handle(LeaseTick(5.0)) == [GrantLease(2, 4, 0, 0), GrantLease(0, 5, 2, 5)]


def leases_of(table: LeaseTable) -> dict[int, int]:
    """Valid leases with their lengths."""
    return {lease.number: lease.length for task in table.tasks.values() for lease in task.leases}


@pytest.mark.parametrize("restarts", [False, True])
def test_what_the_table_says_of_a_lease(restarts):
    table = table_of(1, restarts=restarts)
    table.handle(TaskSubmitted(0.0, 0, 1, True, 7, 100))
    base = 0 if restarts else 7
    assert ([*table.leases], [*leases_of(table)]) == ([0], [0])
    assert (leases_of(table)[0], table.leases[0].recalled_s, table.is_comparable(0)) == (base, None, True)
    table.handle(LeaseProgressed(1.0, 0, 3))
    table.handle(TaskAborted(1.0, 0))
    assert (leases_of(table)[0], table.leases[0].recalled_s is None) == (base + 3, False)


def test_a_task_is_aborted_once_and_one_that_is_over_not_at_all():
    table = table_of(1)
    want(table, 0)
    assert table.handle(TaskAborted(1.0, 0)) == [RecallLease(0, 0)]
    assert table.handle(TaskAborted(2.0, 0)) == table.handle(TaskAborted(2.0, 1)) == []
    assert table.handle(LeaseReturned(3.0, 0)) == [ReturnTask(0)]
    assert table.handle(TaskAborted(4.0, 0)) == []


def test_a_lease_of_another_kind_is_not_comparable():
    table = table_of(1, restarts=True)
    want(table, 0)
    table.handle(LeaseProgressed(1.0, 0, 3))
    table.handle(WorkerLeft(2.0, 0, "cut"))
    table.handle(WorkerJoined(2.0, 1, 1, kind="other"))
    assert table.handle(WorkerSeen(2.0, 1, 1, 0)) == [GrantLease(1, 1, 0, 0)]
    assert not table.is_comparable(1)


# ---- turns of an episode ---------------------------------------------------------------------------------------------


def want_turn(table: LeaseTable, task: int, start: int, num_tokens: int, **more: int) -> list[Command]:
    """A turn that begins after `start` tokens, of an episode of 100 tokens."""
    return table.handle(TaskSubmitted(0.0, task, 1, True, num_tokens, 100, start, **more))


def test_a_lost_turn_begins_again_after_the_last_observation_and_not_at_the_prompt():
    table = table_of(1, 1, restarts=True)
    assert want_turn(table, 0, 7, 9) == [GrantLease(0, 0, 0, 7)], "2 tokens of the turn are of an earlier process"
    assert table.handle(LeaseProgressed(1.0, 0, 5)) == [DiscardTokens("regenerated", 2), CommitTokens(0, 0, 12)]
    assert table.handle(WorkerLeft(2.0, 0, "cut")) == [GrantLease(1, 1, 0, 7)]
    assert table.handle(LeaseProgressed(3.0, 1, 3)) == [DiscardTokens("regenerated", 3)]
    assert table.handle(LeaseProgressed(4.0, 1, 3)) == [DiscardTokens("regenerated", 2), CommitTokens(0, 1, 13)]
    assert table.handle(LeaseFinished(4.0, 1)) == [FinishTask(0, 1)]
    assert dict(table.wasted) == {"regenerated": 7}


@pytest.mark.parametrize("kind", ["", "gpu", None])
def test_the_turns_before_are_no_contradiction_whoever_generates_the_next(kind):
    """Their tokens are not generated again, so that nothing is replaced."""
    table = LeaseTable(LeaseRules(restarts=True))
    table.handle(WorkerJoined(0.0, 0, 1, kind=kind))
    table.handle(WorkerSeen(0.0, 0, 1, 0))
    want_turn(table, 0, 7, 7)
    assert table.handle(LeaseProgressed(1.0, 0, 5)) == [CommitTokens(0, 0, 12)]
    assert table.handle(LeaseFinished(2.0, 0)) == [FinishTask(0, 0)]


def test_relief_of_a_turn_in_sync_is_weighed_by_the_turn():
    """What is left takes 10 s x 4 tokens / 6 here, and the whole turn of 10 tokens 1 s there."""
    table = table_of(1, 1, restarts=True, backup_lease_factor=2.0, backup_lease_after_s=5.0)
    want_turn(table, 0, 90, 90)
    want(table, 1)
    table.handle(LeaseProgressed(10.0, 0, 6))
    table.handle(LeaseProgressed(10.0, 1, 100))
    table.handle(LeaseFinished(10.0, 1))
    assert table.handle(LeaseTick(10.0)) == [GrantLease(1, 2, 0, 90)]


def test_a_turn_goes_to_the_worker_of_the_turn_before_while_that_has_a_free_slot():
    table = table_of(2, 1)
    assert want_turn(table, 0, 7, 7, preferred=1) == [GrantLease(1, 0, 0, 7)]
    assert want_turn(table, 1, 7, 7, preferred=1) == [GrantLease(0, 1, 1, 7)], "its slot is taken"
    assert want_turn(table, 2, 7, 7, preferred=9) == [GrantLease(0, 2, 2, 7)], "it is gone"


def test_the_next_turn_of_an_episode_precedes_older_tasks_that_have_not_begun():
    table = table_of(1)
    for task in range(3):
        want(table, task)
    assert want_turn(table, 3, 7, 7) == []
    assert want_turn(table, 4, 9, 9) == []
    granted = [c[-1] for lease in range(4) for c in [table.handle(LeaseFinished(1.0, lease))]]
    assert [grant.task for grant in granted] == [3, 4, 1, 2]


def test_a_turn_that_its_worker_has_lost_is_not_preferred_there_again():
    table = table_of(4, 1, starve_s=5.0, backup_lease_factor=0.0)
    want_turn(table, 0, 7, 7, preferred=1)
    assert table.handle(LeaseTick(6.0)) == [DropLease(1, 0), GrantLease(0, 1, 0, 7)]


# ---- what the workers of one owner may hold --------------------------------------------------------------------------


def owned_table(*slots: int, **rules: object) -> tuple[LeaseTable, TokenOwner]:
    """A table whose workers are all of one owner and serve version 1 at 0 s."""
    table = LeaseTable(LeaseRules(**{"prefetch": 0.0, "backup_lease_factor": 0.0} | rules))  # type: ignore[arg-type]
    for worker, num in enumerate(slots):
        table.handle(WorkerJoined(0.0, worker, num, owner="somebody"))
        table.handle(WorkerSeen(0.0, worker, 1, 0))
    owner = table.workers[0].owner
    assert owner is not None
    return table, owner


def test_an_owner_s_bound_is_the_places_of_its_workers():
    table, owner = owned_table(4, 8, prefetch=0.25)
    assert owner.credit.slots == 5 + 10
    table.handle(WorkerLeft(1.0, 0, "cut"))
    assert owner.credit.slots == 10
    table.handle(WorkerLeft(1.0, 1, "cut"))
    assert owner.credit.slots == 0


def test_who_leaves_pays_for_the_leases_that_brought_no_token():
    table, owner = owned_table(4)
    for task in range(3):
        want(table, task)
    table.handle(LeaseProgressed(1.0, 1, 5))
    table.handle(WorkerLeft(2.0, 0, "cut"))
    assert (owner.credit.tokens, owner.num_held) == (-128.0, 0)


@pytest.mark.parametrize("event", [LeaseTick, WorkerJoined])
def test_who_has_lost_all_credit_is_given_one_lease_after_a_while(event):
    """Two lost leases are 16 tokens too many, which are 10 s. Worker 1 has lost none, and waits for its owner."""
    table, owner = owned_table(2)
    table.handle(WorkerJoined(0.0, 1, 1, owner="somebody"))
    want(table, 0)
    want(table, 1)
    table.handle(WorkerLeft(0.0, 0, "cut"))
    assert owner.credit.num_leases == 0
    assert table.handle(WorkerSeen(0.0, 1, 1, 0)) == []
    again = [(WorkerJoined(at_s, 2 + i, 8, owner="somebody") if event is WorkerJoined else LeaseTick(at_s))
             for i, at_s in enumerate((9.5, 10.0))]  # fmt: skip
    assert table.handle(again[0]) == []
    assert table.handle(again[1]) == [GrantLease(1, 2, 0, 0)]
    assert owner.num_held == 1


def test_a_place_that_an_owner_gets_back_is_offered_to_all_its_workers():
    table, owner = owned_table(8, 8)
    said = [want(table, task) for task in range(9)]
    assert owner.num_held == 8
    assert said[8] == []
    ended = next(grant for (grant,) in said[:8] if grant.worker == 0)  # type: ignore[misc]
    assert table.handle(WorkerSeen(1.0, 0, None, 0)) == []
    assert table.handle(LeaseFinished(1.0, ended.lease)) == [
        FinishTask(ended.task, ended.lease),
        GrantLease(1, 8, 8, 0),
    ]
    assert owner.num_held == 8


def test_what_a_worker_earns_is_offered_though_its_owner_had_room_before():
    table, owner = owned_table(32, 32)
    owner.credit.earn(1000)
    table.handle(WorkerSeen(0.0, 1, None, 0))
    said = [want(table, task) for task in range(10)]
    assert [len(commands) for commands in said] == [1] * 8 + [0] * 2
    assert table.handle(LeaseProgressed(1.0, 0, 15)) == [CommitTokens(0, 0, 15)]
    assert table.handle(LeaseProgressed(1.0, 0, 1)) == [CommitTokens(0, 0, 16), GrantLease(0, 8, 8, 0)]


def test_what_a_worker_recovers_is_offered_though_its_owner_had_room_before():
    table, owner = owned_table(8, 8)
    owner.credit.earn(1000)
    lost = table.workers[0].credit
    assert lost is not None
    for worker in (0, 1):
        table.handle(WorkerSeen(0.0, worker, None, 0))
    lost.lose()
    lost.lose()
    assert table.handle(WorkerSeen(0.0, 0, 1, 0)) == want(table, 0) == []
    assert table.handle(LeaseTick(9.5)) == []
    assert table.handle(LeaseTick(10.0)) == [GrantLease(0, 0, 0, 0)]


@pytest.mark.parametrize(("task", "tokens"), [(0, -64.0), (1, 0.0)])
def test_a_lease_that_waits_for_a_slot_costs_nothing(task, tokens):
    """One slot, and one lease beyond it: the second only waits."""
    table, owner = owned_table(1, prefetch=1.0, heartbeat_timeout_s=30.0)
    assert [want(table, 0), want(table, 1)] == [[GrantLease(0, 0, 0, 0)], [GrantLease(0, 1, 1, 0)]]
    assert table.handle(TaskAborted(0.0, task)) == [RecallLease(0, task)]
    table.handle(WorkerSeen(20.0, 0, 1, 0))
    assert table.handle(LeaseTick(30.5)) == [DropLease(0, task), ReturnTask(task)]
    assert owner.credit.tokens == tokens


def test_a_wedged_worker_pays_for_each_lease():
    table, owner = owned_table(4, heartbeat_timeout_s=99.0, progress_timeout_s=60.0)
    want(table, 0)
    want(table, 1)
    assert table.handle(LeaseTick(60.5)) == [DisconnectWorker(0, "held 2 leases and generated no token for 60 s")]
    assert owner.credit.tokens == -128.0


@pytest.mark.parametrize(("at_s", "tokens"), [(14.9, 0.0), (15.0, -64.0), (16.0, -64.0)])
def test_a_lease_that_another_worker_finishes_costs_once_it_is_relief_after_s_old(at_s, tokens):
    table = table_of(1, backup_lease_factor=2.0, backup_lease_after_s=5.0, prefetch=0.0)
    want(table, 0)
    table.handle(LeaseProgressed(10.0, 0, 10))
    table.handle(WorkerJoined(10.0, 1, 1, 3.0, owner="somebody"))  # expected to be three times as fast
    table.handle(WorkerSeen(10.0, 1, 1, 0))
    assert table.handle(LeaseTick(10.0)) == [GrantLease(1, 1, 0, 10)]
    assert table.handle(LeaseFinished(at_s, 0)) == [FinishTask(0, 0), DropLease(1, 1)]
    owner = table.workers[1].owner
    assert owner is not None
    assert (owner.credit.tokens, owner.num_held) == (tokens, 0)
