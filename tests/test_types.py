"""The nouns: per-token fields stay in step, trajectories only grow, messages survive the wire."""

from __future__ import annotations

import tracemalloc
from array import array
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import (
    Abort,
    Author,
    Batch,
    FinishReason,
    FromHub,
    FromWorker,
    Group,
    Lease,
    Message,
    PolicyVersion,
    Prompt,
    Report,
    Retry,
    RewardResult,
    SamplingParams,
    ScoredTrajectory,
    Segment,
    TokenColumn,
    Trajectory,
    plain,
    without_replay_data,
)

PROMPT = Prompt("ab12", "sums", (Message("user", "1+1"),), "2", {"gym_seed": 7, "nested": {"list": [1, None]}})


def segment(*token_ids: int, version: int = 0, author: Author = Author.POLICY) -> Segment:
    """A segment whose logprob of token t is -t / 8, which floats hold exactly."""
    return Segment(token_ids, tuple(-t / 8 for t in token_ids), version, author)


def finished(group_id: int, sample_index: int, *token_ids: int) -> Trajectory:
    return Trajectory(group_id, sample_index, (1, 2)).extended((segment(*token_ids),), FinishReason.STOP)


def judged(trajectory: Trajectory, reward: float = 1.0) -> ScoredTrajectory:
    return ScoredTrajectory(trajectory, RewardResult(reward, {"correct": reward}, reward == 1.0, "2"))


@pytest.mark.parametrize(("token_ids", "logprobs"), [((), ()), ((1, 2), (-0.5,)), ((1,), (-0.5, -0.5)), ((), (-0.5,))])
def test_a_segment_has_one_logprob_per_token_and_at_least_one_token(
    token_ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=f"got {len(token_ids)} tokens and {len(logprobs)} logprobs"):
        Segment(token_ids, logprobs, 0)


segments = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=4),
        st.integers(0, 2),  # versions gained since the segment before
        st.sampled_from(Author),
    ),
    max_size=8,
)


@given(pieces=segments, cut=st.integers(0, 8))
def test_per_token_fields_keep_equal_lengths_and_do_not_depend_on_how_often_was_reported(
    pieces: list[tuple[list[int], int, Author]], cut: int
) -> None:
    version, grown = 0, []
    for ids, gained, author in pieces:
        version += gained
        grown.append(segment(*ids, version=version, author=author))
    at_once = Trajectory(3, 1, (5,)).extended(tuple(grown))
    in_two = Trajectory(3, 1, (5,)).extended(tuple(grown[:cut])).extended(tuple(grown[cut:]))
    one_by_one = Trajectory(3, 1, (5,))
    for piece in grown:
        one_by_one = one_by_one.extended((piece,))
    assert at_once == in_two == one_by_one

    tokens = [t for ids, _, _ in pieces for t in ids]
    assert at_once.token_ids == tokens
    assert at_once.num_tokens == len(tokens)
    assert at_once.behavior_logprobs == [-t / 8 for t in tokens]
    assert len(at_once.policy_versions) == len(at_once.is_policy) == len(tokens)
    assert at_once.policy_versions == sorted(at_once.policy_versions)
    keys = [(s.author, s.policy_version) for s in at_once.segments]
    assert all(a != b for a, b in pairwise(keys)), "two adjacent segments could have been one"


def test_adjacent_segments_of_one_author_and_version_become_one_and_others_stay_apart() -> None:
    grown = Trajectory(0, 0, (1,)).extended(
        (
            segment(1, 2, version=4),
            segment(3, version=4),
            segment(4, version=4, author=Author.ENVIRONMENT),
            segment(5, version=4),
            segment(6, version=5),
        )
    )
    assert [s.token_ids for s in grown.segments] == [(1, 2, 3), (4,), (5,), (6,)]
    assert grown.policy_versions == [4, 4, 4, 4, 4, 5]
    assert grown.is_policy == [True, True, True, False, True, True]
    assert grown.behavior_logprobs == [-0.125, -0.25, -0.375, -0.5, -0.625, -0.75]


