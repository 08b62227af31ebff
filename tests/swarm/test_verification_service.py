"""The examiner: what is checked waits for its verdict, and who is convicted loses what is not trained."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

import baton.swarm.verification.policy
from baton.errors import StorageFault
from baton.rollout.episodes import path_seeds
from baton.rollout.rescoring import Claim, Rescored
from baton.swarm.auth import AccessGrant, Role
from baton.swarm.identity import WorkerKeys
from baton.swarm.transport import SwarmTransport
from baton.swarm.verification.policy import InspectionSettings, SegmentAuthor, VerificationPolicy
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.service import VerificationService
from baton.swarm.verification.verify import Calibration, WorkerClass
from baton.types import FinishReason, Lease, PolicyVersion, SamplingParams, Segment, Trajectory

KIND = WorkerClass("cpu", "float32", "fake")
LENGTH = 10


class Script:
    """A scorer that finds each claim's tokens forged by what `forged` says, once it is let."""

    def __init__(self) -> None:
        self.may_score = Event()
        self.may_score.set()
        self.has_begun = Event()
        self.forged: dict[str, float] = {}
        self.loaded: list[int] = []
        self.fails = False

    def load(self, tensors: Any, version: int) -> None:
        assert tensors == {"version": version}
        self.loaded.append(version)
        self.has_begun.set()

    def score(self, claims: list[Claim]) -> list[Rescored]:
        assert self.may_score.wait(60)
        if self.fails:
            raise ArithmeticError("no such number")
        version = self.loaded[-1]
        found = []
        for claim in claims:
            trajectory = claim.trajectory
            places = [p for p, v in enumerate(trajectory.policy_versions) if v == version]
            off = self.forged.get(trajectory.name, 0.0)
            known = [trajectory.behavior_logprobs[p] for p in places]
            found.append(
                Rescored(
                    trajectory.name, version, 1.0, tuple(places), tuple(trajectory.token_ids[p] for p in places),
                    tuple(known), tuple(k - off for k in known), (0.0,) * len(places), (1.0,) * len(places),
                )
            )  # fmt: skip
        return found


