"""A version is written to the bit, part by part and tensor by tensor, with or without writes to the file's mapping."""

from __future__ import annotations

import gc
import os
import random
import tempfile
import threading
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_cases import Run, Twisted, are_bit_equal, changed, disk_full, policy

from baton import clock
from baton.errors import DeadlineExceeded, StorageFault, WeightsFault
from baton.weights import flat_buffer, manifest, version_writer
from baton.weights.fetcher import Fetcher
from baton.weights.manifest import Chunk, Encoding, encode_manifest
from baton.weights.version_files import FlatFile
from tests.all_cases import ALL

pytestmark = pytest.mark.timing


@pytest.fixture
def small(monkeypatch):
    """Parts, blocks and groups of tensors are so small that `policy` has many of each, in several threads."""
    for module, name, value in (
        (flat_buffer, "MAX_PART_BYTES", 512),
        (manifest, "MIN_PART_BYTES", 512),
        (version_writer, "BLOCK_BYTES", 64),
        (version_writer, "GROUP_BYTES", 200),
        (version_writer, "LARGE_BYTES", 3000),
        (clock, "CODERS", 3),
        (version_writer, "in_any_order", lambda work, items, size: clock.in_any_order(work, items, lambda item: 2**20)),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture(params=[True, False], ids=["mapped", "written"])
def is_mapped(request, monkeypatch) -> bool:
    monkeypatch.setattr(FlatFile, "allows_mapped_writes", request.param)
    return request.param


def several_sizes(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`policy` with words of 1 to 8 bytes, and with tensors that are smaller and larger than a group and a part."""
    random_ = torch.Generator().manual_seed(seed)
    more = {f"b{n}": torch.randint(0, 200, (n,), generator=random_, dtype=torch.uint8) for n in (1, 3, 90, 700)}
    return policy(seed, dtype) | more | {"c": torch.randn(300, generator=random_, dtype=torch.float64)}


@settings(max_examples=60 if ALL else 25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    densities=st.lists(st.sampled_from([0.0, 0.002, 0.02, 0.06, 0.2, 1.0]), min_size=4, max_size=9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_any_chain_is_fetched_to_the_bit_also_if_versions_are_skipped(small, is_mapped, densities, dtype, seed):
    choose, tensors = random.Random(seed), several_sizes(seed, dtype)
    with tempfile.TemporaryDirectory() as directory:
        run = Run(directory, keyframe_every=choose.choice((3, 100)))
        follower, kept = Fetcher([run.store]), {}
        for number, density in enumerate(densities):
            run.publish(number, tensors)
            if choose.random() < 0.7:
                found = follower.fetch(run.version(number), deadline_s=60)
                assert are_bit_equal(found, tensors)
                kept = {number: found} if choose.random() < 0.3 else kept  # its file must not be changed
            tensors = changed(tensors, density, seed + number)
            for number_kept, found in kept.items():
                assert are_bit_equal(found, run.tensors[number_kept])


def lent_files(monkeypatch) -> list[FlatFile]:
    """The files of the versions that are held one after another."""
    files, lend = [], FlatFile.lend
    monkeypatch.setattr(FlatFile, "lend", lambda file: files.append(file) or lend(file))
    return files


def written_bytes(monkeypatch) -> list[int]:
    sizes, write = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: sizes.append(len(data)) or write(fd, data, at))
    return sizes


def test_only_an_earlier_versions_file_is_changed_through_its_mapping(tmp_path, monkeypatch, is_mapped):
    run = Run(tmp_path, keyframe_every=100)
    run.chain(range(7))
    fetcher, size = Fetcher([run.store]), sum(tensor.nbytes for tensor in run.tensors[0].values())
    sizes = written_bytes(monkeypatch)
    for number in range(5):
        assert are_bit_equal(fetcher.fetch(run.version(number), deadline_s=60), run.tensors[number])
        assert sum(sizes) == (0 if is_mapped and number >= 2 else size)
        sizes.clear()
    held = fetcher.tensors  # version 4 stays in use, so that version 6 needs a new file
    for number in (5, 6):
        fetcher.fetch(run.version(number), deadline_s=60)
    assert sum(sizes) == size * (1 if is_mapped else 2)
    assert are_bit_equal(held, run.tensors[4])


class OtherChunks(Twisted):
    """A source whose manifests name other chunks than the store's."""

    data = b""

    def chunk(self, digest: str, size: int) -> bytes:
        return self.data


def damaged(run: Run, number: int) -> OtherChunks:
    """A source whose delta to a version has valid digests of chunks, but its last part is cut."""
    manifest = run.store.find("first", number)
    parts, data = list(manifest.delta.parts), b"".join(run.store.chunk(c.digest) for c in manifest.delta.chunks)
    last = max(index for index, part in enumerate(parts) if part.coding == "sparse")
    end = sum(part.size for part in parts[: last + 1])
    data = data[: end - 1] + data[end:]
    parts[last] = msgspec.structs.replace(parts[last], size=parts[last].size - 1)
    way = Encoding(manifest.base, tuple(parts), (Chunk(blake3(data).hexdigest(), len(data)),))
    lie = encode_manifest(msgspec.structs.replace(manifest, ways=(way,)))
    good = run.store.manifest(run.version(number))
    source = OtherChunks(run.store, "relay 7", manifest=lambda sent: lie if sent == good else sent)
    source.data = data
    return source


def gone(after: int):
    asked = count()

    def chunk(data: bytes) -> bytes:
        if next(asked) >= after:
            raise OSError("the relay left")
        return data

    return chunk


@pytest.mark.parametrize("fault", ["damaged", "gone", "late"])
def test_a_fetch_that_fails_while_it_changes_an_earlier_versions_file_leaves_the_held_version(
    tmp_path, monkeypatch, small, is_mapped, fault
):
    run, files = Run(tmp_path, keyframe_every=100), lent_files(monkeypatch)
    run.tensors[0] = {"a": torch.randn(100, 400).bfloat16(), "b": torch.randn(50).bfloat16()}
    run.chain(range(4), density=0.2)
    assert len(run.store.find("first", 3).delta.chunks) > 3
    fetcher = Fetcher([run.store])
    for number in range(3):
        fetcher.fetch(run.version(number), deadline_s=60)
    if fault == "damaged":
        fetcher.sources = [damaged(run, 3)]
        with pytest.raises(WeightsFault, match=r"relay 7: its manifests do not lead to version 3 .* is damaged"):
            fetcher.fetch(run.version(3), deadline_s=60)
    elif fault == "gone":
        fetcher.sources = [Twisted(run.store, "relay 7", chunk=gone(1))]
        with pytest.raises(WeightsFault, match="the relay left"):
            fetcher.fetch(run.version(3), deadline_s=60)
    else:
        now, source = [0.0], Twisted(run.store, "relay 7", chunk=lambda data: now.append(now[-1] + 40) or data)
        monkeypatch.setattr("baton.weights.chunk_fetcher.time.monotonic", lambda: now[-1])
        fetcher.sources = [source]
        with pytest.raises(DeadlineExceeded, match="was not complete after 60 s, waiting for chunk"):
            fetcher.fetch(run.version(3), deadline_s=60)
    assert fetcher.held == run.version(2)
    assert are_bit_equal(fetcher.tensors, run.tensors[2])
    fetcher.sources = [run.store]
    assert are_bit_equal(fetcher.fetch(run.version(3), deadline_s=1e6), run.tensors[3])
    assert files[-1] not in files[:-1], "the file with parts of two versions is not used again"


def test_a_tensor_that_cannot_be_written_ends_all_threads_of_a_fetch(tmp_path, monkeypatch, small):
    """The thread that writes the first tensor then decodes the last part, for which the second tensor waits."""
    run = Run(tmp_path, keyframe_every=100)
    run.tensors[0] = {"a": torch.randn(256).bfloat16(), "b": torch.randn(1024).bfloat16()}
    run.chain(range(2), density=0.0)
    fetcher, before, write = Fetcher([run.store]), set(threading.enumerate()), FlatFile.write
    fetcher.fetch(run.version(0), deadline_s=60)
    monkeypatch.setattr(FlatFile, "write", lambda file, begin, data: write(file, begin, data) if begin else disk_full())
    with pytest.raises(StorageFault):
        fetcher.fetch(run.version(1), deadline_s=60)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_a_fetch_whose_source_left_frees_its_file_without_the_garbage_collector(tmp_path, monkeypatch, small):
    run, files, create = Run(tmp_path, keyframe_every=100), [], FlatFile.__init__
    run.chain(range(2), density=0.2)
    monkeypatch.setattr(
        FlatFile, "__init__", lambda self, *given: (files.append(weakref.ref(self)), create(self, *given))[1]
    )
    before = set(threading.enumerate())
    gc.disable()
    try:
        fetcher = Fetcher([Twisted(run.store, "relay 7", chunk=gone(0))])
        with suppress(WeightsFault):
            fetcher.fetch(run.version(1), deadline_s=60)
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
        assert [file() for file in files] == [None]
    finally:
        gc.enable()


def test_what_an_earlier_versions_file_contains_has_no_effect(tmp_path, monkeypatch):
    monkeypatch.setattr(FlatFile, "allows_mapped_writes", True)
    run, files = Run(tmp_path, keyframe_every=100), lent_files(monkeypatch)
    run.chain(range(3))
    fetcher = Fetcher([run.store])
    for number in range(2):
        fetcher.fetch(run.version(number), deadline_s=60)
    files[0].bytes[:] = 7
    assert are_bit_equal(fetcher.fetch(run.version(2), deadline_s=60), run.tensors[2])
    assert files[2] is files[0]


MOUNTS = "23 1 0:20 / /a\u2028b rw - proc proc rw\n24 1 {device} / /data rw,noatime shared:1 - {kind} /dev/sda rw\n"


@pytest.mark.parametrize(
    ("kind", "is_allowed"),
    [("tmpfs", True), ("ext4", False), ("btrfs", False), ("nfs4", False), ("overlay", False)],
)
def test_a_file_is_changed_through_its_mapping_only_on_tmpfs(tmp_path, monkeypatch, kind, is_allowed):
    file = FlatFile(tmp_path, 10)
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: MOUNTS.format(device=number, kind=kind))
    assert file.allows_mapped_writes is is_allowed


def test_a_file_on_an_unknown_file_system_is_not_changed_through_its_mapping(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: MOUNTS.format(device="250:9", kind="tmpfs"))
    assert FlatFile(tmp_path, 10).allows_mapped_writes is False

    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert FlatFile(tmp_path, 10).allows_mapped_writes is False