def test_extending_leaves_the_shorter_trajectory_as_it_was() -> None:
    short = Trajectory(0, 0, (1,)).extended((segment(1),))
    long = short.extended((segment(2),))
    assert (short.token_ids, long.token_ids) == ([1], [1, 2])
    with pytest.raises(AttributeError):
        short.segments = ()  # type: ignore[misc]


def test_a_finished_trajectory_takes_nothing_more_not_even_nothing() -> None:
    done = finished(7, 2, 1)
    for more in ((segment(2),), ()):
        with pytest.raises(ValueError, match="7/2 is finished"):
            done.extended(more)


def test_a_version_never_decreases_within_a_trajectory() -> None:
    grown = Trajectory(1, 0, (1,)).extended((segment(1, version=3),))
    with pytest.raises(ValueError, match="version 2 cannot follow one of version 3"):
        grown.extended((segment(2, version=2),))
    with pytest.raises(ValueError, match="version 3 cannot follow one of version 4"):
        grown.extended((segment(2, version=4), segment(2, version=3)))


def test_a_group_refuses_partials_and_members_that_are_out_of_place() -> None:
    partial = Trajectory(5, 1, (1, 2)).extended((segment(1),))
    with pytest.raises(AssertionError, match="trajectory 5/1 of a group is not finished"):
        Group(5, PROMPT, (judged(finished(5, 0, 1)), judged(partial)))
    with pytest.raises(AssertionError, match="member 0 of group 5 is trajectory 5/1"):
        Group(5, PROMPT, (judged(finished(5, 1, 1)), judged(finished(5, 0, 1))))
    with pytest.raises(AssertionError, match="member 0 of group 5 is trajectory 6/0"):
        Group(5, PROMPT, (judged(finished(6, 0, 1)),))


def test_a_batch_lists_its_trajectories_group_by_group() -> None:
    groups = tuple(Group(g, PROMPT, tuple(judged(finished(g, i, 1)) for i in range(2))) for g in (4, 9))
    assert [t.name for t in Batch(1, groups).trajectories] == ["4/0", "4/1", "9/0", "9/1"]


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack])
def test_groups_and_messages_come_back_from_the_wire_as_they_went(codec: object) -> None:
    group = Group(5, PROMPT, (judged(finished(5, 0, 1, 2)), judged(finished(5, 1, 3), 0.25)))
    grown = Trajectory(5, 0, (1, 2)).extended((segment(1, version=2), segment(9, version=2, author=Author.ENVIRONMENT)))
    lease = Lease(11, grown, SamplingParams(64, 0.7, 0.9, 5, (3,), ("\n",)), 1234, 2, is_exact=False)
    report = Report(11, 2, (segment(4, 5, version=3),), FinishReason.LENGTH)
    for value, kind in (
        (group, Group),
        (lease, FromHub),
        (Abort(11), FromHub),
        (report, FromWorker),
        (Retry(11, 3), FromWorker),
        (PolicyVersion("ab", 3, "00ff"), PolicyVersion),
    ):
        assert codec.decode(codec.encode(value, enc_hook=plain), type=kind) == value  # type: ignore[attr-defined]


def test_a_message_cut_or_changed_into_one_with_unequal_lengths_is_refused() -> None:
    bad = msgspec.json.encode(Report(1, 0, (segment(4, 5),)), enc_hook=plain).replace(b"[4,5]", b"[4,5,6]")
    with pytest.raises(msgspec.ValidationError, match="one behavior logprob per token"):
        msgspec.json.decode(bad, type=FromWorker)


