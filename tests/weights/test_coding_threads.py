"""Several threads, and blocks that fit into the cache, change no byte of what is stored and sent."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3
from weights_cases import decode

from baton import clock
from baton.clock import in_any_order, in_order
from baton.policy.tensors import as_published, weights_digest
from baton.types import PolicyVersion
from baton.weights.bitstream import BitWriter
from baton.weights.delta import encode
from baton.weights.fetcher import Fetcher
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.store import Store

CODED = [
    (1, 20, "sparse", "3bae61dc470c77c5"),
    (1, 20, "full", "db44157a48a3f8ea"),
    (1, 150, "sparse", "ec4625e2cead515c"),
    (2, 3, "sparse", "6440905e25821d36"),
    (2, 20, "full", "c8d4ec8dee8d5441"),
    (2, 150, "sparse", "51c0a8cbeb20d29e"),
    (2, 400, "sparse", "2bdf656bfee7e64a"),
    (2, 900, "sparse", "3f54a5813a0a3e8a"),
    (4, 20, "sparse", "7ac6b142843e8ad9"),
    (4, 20, "full", "3c5e2ef3ea5040b9"),
    (4, 900, "dense", "cf722852ea0697bc"),
    (8, 150, "sparse", "51c0a8cbeb20d29e"),
    (8, 20, "full", "7c4e2576029a91d3"),
    (8, 900, "dense", "ac89f4f180c6441e"),
]
"""Bytes of a word, changed elements in 1,000 (far from zero), coding, blake3 of the encoded part at commit 57814f73."""


def streams(words: np.ndarray) -> bytes:
    """The byte planes of whole arrays, as the format defines them."""
    writer = BitWriter()
    planes = words.view(np.uint8).reshape(words.size, words.itemsize)
    for byte in reversed(range(words.itemsize)):
        writer.stream(planes[:, byte])
    return b"".join(writer.block)


@pytest.mark.parametrize("size", [1, 2**18 - 1, 2**18, 2**18 + 1, 600_000])
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_blocks_are_coded_to_the_bytes_of_whole_arrays(word, size):
    rng = np.random.default_rng(word * size)
    new, base = (rng.integers(0, 256, size * word, dtype=np.uint8) for _ in range(2))
    now, before = new.view(f"u{word}"), base.view(f"u{word}")
    bits = word * 8
    rotated = (now >> now.dtype.type(bits - 1)) | (now << now.dtype.type(1))
    difference = (now - before).view(f"i{word}")
    folded = ((difference << 1) ^ (difference >> (bits - 1))).view(now.dtype)
    assert b"".join(encode(new, None, word).data) == streams(rotated)
    for coding, data, start in (("full", streams(rotated), base), ("dense", streams(folded), base)):
        piece = start.copy()
        decode(coding, data, piece, word)
        assert (piece == new).all()


def hashed(n: int, seed: int) -> np.ndarray:
    """Random uint64 [n] by SplitMix64, which are the same on every machine."""
    found = (np.arange(n, dtype=np.uint64) + np.uint64(seed * n)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return found ^ (found >> np.uint64(31))


def changed_words(word: int, per_mille: int, n: int = 300_000) -> tuple[np.ndarray, np.ndarray]:
    """Words as floats have them, and the same words after a change, which is more frequent near zero."""
    bits, random = np.uint64(64 - 8 * word), hashed(n, 1)
    exponent = sum((hashed(n, 2) % np.uint64(2**k) == 0).astype(np.uint64) for k in range(1, 12))
    low = np.uint64(2**55 - 1)
    base = ((random & ~np.uint64(2**63 - 1)) | (np.uint64(120) - exponent) << np.uint64(55) | (random & low)) >> bits
    often = np.where(exponent > 5, np.uint64(8), np.uint64(1))
    is_changed = hashed(n, 3) % np.uint64(1000) < often * np.uint64(per_mille)
    step = np.where(hashed(n, 4) % np.uint64(9) == 0, np.uint64(5), np.uint64(0)) - (hashed(n, 5) & np.uint64(1))
    new = base + np.where(is_changed, np.uint64(2) * step + np.uint64(1), np.uint64(0))
    return base.astype(f"u{word}"), new.astype(f"u{word}")


@pytest.mark.skipif(zstandard.ZSTD_VERSION != (1, 5, 7), reason="another release of zstd may give other bytes")
@pytest.mark.parametrize(("word", "per_mille", "coding", "digest"), CODED)
def test_parts_are_encoded_to_the_bytes_of_an_earlier_commit(word, per_mille, coding, digest):
    base, new = changed_words(word, per_mille)
    coded = encode(new.view(np.uint8), base.view(np.uint8) if coding != "full" else None, word)
    data = b"".join(coded.data)
    assert coded.coding == coding
    piece = base.copy()
    decode(coding, data, piece.view(np.uint8), word)
    assert (piece == new).all()
    assert blake3(data).hexdigest(8) == digest


def versions() -> list[dict[str, torch.Tensor]]:
    """Three versions with a tensor of three parts, smaller ones of other dtypes, and changes of several densities."""
    random = torch.Generator().manual_seed(0)
    found = [
        {
            "large": torch.randn(2600, 4096, generator=random) * 0.02,
            "middle": torch.randn(300, 1024, generator=random),
            "small": torch.randn(7, generator=random),
            "counts": torch.randint(0, 9, (400_000,), generator=random),
        }
    ]
    for density in (0.01, 0.4):
        last = found[-1]
        found.append({n: torch.where(torch.rand(t.shape, generator=random) < density, t + t / 64, t).to(t.dtype)
                      for n, t in last.items()})  # fmt: skip
    return found


def stored(root: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setattr(clock, "CODERS", num_threads)
    store = Store(root)
    publisher, follower = (
        Publisher(store, WeightsSettings(chunk_mb=1.0, keyframe_every=2)),
        Fetcher([store]),
    )
    for number, tensors in enumerate(versions()):
        cast = as_published(tensors, dict.fromkeys(tensors, torch.bfloat16))
        version = PolicyVersion("run", number, weights_digest(cast))
        publisher.publish(cast, version)
        found = follower.fetch(version, deadline_s=60)
        assert all(torch.equal(found[name], tensor) for name, tensor in cast.items())
        joined = Fetcher([store]).fetch(version, deadline_s=60)  # from the keyframe
        assert all(torch.equal(joined[name], tensor) for name, tensor in cast.items())
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_any_number_of_threads_stores_the_same_files(tmp_path, monkeypatch):
    one, four = (stored(tmp_path / str(number), number, monkeypatch) for number in (1, 4))
    assert len(one) > 20
    assert one == four


def test_results_come_in_order_and_a_bounded_number_of_items_is_taken():
    taken, yielded, barrier = [], [], threading.Barrier(3)

    def items():
        for number in range(12):
            taken.append(number)
            assert len(taken) - len(yielded) <= 4, "three in threads, and the one that is being taken"
            yield number

    def work(number: int) -> int:
        barrier.wait(60)  # three items are in threads at once, or this test fails
        return -number

    for result in in_order(work, items(), lambda number: 2**20, threads=3):
        yielded += [result]
    assert yielded == [-number for number in range(12)]


@pytest.mark.parametrize("size", [1, 2**20])
def test_the_error_of_an_item_is_raised_where_its_result_is_due(size):
    def work(number: int) -> int:
        if number == 2:
            raise ValueError("item 2")
        return number

    results = in_order(work, range(5), lambda number: size, threads=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="item 2"):
        next(results)


def test_small_items_between_large_ones_do_not_serialize_them():
    """As in a model, where norms lie between matrices."""
    barrier = threading.Barrier(3)

    def work(size: int) -> int:
        if size > 1:
            barrier.wait(60)  # three large items are in threads at once, or this test fails
        return size

    sizes = [2**20, 1, 2**20, 1, 2**20, 1] * 2
    assert list(in_order(work, sizes, lambda size: size, threads=3)) == sizes


def test_in_any_order_an_item_that_takes_long_keeps_no_thread_waiting(monkeypatch):
    monkeypatch.setattr(clock, "CODERS", 2)
    taken, yielded, is_last = [], [], threading.Event()

    def items():
        for number in range(30):
            taken.append(number)
            assert len(taken) - len(yielded) <= 4, "two in threads, one in the queue, and the one that is being taken"
            yield number

    def work(number: int) -> int:
        if number == 0:
            assert is_last.wait(60), "the other thread has not computed all other items"
        if number == 29:
            is_last.set()
        return -number

    for result in in_any_order(work, items(), lambda number: 2**20):
        yielded += [result]
    assert sorted(yielded) == sorted(-number for number in range(30))
    assert yielded.index(0) >= 28


@pytest.mark.parametrize("size", [1, 2**20])
def test_in_any_order_the_error_of_an_item_is_raised(monkeypatch, size):
    def work(number: int) -> int:
        if number == 2:
            raise ValueError("item 2")
        return number

    monkeypatch.setattr(clock, "CODERS", 2)
    with pytest.raises(ValueError, match="item 2"):
        list(in_any_order(work, range(5), lambda number: size))
