"""Whatever goes wrong between trainer and worker: the old version is held, and the error says who is at fault."""

from __future__ import annotations

import errno
import os
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem
from weights_cases import Run, Twisted, are_bit_equal, changed, latest, policy, replaced, version_of

from baton.errors import DeadlineExceeded, StorageFault, UserError, WeightsFault
from baton.types import PolicyVersion
from baton.weights.chunk_fetcher import MAX_ROUNDS, ChunkFetcher, FetchStats
from baton.weights.fetcher import Fetcher
from baton.weights.manifest import (
    MIN_PART_BYTES,
    BufferPart,
    Chunk,
    Encoding,
    Manifest,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    tensors_digest,
)
from baton.weights.publisher import Publisher
from baton.weights.sources import ChunkCache
from baton.weights.storage import LocalStorage
from baton.weights.store import Store
from baton.weights.version_files import VersionFiles

pytestmark = pytest.mark.timing


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def swapped(run: Run):
    """Every chunk is answered with the same other one of the version."""
    other = run.store.chunk(run.store.find("first", 0).chunks[0].digest)
    return lambda data: other


def gone(_: bytes) -> bytes:
    raise FileNotFoundError("no such chunk")


class RefusingFileSystem(MemoryFileSystem):
    """Every call raises an exception of a library, as buckets do: no OSError, and no error of Baton."""

    protocol = "refusing"

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise LookupError("no credentials")

    cat_file = makedirs = size = find = exists = _refuse


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "store", keyframe_every=100)
    run.chain(range(3), density=0.3)
    return run


def holding(run: Run, sources, number: int = 0) -> Fetcher:
    """A fetcher that holds a version, and has other sources for the next one."""
    fetcher = Fetcher([run.store])
    fetcher.fetch(run.version(number), deadline_s=60)
    fetcher.sources = sources
    return fetcher


def still_holds(run: Run, fetcher: Fetcher, number: int = 0) -> bool:
    return fetcher.held == run.version(number) and are_bit_equal(fetcher.tensors, run.tensors[number])


def test_a_bucket_that_refuses_ends_a_publication_with_a_sentence_but_no_fetch_that_has_another_source(run):
    fsspec.register_implementation("refusing", RefusingFileSystem, clobber=True)
    store = Store("refusing://bucket")
    assert are_bit_equal(holding(run, [store, run.store]).fetch(run.version(2), deadline_s=60), run.tensors[2])
    asked = {
        "reading": lambda: Publisher(store, run.settings).publish(run.tensors[2], run.version(2)),
        "looking": lambda: store.put_chunk(b"data"),
        "listing": lambda: store.collect([]),
    }
    for what, ask in asked.items():
        with pytest.raises(WeightsFault, match=f"refusing://bucket: {what} .* failed: LookupError: no credentials"):
            ask()


@pytest.mark.parametrize("url", ["nothing://bucket", "dropbox://bucket"])
def test_a_store_that_fsspec_cannot_open_is_refused_with_a_sentence(url):
    with pytest.raises(UserError, match=f"the store {url} cannot be opened"):
        Store(url)


@pytest.mark.parametrize("fault", ["truncated", "longer", "flipped", "swapped", "omitted", "empty"])
def test_a_bad_chunk_names_its_source_and_the_old_version_is_held(run, fault):
    twist = {
        "truncated": lambda data: data[:-1],
        "longer": lambda data: data + b"x",
        "flipped": flipped,
        "swapped": swapped(run),
        "omitted": gone,
        "empty": lambda data: b"",
    }[fault]
    bad = Twisted(run.store, "relay 7", chunk=twist)
    fetcher = holding(run, [bad])
    what = "did not send" if fault == "omitted" else "refused"
    said = rf"version 2 .* is not available: no source sent chunk \w+ \(relay 7\): relay 7: {what} chunk"
    with pytest.raises(WeightsFault, match=said):
        fetcher.fetch(run.version(2), deadline_s=60)
    assert still_holds(run, fetcher)
    # with a good source beside it, the fetch goes through, and the bad one is asked no more than once
    bad.asked = 0
    fetcher = holding(run, [bad, run.store])
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])
    assert fault == "omitted" or bad.asked <= 1