class Office:
    """An examiner, with the hub's thread played by the test."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.script, self.actions = Script(), SimpleQueue()
        self.released: list[Any] = []
        self.remade: list[Any] = []
        self.said: list[str] = []
        self.records: list[Any] = []
        values = {"share": 1.0, "trusted_share": 1.0, "first": 0, **settings}
        self.calibration = Calibration(min_tokens=40)
        self.verifier = VerificationService(
            lambda: self.script,
            VerificationPolicy(InspectionSettings(**values), b"secret"),
            self.calibration,
            Quarantine(path / "quarantine.jsonl"),
            keep_versions=2,
            noise_seed=9,
        )
        self.verifier.attach(
            SimpleNamespace(
                say=self.said.append,
                release=self.released.append,
                remake=self.remade.append,
                quarantined=self.records.append,
            ),
            self.actions.put,
        )
        for number in (0, 1):
            self.verifier.published(PolicyVersion("a", number), {"version": number})

    def finish(self, group: int, *parts: tuple[SegmentAuthor, int, int], versions: tuple[int, ...] = (1,)) -> bool:
        size = LENGTH // len(versions)
        segments = tuple(Segment((3,) * size, (-1.0,) * size, version) for version in versions)
        whole = Trajectory(group, 0, (5,), segments, FinishReason.LENGTH)
        lease = Lease(group, Trajectory(group, 0, (5,)), SamplingParams(LENGTH), 9, 0)
        return self.verifier.finished(lease, whole, parts)

    def rule(self, count: int = 1) -> None:
        """Let so many verdicts come in."""
        for _ in range(count):
            self.actions.get(timeout=60)()


def author(name: str, *, trusted: bool = False, own: bool = False, token: str = "") -> SegmentAuthor:
    token = token or f"token of {name}"
    return SegmentAuthor(
        name, AccessGrant(token, Role.WORKER, trusted, digest=token, is_own=own), f"{token}#{name}", KIND
    )


def reason(office: Office, name: str, token: str = "") -> str | None:
    return office.verifier.quarantine.reason(author(name, token=token).grant, name)


@pytest.fixture
def office(tmp_path: Path):
    made = Office(tmp_path)
    yield made
    made.script.may_score.set()
    made.verifier.close()
    made.verifier.close()


def test_what_is_checked_waits_for_its_verdict(office):
    office.script.may_score.clear()
    assert office.finish(1, (author("a"), 0, LENGTH))
    office.verifier.tick()
    assert office.released == []
    office.script.may_score.set()
    office.rule()
    assert office.released == [(9, 1, 0)]
    assert office.verifier.num_checked == {"a": 1}


def test_what_nobody_wants_checked_is_not_held(tmp_path):
    office = Office(tmp_path, share=0.0, trusted_share=0.0)
    assert not office.finish(1, (author("a"), 0, LENGTH))
    office.verifier.close()


def test_what_no_verdict_comes_for_is_made_again_twice_and_then_used_and_each_is_said(office, monkeypatch):
    monkeypatch.setattr(baton.swarm.verification.policy, "PATIENCE_S", -1.0)
    office.script.may_score.clear()
    for times in range(3):
        assert office.released == []
        assert office.finish(1, (author("a" if not times else "b"), 0, LENGTH)), "whoever makes it again is checked"
        office.verifier.tick()
        office.verifier.tick()
    assert office.remade == [(9, 1, 0)] * 2
    assert office.released == [(9, 1, 0)]
    assert office.verifier.verification_policy.num_unchecked == 3
    assert [re.sub(r"^.*in time; ", "", text) for text in office.said] == [
        "1 of them are generated again, 0 are used unchecked; 1 so far ([inspection])",
        "1 of them are generated again, 0 are used unchecked; 2 so far ([inspection])",
        "0 of them are generated again, 1 are used unchecked; 3 so far ([inspection])",
    ]
    office.script.forged["1/0"] = 0.5
    office.script.may_score.set()
    office.rule()
    assert office.released == [(9, 1, 0)]
    assert [c.worker for c in office.records] == ["a"], "a late verdict convicts all the same"


def test_checks_that_nobody_waits_for_do_not_accumulate(office, monkeypatch):
    """A scorer that hangs: what is made again twice and then used leaves no check behind."""
    monkeypatch.setattr(baton.swarm.verification.policy, "PATIENCE_S", -1.0)
    monkeypatch.setattr(baton.swarm.verification.policy, "MAX_HELD", 5)
    office.script.may_score.clear()
    for group in range(20):
        for _ in range(3):
            assert office.finish(group, (author("a"), 0, LENGTH))
            assert office.script.has_begun.wait(60)
            office.verifier.tick()
    assert len(office.released) == 20
    office.script.may_score.set()
    office.verifier.close()
    assert office.actions.qsize() <= 1 + 5, "the first was with the scorer already, and 5 waited"


def test_a_trajectory_that_is_only_warned_about_is_not_held(office, monkeypatch):
    """When the first random selection is omitted, the user is warned, and nothing would release the trajectory."""
    monkeypatch.setattr(baton.swarm.verification.policy, "MAX_HELD", 2)
    office.script.may_score.clear()
    assert [office.finish(group, (author("a"), 0, LENGTH)) for group in range(4)] == [True, True, False, False]
    assert len(office.said) == 1


def test_the_runs_own_workers_are_checked_only_where_it_asks_for_that(tmp_path, office):
    mine = author("mine", trusted=True, own=True)
    assert not office.finish(1, (mine, 0, LENGTH))
    assert office.finish(2, (mine, 0, 5), (author("a"), 5, LENGTH)), "the part of a stranger is"
    asking = Office(tmp_path, own=True)
    assert asking.finish(1, (mine, 0, LENGTH))
    asking.verifier.close()


def test_a_conviction_takes_what_is_not_trained_and_lists_what_is(office):
    for group in (1, 2, 3):
        office.finish(group, (author("bad"), 0, LENGTH))
        office.finish(group + 10, (author("good"), 0, LENGTH))
        office.rule(2)
    office.verifier.consumed(7, [(9, 1, 0), (9, 11, 0)])
    office.rule()
    office.script.forged["4/0"] = 0.5
    office.finish(4, (author("bad"), 0, LENGTH))
    office.rule()
    (quarantine_record,) = office.records
    assert quarantine_record.worker == "bad"
    assert quarantine_record.name == "4/0@9"
    assert quarantine_record.requeue == ("2/0@9", "3/0@9", "4/0@9")
    assert quarantine_record.trained == (("1/0@9", 7),)
    assert (quarantine_record.num_trained, quarantine_record.num_finished) == (1, 4)
    assert "logprob" in quarantine_record.verdict.reason
    assert reason(office, "bad") == f"in quarantine: {quarantine_record.verdict.reason}"
    assert reason(office, "good") is None
    assert not office.finish(5, (author("bad"), 0, LENGTH)), "nothing of it is taken any more"


def test_each_author_answers_for_its_own_tokens_under_their_own_versions(office):
    """Version 0 wrote the first half and is honest; only the second half is forged."""
    original = office.script.score

    def second_half_forged(claims: list[Claim]) -> list[Rescored]:
        office.script.forged = {"1/0": 0.5 if office.script.loaded[-1] == 1 else 0.0}
        return original(claims)

    office.script.score = second_half_forged
    office.finish(1, (author("a"), 0, 5), (author("b"), 5, 10), versions=(0, 1))
    office.rule()
    assert office.script.loaded == [0, 1]
    assert [c.worker for c in office.records] == ["b"]


def test_versions_that_are_kept_no_more_cannot_be_checked_and_nobody_is_accused(office):
    for number in (2, 3):
        office.verifier.published(PolicyVersion("a", number), {"version": number})
    office.script.forged["1/0"] = 0.5
    office.finish(1, (author("a"), 0, LENGTH), versions=(1,))
    office.rule()
    assert office.script.loaded == []
    assert office.records == []
    assert office.remade == [(9, 1, 0)]
    assert "none of its versions is kept any more" in office.said[0]


def test_the_quarantine_survives_a_restart(office, tmp_path):
    office.script.forged["1/0"] = 0.5
    office.finish(1, (author("bad"), 0, LENGTH))
    office.rule()
    again = Office(tmp_path)
    assert reason(again, "bad") == reason(office, "bad")
    assert again.verifier.quarantine.records == office.records
    assert not again.finish(2, (author("bad"), 0, LENGTH))
    assert again.finish(3, (author("good"), 0, LENGTH))
    again.rule()
    again.verifier.close()


def test_a_quarantine_that_a_full_disk_does_not_take_is_in_force_and_is_written_later(office, tmp_path, monkeypatch):
    """The disk takes a part of the record, as a nearly full one does: the file has grown, and lacks the record."""
    write = os.write

    def partly(handle: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[: len(data) - 19])

    with monkeypatch.context() as full:
        full.setattr(os, "write", partly)
        assert office.verifier.violated(author("bad"), "nonsense", "a report") is not None
        office.verifier.tick()
        office.verifier.tick()
        assert not office.finish(1, (author("bad"), 0, LENGTH)), "it is not checked like a new worker"
        assert reason(office, "bad") == "in quarantine: nonsense"
        with pytest.raises(StorageFault, match=r"quarantine of .*bad.* is lost, because .* cannot be written"):
            office.verifier.quarantine.close()
    assert Quarantine(tmp_path / "quarantine.jsonl").records == []
    office.verifier.tick()
    assert Quarantine(tmp_path / "quarantine.jsonl").records == office.records
    office.verifier.quarantine.close()


def test_a_quarantine_that_is_written_but_not_flushed_is_not_written_twice(office, tmp_path, monkeypatch):
    """Some file systems report a full disk when they flush."""

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        assert office.verifier.violated(author("bad"), "nonsense", "a report") is not None
        office.verifier.tick()
    office.verifier.tick()
    assert Quarantine(tmp_path / "quarantine.jsonl").records == office.records
    assert office.verifier.quarantine.records == office.records
    office.verifier.quarantine.close()


def test_a_violation_convicts_without_a_check_and_only_once(office):
    quarantine_record = office.verifier.violated(author("bad"), "an id beyond the vocabulary", "a report")
    assert quarantine_record is not None
    assert office.records == [quarantine_record]
    assert office.verifier.violated(author("bad"), "again", "a report") is None
    assert len(office.records) == 1


def test_trusted_workers_calibrate_their_class_and_others_do_not(office):
    before = office.calibration.tolerance(KIND)
    for group in range(6):
        office.script.forged[f"{group}/0"] = 1e-4
        office.finish(group, (author("stranger"), 0, LENGTH))
        office.rule()
    assert office.calibration.num_tokens(KIND) == 0
    assert office.calibration.tolerance(KIND) == before
    for group in range(10, 16):
        office.script.forged[f"{group}/0"] = 1e-4
        office.finish(group, (author("ours", trusted=True), 0, LENGTH))
        office.rule()
    assert office.calibration.num_tokens(KIND) == 60
    assert office.calibration.tolerance(KIND) != before


def test_what_was_made_again_waits_for_its_own_verdict(office):
    """The verdict on the old trajectory of the same name does not release the new one."""
    office.script.may_score.clear()
    office.finish(1, (author("a"), 0, LENGTH))
    office.finish(1, (author("b"), 0, LENGTH))
    office.script.may_score.set()
    office.rule()
    assert office.released == []
    office.rule()
    assert office.released == [(9, 1, 0)]


def test_a_scorer_that_fails_is_named_and_does_not_end_the_run(office):
    office.script.fails = True
    office.finish(1, (author("a"), 0, LENGTH))
    office.rule()
    assert office.remade == [(9, 1, 0)]
    assert "scoring them again failed: ArithmeticError: no such number" in office.said[0]
    office.script.fails = False
    office.finish(1, (author("b"), 0, LENGTH))
    office.rule()
    assert office.released == [(9, 1, 0)]
    assert office.verifier.num_checked.total() == 1


# ---- who is in quarantine --------------------------------------------------------------------------------------------


def test_a_stranger_whose_token_has_the_name_of_another_does_it_no_harm(office):
    """Two token files may each hold a token `local`; the run's own workers bear the one in its own file."""
    bad = SegmentAuthor("1f", AccessGrant("local", Role.WORKER, False, digest="stranger"), "local#0", KIND)
    mine = AccessGrant("local", Role.WORKER, True, digest="mine", is_own=True)
    office.verifier.violated(bad, "nonsense", "a report")
    quarantine = office.verifier.quarantine
    assert quarantine.reason(bad.grant, "1f") == "in quarantine: nonsense"
    assert quarantine.reason(mine, "2e") is None
    assert quarantine.reason(bad.grant, "3d") is None, "another worker of that token"
    assert quarantine.reason(bad.grant) is None, "its token still fetches weights"


