"""Who is checked, how often, and what a conviction takes with it: events in, commands out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.rollout.rescoring import Claim
from baton.swarm.auth import AccessGrant, Role
from baton.swarm.verification import policy
from baton.swarm.verification.policy import (
    BatchConsumed,
    CheckFailed,
    CheckTrajectory,
    InspectionSettings,
    QuarantineLifted,
    QuarantineWorker,
    ReleaseTrajectory,
    RemakeTrajectory,
    ReportViolated,
    SegmentAuthor,
    TrajectoryFinished,
    TrajectoryJudged,
    VerificationPolicy,
    VerificationTick,
    WarnUser,
)
from baton.swarm.verification.verify import CheckOutcome, Tolerance, VerificationResult, WorkerClass
from baton.types import Author, SamplingParams, Segment, Trajectory

TOLERANCE = Tolerance(logprob=0.1, draw_gap=0.2)
HONEST = VerificationResult(CheckOutcome.HONEST, "", num_tokens=100, beyond_typical=20)
SUSPECT = VerificationResult(CheckOutcome.SUSPECT, "a few tokens", "draw", num_tokens=100, beyond_draw=3)
BAD = VerificationResult(CheckOutcome.BAD, "token 3 is forged", "logprob", num_tokens=1)
KIND = WorkerClass("cpu", "float32", "embedded")
LENGTH = 10
CLAIM = Claim(Trajectory(0, 0, (5,), (Segment((3,) * LENGTH, (-1.0,) * LENGTH, 0),)), SamplingParams(LENGTH), 9)


def verification_policy(secret=b"secret", **settings):
    return VerificationPolicy(InspectionSettings(**settings), secret)


def author(worker, *, is_trusted=False):
    return SegmentAuthor(
        worker, AccessGrant("token", Role.WORKER, is_trusted, digest="digest"), f"label of {worker}", KIND
    )


def finished(found, worker, number, at_s=0.0, *, is_trusted=False, group=0):
    """The commands after a worker has finished the trajectory of a number."""
    key, parts = (9, group, number), ((author(worker, is_trusted=is_trusted), 0, LENGTH),)
    return found.handle(TrajectoryFinished(at_s, key, CLAIM, parts))


def name(number, group=0):
    return f"{group}/{number}@9"


def checked(found, worker, count, *, is_trusted=False, group=0):
    return [bool(finished(found, worker, i, is_trusted=is_trusted, group=group)) for i in range(count)]


def judged(found, worker, number, verdict, group=0):
    """The record of the worker's quarantine where this verdict decides."""
    case = policy.Case((9, group, number), CLAIM, (), False)
    event = TrajectoryJudged(case, ((author(worker), verdict, TOLERANCE),))
    records = [one.record for one in found.handle(event) if isinstance(one, QuarantineWorker)]
    return records[0] if records else None


def violated(found, worker, sentence):
    return [one.record for one in found.handle(ReportViolated(author(worker), "a report", sentence))]


def test_a_new_workers_first_trajectories_are_all_checked_and_then_the_share():
    """Of 4000 draws at 5 % 200 ± 14 (one σ) are checked."""
    drawn = checked(verification_policy(first=8, share=0.05), "w", 4008)
    assert all(drawn[:8])
    assert 140 < sum(drawn[8:]) < 260


def test_a_trusted_worker_is_checked_less_but_checked():
    """Of 4000 at 1 %: 40 ± 6."""
    assert 10 < sum(checked(verification_policy(first=0), "w", 4000, is_trusted=True)) < 80


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 100)])
def test_none_and_all(share, expected):
    assert sum(checked(verification_policy(first=0, share=share), "w", 100)) == expected


def test_which_ones_follows_from_the_secret_the_worker_and_the_name_alone():
    drawn = checked(verification_policy(first=0, share=0.5), "w", 200)
    again = verification_policy(first=0, share=0.5)
    assert [bool(finished(again, "w", i)) for i in reversed(range(200))][::-1] == drawn
    assert checked(verification_policy(b"other", first=0, share=0.5), "w", 200) != drawn
    assert checked(verification_policy(first=0, share=0.5), "v", 200) != drawn


def test_a_suspect_verdict_has_the_next_ones_all_checked():
    found = verification_policy(first=0, share=0.0)
    assert not any(checked(found, "w", 3))
    assert judged(found, "w", 0, SUSPECT) is None
    assert checked(found, "w", 18, group=1) == [True] * 16 + [False] * 2
    assert not any(checked(found, "v", 3, group=2)), "another worker is not concerned"