def reset(_: bytes) -> bytes:
    raise ConnectionResetError("reset by peer")


def chunk_of(run: Run, sources: list[Store], deadline_s: float = 60.0) -> bytes:
    """One chunk of version 2, from these sources."""
    fetcher = ChunkFetcher(sources, FetchStats(run.version(2)), avoided=set(), timeouts={}, deadline_s=deadline_s)
    return fetcher.chunk(run.store.find("first", 2).chunks[0])


@pytest.mark.parametrize(
    ("error", "times"), [(ConnectionResetError("reset by peer"), 2), (DeadlineExceeded("no answer in 30 s"), 1)]
)
def test_a_fetch_goes_on_after_a_transfer_failed_at_every_source(run, monkeypatch, error, times):
    monkeypatch.setattr("baton.weights.chunk_fetcher.FIRST_WAIT_S", 0.01)
    left = [error] * times

    def flaky(data: bytes) -> bytes:
        if left:
            raise left.pop()
        return data

    fetcher = holding(run, [Twisted(run.store, "the hub", chunk=flaky)])
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])
    assert sum("did not send chunk" in fault for fault in fetcher.last.faults) == times


def silent(_: bytes) -> bytes:
    raise DeadlineExceeded("no answer in 30 s")


@pytest.mark.parametrize(("twist", "rounds"), [(gone, 1), (flipped, 1), (silent, 2), (reset, MAX_ROUNDS)])
def test_a_chunk_is_asked_for_again_after_a_failed_transfer_only_and_not_for_ever(run, monkeypatch, twist, rounds):
    monkeypatch.setattr("baton.weights.chunk_fetcher.FIRST_WAIT_S", 0.001)
    relay, hub = Twisted(run.store, "relay 7", chunk=gone), Twisted(run.store, "the hub", chunk=twist)
    with pytest.raises(WeightsFault, match="no source sent chunk"):
        chunk_of(run, [relay, hub])
    assert (relay.asked, hub.asked) == (rounds, rounds)


def test_a_chunk_is_not_asked_for_again_after_the_deadline(run):
    hub = Twisted(run.store, "the hub", chunk=reset)
    with pytest.raises(DeadlineExceeded, match=r"waiting for chunk \w+ from the hub .*reset by peer"):
        chunk_of(run, [hub], deadline_s=0.2)
    assert hub.asked == 1


@pytest.mark.parametrize("has_manifests", [False, True])
def test_a_source_that_does_not_answer_is_asked_once_and_again_after_a_pause(run, monkeypatch, has_manifests):
    """Each attempt may take as long as its timeout, so a relay that a worker cannot reach must not delay each fetch."""
    asked = []

    def silent(data: bytes) -> bytes:
        asked.append(len(data))
        raise DeadlineExceeded("no answer in 30 s")

    relay = Twisted(run.store, "relay 7", chunk=silent, **({} if has_manifests else {"manifest": silent}))
    relay.distance = -1  # it is asked first
    for pause_s, expected in ((3000.0, 1), (0.0, 2)):
        monkeypatch.setattr("baton.weights.chunk_fetcher.FIRST_PAUSE_S", pause_s)
        asked.clear()
        fetcher = Fetcher([relay, run.store])
        for number in (0, 2):
            assert are_bit_equal(fetcher.fetch(run.version(number), deadline_s=60), run.tensors[number])
        assert len(asked) == expected


@pytest.mark.parametrize("twist", [flipped, lambda data: data[:-1], lambda data: b"", gone])
def test_a_bad_manifest_names_its_source_and_the_old_version_is_held(run, twist):
    bad = Twisted(run.store, "relay 7", manifest=twist)
    fetcher = holding(run, [bad])
    with pytest.raises(WeightsFault, match="relay 7"):
        fetcher.fetch(run.version(2), deadline_s=60)
    assert still_holds(run, fetcher)
    fetcher = holding(run, [bad, run.store])
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])


