"""A version arrives whole, in order and unchanged, or the load fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import WeightsFault
from baton.weights.direct.stream import IncomingVersion, OutgoingVersion, checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 300))
def test_a_changed_or_exchanged_word_changes_the_checksum(data, dtype, size):
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    words = torch.randint(0, 2, (size,)).to(word) if dtype == torch.bool else torch.randint(0, 100, (size,)).to(word)
    before = checksum(words.view(dtype))
    at = data.draw(st.integers(0, size - 1))
    changed = words.clone()
    changed[at] ^= 1
    assert checksum(changed.view(dtype)) != before
    other = data.draw(st.integers(0, size - 1))
    exchanged = words.clone()
    exchanged[at], exchanged[other] = words[other], words[at]
    assert (checksum(exchanged.view(dtype)) == before) == bool(words[at] == words[other])


def test_the_checksum_is_that_of_the_formula_across_pieces(monkeypatch):
    monkeypatch.setattr("baton.weights.direct.stream.PIECE_WORDS", 3)
    words = [5, 0, 7, 1, 9, 2, 65535]
    expected = sum((w - 65536 * (w > 32767)) * (2 * i + 1) for i, w in enumerate(words)) * 0x9E3779B97F4A7C15 % 2**64
    tensor = torch.tensor(words, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert int(checksum(tensor)) % 2**64 == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_checksum_on_a_cpu_starts_no_threads_of_torch():
    """On a busy machine, the threads would wait for each other at each of its many small operations."""
    program = """
import os, torch
from baton.weights.direct.stream import checksum
torch.set_num_threads(3)
words = torch.empty(2**18, dtype=torch.int16)
before = len(os.listdir("/proc/self/task"))
checksum(words)
assert len(os.listdir("/proc/self/task")) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def version() -> OutgoingVersion:
    return OutgoingVersion({f"w{i}": torch.full((4,), float(i)) for i in range(5)}, bucket_bytes=32)


def receive(incoming: IncomingVersion, bucket) -> None:
    incoming.expect(bucket.info["names"], bucket.info["bucket"])
    incoming.loaded(list(zip(bucket.info["names"], bucket.tensors, strict=True)))
    incoming.end_bucket()


def test_buckets_hold_all_tensors_once_in_order_within_their_size():
    buckets = version().buckets
    assert [bucket.info["names"] for bucket in buckets] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    incoming = IncomingVersion()
    incoming.begin()
    for bucket in buckets:
        assert incoming.is_receiving
        receive(incoming, bucket)
    incoming.finish()
    assert not incoming.is_receiving


@pytest.mark.parametrize("order", [(), (0,), (0, 1), (1,), (0, 2), (0, 0), (2, 1, 0)])
def test_a_missing_repeated_or_reordered_bucket_is_a_fault(order):
    buckets, incoming = version().buckets, IncomingVersion()
    incoming.begin()

    def transfer():
        for index in order:
            receive(incoming, buckets[index])
        incoming.finish()

    with pytest.raises(WeightsFault, match="needs a whole version"):
        transfer()
    with pytest.raises(WeightsFault):
        incoming.finish()


def test_a_tensor_that_the_loader_never_gets_is_named():
    bucket, incoming = version().buckets[0], IncomingVersion()
    incoming.begin()
    incoming.expect(bucket.info["names"], bucket.info["bucket"])
    incoming.loaded([("w0", bucket.tensors[0])])
    with pytest.raises(WeightsFault, match="did not receive w1"):
        incoming.end_bucket()
