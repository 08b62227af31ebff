"""The coding of one piece: exact for all bits, near the entropy, and never larger than what it was told to expect."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_cases import decode

from baton.errors import WeightsFault
from baton.weights.bitstream import BitReader, BitWriter
from baton.weights.delta import encode
from baton.weights.magnitude_buckets import bucket_limits, magnitudes
from baton.weights.rice import read_mask, write_mask


def joined(coded) -> bytes:
    return b"".join(coded.data)


def coded_and_back(new: np.ndarray, base: np.ndarray | None):
    """Code words, decode them over the base, and check that they are the same; return what was coded."""
    word = new.itemsize
    coded = encode(new.view(np.uint8), None if base is None else base.view(np.uint8), word)
    piece = (np.full_like(new, 77) if base is None else base).copy()
    decode(coded.coding, joined(coded), piece.view(np.uint8), word)
    assert np.array_equal(piece, new)
    return coded


@settings(max_examples=150, deadline=None)
@given(
    word=st.sampled_from([1, 2, 4, 8]),
    n=st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 1000, 5000]),
    density=st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.5, 0.51, 0.9, 1.0]),
    largest=st.sampled_from([1, 3, 200, 2**63]),
    seed=st.integers(0, 10_000),
)
def test_any_words_are_coded_to_the_bit(word, n, density, largest, seed):
    random = np.random.default_rng(seed)
    base = random.integers(0, 2 ** (8 * word) - 1, n, dtype=np.uint64, endpoint=True).astype(f"u{word}")
    if seed % 2:
        base >>= base.dtype.type(word * 4)
    changes = random.integers(1, min(largest, 2 ** (8 * word) - 1), n, dtype=np.uint64, endpoint=True)
    new = np.where(random.random(n) < density, base + changes.astype(base.dtype), base)
    coded_and_back(new, base)
    coded_and_back(new, None)
    coded_and_back(base, base)


@given(places=st.sets(st.integers(0, 999)), n=st.just(1000))
def test_any_mask_is_read_back(places, n):
    mask = np.zeros(n, np.bool_)
    mask[sorted(places)] = True
    writer = BitWriter()
    write_mask(writer, mask)
    reader = BitReader(b"".join(writer.block))
    assert np.array_equal(read_mask(reader, n), np.flatnonzero(mask))
    reader.end()


def entropy_bytes(n: int, num_changed: int, steps: np.ndarray) -> float:
    share = num_changed / n
    where = -n * sum(p * math.log2(p) for p in (share, 1 - share) if p)
    _, counts = np.unique(steps, return_counts=True)
    return (where - float((counts * np.log2(counts / counts.sum())).sum())) / 8


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.95])
def test_changes_without_order_take_little_more_than_their_entropy(density):
    random = np.random.default_rng(0)
    n = 300_000
    base = (random.normal(0, 0.02, n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    changed = random.random(n) < density
    steps = random.choice(np.array([1, 65535, 2, 65534], np.uint16), n, p=[0.45, 0.45, 0.05, 0.05])[changed]
    new = base.copy()
    new[changed] += steps
    coded = coded_and_back(new, base)
    assert coded.num_changed == changed.sum()
    assert len(joined(coded)) <= 1.06 * entropy_bytes(n, int(changed.sum()), steps)


def test_small_weights_that_change_more_often_are_looked_at_apart():
    """Steps of 1e-6 on weights of 0.02, rounded to bfloat16: what an optimiser does, at a quarter less than entropy."""
    random = np.random.default_rng(0)
    weights = random.normal(0, 0.02, 400_000).astype(np.float32)
    moved = weights + random.choice(np.array([-1e-6, 1e-6], np.float32), weights.size)
    base, new = ((w.view(np.uint32) >> 16).astype(np.uint16) for w in (weights, moved))
    changed = np.flatnonzero(base != new)
    coded = coded_and_back(new, base)
    assert 1 <= len(bucket_limits(base, magnitudes(base[changed]))) <= 2
    assert len(joined(coded)) <= 0.85 * entropy_bytes(base.size, changed.size, (new - base)[changed])


def test_nothing_changed_takes_nothing_and_one_change_next_to_nothing():
    base = np.arange(100_000, dtype=np.uint16)
    assert coded_and_back(base, base)[:2] == ("same", [])
    new = base.copy()
    new[70_000] ^= 1
    assert len(joined(coded_and_back(new, base))) <= 16


def test_where_every_float32_moves_the_difference_is_sent_and_of_another_model_the_whole():
    random = np.random.default_rng(0)
    weights = random.normal(0, 0.02, 100_000).astype(np.float32)
    moved = (weights + random.normal(0, 1e-6, weights.size)).astype(np.float32)
    dense = coded_and_back(moved.view(np.uint32), weights.view(np.uint32))
    assert dense.coding == "dense"
    assert len(joined(dense)) < 0.5 * weights.nbytes
    other = random.normal(0, 0.02, weights.size).astype(np.float32)
    assert coded_and_back(other.view(np.uint32), weights.view(np.uint32)).coding == "full"


def test_decoding_is_a_function_of_the_base():
    """Twice from the same base gives the same; twice in a row does not, which the digest of the result then shows."""
    base, new = np.zeros(1000, np.uint16), np.zeros(1000, np.uint16)
    new[::10] = 3
    coded = encode(new.view(np.uint8), base.view(np.uint8), 2)
    pieces = [base.copy(), base.copy()]
    for piece in pieces:
        decode(coded.coding, joined(coded), piece.view(np.uint8), 2)
    assert np.array_equal(*pieces)
    decode(coded.coding, joined(coded), pieces[0].view(np.uint8), 2)
    assert not np.array_equal(*pieces)


@pytest.mark.parametrize("writes_size", [0, 1])
def test_a_frame_that_swells_is_refused_before_there_is_room_for_it(writes_size):
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=writes_size
    )
    bomb = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(400_000_000))
    writer = BitWriter()
    writer.number(len(bomb))
    block = b"".join([*writer.block, bomb])
    tracemalloc.start()
    with pytest.raises(WeightsFault, match="does not have the expected"):
        BitReader(block).stream(100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_more_low_bits_than_the_gaps_need_are_refused():
    """The positions are valid, but each gap of 0 has 31 low bits. A damaged part of 8 MiB could thus ask for 248 MiB of
    unpacked bits."""
    count = 512
    writer = BitWriter()
    writer.number(2 * count)
    writer.stream(np.full(count // 128, 31, np.uint8))
    writer.number(count)
    writer.bits(np.ones(count, np.uint8))
    writer.bits(np.zeros(31 * count, np.uint8))
    reader = BitReader(b"".join(writer.block))
    with pytest.raises(WeightsFault, match="do not fit its number of elements"):
        read_mask(reader, 2 * count)


@pytest.mark.parametrize("is_twice", [False, True])
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_differences_that_all_have_as_many_bits_as_a_word_need_little_memory(word, is_twice):
    """A few hundred bytes state that every element changed, in all its bits; and perhaps that each changed twice."""
    n = 2**18
    count, writer = n * (1 + is_twice), BitWriter()
    writer.number(int(is_twice))
    if is_twice:
        writer.number(255)  # a bucket with all elements
        write_mask(writer, np.ones(n, np.bool_))
    write_mask(writer, np.ones(n, np.bool_))
    writer.bits(np.zeros(count, np.uint8))
    for _ in range(8 * word - 1):
        write_mask(writer, np.ones(count, np.bool_))
    write_mask(writer, np.zeros(count, np.bool_))
    writer.bits(np.zeros(count * (8 * word - 1), np.uint8))
    data, piece = b"".join(writer.block), np.zeros(n * word, np.uint8)
    assert len(data) < 1000
    tracemalloc.start()
    if is_twice:
        with pytest.raises(WeightsFault, match="more changes than elements"):
            decode("sparse", data, piece, word)
    else:
        decode("sparse", data, piece, word)
        assert (piece.view(f"u{word}") == 1 << (8 * word - 1)).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 72 * n


def test_a_mask_with_the_longer_of_its_two_lists_is_refused():
    writer = BitWriter()
    writer.number(2 * 501)  # the positions of 501 true elements of 1,000, instead of those of 499 false ones
    with pytest.raises(WeightsFault, match="got the number 1002, allowed are at most 1001"):
        read_mask(BitReader(b"".join(writer.block)), 1000)


@settings(max_examples=300, deadline=None)
@given(
    coding=st.sampled_from(["same", "sparse", "dense", "full"]),
    data=st.binary(max_size=60),
    n=st.sampled_from([0, 1, 50, 3000]),
    word=st.sampled_from([1, 2, 4, 8]),
)
def test_noise_is_decoded_to_something_of_the_right_size_or_refused(coding, data, n, word):
    piece = np.zeros(n * word, np.uint8)
    try:
        decode(coding, data, piece, word)
    except WeightsFault as fault:
        assert str(fault).startswith("an encoded part is damaged")  # noqa: PT017
    assert piece.size == n * word


@settings(max_examples=150, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=4), cut=st.integers(0, 3)
)
def test_damaged_bytes_are_decoded_to_something_or_refused(flips, cut):
    random = np.random.default_rng(0)
    base = random.integers(0, 2**16, 4000, dtype=np.uint16)
    new = np.where(random.random(4000) < 0.1, base + random.integers(1, 300, 4000).astype(np.uint16), base)
    data = bytearray(joined(encode(new.view(np.uint8), base.view(np.uint8), 2)))
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    try:
        decode("sparse", bytes(data[: len(data) - cut]), base.view(np.uint8), 2)
    except WeightsFault as fault:
        assert str(fault).startswith("an encoded part is damaged")  # noqa: PT017