def test_a_worker_that_drops_its_key_takes_its_token_with_it_after_three(office):
    for worker in ("a", "b"):
        office.verifier.violated(author(worker, token="one"), "nonsense", "a report")
        assert reason(office, "next", token="one") is None
    office.verifier.violated(author("c", token="one"), "more nonsense", "a report")
    said = "in quarantine: 3 workers of this token are quarantined; the last: more nonsense"
    assert reason(office, "next", token="one") == said
    assert reason(office, "next", token="two") is None
    assert not office.finish(1, (author("next", token="one"), 0, LENGTH)), "nothing of it is taken any more"


def test_a_key_is_known_again_after_a_restart_and_only_with_its_token():
    keys = WorkerKeys(b"s" * 32)
    key = keys.issue("token")
    worker = keys.worker("token", key)
    assert worker is not None
    assert WorkerKeys(b"s" * 32).worker("token", key) == worker
    assert WorkerKeys(b"t" * 32).worker("token", key) is None
    assert keys.worker("other", key) is None
    assert keys.worker("token", keys.issue("token")) not in {worker, None}
    for forged in ("", ".", key[:-1], f"0{key}", "é.é", worker):
        assert keys.worker("token", forged) is None


def test_whose_quarantine_was_lifted_while_the_hub_runs_is_a_new_worker(office, tmp_path):
    office.verifier.violated(author("a"), "nonsense", "a report")
    assert not office.finish(1, (author("a"), 0, LENGTH))
    Quarantine(tmp_path / "quarantine.jsonl").lift("a", 0.0)
    office.verifier.tick()
    assert reason(office, "a") is None
    assert office.finish(2, (author("a"), 0, LENGTH))
    office.rule()
    assert office.released == [(9, 2, 0)]