def test_segments_between_two_tokens_by_hand():
    first, second, third = segment(0, 1, 2, 3, version=1), segment(4, 5, version=2), segment(6, 7, 8, 9, version=5)
    trajectory = Trajectory(0, 0, (1,), (first, second, third))
    assert trajectory.segments_between(0, 10) == trajectory.segments
    ends = segment(2, 3, version=1), second, segment(6, version=5)
    assert trajectory.segments_between(2, 7) == ends
    assert trajectory.segments_between(4, 6) == (second,)
    assert trajectory.segments_between(5, 5) == ()
    assert trajectory.segments_between(10, 99) == ()
    routed = msgspec.structs.replace(segment(0, 1, 2), routing=(b"a", b"b", b"c"))
    assert Trajectory(0, 0, (1,), (routed,)).segments_between(1, 2)[0].routing == (b"b",)
    masked = Trajectory(0, 0, (1,), (msgspec.structs.replace(routed, kept=(b"ab", b"cdef", b"gh")),))
    assert masked.segments_between(1, 3)[0].kept == (b"cdef", b"gh")
    assert trajectory.ids_between(2, 7) == [2, 3, 4, 5, 6]


def test_sampling_masks_grow_with_their_tokens_and_neither_they_nor_routing_leave_with_a_lease():
    first = msgspec.structs.replace(segment(5, 6), kept=(b"ab", b"cd"))
    seen = segment(8, 9, author=Author.ENVIRONMENT)
    second = msgspec.structs.replace(segment(7), kept=(b"efgh",))
    trajectory = Trajectory(0, 0, (2,)).extended((first, second, seen, second))
    assert [s.kept for s in trajectory.segments] == [(b"ab", b"cd", b"efgh"), (), (b"efgh",)]
    assert trajectory.kept == [b"ab", b"cd", b"efgh", b"", b"", b"efgh"]
    with pytest.raises(ValueError, match="2 tokens must have as many kept entries or none: got 1"):
        msgspec.structs.replace(segment(5, 6), kept=(b"ab",))
    lease = Lease(1, trajectory, SamplingParams(9, top_k=3, reports_kept=True), 0, 0)
    sent = without_replay_data(lease)
    assert sent.trajectory.token_ids == trajectory.token_ids
    assert sent.trajectory.kept == [b""] * 6
    assert lease.trajectory.kept == trajectory.kept
    assert without_replay_data(sent) is sent
    routed = Trajectory(0, 0, (2,), (msgspec.structs.replace(segment(5, 6), routing=(b"a", b"b")),))
    sent = without_replay_data(Lease(1, routed, SamplingParams(9), 0, 0))
    assert (sent.trajectory.token_ids, sent.trajectory.segments[0].routing) == ([5, 6], ())


def test_the_current_turn_begins_after_the_last_observation():
    seen = segment(8, 9, author=Author.ENVIRONMENT)
    before = Trajectory(0, 0, (1,)).extended((segment(1, 2, 3), seen))
    turn = before.extended((segment(4, version=1),)).extended((segment(5, version=2),))
    assert (before.turn_offset, before.turn_ids) == (5, [])
    assert (turn.turn_offset, turn.turn_ids) == (5, [4, 5])
    assert (turn.num_tokens, turn.num_policy_tokens) == (7, 5)
    first = Trajectory(0, 0, (1,)).extended((segment(1, 2),))
    assert (first.turn_offset, first.turn_ids) == (0, [1, 2])


# ---- columns ---------------------------------------------------------------------------------------------------------

VALUES = {
    "i": st.integers(-(2**31), 2**31 - 1),
    "d": st.floats(allow_nan=False),
    "": st.binary(max_size=3),
}
"""Type code of the buffer, or an empty one for a list → its values."""