def test_the_manifest_of_another_version_is_refused(run):
    other = run.store.manifest(run.version(1))
    fetcher = holding(run, [Twisted(run.store, "relay 7", manifest=lambda data: other)])
    with pytest.raises(
        WeightsFault, match=r"relay 7: refused the manifest of version 2 .* the source sent the manifest of version 1"
    ):
        fetcher.fetch(run.version(2), deadline_s=60)
    assert still_holds(run, fetcher)


def lying(run: Run, number: int, way: Encoding) -> bytes:
    """A manifest of a version's own tensors, with another way to them."""
    manifest = run.store.find("first", number)
    return encode_manifest(msgspec.structs.replace(manifest, ways=(way,)))


def test_chunks_that_make_other_tensors_are_the_manifests_fault(run):
    """Each chunk has the digest its manifest says, the version's digest is right, and still the way leads elsewhere."""
    right, wrong = run.store.find("first", 2), run.store.find("first", 1)
    data = lying(run, 2, Encoding(run.version(1), wrong.delta.parts, wrong.delta.chunks))
    liar = Twisted(run.store, "relay 7", manifest=lambda good: data if right == decode_manifest(good) else good)
    fetcher = holding(run, [liar], 1)
    with pytest.raises(WeightsFault, match=r"relay 7: its manifests do not lead to version 2 .* another digest"):
        fetcher.fetch(run.version(2), deadline_s=60)
    assert still_holds(run, fetcher, 1)
    for _ in range(16):  # sources are asked in random order
        fetcher = holding(run, [liar, run.store], 1)
        assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])


def test_a_delta_from_another_base_is_refused_and_out_of_order_is_put_in_order(run):
    # a way that claims to lead from 0, though its delta is from 1: the same delta twice would end here as well
    delta = run.store.find("first", 2).delta
    data = lying(run, 2, Encoding(run.version(0), delta.parts, delta.chunks))
    fetcher = holding(run, [Twisted(run.store, "relay 7", manifest=lambda good: data)])
    with pytest.raises(WeightsFault, match="relay 7: its manifests do not lead to version 2"):
        fetcher.fetch(run.version(2), deadline_s=60)
    assert still_holds(run, fetcher)
    # who holds 0 and asks for 2 first gets 1 on the way, and asking for 1 afterwards is no harm
    fetcher = holding(run, [run.store])
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])
    assert fetcher.last.num_steps == 2
    assert are_bit_equal(fetcher.fetch(run.version(1), deadline_s=60), run.tensors[1])


def test_who_holds_another_version_of_the_same_number_begins_whole(run, tmp_path):
    other = Run(tmp_path / "other")
    other.publish(1, changed(run.tensors[1], 0.5, 77))
    fetcher = holding(other, [run.store], 1)
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])
    assert fetcher.last.num_steps == 3  # 0 whole, then 1 and 2


def test_a_version_that_is_not_published_is_not_had(run):
    fetcher = holding(run, [run.store])
    for want in (PolicyVersion("first", 9, "0" * 64), PolicyVersion("first", 2, "0" * 64), PolicyVersion("../x", 1)):
        with pytest.raises(WeightsFault):
            fetcher.fetch(want, deadline_s=60)
        assert still_holds(run, fetcher)
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])  # nothing is left of it (E12)


def test_a_fetch_ends_at_its_deadline_and_names_who_was_waited_for(run):
    fetcher = holding(run, [Twisted(run.store, "relay 7")])
    with pytest.raises(DeadlineExceeded, match=r"waiting for the manifest of version 2 .* from relay 7"):
        fetcher.fetch(run.version(2), deadline_s=-1.0)
    assert still_holds(run, fetcher)


