"""The contract of all engines, kept by the embedded and the fake one, and what these two do step by step."""

from __future__ import annotations

import pytest
from engine_contract import *  # noqa: F403
from engine_contract import PROMPT, first_new, segment

from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import END_ID, FakeEngine, fake_token
from baton.types import Author, FinishReason, PolicyVersion, Retry

pytestmark = pytest.mark.numerics


@pytest.fixture
def same_weights(load):
    """What the embedded engine of `any_engine` has; the fake does not look."""
    return {name: parameter.detach() for name, parameter in load("llama").named_parameters()}


def test_a_freed_slot_is_refilled_at_once(any_engine, driver):
    """9 leases, 8 slots, 4 tokens each: the ninth is admitted in the fifth step, so all end in 8."""
    engine = any_engine()
    driver.run(engine, [driver.lease(i, PROMPT, 4) for i in range(9)])
    assert engine.stats.decode_steps == 8


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


def test_aborted_and_resubmitted_under_the_same_id_in_two_ticks(any_engine, driver):
    engine = any_engine()
    engine.submit(driver.lease(0, PROMPT, 5))
    engine.step()
    engine.abort(0)
    (report,) = engine.step()
    assert (report.is_aborted, len(report.segments[0].token_ids)) == (True, 1)
    grown = driver.run(engine, [driver.lease(0, PROMPT, 5, segments=report.segments)])[0]
    assert grown.num_tokens == 5


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
