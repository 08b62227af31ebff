"""What every engine does with leases, whatever makes its tokens: endings, budgets, aborts, versions, reports."""

from __future__ import annotations

import pytest

from baton.errors import UserError
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import END_ID, FakeEngine, fake_token
from baton.types import Author, FinishReason, PolicyVersion, Report, Retry, Segment

PROMPT = [5, 6, 7, 8]


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


def test_a_freed_slot_is_refilled_at_once(any_engine, driver):
    """9 leases, 8 slots, 4 tokens each: the ninth is admitted in the fifth step, so all end in 8."""
    engine = any_engine()
    driver.run(engine, [driver.lease(i, PROMPT, 4) for i in range(9)])
    assert engine.stats.decode_steps == 8


def test_an_end_id_is_kept_as_the_last_token_with_its_logprob(any_engine, driver):
    free = driver.run(any_engine(), [driver.lease(0, PROMPT, 30)])[0]
    at = first_new(free.token_ids, 3)
    stopped = driver.run(any_engine(), [driver.lease(0, PROMPT, 30, stop_token_ids=(free.token_ids[at],))])[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert stopped.behavior_logprobs == free.behavior_logprobs[: at + 1]


def test_the_engines_own_end_ids_stop_a_trajectory(embedded, driver):
    free = driver.run(embedded(), [driver.lease(0, PROMPT, 30)])[0]
    at = first_new(free.token_ids, 3)
    stopped = driver.run(embedded(end_ids=(free.token_ids[at],)), [driver.lease(0, PROMPT, 30)])[0]
    assert (stopped.finish_reason, stopped.num_tokens) == (FinishReason.STOP, at + 1)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_stop_string_ends_a_trajectory_where_it_is_complete_also_across_a_resume(cut, embedded, tokenizer, driver):
    """The string spans tokens 2, 3 and 4, wherever the trajectory was put down before."""
    free = driver.run(embedded(), [driver.lease(0, PROMPT, 30)])[0]
    text = tokenizer.text(free.token_ids[2:5])
    assert tokenizer.text(free.token_ids).index(text) == 2
    before = (segment(free.token_ids[:cut]),) if cut else ()
    lease = driver.lease(0, PROMPT, 30, segments=before, stop=("not here", text))
    stopped = driver.run(embedded(), [lease])[0]
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, free.token_ids[:5])


def test_a_stop_string_in_what_the_environment_said_does_not_count(driver):
    engine = FakeEngine(EngineSettings(slots=8), PolicyVersion("run", 0), lambda group, sample: 1000)
    said = (segment([1]), segment([17, 18], author=Author.ENVIRONMENT))
    grown = driver.run(engine, [driver.lease(0, PROMPT, 8, segments=said, stop=("17 18",))])[0]
    assert (grown.finish_reason, grown.num_tokens) == (FinishReason.LENGTH, 8)


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
    with pytest.raises(UserError, match=f"has {length} tokens, allowed 1 to 19"):
        engine.submit(driver.lease(0, [1] * length))
    assert driver.run(engine, [driver.lease(1, [1] * 19)])[1].num_tokens == 1


def test_tokens_are_reported_at_least_as_often_as_asked_with_running_offsets(any_engine, driver):
    """11 tokens, due every 4: reports of 4, 4 and 3 at offsets 0, 4 and 8."""
    grown = driver.run(any_engine(report_every_tokens=4), [driver.lease(0, PROMPT, 11)])[0]
    assert [(r.token_offset, len(r.segments[0].token_ids)) for r in driver.reports] == [(0, 4), (4, 4), (8, 3)]
    assert [r.finish_reason for r in driver.reports] == [None, None, FinishReason.LENGTH]
    assert grown.num_tokens == 11


@pytest.mark.parametrize("after", range(8))
def test_an_abort_reports_what_there_is_at_any_token(after, any_engine, driver):
    """After n steps n tokens exist; aborted before the next step, the lease reports the prefix it would have had."""
    whole = driver.run(any_engine(), [driver.lease(0, PROMPT, 8)])[0]
    engine, neighbour = any_engine(), driver.lease(1, PROMPT, 8)
    put_down = driver.run(
        engine,
        [driver.lease(0, PROMPT, 8), neighbour],
        before_step=lambda step: engine.abort(0) if step == after else None,
    )
    assert put_down[0].token_ids == whole.token_ids[:after]
    assert put_down[0].finish_reason is None
    assert put_down[1].finish_reason is FinishReason.LENGTH
    resumed = driver.lease(2, PROMPT, 8, group_id=0, segments=put_down[0].segments)
    assert driver.run(engine, [resumed])[2].token_ids == whole.token_ids