@given(data=st.data(), code=st.sampled_from(sorted(VALUES)))
def test_a_column_is_a_sequence_that_keeps_its_values_while_others_grow_from_it(data: Any, code: str) -> None:
    """Every column is compared with a tuple that was made in the same way."""
    some = st.lists(VALUES[code], max_size=5)

    def column(values: list[Any]) -> TokenColumn[Any]:
        return TokenColumn(array(code, values) if code else list(values))

    first = data.draw(some)
    pairs: list[tuple[TokenColumn[Any], tuple[Any, ...]]] = [(column(first), tuple(first))]
    for _ in range(data.draw(st.integers(0, 12))):
        grown, expected = data.draw(st.sampled_from(pairs))
        match data.draw(st.sampled_from(("values", "column", "slice"))):
            case "values":
                more = data.draw(some)
                pairs.append((grown.appended(more), (*expected, *more)))
            case "column":  # perhaps of the same buffer
                other, more = data.draw(st.sampled_from(pairs))
                pairs.append((grown.appended(other), (*expected, *more)))
            case "slice":
                part = data.draw(st.slices(len(expected)) if expected else st.just(slice(None)))
                pairs.append((grown[part], expected[part]))
    for grown, expected in pairs:
        assert (len(grown), bool(grown), tuple(grown), repr(grown)) == (
            len(expected),
            bool(expected),
            expected,
            repr(expected),
        )
        assert grown == expected
        assert expected == grown
        assert hash(grown) == hash(expected)
        assert tuple(reversed(grown)) == expected[::-1]
        assert [grown[i] for i in range(-len(expected), len(expected))] == [*expected, *expected]
        with pytest.raises(IndexError):
            grown[len(expected)]
        encoded = [msgspec.msgpack.encode(each, enc_hook=plain) for each in (grown, expected)]
        assert encoded[0] == encoded[1]
        for other, same in pairs:
            assert (grown == other) == (expected == same)


def test_a_column_differs_from_what_is_no_column() -> None:
    column = TokenColumn([1, 2])
    assert column != [1, 2]
    assert column != 1
    assert column != (1, 3)
    with pytest.raises(NotImplementedError, match="set cannot be encoded"):
        msgspec.msgpack.encode({"a": object()}, enc_hook=lambda value: plain({value}))


def test_only_the_first_view_that_grows_grows_in_place() -> None:
    short = TokenColumn([1])
    long = short.appended([2])
    other = short.appended([3])
    assert (tuple(short), tuple(long), tuple(other)) == ((1,), (1, 2), (1, 3))
    again = long[:1].appended([4])
    assert (tuple(long), tuple(again)) == ((1, 2), (1, 4))


def test_a_segment_keeps_ids_and_logprobs_to_the_last_bit() -> None:
    logprobs = (-0.1, -1e-300, 0.0, -123.456789012345)
    ids = (0, 1, 151_935, 2**31 - 1)
    kept = Segment(ids, logprobs, 3)
    for codec in (msgspec.msgpack, msgspec.json):
        found = codec.decode(codec.encode(kept, enc_hook=plain), type=Segment)
        assert (found, tuple(found.token_ids), tuple(found.behavior_logprobs)) == (kept, ids, logprobs)
    with pytest.raises(ValueError, match=r"a token id is 2147483648; allowed are ids below 2\^31"):
        Segment((2**31,), (-0.5,), 0)
    with pytest.raises(msgspec.ValidationError, match="allowed are ids below"):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode({"token_ids": [2**40], "behavior_logprobs": [-0.5], "policy_version": 0}),
            type=Segment,
        )


@pytest.mark.parametrize("turn_tokens", [None, 128])
def test_a_growing_trajectory_takes_at_most_twenty_bytes_a_token_and_is_never_copied(turn_tokens: int | None) -> None:
    """By turns of 128 tokens it has 312 segments, each of which costs a few objects."""
    num_reports, size = 625, 64

    def report(number: int) -> Segment:
        is_seen = turn_tokens is not None and number * size // turn_tokens % 2 == 1
        ids = tuple(1000 + number * size + i for i in range(size))
        logprobs = tuple(-1 / token for token in ids)
        return Segment(ids, logprobs, 0, Author.ENVIRONMENT if is_seen else Author.POLICY)

    grown = Trajectory(0, 0, (1,)).extended((report(0),))
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        for number in range(1, num_reports):
            grown = grown.extended((report(number),))
        now_bytes, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_tokens = num_reports * size
    assert grown.num_tokens == num_tokens
    assert len(grown.segments) == (1 if turn_tokens is None else num_tokens // turn_tokens + 1)
    assert now_bytes - before_bytes < 20 * num_tokens
    assert most_bytes - now_bytes < 4 * num_tokens, "a copy of the whole trajectory needs 12 bytes a token"
