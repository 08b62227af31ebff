"""Decisions of the scheduler one by one, by hand: what is open, what is leased, what a version and a batch change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.errors import UserError
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
    Finished,
    LeaseEnded,
    Load,
    Observed,
    Open,
    Restart,
    Revoked,
    Rewarded,
    TokensLost,
    TokensReceived,
    TurnEnded,
    VersionServed,
    VersionTrained,
)
from baton.rollout.scheduler import RolloutScheduler
from baton.rollout.scheduler_state import TrackedGroup, TrajectoryState
from baton.rollout.settings import FILTERED_LIMIT, Rules


def served(rules: Rules, *, slots: int = 100, queue: int = 0, **start: float) -> tuple[RolloutScheduler, list[Command]]:
    """A scheduler whose workers serve its version and whose trainer wants a batch; and what it said to that."""
    made = RolloutScheduler(rules, **start)  # type: ignore[arg-type]
    assert made.handle(VersionTrained(0.0, made.version)) == [Load(made.version)]
    assert made.handle(VersionServed(0.0, made.version)) == []
    assert made.handle(BatchRequested(0.0)) == []
    return made, made.handle(Capacity(0.0, slots, queue))


def opened(commands: list[Command]) -> list[int]:
    return [command.group_id for command in commands if isinstance(command, Open)]


def leased(commands: list[Command]) -> list[tuple[int, int]]:
    return [(c.group_id, c.sample_index) for c in commands if isinstance(c, Assign)]


def finish(
    made: RolloutScheduler, group_id: int, rewards: list[float], *, version: int = 0, tokens: int = 1
) -> list[Command]:
    """Grow, finish and judge all members of a group; return what was said to it all."""
    said: list[Command] = []
    for index, reward in enumerate(rewards):
        said += made.handle(TokensReceived(0.0, group_id, index, version, tokens))
        said += made.handle(Finished(0.0, group_id, index))
        said += made.handle(Rewarded(0.0, group_id, index, reward))
    return said


# ---- how much is open and leased -------------------------------------------------------------------------------------


def test_partial_has_exactly_overprovision_times_the_batch_open() -> None:
    made, said = served(Rules(mode="partial", batch_groups=2, group_size=1, overprovision=1.5, on_new_version="resume"))
    assert opened(said) == [0, 1, 2]
    assert made.num_open == 3


@pytest.mark.parametrize(("max_staleness", "most"), [(0, 2), (1, 4)])
def test_async_opens_what_versions_within_the_bound_will_consume(max_staleness: int, most: int) -> None:
    """N of them may be open at version 0 while floor((N − 1) / 2) ≤ max_staleness."""
    rules = Rules(mode="async", batch_groups=2, group_size=1, max_staleness=max_staleness, on_new_version="resume")
    assert opened(served(rules)[1]) == list(range(most))


def test_no_group_is_opened_that_the_last_batches_do_not_need() -> None:
    rules = Rules(mode="async", batch_groups=2, group_size=1, max_staleness=9, on_new_version="resume")
    assert opened(served(rules, num_batches=3)[1]) == list(range(6))
    assert opened(served(rules, version=2, num_batches=3)[1]) == [0, 1]


@pytest.mark.parametrize(("queue", "max_concurrency", "most"), [(0, None, 3), (2, None, 5), (2, 4, 4), (0, 4, 3)])
def test_leases_fill_slots_and_queue_up_to_the_concurrency(queue: int, max_concurrency: int | None, most: int) -> None:
    rules = Rules(batch_groups=4, group_size=2, max_concurrency=max_concurrency)
    made, said = served(rules, slots=3, queue=queue)
    assert leased(said) == [(i // 2, i % 2) for i in range(most)]
    assert made.num_leased == most
    assert opened(said) == list(range((most + 1) // 2)), "a group is opened when its first member is leased"


def test_partial_without_overprovision_opens_no_episodes_without_end_while_environments_work() -> None:
    """Of at most 4 trajectories, 3 act: one of the 2 slots stays empty until an environment answers."""
    rules = Rules(mode="partial", batch_groups=9, group_size=1, overprovision=math.inf, max_concurrency=4)
    made, said = served(rules, slots=2)
    assert leased(said) == [(0, 0), (1, 0)]
    for group_id, opened_next in ((0, [2]), (1, [3]), (2, [])):
        made.handle(TokensReceived(0.0, group_id, 0, 0, 1))
        assert opened(made.handle(TurnEnded(0.0, group_id, 0))) == opened_next
    assert (made.num_leased, made.num_acting) == (1, 3)
    assert leased(made.handle(Observed(0.0, 0, 0))) == [(0, 0)]


def test_a_lease_asks_for_exactly_the_served_version_but_in_flight_for_at_least_the_oldest() -> None:
    made, said = served(Rules(batch_groups=1, group_size=1), version=3)
    assert said == [Open(0), Assign(0, 0, 3, True)]
    rules = Rules(mode="async", batch_groups=1, group_size=1, on_new_version="keep", max_staleness=2, max_lag=2)
    made = RolloutScheduler(rules, version=3)
    made.handle(VersionTrained(0.0, 3))
    made.handle(VersionServed(0.0, 3))
    said = made.handle(Capacity(0.0, 1))
    assert said == [Open(0), Assign(0, 0, 1, False)]  # 3 − max_lag
    made.handle(TokensReceived(0.0, 0, 0, 1, 2))
    made.handle(TokensReceived(0.0, 0, 0, 2, 5))
    assert made.handle(LeaseEnded(0.0, 0, 0)) == [Assign(0, 0, 2, False)], "not older than its last token"
    assert (made.step.resumed, made.step.reprefilled_tokens) == (1, 7)


def test_in_flight_a_lease_never_asks_for_a_version_below_zero() -> None:
    rules = Rules(mode="async", batch_groups=1, group_size=1, on_new_version="keep", max_staleness=0, max_lag=2)
    _, said = served(rules)
    assert said == [Open(0), Assign(0, 0, 0, False)]


def test_of_those_without_a_token_the_first_is_leased_first_though_it_was_put_down() -> None:
    made, said = served(Rules(batch_groups=1, group_size=2), slots=1)
    assert leased(said) == [(0, 0)]
    made.handle(Capacity(0.0, 0))
    made.handle(LeaseEnded(0.0, 0, 0))
    assert leased(made.handle(Capacity(0.0, 2))) == [(0, 0), (0, 1)]


def test_what_was_put_down_is_leased_before_what_has_no_token() -> None:
    made, _ = served(Rules(batch_groups=3, group_size=1), slots=2)
    made.handle(Capacity(0.0, 0))
    made.handle(LeaseEnded(0.0, 0, 0))
    made.handle(TokensReceived(0.0, 1, 0, 0, 4))
    made.handle(LeaseEnded(0.0, 1, 0))
    assert leased(made.handle(Capacity(0.0, 9))) == [(1, 0), (0, 0), (2, 0)]


def test_nothing_is_leased_while_nobody_serves_nobody_wants_a_batch_or_all_is_paused() -> None:
    made = RolloutScheduler(Rules(batch_groups=1, group_size=1))
    assert made.handle(Capacity(0.0, 1)) == []
    assert made.handle(BatchRequested(0.0)) == []
    made.handle(VersionTrained(0.0, 0))
    assert made.handle(DispatchPaused(0.0)) == []
    assert made.handle(VersionServed(0.0, 0)) == []
    assert made.handle(DispatchResumed(0.0)) == [Open(0), Assign(0, 0, 0, True)]
    assert made.handle(DispatchPaused(0.0)) == [AbortTrajectory(0, 0)]
    assert made.handle(LeaseEnded(0.0, 0, 0)) == []
    assert made.handle(DispatchResumed(0.0)) == [Assign(0, 0, 0, True)]
    unwanted = RolloutScheduler(Rules(batch_groups=1, group_size=1))
    unwanted.handle(VersionTrained(0.0, 0))
    unwanted.handle(VersionServed(0.0, 0))
    assert unwanted.handle(Capacity(0.0, 1)) == []


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_delivered_with_its_last_group_and_counted_to_the_token() -> None:
    """Tokens of versions 0 to 2 in the batch of version 2 with max_staleness 1: those of version 0 are masked."""
    rules = Rules(
        mode="partial", batch_groups=2, group_size=1, overprovision=1.5, on_new_version="resume", max_staleness=1
    )
    made, _ = served(rules, version=2)
    made.handle(TokensReceived(0.0, 0, 0, 0, 3))
    made.handle(TokensReceived(0.0, 0, 0, 1, 2))
    assert finish(made, 0, [1.0], version=2, tokens=4) == []
    said = finish(made, 1, [1.0], version=2, tokens=5)
    assert said == [AbortTrajectory(2, 0), Deliver(3, (0, 1))]
    assert (made.ledger.generated, made.ledger.trained, made.ledger.masked) == (14, 11, 3)
    assert (made.step.finished, made.step.carried_groups, made.step.generated_tokens) == (2, 1, 14)
    assert (made.num_open, made.num_carried_tokens) == (1, 0)
    with pytest.raises(AssertionError, match="a batch is requested before the last batch has been trained"):
        made.handle(BatchRequested(0.0))
    with pytest.raises(AssertionError, match="version 4 was trained on 3 batches"):
        made.handle(VersionTrained(0.0, 4))
    assert [g.group_id for g in made.groups()] == [2]
    assert made.take_step_counts().finished == 2
    assert made.step.finished == 0


def test_a_second_batch_is_not_wanted_before_the_first_has_come() -> None:
    made, _ = served(Rules(batch_groups=1, group_size=1))
    with pytest.raises(AssertionError, match="a batch is requested twice"):
        made.handle(BatchRequested(0.0))


@pytest.mark.parametrize("max_requeues", [1, 2])
def test_a_group_that_is_too_old_is_tried_again_max_requeues_times_and_then_given_up(max_requeues: int) -> None:
    """Its prompt comes back under new ids; a group of version 0 is dropped at version 1 with max_staleness 0."""
    rules = Rules(
        mode="partial", batch_groups=1, group_size=1, overprovision=2.0, stale="drop", max_requeues=max_requeues,
        on_new_version="resume", consume="completion",
    )  # fmt: skip
    made, said = served(rules)
    assert opened(said) == [0, 1]
    stale = 1
    outcomes: list[tuple[int, int]] = []
    reopened: list[Open] = []
    for version in range(max_requeues + 1):
        fresh = next(g.group_id for g in made.groups() if g.group_id != stale)
        said = finish(made, fresh, [1.0], version=version)  # the batch; the other one is put down
        assert Deliver(version + 1, (fresh,)) in said
        made.handle(TokensReceived(0.0, stale, 0, version, 1))
        made.handle(LeaseEnded(0.0, stale, 0))
        said = made.handle(VersionTrained(0.0, version + 1)) + made.handle(VersionServed(0.0, version + 1))
        said += made.handle(BatchRequested(0.0))
        said += made.handle(Finished(0.0, stale, 0)) + made.handle(Rewarded(0.0, stale, 0, 1.0))
        assert Discard(stale, "dropped") in said
        outcomes.append((made.step.requeued_groups, made.step.dropped_groups))
        reopened += [c for c in said if isinstance(c, Open) and c.again is not None]
        if reopened:
            stale = reopened[-1].group_id
    assert outcomes == [(1, 0), (1, 1)] if max_requeues == 1 else [(1, 0), (2, 0), (2, 1)]
    assert len(reopened) == max_requeues
    assert reopened[0].again == 1
    assert made.ledger.dropped == max_requeues + 1


def test_a_filtered_group_is_discarded_and_its_place_given_to_another() -> None:
    made, _ = served(Rules(batch_groups=1, group_size=2, dynamic_sampling=True))
    said = finish(made, 0, [1.0, 1.0], tokens=3)
    assert said == [Discard(0, "filtered"), Open(1), Assign(1, 0, 0, True), Assign(1, 1, 0, True)]
    assert (made.ledger.filtered, made.step.filtered_groups) == (6, 1)
    assert finish(made, 1, [1.0, 0.0]) == [Deliver(1, (1,))]
    plain, _ = served(Rules(batch_groups=1, group_size=2))
    assert finish(plain, 0, [1.0, 1.0]) == [Deliver(1, (0,))]


def test_dynamic_sampling_gives_up_at_exactly_its_limit() -> None:
    made, _ = served(Rules(batch_groups=1, group_size=2, dynamic_sampling=True))
    for group_id in range(FILTERED_LIMIT - 1):
        finish(made, group_id, [1.0, 1.0])
    with pytest.raises(UserError, match=f"filtered {FILTERED_LIMIT} groups for one batch of 1"):
        finish(made, FILTERED_LIMIT - 1, [1.0, 1.0])


# ---- versions --------------------------------------------------------------------------------------------------------


def test_a_version_that_is_not_published_changes_nothing_for_the_workers() -> None:
    made, _ = served(Rules(mode="async", batch_groups=1, group_size=1, max_staleness=1, on_new_version="resume"))
    finish(made, 0, [1.0])
    assert made.num_leased == 1
    assert made.handle(VersionTrained(0.0, 1, is_published=False)) == []
    assert (made.version, made.num_leased) == (1, 1)


def test_resume_puts_all_down_and_loads_once_when_nobody_runs() -> None:
    made, _ = served(Rules(mode="async", batch_groups=1, group_size=1, max_staleness=2, on_new_version="resume"))
    assert Deliver(1, (0,)) in finish(made, 0, [1.0])
    assert made.handle(VersionTrained(0.0, 1)) == [AbortTrajectory(1, 0), AbortTrajectory(2, 0)]
    assert made.handle(LeaseEnded(0.0, 1, 0)) == []
    assert made.handle(LeaseEnded(0.0, 2, 0)) == [Load(1)]
    assert made.handle(Capacity(0.0, 100)) == [], "neither loaded twice nor leased before it is served"
    assert leased(made.handle(VersionServed(0.0, 1))) == [(1, 0), (2, 0), (3, 0)]


def test_a_version_that_is_being_loaded_is_not_loaded_again() -> None:
    made, _ = served(Rules(mode="async", batch_groups=1, group_size=1, max_staleness=2, on_new_version="resume"))
    finish(made, 0, [1.0])
    made.handle(VersionTrained(0.0, 1))
    made.handle(LeaseEnded(0.0, 1, 0))
    assert made.handle(LeaseEnded(0.0, 2, 0)) == [Load(1)]
    assert made.handle(Revoked(0.0, 1, 0, "verification")) == [Restart(1, 0)]


def test_keep_loads_at_once_and_leases_on() -> None:
    made, _ = served(Rules(mode="async", batch_groups=1, group_size=1, max_staleness=1, on_new_version="keep"))
    assert Deliver(1, (0,)) in finish(made, 0, [1.0])
    assert made.handle(VersionTrained(0.0, 1)) == [Load(1)]
    assert made.handle(LeaseEnded(0.0, 1, 0)) == [Assign(1, 0, 0, False)]
    assert leased(made.handle(VersionServed(0.0, 1))) == [(2, 0)]


def test_an_older_version_served_is_not_the_one_that_is_published() -> None:
    made = RolloutScheduler(Rules(batch_groups=1, group_size=1), version=2)
    made.handle(VersionTrained(0.0, 2))
    made.handle(BatchRequested(0.0))
    made.handle(Capacity(0.0, 1))
    assert made.handle(VersionServed(0.0, 1)) == [Load(2)]
    assert made.handle(VersionServed(0.0, 2)) == [Open(0), Assign(0, 0, 2, True)]


# ---- what is lost, and what is taken up ------------------------------------------------------------------------------


def test_a_revoked_trajectory_begins_again_from_any_state_and_its_tokens_are_lost() -> None:
    made, _ = served(Rules(batch_groups=2, group_size=2))
    made.handle(TokensReceived(0.0, 0, 0, 0, 3))
    assert made.handle(Revoked(0.0, 0, 0, "verification")) == [Restart(0, 0), Assign(0, 0, 0, True)]  # leased
    finish(made, 0, [1.0, 0.0], tokens=5)
    assert made.handle(Revoked(0.0, 0, 1, "verification")) == [Restart(0, 1), Assign(0, 1, 0, True)]  # judged
    made.handle(TokensReceived(0.0, 0, 1, 0, 7))
    made.handle(Finished(0.0, 0, 1))
    assert made.handle(Rewarded(0.0, 0, 0, 0.5)) == [], "judged again with its group"
    assert made.handle(Rewarded(0.0, 0, 1, 0.0)) == []
    assert (made.ledger.lost["verification"], made.step.lost_tokens) == (8, 8)
    assert finish(made, 1, [1.0, 0.0]) == [Deliver(1, (0, 1))]
    assert made.handle(TokensLost(0.0, "branch", 4)) == []
    assert (made.ledger.lost["branch"], made.step.lost_tokens) == (4, 12)
    assert made.ledger.generated == 3 + 10 + 7 + 2 + 4


def test_a_revoked_trajectory_that_waits_is_leased_once_and_after_those_with_tokens() -> None:
    made, _ = served(Rules(batch_groups=2, group_size=1), slots=2)
    made.handle(Capacity(0.0, 0))
    for group_id in (0, 1):
        made.handle(TokensReceived(0.0, group_id, 0, 0, 2))
        made.handle(LeaseEnded(0.0, group_id, 0))
    assert made.handle(Revoked(0.0, 0, 0, "verification")) == [Restart(0, 0)]
    assert leased(made.handle(Capacity(0.0, 9))) == [(1, 0), (0, 0)]


def test_groups_of_an_earlier_process_are_taken_up_where_they_were() -> None:
    made = RolloutScheduler(Rules(batch_groups=2, group_size=1), next_group_id=7)
    done, waiting = (TrackedGroup.new(group_id, 1, opened_at=0) for group_id in (5, 6))
    done.members[0].grow(0, 3)
    done.members[0].state, done.members[0].reward, done.num_unscored = TrajectoryState.SCORED, 1.0, 0
    waiting.members[0].grow(0, 2)
    assert made.restore([done, waiting]) == []
    assert (made.num_open, made.ledger.generated, made.num_carried_tokens) == (2, 5, 5)
    made.handle(VersionTrained(0.0, 0))
    made.handle(VersionServed(0.0, 0))
    made.handle(BatchRequested(0.0))
    assert made.handle(Capacity(0.0, 9)) == [Assign(6, 0, 0, True)]
    assert finish(made, 6, [0.0]) == [Deliver(1, (5, 6))]
    with pytest.raises(AssertionError, match="cannot restore group 7: ids from 7 on are not assigned yet"):
        RolloutScheduler(Rules(), next_group_id=7).restore([TrackedGroup.new(7, 1, opened_at=0)])


def test_slot_time_is_counted_from_event_to_event() -> None:
    """Of 4 slots 1 is busy for 2 s, half a second at first, then none for 5 s, which count for nothing."""
    made, _ = served(Rules(batch_groups=1, group_size=1), slots=4)
    made.handle(TokensReceived(0.5, 0, 0, 0, 1))
    assert (made.step.busy_slot_s, made.step.slot_s) == (0.5, 2.0)
    made.handle(TokensReceived(2.0, 0, 0, 0, 1))
    made.handle(Finished(2.0, 0, 0))
    made.handle(Rewarded(7.0, 0, 0, 1.0))
    assert (made.step.busy_slot_s, made.step.slot_s) == (2.0, 8.0)
    made.handle(Capacity(9.0, 4))
    assert (made.step.busy_slot_s, made.step.slot_s) == (2.0, 8.0)


def test_paused_leases_go_on_under_the_next_version_and_their_pause_is_no_slot_time() -> None:
    """Of 2 slots, both are busy for 3 s, until the batch is delivered. The pause of 60 s counts for nothing."""
    rules = Rules(mode="partial", batch_groups=1, group_size=1, overprovision=2.0, on_new_version="keep")
    for may_pause, said in ((False, [AbortTrajectory(1, 0), Deliver(1, (0,))]), (True, [Deliver(1, (0,))])):
        made, _ = served(replace(rules, may_pause=may_pause), slots=2)
        made.handle(TokensReceived(0.0, 0, 0, 0, 1))
        made.handle(Finished(3.0, 0, 0))
        assert made.handle(Rewarded(3.0, 0, 0, 1.0)) == said
    made.handle(TokensReceived(3.0, 1, 0, 0, 2))
    assert made.handle(VersionTrained(63.0, 1)) == [Load(1)]
    assert made.handle(VersionServed(63.0, 1)) == []
    assert leased(made.handle(BatchRequested(63.0))) == [(2, 0)]
    assert (made.step.busy_slot_s, made.step.slot_s) == (6.0, 6.0)
    assert (made.num_leased, made.step.resumed) == (2, 0)
    made.handle(TokensReceived(64.0, 1, 0, 1, 1))
    assert (made.step.busy_slot_s, made.step.slot_s) == (8.0, 8.0)


def test_the_queue_of_an_engine_in_the_trainers_process_is_refilled_when_half_of_it_is_empty() -> None:
    rules = Rules(batch_groups=20, group_size=1, may_pause=True)
    made, said = served(rules, slots=4, queue=4)
    assert len(leased(said)) == 8
    assert leased(made.handle(Finished(0.0, 0, 0))) == [], "3 of 4 places of the queue are full"
    assert leased(made.handle(Finished(0.0, 1, 0))) == [(8, 0), (9, 0)]
    few, said = served(replace(rules, max_concurrency=3), slots=4, queue=4)
    assert len(leased(said)) == 3
    assert leased(few.handle(Finished(0.0, 0, 0))) == [(3, 0)], "without a queue, a free slot is filled at once"


def test_before_the_first_event_there_is_neither_time_nor_a_slot() -> None:
    made = RolloutScheduler(Rules(batch_groups=1, group_size=1))
    made.handle(VersionTrained(0.0, 0))
    made.handle(VersionServed(0.0, 0))
    assert made.handle(BatchRequested(0.0)) == []


def test_events_that_cannot_be_are_refused() -> None:
    made, _ = served(Rules(batch_groups=1, group_size=1))
    with pytest.raises(AssertionError, match="trajectory 0/0 received a reward in state LEASED"):
        made.handle(Rewarded(0.0, 0, 0, 1.0))
    made.handle(Finished(0.0, 0, 0))
    with pytest.raises(AssertionError, match="trajectory 0/0 received tokens in state SCORING"):
        made.handle(TokensReceived(0.0, 0, 0, 0, 1))
    with pytest.raises(AssertionError, match="trajectory 0/0 is SCORING, neither leased nor acting"):
        made.handle(LeaseEnded(0.0, 0, 0))