def test_an_abort_in_the_queue_reports_no_segments_and_leaves_the_slot_to_others(any_engine, driver):
    engine = any_engine()
    leases = [driver.lease(i, PROMPT, 4) for i in range(10)]
    grown = driver.run(engine, leases, before_step=lambda step: engine.abort(8) if step == 1 else None)
    assert [r for r in driver.reports if r.lease_id == 8] == [Report(8, 0, (), is_aborted=True)]
    assert grown[9].num_tokens == 4


def test_an_abort_after_the_last_token_or_of_an_unknown_lease_is_harmless(any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 2))
    engine.step()
    (report,) = engine.step()
    assert report.finish_reason is FinishReason.LENGTH
    engine.abort(0)
    engine.abort(77)
    assert engine.step() == []
    assert driver.run(engine, [driver.lease(0, PROMPT, 2)])[0].num_tokens == 2, "the old abort must not hit a new lease"


def test_aborted_and_resubmitted_under_the_same_id_in_two_ticks(any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 5))
    engine.step()
    engine.abort(0)
    (report,) = engine.step()
    assert (report.is_aborted, len(report.segments[0].token_ids)) == (True, 1)
    grown = driver.run(engine, [driver.lease(0, PROMPT, 5, segments=report.segments)])[0]
    assert grown.num_tokens == 5


@pytest.mark.parametrize(
    ("asked", "is_exact", "is_served"), [(0, True, True), (1, True, False), (0, False, True), (1, False, False)]
)
def test_a_version_is_served_as_asked_or_refused(asked, is_exact, is_served, any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 1, version=asked, is_exact=is_exact))
    (answer,) = engine.step()
    assert isinstance(answer, Report) if is_served else answer == Retry(0, 0)


def test_an_older_version_is_served_only_where_at_least_it_was_asked(driver):
    engine = FakeEngine(EngineSettings(slots=8), PolicyVersion("run", 4), lambda group, sample: 3)
    engine.submit(driver.lease(0, PROMPT, version=3, is_exact=True))
    assert engine.step() == [Retry(0, 4)]
    grown = driver.run(engine, [driver.lease(1, PROMPT, version=3, is_exact=False)])[1]
    assert grown.policy_versions == [4, 4, 4]


def test_new_weights_send_back_waiting_leases_and_put_down_running_ones_that_asked_for_the_old_exactly(driver):
    """8 run and one waits for exactly version 0; a tenth, under any version, goes on."""
    engine = FakeEngine(EngineSettings(slots=8), PolicyVersion("run", 0), lambda group, sample: 50)
    engine.submit(driver.lease(100, PROMPT, 5, is_exact=False))
    for i in range(8):
        engine.submit(driver.lease(i, PROMPT, 5))
    engine.step()
    engine.load_weights({}, PolicyVersion("run", 1))
    assert engine.version.number == 1
    reports = engine.step()
    assert reports[0] == Retry(7, 1)
    assert [(r.lease_id, r.is_aborted, r.segments[0].policy_version) for r in reports[1:]] == [
        (i, True, 0) for i in range(7)
    ]
    rest = [engine.step() for _ in range(3)][-1][0]
    assert [(s.policy_version, len(s.token_ids)) for s in rest.segments] == [(0, 1), (1, 4)]


def test_the_fake_follows_its_script(driver):
    """Lengths by script, the end id last, every token the published pure function of its coordinates."""
    settings = EngineSettings(slots=8, report_every_tokens=3)
    engine = FakeEngine(settings, PolicyVersion("run", 0), lambda group, sample: 4 + group + sample)
    leases = [driver.lease(i, PROMPT, 100, group_id=i // 2, sample_index=i % 2, is_exact=False) for i in range(20)]
    grown = driver.run(
        engine, leases, lambda step: engine.load_weights({}, PolicyVersion("run", 1)) if step == 3 else None
    )
    for i, trajectory in grown.items():
        group, index, length = i // 2, i % 2, 4 + i // 2 + i % 2
        assert (trajectory.num_tokens, trajectory.finish_reason) == (length, FinishReason.STOP)
        assert trajectory.token_ids == [
            fake_token(group, index, position, version, length=length)
            for position, version in enumerate(trajectory.policy_versions)
        ]
        assert trajectory.token_ids.index(END_ID) == length - 1
        assert trajectory.policy_versions == ([0] * 3 + [1] * (length - 3) if i < 8 else [1] * length)
