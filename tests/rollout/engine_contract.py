"""What every engine does with leases, whatever makes its tokens: endings, budgets, aborts, versions, reports.

Not collected by itself: a test module imports these functions, beside a fixture `any_engine(**settings)` that builds
its engine with 8 slots and version 0. Nothing here counts an engine's steps: some make tokens while nobody looks.
"""

from __future__ import annotations

import pytest

from baton.errors import UserError
from baton.types import Author, FinishReason, PolicyVersion, Report, Retry, Segment

PROMPT = [5, 6, 7, 8]
V1 = PolicyVersion("run", 1)


def segment(tokens, version=0, author=Author.POLICY) -> Segment:
    return Segment(tuple(tokens), (0.0,) * len(tokens), version, author)


def first_new(tokens: list[int], start: int) -> int:
    """Return the first position from `start` on whose token has not occurred before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


def test_every_lease_ends_once_with_more_leases_than_slots(any_engine, driver):
    engine = any_engine()
    leases = [driver.lease(i, PROMPT, 3 + i % 7) for i in range(30)]
    grown = driver.run(engine, leases)
    assert [t.num_tokens for t in grown.values()] == [3 + i % 7 for i in range(30)]
    assert {t.finish_reason for t in grown.values()} == {FinishReason.LENGTH}
    assert engine.stats.decoded_tokens == sum(t.num_tokens for t in grown.values())
    assert engine.step() == []


def test_a_waiting_turn_precedes_trajectories_that_have_not_begun(any_engine, driver):
    """9 leases run or wait for the 8 slots when the next turn of an episode comes: it gets the first free slot."""
    engine = any_engine()
    turn = driver.lease(9, PROMPT, 20, segments=(segment([1, 2, 3]), segment([9], author=Author.ENVIRONMENT)))
    leases = [*(driver.lease(i, PROMPT, 5 + 4 * i) for i in range(9)), turn]
    ended = []
    for lease in leases:
        engine.submit(lease)
    while len(ended) < len(leases):
        ended += [report.lease_id for report in engine.step() if report.finish_reason is not None]
    assert ended.index(9) < ended.index(8)
    assert ended.index(9) > ended.index(0)


def test_an_end_id_is_kept_as_the_last_token_with_its_logprob(any_engine, driver):
    free = driver.run(any_engine(), [driver.lease(0, PROMPT, 30)])[0]
    at = first_new(free.token_ids, 3)
    stopped = driver.run(any_engine(), [driver.lease(0, PROMPT, 30, stop_token_ids=(free.token_ids[at],))])[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert stopped.behavior_logprobs == pytest.approx(free.behavior_logprobs[: at + 1], abs=1e-4)


def test_the_budget_counts_all_tokens_after_the_prompt(any_engine, driver):
    before = (segment([1, 2, 3]), segment([9], author=Author.ENVIRONMENT))
    grown = driver.run(any_engine(), [driver.lease(0, PROMPT, 10, segments=before)])[0]
    assert (grown.num_tokens, grown.finish_reason) == (10, FinishReason.LENGTH)


def test_a_full_context_ends_a_trajectory(any_engine, driver):
    grown = driver.run(any_engine(max_context_tokens=20), [driver.lease(0, PROMPT, 1000)])[0]
    assert (grown.num_tokens, grown.finish_reason) == (16, FinishReason.LENGTH)


@pytest.mark.parametrize("shape", [{"max_context_tokens": 128}, {"max_context_tokens": 7}])
def test_a_lease_with_nothing_left_is_reported_finished_without_a_step_of_the_model(shape, any_engine, driver):
    engine = any_engine(**shape)
    engine.submit(driver.lease(0, PROMPT, 3, segments=(segment([1, 2, 3]),)))
    assert engine.step() == [Report(0, 3, (), FinishReason.LENGTH)]
    assert engine.stats.decode_steps == 0


@pytest.mark.parametrize("length", [0, 20, 21])
def test_a_prompt_without_room_for_a_token_is_refused(length, any_engine, driver):
    engine = any_engine(max_context_tokens=20)
    with pytest.raises(UserError, match=f"has {length} tokens, allowed are 1 to 19"):
        engine.submit(driver.lease(0, [1] * length))
    assert driver.run(engine, [driver.lease(1, [1] * 19)])[1].num_tokens == 1


def test_tokens_are_reported_at_least_as_often_as_asked_with_running_offsets(any_engine, driver):
    """11 tokens, due every 4: reports of 4, 4 and 3 at offsets 0, 4 and 8."""
    grown = driver.run(any_engine(report_every_tokens=4), [driver.lease(0, PROMPT, 11)])[0]
    assert [(r.token_offset, len(r.segments[0].token_ids)) for r in driver.reports] == [(0, 4), (4, 4), (8, 3)]
    assert [r.finish_reason for r in driver.reports] == [None, None, FinishReason.LENGTH]
    assert grown.num_tokens == 11


def test_what_has_grown_is_reported_when_asked_for_and_never_twice(any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 100))
    driver.grow(engine, 3)
    (first,) = engine.flush()
    assert len(first.segments[0].token_ids) >= 3
    driver.grow(engine, 2)
    (second,) = engine.flush()
    assert second.token_offset == len(first.segments[0].token_ids)


@pytest.mark.parametrize("after", range(8))
def test_an_abort_keeps_what_there_is_and_the_rest_can_be_grown_from_it(after, any_engine, driver):
    """Put down when at least so many tokens exist: a prefix of what it would have been, and its end from there."""
    whole = driver.run(any_engine(), [driver.lease(0, PROMPT, 40, temperature=0.0)])[0]
    engine, neighbour = any_engine(), driver.lease(1, PROMPT, 40, temperature=0.0)

    def abort(step: int) -> None:
        if engine.stats.decoded_tokens >= 2 * after:
            engine.abort(0)

    leases = [driver.lease(0, PROMPT, 40, temperature=0.0), neighbour]
    put_down = driver.run(engine, leases, before_step=abort)
    num = put_down[0].num_tokens
    assert put_down[0].finish_reason is None
    assert put_down[0].token_ids == whole.token_ids[:num]
    assert put_down[1].finish_reason is FinishReason.LENGTH
    resumed = driver.lease(2, PROMPT, 40, group_id=0, segments=put_down[0].segments, temperature=0.0)
    assert driver.run(engine, [resumed])[2].token_ids == whole.token_ids


def test_an_abort_in_the_queue_reports_no_segments_and_leaves_the_slot_to_others(any_engine, driver):
    engine = any_engine()
    leases = [driver.lease(i, PROMPT, 100) for i in range(10)]
    grown = driver.run(engine, leases, before_step=lambda step: engine.abort(8) if step == 1 else None)
    assert [r for r in driver.reports if r.lease_id == 8] == [Report(8, 0, (), is_aborted=True)]
    assert grown[9].num_tokens == 100


def test_an_abort_after_the_last_token_or_of_an_unknown_lease_is_harmless(any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 2))
    (report,) = driver.hear(engine)
    assert report.finish_reason is FinishReason.LENGTH
    engine.abort(0)
    engine.abort(77)
    assert engine.step() == []
    assert driver.run(engine, [driver.lease(0, PROMPT, 2)])[0].num_tokens == 2, "the old abort must not hit a new lease"


def test_aborted_and_resubmitted_under_the_same_id(any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 90))
    driver.grow(engine, 1)
    engine.abort(0)
    (report,) = driver.hear(engine)
    assert (report.is_aborted, len(report.segments)) == (True, 1)
    grown = driver.run(engine, [driver.lease(0, PROMPT, 90, segments=report.segments)])[0]
    assert grown.num_tokens == 90


@pytest.mark.parametrize(
    ("asked", "is_exact", "is_served"), [(0, True, True), (1, True, False), (0, False, True), (1, False, False)]
)
def test_a_version_is_served_as_asked_or_refused(asked, is_exact, is_served, any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 1, version=asked, is_exact=is_exact))
    (answer,) = driver.hear(engine)
    assert isinstance(answer, Report) if is_served else answer == Retry(0, 0)


def test_new_weights_send_back_waiting_leases_and_put_down_running_ones_that_asked_for_the_old_exactly(
    any_engine, same_weights, driver
):
    """8 run and one waits for exactly version 0; a tenth, under any version, goes on in flight."""
    engine = any_engine()
    engine.submit(driver.lease(100, PROMPT, 110, is_exact=False))
    for i in range(8):
        engine.submit(driver.lease(i, PROMPT, 110))
    driver.grow(engine, 16)
    engine.load_weights(same_weights, V1)
    assert engine.version == V1
    reports = driver.hear(engine)
    assert reports[0] == Retry(7, 1)
    assert [(r.lease_id, r.is_aborted, r.segments[0].policy_version) for r in reports[1:8]] == [
        (i, True, 0) for i in range(7)
    ]
    (rest,) = reports[8:] or driver.hear(engine)
    assert [s.policy_version for s in rest.segments] == [0, 1]
    assert sum(len(s.token_ids) for s in rest.segments) == 110