def test_no_source_at_all_is_a_fault(run):
    fetcher = holding(run, [])
    with pytest.raises(WeightsFault, match="no source sent"):
        fetcher.fetch(run.version(2), deadline_s=60)
    assert still_holds(run, fetcher)


def full_disk(after: int):
    """LocalStorage.write that finds the disk full from the n-th call on."""
    write, calls = LocalStorage.write, []

    def limited(self: LocalStorage, name: str, *data: bytes) -> None:
        calls.append(name)
        if len(calls) > after:
            raise StorageFault(f"{name} cannot be written") from OSError(errno.ENOSPC, "No space left on device")
        write(self, name, *data)

    return limited


def test_a_full_disk_of_a_cache_keeps_the_chunks_that_it_has(tmp_path, monkeypatch):
    cache = ChunkCache(tmp_path, 10**9)
    monkeypatch.setattr(LocalStorage, "write", full_disk(after=1))
    cache.put("a" * 64, b"first")
    with pytest.raises(StorageFault, match="cannot be written"):
        cache.put("b" * 64, b"second")
    monkeypatch.undo()
    assert (cache.get("a" * 64), cache.get("b" * 64)) == (b"first", None)
    cache.put("b" * 64, b"second")
    assert cache.get("b" * 64) == b"second"


def test_a_cache_that_starts_again_removes_the_oldest_chunk_first(tmp_path):
    cache, letters = ChunkCache(tmp_path, 100), "cafebd"
    for age, letter in enumerate(letters):
        cache.put(letter * 64, bytes(10))
        os.utime(tmp_path / "chunks" / (letter * 64), (age, age))
    for num_left in range(len(letters), 0, -1):
        cache = ChunkCache(tmp_path, 10 * num_left)
        assert [letter for letter in letters if cache.get(letter * 64)] == list(letters[-num_left:])


def test_a_cache_that_is_filled_by_several_threads_never_outgrows_its_limit(tmp_path, monkeypatch):
    cache, remove, both = ChunkCache(tmp_path, 10), LocalStorage.remove, threading.Barrier(2)
    cache.put("a" * 64, bytes(10))

    def slow(self: LocalStorage, name: str) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(1.0)  # for another thread that removes the same chunk
        remove(self, name)

    monkeypatch.setattr(LocalStorage, "remove", slow)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda letter: cache.put(letter * 64, bytes(10)), "bc"))
    assert len(list((tmp_path / "chunks").iterdir())) == 1


def test_the_operating_systems_no_space_left_is_named(tmp_path, monkeypatch):
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    place = LocalStorage(tmp_path)
    monkeypatch.setattr("pathlib.Path.open", no_space)
    with pytest.raises(StorageFault, match="No space left on device"):
        place.write("chunks/x", b"data")
    assert not list(tmp_path.rglob("*.unfinished"))


