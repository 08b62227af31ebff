"""Who is checked, how often, and what a conviction takes with it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.swarm.verification.policy import InspectionSettings, Inspector
from baton.swarm.verification.verify import Outcome, Tolerance, Verdict, violation

TOLERANCE = Tolerance(logprob=0.1, draw_gap=0.2)
HONEST = Verdict(Outcome.HONEST, "", num_tokens=100, beyond_typical=20)
SUSPECT = Verdict(Outcome.SUSPECT, "a few tokens", "draw", num_tokens=100, beyond_draw=3)
BAD = Verdict(Outcome.BAD, "token 3 is forged", "logprob", num_tokens=1)


def inspector(secret=b"secret", **settings):
    return Inspector(InspectionSettings(**settings), secret)


def checked(found, worker, count, prefix="t"):
    return [found.finished(worker, f"{prefix}{i}") for i in range(count)]


def test_a_new_workers_first_trajectories_are_all_checked_and_then_the_share():
    """Of 4000 draws at 5 % 200 ± 14 (one σ) are checked."""
    found = inspector(first=8, share=0.05)
    drawn = checked(found, "w", 4008)
    assert all(drawn[:8])
    assert 140 < sum(drawn[8:]) < 260
    assert found.standing("w").num_finished == 4008


def test_a_trusted_worker_is_checked_less_but_checked():
    """Of 4000 at 1 %: 40 ± 6."""
    found = inspector(first=0)
    found.joined("w", is_trusted=True)
    assert 10 < sum(checked(found, "w", 4000)) < 80


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 100)])
def test_none_and_all(share, expected):
    assert sum(checked(inspector(first=0, share=share), "w", 100)) == expected


def test_which_ones_follows_from_the_secret_the_worker_and_the_name_alone():
    drawn = checked(inspector(first=0, share=0.5), "w", 200)
    again = inspector(first=0, share=0.5)
    assert [again.finished("w", f"t{i}") for i in reversed(range(200))][::-1] == drawn
    assert checked(inspector(b"other", first=0, share=0.5), "w", 200) != drawn
    assert checked(inspector(first=0, share=0.5), "v", 200) != drawn


def test_a_suspect_verdict_has_the_next_ones_all_checked():
    found = inspector(first=0, share=0.0, after_suspect=5)
    assert not any(checked(found, "w", 3))
    assert found.judged("w", "t0", SUSPECT, TOLERANCE) is None
    assert checked(found, "w", 7, "u") == [True] * 5 + [False] * 2
    assert found.standing("w").num_suspect == 1
    assert not any(checked(found, "v", 3, "v")), "another worker is not concerned"


def test_a_conviction_requeues_what_is_not_trained_and_lists_what_is():
    found = inspector(first=0, share=0.0)
    checked(found, "w", 5)
    checked(found, "v", 2, "v")
    found.consumed(["t0", "t1", "v0"], step=7)
    found.lost(["t2"])
    conviction = found.judged("w", "t4", BAD, TOLERANCE)
    assert conviction is not None
    assert conviction.requeue == ("t3", "t4")
    assert conviction.trained == (("t0", 7), ("t1", 7))
    assert (conviction.num_trained, conviction.num_finished, conviction.num_checked) == (2, 5, 1)
    assert conviction.verdict.reason == "token 3 is forged"
    assert found.quarantine == {"w": conviction}
    assert found.standing("w").is_quarantined
    assert not found.standing("v").is_quarantined


def test_a_worker_is_convicted_once_and_then_finishes_nothing():
    found = inspector()
    checked(found, "w", 2)
    assert found.judged("w", "t0", BAD, TOLERANCE) is not None
    assert found.judged("w", "t1", BAD, TOLERANCE) is None
    assert found.violated("w", "t1", violation("nonsense")) is None
    found.joined("w")
    with pytest.raises(AssertionError, match="worker w is in quarantine"):
        found.finished("w", "t2")


def test_a_report_no_honest_worker_sends_convicts_at_once():
    found = inspector()
    conviction = found.violated("w", "t0", violation("token 0 has the id -1"))
    assert (conviction.verdict.test, conviction.verdict.reason) == ("report", "token 0 has the id -1")


def test_suspects_add_up_to_a_conviction_and_honest_verdicts_do_not():
    """3 of 100 tokens beyond where 0.2 % may be; after a few such trajectories rounding explains it no more."""
    found = inspector()
    assert all(found.judged("honest", f"h{i}", HONEST, TOLERANCE) is None for i in range(500))
    given = [found.judged("w", f"t{i}", SUSPECT, TOLERANCE) for i in range(10)]
    number = next(i for i, conviction in enumerate(given) if conviction)
    assert 1 <= number <= 4
    assert "trajectories together" in given[number].verdict.reason


def test_a_conviction_from_before_a_restart_stays():
    before = inspector()
    conviction = before.violated("w", "t0", violation("nonsense"))
    after = inspector()
    after.restore(conviction)
    assert after.standing("w").is_quarantined


def test_a_trajectory_grown_again_elsewhere_belongs_to_whom_finished_it_last():
    found = inspector()
    found.finished("w", "t0")
    found.finished("v", "t0")
    assert found.judged("w", "t0", BAD, TOLERANCE).requeue == ()
    assert found.judged("v", "t0", BAD, TOLERANCE).requeue == ("t0",)


@given(st.lists(st.tuples(st.sampled_from(["finish", "consume", "lose", "convict"]), st.integers(0, 9)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_every_finished_trajectory_is_open_trained_or_lost(happenings):
    """Each name is requeued or listed as trained at most once, and by the worker that finished it last."""
    found = inspector()
    open_, trained = {}, {}
    for step, (what, number) in enumerate(happenings):
        name, worker = f"t{number}", f"w{number % 3}"
        if what == "finish" and worker not in found.quarantine and name not in trained:
            found.finished(worker, name)
            open_[name] = worker
        elif what == "consume":
            found.consumed([name], step)
            if open_.pop(name, None):
                trained[name] = (worker, step)
        elif what == "lose":
            found.lost([name])
            open_.pop(name, None)
        elif what == "convict" and (conviction := found.judged(worker, name, BAD, TOLERANCE)):
            assert set(conviction.requeue) == {n for n, w in open_.items() if w == worker}
            assert dict(conviction.trained) == {n: s for n, (w, s) in trained.items() if w == worker}
            open_ = {n: w for n, w in open_.items() if w != worker}