def test_a_conviction_requeues_what_is_not_trained_and_lists_what_is():
    found = verification_policy(first=0, share=0.0)
    checked(found, "w", 5)
    checked(found, "v", 2, group=1)
    assert found.handle(BatchConsumed((name(0), name(1), name(0, group=1)), step=7)) == []
    finished(found, "v", 2)  # made again by another
    quarantine_record = judged(found, "w", 4, BAD)
    assert quarantine_record is not None
    assert quarantine_record.requeue == (name(3), name(4))
    assert quarantine_record.trained == ((name(0), 7), (name(1), 7))
    assert (quarantine_record.num_trained, quarantine_record.num_finished, quarantine_record.num_checked) == (2, 5, 1)
    assert quarantine_record.verdict.reason == "token 3 is forged"
    assert (quarantine_record.token, quarantine_record.label) == ("digest", "label of w")


def test_a_worker_is_convicted_once_and_then_finishes_nothing():
    found = verification_policy()
    checked(found, "w", 2)
    assert judged(found, "w", 0, BAD) is not None
    assert judged(found, "w", 1, BAD) is None
    assert violated(found, "w", "nonsense") == []
    assert finished(found, "w", 2) == []
    assert finished(found, "v", 2) != []
    assert found.handle(QuarantineLifted(("w",))) == []
    assert finished(found, "w", 3) != []


def test_who_is_banned_by_its_token_is_not_checked():
    event = TrajectoryFinished(0.0, (9, 0, 0), CLAIM, ((author("w"), 0, LENGTH),), banned=frozenset({"w"}))
    assert verification_policy().handle(event) == []


def test_a_report_no_honest_worker_sends_convicts_at_once():
    (quarantine_record,) = violated(verification_policy(), "w", "token 0 has the id -1")
    assert (quarantine_record.verdict.test, quarantine_record.verdict.reason) == ("report", "token 0 has the id -1")


def test_suspects_add_up_to_a_conviction_and_honest_verdicts_do_not():
    """3 of 100 tokens beyond where 0.2 % may be; after a few such trajectories rounding explains it no more."""
    found = verification_policy()
    assert all(judged(found, "honest", i, HONEST) is None for i in range(500))
    given = [judged(found, "w", i, SUSPECT) for i in range(10)]
    number = next(i for i, quarantine_record in enumerate(given) if quarantine_record)
    assert 1 <= number <= 4
    assert "trajectories together" in given[number].verdict.reason


def test_a_conviction_from_before_a_restart_stays():
    after = verification_policy()
    after.restore(["w"])
    assert finished(after, "w", 0) == []
    assert violated(after, "w", "nonsense") == []


def test_a_trajectory_grown_again_elsewhere_belongs_to_whom_finished_it_last():
    found = verification_policy()
    finished(found, "w", 0)
    finished(found, "v", 0)
    assert judged(found, "w", 0, BAD).requeue == ()
    assert judged(found, "v", 0, BAD).requeue == (name(0),)


def test_a_held_trajectory_is_released_by_its_own_verdict_alone():
    found = verification_policy()
    (old,), (new,) = finished(found, "w", 0), finished(found, "v", 0)
    assert found.handle(TrajectoryJudged(old.case, ())) == []
    assert found.handle(TrajectoryJudged(new.case, (), is_whole=False)) == [ReleaseTrajectory((9, 0, 0))]
    assert found.num_unchecked == 1
    assert found.handle(TrajectoryJudged(new.case, ())) == [], "released once"


def test_a_trajectory_that_cannot_be_checked_is_made_again_twice_and_then_released():
    """Its deadline is 120 s and 0.02 s for each of its 10 tokens; by what the hub is late, it moves."""
    found, key = verification_policy(first=0, share=1.0), (9, 0, 0)
    for worker, end in (("a", RemakeTrajectory(key)), ("b", RemakeTrajectory(key)), ("c", ReleaseTrajectory(key))):
        assert [type(one) for one in finished(found, worker, 0, at_s=1000.0)] == [CheckTrajectory]
        assert found.handle(VerificationTick(1120.0)) == []
        assert found.handle(VerificationTick(1150.0, delay_s=30.0)) == []
        assert found.handle(VerificationTick(1151.0))[0] == end
    assert found.handle(VerificationTick(9999.0)) == []
    assert found.num_unchecked == 3


def test_a_trajectory_is_not_late_while_the_scorer_returns_results():
    """Checks one after another, each within 120.2 s of the last result; the last waits longer than that in all."""
    found = verification_policy(first=0, share=1.0)
    checks = [finished(found, "w", number)[0] for number in range(3)]
    assert found.handle(VerificationTick(100.0)) == []
    assert found.handle(TrajectoryJudged(checks[0].case, ())) == [ReleaseTrajectory((9, 0, 0))]
    assert found.handle(VerificationTick(200.0)) == []
    assert found.handle(TrajectoryJudged(checks[1].case, ())) == [ReleaseTrajectory((9, 0, 1))]
    assert found.handle(VerificationTick(320.0)) == []
    assert found.handle(VerificationTick(321.0))[0] == RemakeTrajectory((9, 0, 2)), "silence is what makes it late"