def fills_up(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The disk takes the first writes to files of versions, and no more."""
    write, calls = os.pwrite, []

    def full(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", full)


@pytest.mark.parametrize("after", [0, 2])
def test_a_disk_that_fills_up_within_a_version_is_one_error_and_leaves_no_file(run, tmp_path, monkeypatch, after):
    files = VersionFiles(tmp_path / "files")
    publisher = Publisher(run.store, run.settings, files=files)
    tensors = changed(run.tensors[2], 0.1, 5)
    fills_up(monkeypatch, after)
    with pytest.raises(StorageFault, match=r"a version cannot be written to .*files.* \(No space left on device\)"):
        publisher.publish(tensors, version_of(tensors, 3))
    assert not list(files.directory.iterdir())
    assert latest(run.store) == run.version(2)
    monkeypatch.undo()
    publisher.publish(tensors, version_of(tensors, 3))
    assert are_bit_equal(files.read(version_of(tensors, 3)), tensors)


def test_a_fetch_onto_a_full_disk_leaves_the_held_version_and_succeeds_later(run, monkeypatch):
    fetcher = Fetcher([run.store])
    fetcher.fetch(run.version(1), deadline_s=60)
    fills_up(monkeypatch, 1)
    with pytest.raises(StorageFault, match="No space left on device"):
        fetcher.fetch(run.version(2), deadline_s=60)
    assert fetcher.held == run.version(1)
    assert are_bit_equal(fetcher.tensors, run.tensors[1])
    monkeypatch.undo()
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])


def test_full_shared_memory_is_an_error_and_publishing_goes_on_once_there_is_room(run, tmp_path, monkeypatch):
    shared = VersionFiles(tmp_path / "shared")
    publisher = Publisher(run.store, run.settings, files=shared)
    tensors = changed(run.tensors[2], 0.1, 5)
    opened = Path.open

    def full(path: Path, *arguments: object, **more: object) -> object:
        if path.is_relative_to(shared.directory):
            raise OSError(28, "No space left on device")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StorageFault, match="No space"):
        publisher.publish(tensors, version_of(tensors, 3))
    assert latest(run.store) == run.version(2)
    monkeypatch.undo()
    publisher.publish(tensors, version_of(tensors, 3))
    assert are_bit_equal(shared.read(version_of(tensors, 3)), tensors)


class Death(BaseException):
    """The process ends here: nothing that was to come happens."""


def dying(at: int):
    """LocalStorage.write that dies at its n-th call, in the middle of the file."""
    write, calls = LocalStorage.write, []

    def mortal(self: LocalStorage, name: str, *data: bytes) -> None:
        calls.append(name)
        if len(calls) == at:
            whole = b"".join(data)
            write(self, f"{name}.unfinished", whole[: len(whole) // 2])
            raise Death
        write(self, name, *data)

    return mortal, calls


def test_a_publisher_that_dies_at_any_write_leaves_the_old_version_and_a_new_one_goes_on(tmp_path, monkeypatch):
    tensors = changed(policy(), 0.4, 1)
    deaths, at = 0, 1
    while True:
        run = Run(tmp_path / str(at))
        run.publish(0, policy())
        mortal, calls = dying(at)
        monkeypatch.setattr(LocalStorage, "write", mortal)
        try:
            run.publish(1, tensors)
            break  # it has fewer writes than that
        except Death:
            deaths += 1
        finally:
            monkeypatch.undo()
        store = Store(tmp_path / str(at))
        assert latest(store) == run.version(0)
        assert are_bit_equal(Fetcher([store]).fetch(run.version(0), deadline_s=60), policy())
        # the next process: what the dead one left goes, and the same version can be published
        store.collect([], keep=1)
        left = [path for path in (tmp_path / str(at)).rglob("*") if path.is_file()]
        assert len(left) == 1 + len({chunk.digest for chunk in store.find("first", 0).chunks})
        again = Publisher(store, run.settings)
        again.publish(tensors, version_of(tensors, 1))
        follower = Fetcher([store])
        assert are_bit_equal(follower.fetch(version_of(tensors, 1), deadline_s=60), tensors)
        at += 1
    assert deaths == len(calls) >= 2  # a chunk and the manifest at least


def test_a_publisher_that_failed_goes_on_from_what_it_last_published(run, monkeypatch):
    tensors = changed(run.tensors[2], 0.1, 5)
    monkeypatch.setattr(LocalStorage, "write", full_disk(after=0))
    with pytest.raises(StorageFault):
        run.publisher.publish(tensors, version_of(tensors, 3))
    monkeypatch.undo()
    later = changed(tensors, 0.1, 6)
    assert run.publish(4, later).manifest.base == run.version(2)
    fetcher = holding(run, [run.store], 2)
    assert are_bit_equal(fetcher.fetch(run.version(4), deadline_s=60), later)


# ---- manifests that others made --------------------------------------------------------------------------------------


def test_every_cut_and_every_flip_of_a_manifest_is_refused_or_changes_nothing_that_is_vouched_for(run):
    good = run.store.manifest(run.version(2))
    manifest = decode_manifest(good)
    for size in range(len(good)):
        with pytest.raises(WeightsFault):
            decode_manifest(good[:size])
    random_ = random.Random(0)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(random_.choice((1, 1, 2, 5))):
            data[random_.randrange(len(data))] = random_.randrange(256)
        try:
            read = decode_manifest(bytes(data))
        except WeightsFault:
            continue
        assert read.version.digest != manifest.version.digest or read.tensors == manifest.tensors
    for _ in range(500):
        with pytest.raises(WeightsFault):
            decode_manifest(random_.randbytes(random_.randrange(200)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format", 2, "format 2"),
        ("ways", [], "0 encodings"),
        ("version", {"lineage": "../../etc", "number": 1, "digest": "0" * 64}, "lineage '../../etc'"),
        ("version", {"lineage": "first", "number": -1, "digest": "0" * 64}, "number -1"),
        ("version", {"lineage": "first", "number": 1, "digest": "0" * 64}, "not 00000000"),
        ("tensors", [["../a", "float32", [1], "0" * 64]], "tensor name"),
        ("tensors", [["a" * 600, "float32", [1], "0" * 64]], "tensor name"),
        ("tensors", [["a", "object", [1], "0" * 64]], "dtype"),
        ("tensors", [["a", "float32", [-1], "0" * 64]], "shape"),
        ("tensors", [["a", "float32", [2**50], "0" * 64]], "shape"),
        ("tensors", [["a", "float32", [2**22, 2**22], "0" * 64]], "tensors of over"),
        ("tensors", [["a", "float32", [1] * 17, "0" * 64]], "shape"),
        ("tensors", [["a", "float32", [1], "0" * 63]], "digest"),
        ("tensors", [["b", "float32", [1], "0" * 64], ["a", "float32", [1], "0" * 64]], "out of order"),
        ("tensors", [["a", "float32", [1], "0" * 64], ["a", "float32", [1], "0" * 64]], "out of order"),
        ("tensors", [["a", "float32", [1], "0" * 64], ["a", "bfloat16", [1], "0" * 64]], "two tensors of one name"),
        ("more", 1, "cannot be decoded"),
    ],
)
def test_a_manifest_that_does_not_fit_together_is_refused(run, field, value, said):
    good = run.store.manifest(run.version(2))
    with pytest.raises(WeightsFault, match=said):
        decode_manifest(replaced(good, **{field: value}))


def test_ways_that_do_not_make_the_tensors_are_refused(run, monkeypatch):
    manifest: Manifest = run.store.find("first", 2)
    way = manifest.delta
    part, chunk = way.parts[0], way.chunks[0]
    later = PolicyVersion("first", 2, "0" * 64)
    wrong = {
        "not an earlier version": Encoding(later, way.parts, way.chunks),
        "do not cover the tensors": Encoding(way.base, way.parts[:-1], way.chunks),
        "chunks of": Encoding(way.base, way.parts, way.chunks[:-1]),
        "chunk digest": Encoding(way.base, way.parts, (Chunk("../" + chunk.digest[3:], chunk.size), *way.chunks[1:])),
        "a chunk of": Encoding(way.base, way.parts, (Chunk(chunk.digest, 2**40), *way.chunks[1:])),
        "an encoded part of": Encoding(
            way.base, (BufferPart(part.num_bytes, part.word, part.coding, 2**40), *way.parts[1:]), ()
        ),
        "a part of .* bytes": Encoding(way.base, (BufferPart(2**40, part.word, part.coding, 1), *way.parts[1:]), ()),
        "not the last of its word size": Encoding(
            way.base, (BufferPart(part.word, part.word, "same", 0), *way.parts), way.chunks
        ),
        "words of 3 bytes": Encoding(way.base, (BufferPart(3, 3, part.coding, 1), *way.parts[1:]), ()),
        "without a base": Encoding(None, way.parts, way.chunks),
    }
    for said, other in wrong.items():
        with pytest.raises(WeightsFault, match=said):
            encode_manifest(msgspec.structs.replace(manifest, ways=(other,)))
    with pytest.raises(WeightsFault, match="two encodings of one kind"):
        encode_manifest(msgspec.structs.replace(manifest, ways=(way, way)))
    num_bytes = len(encode_manifest(manifest))
    monkeypatch.setattr("baton.weights.manifest.MAX_MANIFEST_BYTES", num_bytes - 1)
    with pytest.raises(WeightsFault, match=rf"would have {num_bytes} bytes, .*: raise weights\.chunk_mb"):
        encode_manifest(manifest)


class EndlessDeltas:
    """A source whose every version is a delta to the version before, in as many parts as allowed."""

    name, distance = "relay 7", 0

    def __init__(self, num_parts: int) -> None:
        self.entries = (TensorEntry("a", "uint8", (num_parts * MIN_PART_BYTES,), "0" * 64),)
        self.digest, self.asked, self.sent = tensors_digest(self.entries), 0, b""
        self._parts = (BufferPart(MIN_PART_BYTES, 1, "same", 0),) * num_parts

    def manifest(self, version: PolicyVersion) -> bytes:
        self.asked += 1
        base = PolicyVersion(version.lineage, version.number - 1, self.digest)
        self.sent = encode_manifest(Manifest(version, self.entries, (Encoding(base, self._parts, ()),)))
        return self.sent


def test_manifests_that_never_end_are_read_up_to_a_limit_and_kept_encoded(monkeypatch):
    """Decoded, the manifests of this limit would take more than 6 MB."""
    monkeypatch.setattr("baton.weights.fetcher.MAX_PLAN_BYTES", 1_000_000)
    source = EndlessDeltas(4000)
    fetcher = Fetcher([source])
    tracemalloc.start()
    try:
        with pytest.raises(WeightsFault, match=r"no keyframe among the last \d+ versions"):
            fetcher.fetch(PolicyVersion("first", 1000, source.digest), deadline_s=60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.asked == -(-1_000_000 // len(source.sent)) > 10
    assert peak < 3_000_000


def test_coded_parts_that_nobody_wrote_end_in_a_fault_or_in_a_wrong_digest(run):
    """Chunks of the right digest whose content is noise or cut: the manifest's source is at fault each time."""
    random_ = random.Random(0)
    manifest = run.store.find("first", 2)
    coded = b"".join(run.store.chunk(chunk.digest) for chunk in manifest.delta.chunks)
    for round_ in range(60):
        data = bytearray(coded)
        for _ in range(1 + round_ % 3):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        chunk = Chunk(blake3(bytes(data)).hexdigest(), len(data))
        lie = lying(run, 2, Encoding(run.version(1), manifest.delta.parts, (chunk,)))

        class Liar:
            name = "relay 7"
            distance = 0

            def manifest(self, version, lie=lie):
                return lie

            def chunk(self, digest, size, data=bytes(data)):
                return data

        fetcher = holding(run, [Liar()], 1)
        try:
            found = fetcher.fetch(run.version(2), deadline_s=60)
        except WeightsFault as error:
            assert "relay 7: its manifests do not lead to version 2" in str(error)  # noqa: PT017
            assert still_holds(run, fetcher, 1)
        else:  # a bit that fills up a byte
            assert are_bit_equal(found, run.tensors[2])


def test_a_folder_that_could_not_be_flushed_is_flushed_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, flushed = LocalStorage(tmp_path), list[Path]()

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage.write("a", b"1")
    monkeypatch.setattr("baton.weights.storage.flush_to_disk", fail)
    with pytest.raises(StorageFault, match="cannot be flushed to disk"):
        storage.settle()
    monkeypatch.setattr("baton.weights.storage.flush_to_disk", flushed.append)
    storage.settle()
    assert tmp_path in flushed
