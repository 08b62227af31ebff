"""The journal gives back what it was told, across a kill; what a checkpoint contains is forgotten."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from baton.errors import StorageFault
from baton.records.journal import IssuedGroup, Journal, StreamCursor
from baton.types import (
    Episode,
    Exchange,
    FailureCause,
    FinishReason,
    Message,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
    plain,
)

PROMPT = Prompt("p", "task", (Message("user", "2 + 2"),), "4", {"nested": {"a": [1, None]}})


def issue(journal: Journal, group_id: int) -> IssuedGroup:
    issued = IssuedGroup(group_id, PROMPT, (5, 6), 2, opened_at=3, attempts=1)
    journal.issued(issued, StreamCursor(group_id + 1, {"task": 10 * group_id}))
    return issued


def finished(group_id: int, index: int) -> Trajectory:
    return Trajectory(group_id, index, (5, 6), (Segment((7, 0), (-0.25, -1.5), 3),), FinishReason.STOP)


def test_everything_told_before_a_kill_is_there_after_it(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    child = os.fork()
    if child == 0:
        journal = Journal(path, keeps_partials=True)
        issue(journal, 4)
        journal.grew(4, 0, 0, (Segment((7,), (-0.5,), 3),))
        journal.grew(4, 0, 1, (Segment((8, 9), (-0.1, -0.2), 3), Segment((1,), (-2.0,), 4)))
        journal.finished(finished(4, 1))
        journal.judged(
            ScoredTrajectory(
                finished(4, 1), RewardResult(0.0, {}, False, None, "no answer in 5 s", FailureCause.TIMEOUT)
            )
        )
        journal.commit()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    journal = Journal(path, keeps_partials=True)
    (group,) = journal.open_groups()
    assert group.issued == IssuedGroup(4, PROMPT, (5, 6), 2, 3, 1)
    assert group.members[0].segments == (Segment((7, 8, 9), (-0.5, -0.1, -0.2), 3), Segment((1,), (-2.0,), 4))
    assert group.members[0].finish_reason is None
    assert group.members[1] == finished(4, 1)
    assert group.judged[1].judgement.cause is FailureCause.TIMEOUT, "outcomes are kept, failures included"
    assert journal.place() == StreamCursor(5, {"task": 40})


def test_the_turn_of_an_earlier_path_has_not_ended_in_a_later_one_of_the_same_length(tmp_path: Path):
    journal = Journal(tmp_path / "j", keeps_partials=True)
    issue(journal, 4)
    segments = (Segment((7, 8), (-0.5, -0.1), 3),)
    first, second = Trajectory(4, 0, (5, 6), segments), Trajectory(4, 0, (5, 9, 9))
    journal.grew(4, 0, 0, segments)
    journal.turn_ended(first)
    assert journal.open_groups()[0].ended_turns == (0,)
    journal.observed(second, Episode(earlier=(first,)))
    assert journal.open_groups()[0].has_begun(0)
    journal.grew(4, 0, 0, segments)
    (group,) = journal.open_groups()
    assert group.members[0] == second.extended(segments)
    assert group.ended_turns == (), "its turn goes on"


def test_in_sync_partials_are_not_kept(tmp_path: Path):
    journal = Journal(tmp_path / "j", keeps_partials=False)
    issue(journal, 0)
    journal.grew(0, 0, 0, (Segment((7,), (-0.5,), 3),))
    assert journal.open_groups()[0].members[0].segments == ()


def exchanges(*paths: int) -> tuple[Exchange, ...]:
    return tuple(Exchange(1, f"move {i}", i / 2, f"room {i}", f"{i}", 0.1, path) for i, path in enumerate(paths))


def test_each_exchange_and_path_of_an_open_episode_is_recorded_once(tmp_path: Path):
    journal = Journal(tmp_path / "j", keeps_partials=True)
    issue(journal, 0)
    first = Trajectory(0, 1, (5, 6)).extended((Segment((7,), (-0.5,), 3),))
    journal.grew(0, 1, 0, first.segments)
    journal.observed(first, Episode(exchanges(0), metrics={"moves": 1.0}))
    ended = msgspec.structs.replace(first, finish_reason=FinishReason.STOP)
    journal.observed(Trajectory(0, 1, (9, 9)), Episode(exchanges(0, 0), (ended,), metrics={"moves": 2.0}))
    second = Trajectory(0, 1, (9, 9)).extended((Segment((8,), (-0.5,), 4),))
    journal.grew(0, 1, 0, second.segments)
    last = Episode(exchanges(0, 0, 1), (ended,), attempt=1, metrics={"moves": 3.0})
    journal.observed(second, last)
    (group,) = journal.open_groups()
    assert (group.episodes, group.members[1]) == ({1: last}, second)
    journal.close()
    with closing(sqlite3.connect(tmp_path / "j")) as database:
        contents = b"".join(content for (content,) in database.execute("SELECT content FROM entries"))
    assert [contents.count(b"move %d" % i) for i in range(3)] == [1, 1, 1]
    journal = Journal(tmp_path / "j", keeps_partials=True)
    journal.revoked(0, 1)
    assert journal.open_groups()[0].episodes == {}


def test_an_episode_that_an_earlier_version_recorded_as_a_whole_goes_on(tmp_path: Path):
    journal = Journal(tmp_path / "j", keeps_partials=True)
    issue(journal, 0)
    journal.close()
    ended = finished(0, 1)
    key, content = ("episode", 0, 1, 0), msgspec.msgpack.encode(Episode(exchanges(0, 0, 1), (ended,)), enc_hook=plain)
    digest = blake3(msgspec.msgpack.encode((*key, content))).digest(length=16)
    with closing(sqlite3.connect(tmp_path / "j")) as database, database:
        database.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", (*key, content, digest))
    journal = Journal(tmp_path / "j", keeps_partials=True)
    assert journal.open_groups()[0].episodes == {1: Episode(exchanges(0, 0, 1), (ended,))}
    grown = Trajectory(0, 1, (9,)).extended((Segment((8,), (-0.5,), 4),))
    journal.observed(grown, Episode(exchanges(0, 0, 1, 1), (ended,)))
    assert journal.open_groups()[0].episodes == {1: Episode(exchanges(0, 0, 1, 1), (ended,))}


def test_consumed_and_discarded_groups_are_not_open_and_a_checkpoint_forgets_them(tmp_path: Path):
    journal = Journal(tmp_path / "j", keeps_partials=True)
    for group_id in range(4):
        issue(journal, group_id)
        journal.finished(finished(group_id, 0))
    journal.counted(1, {"rollout/carried_groups": 2.0})
    journal.consumed(1, [0])
    journal.consumed(2, [1])
    journal.discarded(2, "filtered")
    assert [g.issued.group_id for g in journal.open_groups()] == [3]
    assert journal.metrics(1) == {"rollout/carried_groups": 2.0}
    journal.checkpointed(1, oldest_step=1)
    assert journal.metrics(1) == {}
    assert [g.issued.group_id for g in journal.open_groups()] == [3]
    assert [g.issued.group_id for g in journal.open_groups(1)] == [1, 3], "it stays until a checkpoint contains it"
    assert journal.place() == StreamCursor(4, {"task": 30})


def test_a_file_that_is_no_journal_is_named(tmp_path: Path):
    (tmp_path / "j").write_bytes(b"this is not a database, whatever it may be" * 100)
    with pytest.raises(StorageFault, match="the run's journal, is damaged"):
        Journal(tmp_path / "j", keeps_partials=True)


def test_new_reward_parts_delete_the_rewards_of_scorers_and_keep_what_environments_said(tmp_path: Path):
    journal = Journal(tmp_path / "j", keeps_partials=True)
    issue(journal, 0)
    issue(journal, 1)
    episode, failed = Episode(is_success=True), Episode(num_failures=3)
    one_turn = ScoredTrajectory(finished(0, 0), RewardResult(1.0, {}, True))
    played = ScoredTrajectory(finished(0, 1), RewardResult(2.5, {"environment": 2.0, "mine": 0.5}, True), episode)
    without = ScoredTrajectory(finished(1, 0), RewardResult(0.0, {}, False, failure="it hung"), failed)
    for each in (one_turn, played, without):
        journal.finished(each.trajectory, each.episode)
        journal.judged(each)
    assert [(g.judged.keys(), g.episodes) for g in journal.open_groups()] == [({0, 1}, {}), ({0}, {})]
    journal.delete_rewards()
    first, second = journal.open_groups()
    assert (first.judged, second.judged) == ({}, {0: without}), "an environment's failure cannot be scored"
    assert (first.episodes, second.episodes) == ({1: episode}, {}), "the exchanges have the environment's rewards"
    assert first.members == (one_turn.trajectory, played.trajectory)