def test_only_the_tokens_of_a_trusted_author_calibrate_its_class(office):
    """As in a later turn of an episode, whose earlier turns are somebody else's."""
    office.finish(1, (author("mine", trusted=True), 5, LENGTH))
    office.rule()
    assert office.calibration.num_tokens(KIND) == LENGTH - 5


def test_each_path_of_an_episode_is_trained_on(office):
    """A path has a noise seed of its own, which names it."""
    seeds = path_seeds(9, 2)
    for seed in seeds:
        trajectory = Trajectory(1, 0, (5,), (Segment((3,) * LENGTH, (-1.0,) * LENGTH, 1),), FinishReason.STOP)
        lease = Lease(1, Trajectory(1, 0, (5,)), SamplingParams(LENGTH), seed, 0)
        office.verifier.finished(lease, trajectory, [(author("a"), 0, LENGTH)])
        office.rule()
    keys: list[Any] = []
    members = SimpleNamespace(verifier=office.verifier, broker=SimpleNamespace(trained=keys.extend))
    hub = SimpleNamespace(members=members, call=lambda action: action())
    progress = SimpleNamespace(consumed=lambda step, groups: None)
    transport = SwarmTransport(hub, None, progress, (), None)  # type: ignore[arg-type]
    transport.consumed(7, [SimpleNamespace(members=[SimpleNamespace(paths=(trajectory,) * 2)])])  # type: ignore[list-item]
    office.rule()
    assert keys == [(seed, 1, 0) for seed in seeds]
    found = office.verifier.violated(author("a"), "a lie", "a report")
    assert found is not None
    assert found.trained == tuple((f"1/0@{seed}", 7) for seed in seeds)
