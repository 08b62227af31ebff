"""The contract of all engines, kept by vLLM; and what it adds to it."""

from __future__ import annotations

import pytest
from engine_contract import *  # noqa: F403
from engine_contract import PROMPT, first_new, segment

from baton.errors import UserError
from baton.types import FinishReason, Retry


def test_the_engines_own_end_ids_stop_a_trajectory(vllm, driver):
    free = driver.run(vllm(), [driver.lease(0, PROMPT, 30)])[0]
    at = first_new(free.token_ids, 3)
    stopped = driver.run(vllm(end_ids=(free.token_ids[at],)), [driver.lease(0, PROMPT, 30)])[0]
    assert (stopped.finish_reason, stopped.num_tokens) == (FinishReason.STOP, at + 1)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_stop_string_ends_a_trajectory_where_it_is_complete_also_across_a_resume(cut, vllm, tokenizer, driver):
    """The string spans tokens 2, 3 and 4, wherever the trajectory was put down; what vLLM made beyond is not kept."""
    engine = vllm()
    free = driver.run(engine, [driver.lease(0, PROMPT, 30, temperature=0.0)])[0]
    text = tokenizer.text(free.token_ids[2:5])
    assert tokenizer.text(free.token_ids).index(text) == 2
    before = (segment(free.token_ids[:cut]),) if cut else ()
    lease = driver.lease(1, PROMPT, 30, segments=before, stop=("not here", text), temperature=0.0)
    stopped = driver.run(engine, [lease])[1]
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, free.token_ids[:5])


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_what_it_has_no_logprobs_for_is_refused(cut, vllm, driver):
    with pytest.raises(UserError, match="only temperature is allowed"):
        vllm().submit(driver.lease(0, PROMPT, 4, **cut))


def test_a_trajectory_draws_the_same_again_its_siblings_and_other_seeds_draw_others(vllm, driver):
    def grown():
        leases = [driver.lease(i, PROMPT, 40, group_id=3, sample_index=i) for i in range(8)]
        return driver.run(vllm(), leases)

    first, again = grown(), grown()
    assert [t.token_ids for t in first.values()] == [t.token_ids for t in again.values()]
    driver.noise_seed = 12
    other = grown()
    assert len({tuple(t.token_ids) for t in [*first.values(), *other.values()]}) == 16


def test_an_engine_without_a_version_serves_nobody(vllm, load, driver):
    """As a worker before its first fetch."""
    from baton.types import PolicyVersion

    engine = vllm()
    engine._table.switch(PolicyVersion("", -1))
    engine.submit(driver.lease(0, PROMPT, 4, is_exact=False))
    assert driver.hear(engine) == [Retry(0, -1)]
