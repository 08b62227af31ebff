"""A version arrives whole, in order and unchanged, or the load fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import WeightsFault
from baton.types import PolicyVersion
from baton.weights.direct.stream import NUM_CHANGED, IncomingVersion, OutgoingVersion, checksum, patch_checksum

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


def v(number: int) -> PolicyVersion:
    return PolicyVersion("run", number)


def version() -> OutgoingVersion:
    return OutgoingVersion({f"w{i}": torch.full((4,), float(i)) for i in range(5)}, v(1), bucket_bytes=32)


def receive(incoming: IncomingVersion, bucket) -> None:
    incoming.expect(bucket.info["names"], bucket.info["bucket"])
    incoming.loaded(list(zip(bucket.info["names"], bucket.tensors, strict=True)))
    incoming.end_bucket()


def test_buckets_hold_all_tensors_once_in_order_within_their_size():
    buckets = version().buckets()
    assert [bucket.info["names"] for bucket in buckets] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    incoming = IncomingVersion()
    incoming.begin()
    for bucket in buckets:
        receive(incoming, bucket)
    incoming.finish()


@pytest.mark.parametrize("order", [(), (0,), (0, 1), (1,), (0, 2), (0, 0), (2, 1, 0)])
def test_a_missing_repeated_or_reordered_bucket_is_a_fault(order):
    buckets, incoming = version().buckets(), IncomingVersion()
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
    bucket, incoming = version().buckets()[0], IncomingVersion()
    incoming.begin()
    incoming.expect(bucket.info["names"], bucket.info["bucket"])
    incoming.loaded([("w0", bucket.tensors[0])])
    with pytest.raises(WeightsFault, match="did not receive w1"):
        incoming.end_bucket()


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(FLOATS), st.integers(1, 200))
def test_the_checksum_of_changed_elements_is_that_of_the_tensor_that_the_loader_gets(data, dtype, size):
    at = torch.tensor(sorted(data.draw(st.sets(st.integers(0, size - 1)))), dtype=torch.int64)
    values = torch.randn(len(at)).to(dtype)
    masked = torch.full((size,), float("nan"), dtype=dtype)
    masked[at] = values
    assert patch_checksum(at, values, size) == checksum(masked)


def applied(old: dict[str, torch.Tensor], buckets, incoming: IncomingVersion) -> dict[str, torch.Tensor]:
    """What a replica has that receives the buckets."""
    made = {name: tensor.clone() for name, tensor in old.items()}
    for bucket in buckets:
        names, shapes = bucket.info["names"], bucket.info["shapes"]
        incoming.expect(names, bucket.info["bucket"])
        if NUM_CHANGED not in bucket.info:
            weights = list(zip(names, bucket.tensors, strict=True))
            made |= dict(weights)
        else:
            weights = []
            for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                indices, values = bucket.tensors[2 * i : 2 * i + 2]
                assert indices.dtype == torch.int32
                masked = torch.full(shape, float("nan"), dtype=values.dtype)
                masked.view(-1)[indices.long()] = values
                made[name].view(-1)[indices.long()] = values
                weights.append((name, masked))
        incoming.loaded(weights)
        incoming.end_bucket()
    return made


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one
    )


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(FLOATS), st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.integers(1, 4000))
def test_a_difference_gives_the_new_bits_and_is_never_longer_than_the_version(dtype, seed, share, bucket_bytes):
    """Also zeros that change only their sign, and a tensor of integers, of which no element can be marked by NaN."""
    torch.manual_seed(seed)
    old = {f"w{i}": torch.randn(17, 1 + 9 * i).to(dtype) for i in range(4)}
    old |= {"zeros": torch.zeros(64, dtype=dtype), "ids": torch.arange(8), "empty": torch.zeros(0, 3, dtype=dtype)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        changes = torch.rand(tensor.shape) < share
        tensor[changes] = -tensor[changes]
    base = OutgoingVersion(old, v(1), bucket_bytes=bucket_bytes)
    outgoing = OutgoingVersion(new, v(2), base, bucket_bytes=bucket_bytes)
    incoming = IncomingVersion()
    for sent, number in ((base.buckets(), 1), (outgoing.buckets(v(1)), 2)):
        incoming.begin()
        made = applied(old if number == 2 else {}, sent, incoming)
        incoming.finish()
    assert same_bits(made, new)
    whole, difference = (sum(b.num_bytes for b in outgoing.buckets(held)) for held in (None, v(1)))
    assert difference <= whole
    if share == 0.01:
        assert difference < whole / 2


def test_a_new_nan_is_sent_with_its_whole_tensor():
    old = {"w": torch.zeros(100), "other": torch.zeros(100)}
    new = {"w": torch.zeros(100), "other": torch.zeros(100)}
    new["w"][3], new["other"][3] = float("nan"), 1.0
    patched, whole = OutgoingVersion(new, v(2), OutgoingVersion(old, v(1))).buckets(v(1))
    assert (patched.info["names"], patched.info[NUM_CHANGED], patched.num_bytes) == (["other"], [1], 8)
    assert (whole.info["names"], NUM_CHANGED in whole.info) == (["w"], False)


@pytest.mark.parametrize("held", [None, v(0), PolicyVersion("resumed", 1)])
def test_who_does_not_hold_exactly_the_base_gets_the_whole_version_and_refuses_a_difference(held):
    old = {"w": torch.zeros(100)}
    new = {"w": torch.cat([torch.ones(1), torch.zeros(99)])}
    outgoing = OutgoingVersion(new, v(2), OutgoingVersion(old, v(1)))
    incoming = IncomingVersion()
    if held is not None:
        incoming.begin()
        applied({}, OutgoingVersion(old, held).buckets(), incoming)
        incoming.finish()
    incoming.begin()
    with pytest.raises(WeightsFault, match="got a difference from version run-1-"):
        applied(old, outgoing.buckets(v(1)), incoming)
    incoming.begin()
    assert same_bits(applied({}, outgoing.buckets(held), incoming), new)
    incoming.finish()


def test_after_a_transfer_that_failed_a_difference_from_the_version_before_it_is_refused():
    old, new = {"w": torch.zeros(100)}, {"w": torch.cat([torch.ones(1), torch.zeros(99)])}
    base = OutgoingVersion(old, v(1))
    incoming = IncomingVersion()
    incoming.begin()
    applied({}, base.buckets(), incoming)
    incoming.finish()
    incoming.begin()
    incoming.abandon()
    incoming.begin()
    with pytest.raises(WeightsFault, match="but the replica held None"):
        applied(old, OutgoingVersion(new, v(2), base).buckets(v(1)), incoming)


@pytest.mark.parametrize("part", [0, 1], ids=["index", "value"])
def test_a_damaged_index_or_value_is_detected(part):
    old, new = {"w": torch.zeros(100)}, {"w": torch.zeros(100)}
    new["w"][[3, 50]] = torch.tensor([1.0, 2.0])
    base = OutgoingVersion(old, v(1))
    (bucket,) = OutgoingVersion(new, v(2), base).buckets(v(1))
    incoming = IncomingVersion()
    incoming.begin()
    applied({}, base.buckets(), incoming)
    incoming.finish()
    incoming.begin()
    bucket.tensors[part][1] += 1
    with pytest.raises(WeightsFault, match="w has the checksum"):
        applied(old, [bucket], incoming)


def test_a_version_with_other_tensors_has_no_difference():
    base = OutgoingVersion({"w": torch.zeros(4)}, v(1))
    for other in ({"w": torch.zeros(5)}, {"w": torch.zeros(4).half()}, {"x": torch.zeros(4)}):
        (bucket,) = OutgoingVersion(other, v(2), base).buckets(v(1))
        assert bucket.info["bucket"]["base"] is None
