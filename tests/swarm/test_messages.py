"""Frames between hub and worker: what is said arrives as it was, and what is no message is refused by name."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_bench import hello

from baton.errors import Fault
from baton.rollout.engine import EngineStats
from baton.swarm.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Ack,
    Admitted,
    Dropped,
    Heartbeat,
    Leaving,
    Malformed,
    Rejected,
    Want,
    Welcome,
    decode_from_hub,
    decode_from_worker,
    encode,
    max_report_tokens,
)
from baton.swarm.verification.checks import ReportLimits
from baton.types import (
    Abort,
    FinishReason,
    Lease,
    PolicyVersion,
    Report,
    Retry,
    SamplingParams,
    Segment,
    Trajectory,
    plain,
)

VERSION = PolicyVersion("a", 3, "d" * 64)
SEGMENT = Segment((1, 2), (-0.1, -1e-9), 3, routing=(b"\x00", b"\xff"))
LEASE = Lease(4, Trajectory(1, 2, (5, 6), (SEGMENT,)), SamplingParams(9, stop=("\n",)), 7, 3, is_exact=False)
WELCOME = Welcome(
    PROTOCOL, "run", "i", "m", False, VERSION, "sdpa", {"slots": 8}, "keep", relay_secret="s", heartbeat_s=5.0,
    report_every_s=2.0,
)  # fmt: skip
FROM_HUB = [WELCOME, Want(VERSION, "/dev/shm/x", ("http://r",)), LEASE, Abort(3), Dropped(4), Ack(4, 9, True),
            Rejected("no", True), Admitted("k")]  # fmt: skip
FROM_WORKER = [hello("s", serves=VERSION, leases=(1, 2)), Heartbeat(VERSION, EngineStats(1, 2, 3, 4), 5, 6, "f\n"),
               Report(4, 2, (SEGMENT,), FinishReason.STOP), Retry(4, -1), Fault("OSError", "a\nb"),
               Leaving()]  # fmt: skip


@pytest.mark.parametrize("message", FROM_HUB, ids=lambda message: type(message).__name__)
def test_what_the_hub_says_arrives_as_it_was_and_is_no_workers_word(message):
    assert decode_from_hub(encode(message)) == message
    with pytest.raises(Malformed):
        decode_from_worker(encode(message))


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_what_a_worker_says_arrives_as_it_was_and_is_no_hubs_word(message):
    assert decode_from_worker(encode(message)) == message
    with pytest.raises(Malformed):
        decode_from_hub(encode(message))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_malformed(data):
    for decode in (decode_from_hub, decode_from_worker):
        with contextlib.suppress(Malformed):
            assert decode(encode(decode(data))) is not None


@pytest.mark.parametrize("message", [*FROM_HUB, *FROM_WORKER], ids=lambda message: type(message).__name__)
def test_every_truncation_is_malformed(message):
    frame = encode(message)
    for end in range(len(frame)):
        for decode in (decode_from_hub, decode_from_worker):
            with pytest.raises(Malformed):
                decode(frame[:end])


@pytest.mark.parametrize(
    "message",
    [
        hello("s", slots=0),
        hello("s", slots=4097),
        hello("s", slots=-1),
        hello("s", leases=range(8193)),
        hello("s" * 257),
        hello("a\x1b[2Jb"),
        hello("s", serves=PolicyVersion("x" * 257, 1)),
        Heartbeat(PolicyVersion("a", 1, "\n")),
        Heartbeat(None, EngineStats(decoded_tokens=-1)),
        Heartbeat(None, EngineStats(prefilled_tokens=2**63)),
        Heartbeat(None, fetched_bytes=-1),
        Heartbeat(None, fetching=-1),
        Heartbeat(None, fault="x" * 4097),
        Fault("x", "y" * 4096),
    ],
)
def test_what_is_out_of_bounds_is_malformed(message):
    with pytest.raises(Malformed):
        decode_from_worker(encode(message))


@pytest.mark.parametrize(("routing_bytes", "max_kept"), [(48 * 8, 0), (61 * 8 * 2, 0), (48 * 8, 50)])
def test_a_report_of_the_maximum_number_of_tokens_fits_in_a_frame_with_little_room_left(routing_bytes, max_kept):
    num = max_report_tokens(routing_bytes, max_kept)
    routing, kept = (b"\xff" * size for size in (routing_bytes, 4 * max_kept))

    def segment(num_tokens: int) -> Segment:
        each = {name: (value,) * num_tokens for name, value in (("routing", routing), ("kept", kept)) if value}
        return Segment((2**31 - 1,) * num_tokens, (-0.123,) * num_tokens, 2**31, **each)

    most = ReportLimits(1, 1).max_segments
    segments = (*(segment(1) for _ in range(most - 1)), segment(num - most + 1))
    size = len(encode(Report(2**62, 2**31, segments, FinishReason.STOP)))
    assert 0.9 * MAX_FRAME_BYTES < size <= MAX_FRAME_BYTES


def test_a_segment_that_lacks_logprobs_never_becomes_one():
    lying = msgspec.to_builtins(FROM_WORKER[2], enc_hook=plain)
    lying["segments"][0]["behavior_logprobs"] = [-0.5]
    lying["segments"][0]["routing"] = []
    with pytest.raises(Malformed):
        decode_from_worker(msgspec.msgpack.encode(lying))
