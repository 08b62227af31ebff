"""Counted tokens behave like token ids in a trajectory: whole segments, merged versions, exact positions."""

from __future__ import annotations

import pytest

from baton.simulator.counted_tokens import ORIGIN, CountedTokens, counted, counted_segment
from baton.swarm.messages import decode_from_hub, decode_from_worker, encode
from baton.types import Lease, Report, SamplingParams, Segment, Trajectory


def test_a_counted_trajectory_grows_and_divides_like_one_with_ids() -> None:
    counted, real = Trajectory(3, 1, CountedTokens(range(5))), Trajectory(3, 1, range(5))
    for start, num, version in ((0, 4, 0), (4, 2, 0), (6, 3, 2)):
        counted = counted.extended((counted_segment(start, num, version),))
        ids = range(start, start + num)
        real = real.extended((Segment(ids, [-float(i) for i in ids], version),))
    assert counted.num_tokens == counted.num_policy_tokens == 9
    assert [len(segment.token_ids) for segment in counted.segments] == [6, 3]
    assert counted.policy_versions == real.policy_versions
    assert counted.ids_between(3, 8) == real.ids_between(3, 8) == [3, 4, 5, 6, 7]
    assert counted.behavior_logprobs == real.behavior_logprobs
    parts = counted.segments_between(5, 7)
    assert [(list(part.token_ids), part.policy_version) for part in parts] == [([5], 0), ([6], 2)]


def test_tokens_of_two_origins_differ_and_keep_their_positions() -> None:
    begun = Trajectory(0, 0, CountedTokens(range(1))).extended((counted_segment(0, 4, 0),))
    same, other = (begun.extended((counted_segment(4, 3, 0, origin),)) for origin in (0, 5))
    assert same.ids_between(0, 4) == other.ids_between(0, 4)
    assert same.ids_between(4, 7) == [4, 5, 6] != other.ids_between(4, 7)
    assert other.ids_between(4, 7) == [5 * ORIGIN + place for place in (4, 5, 6)]
    (column,) = (segment.token_ids for segment in same.segments)
    assert isinstance(column, CountedTokens)
    again = other.extended((counted_segment(7, 2, 1, 5), counted_segment(9, 1, 1, 0)))
    assert again.num_tokens == 10
    assert again.ids_between(8, 10) == [5 * ORIGIN + 8, 9]


def test_tokens_that_do_not_follow_cannot_be_appended() -> None:
    begun = Trajectory(0, 0, CountedTokens(range(1))).extended((counted_segment(0, 4, 0),))
    with pytest.raises(AssertionError, match="from 5 on cannot follow tokens up to 4"):
        begun.extended((counted_segment(5, 1, 0),))


def test_a_message_that_was_encoded_has_the_same_tokens() -> None:
    begun = Trajectory(0, 0, range(3)).extended((counted_segment(0, 4, 0, 7),))
    mixed = begun.extended((counted_segment(4, 2, 0, 8),))
    for known in (begun, mixed):
        lease = Lease(1, known, SamplingParams(9), 0, 0)
        found = counted(decode_from_hub(encode(lease)))
        assert found.trajectory.token_ids == known.token_ids
        assert found.trajectory.behavior_logprobs == known.behavior_logprobs
        (column,) = (segment.token_ids for segment in found.trajectory.segments)
        assert isinstance(column, CountedTokens) == (known is begun)
    report = Report(1, 4, (counted_segment(4, 2, 3, 5000),))
    again = counted(decode_from_worker(encode(report)))
    assert again == report
    assert isinstance(again.segments[0].token_ids, CountedTokens)
    assert begun.extended(again.segments).num_tokens == 6, "the ids of every origin are below 2^31"
