"""What an engine reports passes whatever happens to it; each thing that none reports is named in a sentence."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import END_ID, FakeEngine
from baton.swarm.messages import Malformed, decode_from_worker, encode
from baton.swarm.verification.checks import ReportLimits, check_report
from baton.types import Author, FinishReason, Lease, PolicyVersion, Report, SamplingParams, Segment, Trajectory

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
LIMITS = ReportLimits(vocabulary=100, max_context_tokens=50, end_ids=(1,))
LOOSE = Lease(9, Trajectory(4, 2, (7, 8, 9)), SamplingParams(20), 5, version=3, is_exact=False)
EXACT = msgspec.structs.replace(LOOSE, is_exact=True)
WORDS = msgspec.structs.replace(LOOSE, sampling=SamplingParams(20, stop=("cd",), stop_token_ids=(50,)))


def spoken(ids):
    """Ids from 10 on are letters."""
    return "".join(chr(ord("a") + i - 10) for i in ids if 10 <= i < 36)


def segment(ids, version=3, logprobs=None, **other):
    return Segment(tuple(ids), tuple([-1.0] * len(ids) if logprobs is None else logprobs), version, **other)


def report(*segments, offset=0, reason=None, is_aborted=False):
    return Report(9, offset, segments, reason, is_aborted)


def check(lease, given, grown=None, newest=5, limits=LIMITS):
    grown = lease.trajectory if grown is None else grown
    return check_report(lease, given, limits, grown=grown, newest_version=newest, text=spoken)


TWENTY = segment([2] * 20)


@pytest.mark.parametrize(
    ("lease", "given"),
    [
        (LOOSE, report(segment([2, 3, 4]))),
        (LOOSE, report(segment([2, 3], 3), segment([4], 5))),
        (LOOSE, report(segment([2, 99, 1]), reason=STOP)),
        (LOOSE, report(TWENTY, reason=LENGTH)),
        (LOOSE, report(segment([2]), is_aborted=True)),
        (LOOSE, report(is_aborted=True)),
        (LOOSE, report(segment([2], logprobs=[1e-6]))),
        (EXACT, report(segment([2, 3, 1]), reason=STOP)),
        (WORDS, report(segment([10, 11, 12, 13]), reason=STOP)),
        (WORDS, report(segment([10, 50]), reason=STOP)),
        (WORDS, report(segment([10, 11, 12]))),
    ],
)
def test_what_honest_workers_send_passes(lease, given):
    assert check(lease, given) is None


@pytest.mark.parametrize(
    ("lease", "given", "sentence"),
    [
        (LOOSE, report(segment([2] * 21)), "would have 21 tokens; its budget is 20"),
        (LOOSE, report(*[segment([2])] * 65), "has 65 segments; at most 64 are allowed"),
        (LOOSE, report(segment([2, 100])), "token 1 has the id 100; allowed are 0 to 99"),
        (LOOSE, report(segment([-1])), "token 0 has the id -1"),
        (LOOSE, report(segment([2, 3], logprobs=[-1.0, float("nan")])), "token 1 has the behavior logprob nan"),
        (LOOSE, report(segment([2], logprobs=[float("-inf")])), "behavior logprob -inf"),
        (LOOSE, report(segment([2], logprobs=[0.01])), "behavior logprob 0.01; allowed are finite values up to 0"),
        (LOOSE, report(segment([2], author=Author.ENVIRONMENT)), "has the author environment"),
        (LOOSE, report(segment([2], routing=(b"x",))), "has the routing of 1 tokens; allowed are 0"),
        (EXACT, report(segment([2], 4)), "tokens of version 4 on a lease that requires exactly version 3"),
        (LOOSE, report(segment([2], 2)), "tokens of version 2; the lease allows versions 3 to 5"),
        (LOOSE, report(segment([2], 6)), "tokens of version 6; the lease allows versions 3 to 5"),
        (LOOSE, report(segment([2], 5), segment([2], 4)), "tokens of version 4 after tokens of version 5"),
        (LOOSE, report(segment([2]), reason=FinishReason.ENVIRONMENT), "which a worker cannot report"),
        (LOOSE, report(segment([1]), reason=STOP, is_aborted=True), "both finished (stop) and aborted"),
        (LOOSE, report(segment([2, 1, 3, 4])), "2 tokens after the end id 1 at token 1"),
        (LOOSE, report(segment([1]), segment([3, 1], 4), reason=STOP), "2 tokens after the end id 1 at token 0"),
        (LOOSE, report(segment([2, 1])), "ends with the end id 1, but is reported as unfinished"),
        (LOOSE, report(segment([2] * 19 + [1]), reason=LENGTH), "ends with the end id 1, but is reported as length"),
        (LOOSE, report(segment([2, 3]), reason=STOP), "its last token is no end id"),
        (LOOSE, report(reason=STOP), "finished by stop, but the report has no token"),
        (LOOSE, report(reason=LENGTH), "finished by length at 0 tokens of a budget of 20"),
        (LOOSE, report(segment([2] * 19), reason=LENGTH), "finished by length at 19 tokens of a budget of 20"),
        (LOOSE, report(TWENTY), "has used its budget of 20 tokens, but is not reported as finished"),
        (WORDS, report(segment([10, 11]), reason=STOP), "completes no stop string"),
        (WORDS, report(segment([12, 13, 14])), "token 1 completes a stop string, but is not the last"),
        (WORDS, report(segment([12, 13])), "token 1 completes a stop string, but is not the last"),
        (WORDS, report(segment([10, 50, 11])), "1 tokens after the end id 50"),
    ],
)
def test_what_none_sends_is_named(lease, given, sentence):
    assert sentence in check(lease, given)


def test_a_stop_string_may_span_two_reports():
    grown = WORDS.trajectory.extended((segment([11, 12]),))
    assert check(WORDS, report(segment([13]), offset=2, reason=STOP), grown) is None
    assert "completes a stop string" in check(WORDS, report(segment([13]), offset=2), grown)


def test_a_later_turn_is_checked_like_a_whole_trajectory():
    """Its budget is a position: 12 tokens before the turn, and at most 8 in it."""
    seen = segment([90, 91], logprobs=[0.0, 0.0], author=Author.ENVIRONMENT)
    before = Trajectory(4, 2, (7, 8, 9), (segment([2] * 9 + [1]), seen))
    turn = msgspec.structs.replace(LOOSE, trajectory=before)
    assert check(turn, report(segment([2, 1]), offset=12, reason=STOP)) is None
    assert check(turn, report(segment([2] * 8), offset=12, reason=LENGTH)) is None
    assert check(turn, report(segment([2] * 7), offset=12, reason=LENGTH)) == (
        "finished by length at 19 tokens of a budget of 20"
    )
    words = msgspec.structs.replace(WORDS, trajectory=before.extended((segment([10, 11]),)))
    assert check(words, report(segment([12, 13]), offset=14, reason=STOP)) is None
    sentence = check(turn, report(segment([90], author=Author.ENVIRONMENT), offset=12))
    assert sentence is not None
    assert "may report only the policy's" in sentence


def test_versions_do_not_descend_across_reports():
    grown = LOOSE.trajectory.extended((segment([2, 3], 4),))
    assert "version 3 after tokens of version 4" in check(LOOSE, report(segment([2], 3), offset=2), grown)


def test_a_full_context_is_a_budget_too_and_nothing_left_is_finished_at_once():
    tight = ReportLimits(vocabulary=100, max_context_tokens=5, end_ids=(1,))
    assert check(LOOSE, report(segment([2, 3]), reason=LENGTH), limits=tight) is None
    grown = LOOSE.trajectory.extended((segment([2, 3]),))
    assert check(LOOSE, report(offset=2, reason=LENGTH), grown, limits=tight) is None


def test_routing_comes_whole_or_not_at_all():
    sparse = ReportLimits(vocabulary=100, max_context_tokens=50, routing_bytes=2, num_experts=101)
    assert check(LOOSE, report(segment([2, 3], routing=(b"ab", b"cd"))), limits=sparse) is None
    assert check(LOOSE, report(segment([2, 3])), limits=sparse) is None
    assert "not 2 bytes" in check(LOOSE, report(segment([2, 3], routing=(b"ab", b"cdefgh"))), limits=sparse)
    unknown = check(LOOSE, report(segment([2, 3], routing=(b"ab", b"ce"))), limits=sparse)
    assert "names an unknown expert; allowed are 0 to 100" in unknown  # e is 101
    wide = ReportLimits(vocabulary=100, max_context_tokens=50, routing_bytes=2, num_experts=300)
    assert check(LOOSE, report(segment([2, 3], routing=(b"ab", b"\x2b\x01"))), limits=wide) is not None
    assert check(LOOSE, report(segment([2], routing=(b"\x2b\x01",))), limits=wide) is None


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=10),
    st.lists(st.sampled_from(["load", "abort", "step", "step", "step"]), max_size=40),
    st.integers(1, 7),
)
@settings(max_examples=100, deadline=None)
def test_no_engine_is_accused_whatever_happens_to_it(lengths, happenings, due):
    """Scripted lengths beyond and within the budget, new versions, aborts, reports every few tokens."""
    limits = ReportLimits(vocabulary=1 << 20, max_context_tokens=30, end_ids=(END_ID,))
    engine = FakeEngine(
        EngineSettings(slots=8, max_context_tokens=30, report_every_tokens=due),
        PolicyVersion("run", 0),
        lambda group, sample: lengths[group],
    )
    leases = {
        i: Lease(i, Trajectory(i, 0, (5, 6, 7)), SamplingParams(20), 1, version=0, is_exact=i % 3 == 0)
        for i in range(len(lengths))
    }
    grown = {i: lease.trajectory for i, lease in leases.items()}
    for lease in leases.values():
        engine.submit(lease)
    version = 0
    for happening in [*happenings, *["step"] * 60]:
        if happening == "load":
            version += 1
            engine.load_weights({}, PolicyVersion("run", version))
        elif happening == "abort":
            engine.abort(len(happenings) % len(lengths))
        else:
            for said in engine.step():
                if isinstance(said, Report):
                    i = said.lease_id
                    found = check_report(
                        leases[i], said, limits, grown=grown[i], newest_version=version, text=lambda ids: ""
                    )
                    assert found is None
                    grown[i] = grown[i].extended(said.segments, said.finish_reason)


MASKED = msgspec.structs.replace(LOOSE, sampling=SamplingParams(20, top_p=0.9, top_k=3, reports_kept=True))


def mask(*ids: int, dtype: str = "<u2") -> bytes:
    return np.array(ids, dtype).tobytes()


def test_a_sampling_mask_has_its_own_token_and_known_ids_in_order():
    good = report(segment([2, 9], kept=(mask(2, 5), mask(1, 8, 9))))
    assert check(MASKED, good) is None
    wide = ReportLimits(vocabulary=70_000, max_context_tokens=50)
    assert check(MASKED, report(segment([69_999], kept=(mask(4, 69_999, dtype="<u4"),))), limits=wide) is None


@pytest.mark.parametrize(
    ("lease", "kept", "sentence"),
    [
        (MASKED, (), "has the sampling masks of 0 tokens; it needs 2"),
        (LOOSE, (mask(2), mask(9)), "has the sampling masks of 2 tokens; it needs 0"),
        (MASKED, (mask(2), b""), "token 1 has a sampling mask of 0 bytes; allowed are 1 to 3 ids of 2 bytes"),
        (MASKED, (mask(2), mask(6, 7, 8, 9)), "token 1 has a sampling mask of 8 bytes; allowed are 1 to 3 ids"),
        (MASKED, (mask(2), b"\x09\x00\x0a"), "token 1 has a sampling mask of 3 bytes"),
        (MASKED, (mask(2, 100), mask(9)), "token 0 has a sampling mask that is not ascending ids from 0 to 99"),
        (MASKED, (mask(2, 65_535), mask(9)), "token 0 has a sampling mask that is not ascending ids from 0 to 99"),
        (MASKED, (mask(2), mask(9, 5)), "token 1 has a sampling mask that is not ascending ids"),
        (MASKED, (mask(2), mask(9, 9)), "token 1 has a sampling mask that is not ascending ids"),
        (MASKED, (mask(2), mask(5, 8)), "token 1 has the id 9, which is not in its own sampling mask"),
    ],
)
def test_a_sampling_mask_that_none_sends_is_named(lease, kept, sentence):
    assert sentence in check(lease, report(segment([2, 9], kept=kept)))


def test_a_report_with_fewer_masks_than_tokens_is_no_report():
    frame = encode(report(segment([2, 9], kept=(mask(2), mask(9)))))
    tree = msgspec.msgpack.decode(frame)
    tree["segments"][0]["kept"].pop()
    with pytest.raises(Malformed, match="a segment of 2 tokens must have as many kept entries or none: got 1"):
        decode_from_worker(msgspec.msgpack.encode(tree))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=8), min_size=2, max_size=2))
def test_any_bytes_are_checked_without_an_error(kept):
    verdict = check(MASKED, report(segment([2, 9], kept=tuple(kept))))
    ids = [np.frombuffer(each, "<u2").tolist() if len(each) % 2 == 0 else [] for each in kept]
    is_good = all(own in each and len(each) <= 3 and each == sorted(set(each)) and each[-1] < 100
                  for own, each in zip((2, 9), ids, strict=True))  # fmt: skip
    assert (verdict is None) == is_good
