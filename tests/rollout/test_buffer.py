"""Which groups make a batch, by hand: who is too old, in which order they are consumed, when there is none."""

from __future__ import annotations

import pytest

from baton.rollout.buffer import Buffer, Consume, Stale, TakeResult


def buffer(
    oldest: dict[int, int], *, batch: int = 2, max_staleness: int = 1, consume: Consume, stale: Stale = "mask"
) -> Buffer:
    """Groups in the order of completion → the oldest version among their tokens; opened in the order of their ids."""
    made = Buffer(batch, max_staleness, consume=consume, stale=stale)
    for group_id in sorted(oldest):
        made.opened(group_id)
    for group_id, version in oldest.items():
        made.completed(group_id, version)
    return made


@pytest.mark.parametrize(
    ("consume", "expected"),
    [("completion", (7, 3)), ("submission", (3, 5)), ("stalest", (5, 3))],  # of 5 and 7 of version 4: the lower id
)
def test_the_order_in_which_groups_are_consumed(consume: Consume, expected: tuple[int, ...]) -> None:
    oldest = {7: 4, 3: 2, 5: 1}
    assert buffer(oldest, consume=consume, max_staleness=9).take(5) == TakeResult(expected, ())


def test_of_equally_stale_groups_the_first_submitted_goes_first() -> None:
    assert buffer({7: 4, 3: 4, 5: 4}, consume="stalest").take(4) == TakeResult((3, 5), ())


def test_there_is_a_batch_at_exactly_as_many_groups_as_it_needs() -> None:
    made = buffer({0: 0}, consume="completion")
    assert made.take(0) == TakeResult((), ())
    made.opened(1)
    made.completed(1, 0)
    assert (len(made), made.num_complete) == (2, 2)
    assert made.take(0) == TakeResult((0, 1), ())
    assert (len(made), made.num_complete) == (0, 0)


def test_in_the_order_of_submission_an_unfinished_group_holds_up_those_behind_it() -> None:
    made = Buffer(2, 0, consume="submission", stale="mask")
    for group_id in range(4):
        made.opened(group_id)
    for group_id in (0, 2, 3):
        made.completed(group_id, 0)
    assert made.take(0) == TakeResult((), ())
    made.completed(1, 0)
    assert made.take(0) == TakeResult((0, 1), ())
    assert (len(made), made.num_complete) == (2, 2)


def test_a_group_of_exactly_the_oldest_version_allowed_is_trained_and_an_older_one_is_dropped() -> None:
    """At version 5 with max_staleness 2 the oldest is 3."""
    made = buffer({0: 2, 1: 3, 2: 4}, consume="completion", stale="drop", max_staleness=2)
    assert made.take(5) == TakeResult((1, 2), (0,))
    assert (len(made), made.num_complete) == (0, 0)


def test_what_is_dropped_has_left_though_there_is_no_batch() -> None:
    made = buffer({0: 0, 1: 1, 2: 3}, consume="completion", stale="drop", max_staleness=1)
    assert made.take(3) == TakeResult((), (0, 1))
    assert (len(made), made.num_complete) == (1, 1)
    assert made.take(3) == TakeResult((), ())


def test_where_stale_tokens_are_masked_no_group_is_dropped() -> None:
    assert buffer({0: 0, 1: 0}, consume="completion", max_staleness=1).take(9) == TakeResult((0, 1), ())


def test_a_reopened_group_waits_to_be_complete_again_and_a_closed_one_is_gone() -> None:
    made = buffer({0: 0, 1: 0}, consume="completion")
    made.reopened(0)
    assert (len(made), made.num_complete) == (2, 1)
    assert made.take(0) == TakeResult((), ())
    made.closed(1)
    made.completed(0, 0)
    assert (len(made), made.num_complete) == (1, 1)


def test_groups_come_and_complete_once() -> None:
    made = buffer({0: 0}, consume="completion")
    with pytest.raises(AssertionError, match="group 0 was opened twice"):
        made.opened(0)
    with pytest.raises(AssertionError, match="group 0 was completed twice"):
        made.completed(0, 0)
    with pytest.raises(AssertionError, match="group 1 was completed but is not open"):
        made.completed(1, 0)