def test_a_full_backlog_pauses_the_random_selection_and_holds_back_what_must_be_checked(monkeypatch):
    monkeypatch.setattr(policy, "MAX_HELD", 3)
    found = verification_policy(first=1, share=1.0)
    checks = [finished(found, "w", number) for number in range(6)]
    assert [[type(one) for one in commands] for commands in checks] == [
        [CheckTrajectory], [CheckTrajectory], [CheckTrajectory], [WarnUser], [], []
    ]  # fmt: skip
    assert "the scorer is slower than the workers" in checks[3][0].text
    assert found.num_unchecked == 3
    assert [type(one) for one in finished(found, "new", 6)] == [CheckTrajectory], "the first of a worker always"
    for number in (0, 1):
        found.handle(TrajectoryJudged(checks[number][0].case, ()))
    assert [type(one) for one in finished(found, "w", 7)] == [CheckTrajectory], "there is room again"
    assert found.num_unchecked == 3


def test_what_trusted_workers_wrote_is_released_where_it_cannot_be_checked():
    found = verification_policy(trusted_share=1.0)
    (check,) = finished(found, "w", 0, is_trusted=True)
    released, warned = found.handle(CheckFailed((check.case,), "no memory"))
    assert released == ReleaseTrajectory((9, 0, 0))
    assert isinstance(warned, WarnUser)
    assert "could not be checked: no memory; 0 of them are generated again, 1 are used" in warned.text
    assert found.handle(CheckFailed((check.case,), "again")) == []


@given(st.lists(st.tuples(st.sampled_from(["finish", "consume", "convict"]), st.integers(0, 9)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_every_finished_trajectory_is_open_or_trained(happenings):
    """Each name is requeued or listed as trained at most once, and by the worker that finished it last."""
    found = verification_policy()
    open_, trained, convicted = {}, {}, set()
    for step, (what, number) in enumerate(happenings):
        worker = f"w{(number + step) % 3}"
        if what == "finish" and worker not in convicted and name(number) not in trained:
            finished(found, worker, number)
            open_[name(number)] = worker
        elif what == "consume":
            found.handle(BatchConsumed((name(number),), step))
            if by := open_.pop(name(number), None):
                trained[name(number)] = (by, step)
        elif what == "convict" and (quarantine_record := judged(found, worker, number, BAD)):
            convicted.add(worker)
            assert set(quarantine_record.requeue) == {n for n, w in open_.items() if w == worker}
            assert dict(quarantine_record.trained) == {n: s for n, (w, s) in trained.items() if w == worker}
            open_ = {n: w for n, w in open_.items() if w != worker}


# ---- turns of an episode ---------------------------------------------------------------------------------------------


def turn_finished(found, worker, turn, at_s=0.0, number=0):
    """The commands after a worker has finished a turn: turn 0 is the first, and each has 10 tokens."""
    own = Segment((3,) * LENGTH, (-1.0,) * LENGTH, 0)
    seen = Segment((4,), (0.0,), 0, Author.ENVIRONMENT)
    whole = Trajectory(0, number, (5,), (own, seen) * turn + (own,))
    begin = turn * (LENGTH + 1)
    parts = ((author(worker), begin, begin + LENGTH),)
    return found.handle(TrajectoryFinished(at_s, (9, 0, number), Claim(whole, CLAIM.sampling, 9), parts))


def test_each_turn_has_a_draw_of_its_own():
    found = verification_policy(first=0, share=0.5)
    drawn = [[bool(turn_finished(found, "w", turn, number=number)) for turn in range(3)] for number in range(200)]
    assert {tuple(turns) for turns in drawn} == {(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)}
    assert all(60 < sum(column) < 140 for column in zip(*drawn, strict=True))


def test_a_turn_that_can_never_be_checked_does_not_restart_its_episode_for_ever():
    found, key = verification_policy(first=0, share=1.0), (9, 0, 0)
    for end in (RemakeTrajectory(key), RemakeTrajectory(key), ReleaseTrajectory(key)):
        (checked_turn,) = turn_finished(found, "w", 0)
        assert found.handle(TrajectoryJudged(checked_turn.case, ())) == [ReleaseTrajectory(key)]
        (checked_turn,) = turn_finished(found, "w", 1)
        assert found.handle(CheckFailed((checked_turn.case,), "out of memory"))[0] == end


def test_an_episode_is_listed_for_each_of_its_authors():
    found = verification_policy(first=0, share=0.0)
    turn_finished(found, "a", 0)
    turn_finished(found, "b", 1)
    turn_finished(found, "b", 0, number=1)
    (record,) = violated(found, "a", "a lie")
    assert record.requeue == ("0/0@9",)
    turn_finished(found, "c", 0)
    turn_finished(found, "b", 1)
    found.handle(BatchConsumed(("0/0@9", "0/1@9"), 4))
    (record,) = violated(found, "c", "a lie")
    assert record.trained == (("0/0@9", 4),)
    (record,) = violated(found, "b", "a lie")
    assert record.trained == (("0/0@9", 4), ("0/1@9", 4))
    assert record.requeue == ()
