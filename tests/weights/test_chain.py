"""Whatever is published is fetched to the bit, by whichever way is there."""

from __future__ import annotations

import errno
import os
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from weights_cases import SPECIAL, Run, are_bit_equal, changed, latest, policy, version_of, words

from baton.errors import WeightsFault
from baton.policy.tensors import as_published, tensor_digest, weights_digest
from baton.weights.fetcher import Fetcher
from baton.weights.flat_buffer import flattened
from baton.weights.manifest import decode_manifest, tensors_digest
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.sources import ChunkCache
from baton.weights.store import Store
from baton.weights.version_files import FlatFile, TensorsOfFile, VersionFiles

pytestmark = pytest.mark.numerics

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@settings(max_examples=25, deadline=None)
@given(
    density=st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.6, 1.0]),
    dtype=st.sampled_from(DTYPES),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_a_chain_of_versions_is_fetched_to_the_bit(density, dtype, steps, seed):
    with tempfile.TemporaryDirectory() as directory:
        run, number, tensors = Run(directory), 0, policy(seed, dtype)
        follower = Fetcher([run.store])
        for step in steps:
            run.publish(number, tensors)
            assert are_bit_equal(follower.fetch(run.version(number), deadline_s=60), tensors)
            number, tensors = number + step, changed(tensors, density, seed + number)
        for published in run.tensors:  # whoever joins has no version before
            joiner = Fetcher([run.store])
            assert are_bit_equal(joiner.fetch(run.version(published), deadline_s=60), run.tensors[published])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_value_of_a_dtype_survives_next_to_any_other(tmp_path, dtype):
    random = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        tensors = [torch.tensor(SPECIAL * 40, dtype=dtype)[torch.randperm(280, generator=random)] for _ in range(5)]
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        tensors = [torch.randint(low, high, (280,), generator=random, dtype=dtype) for _ in range(5)]
    run = Run(tmp_path)
    fetcher = Fetcher([run.store])
    for number, tensor in enumerate(tensors):
        run.publish(number, {"weight": tensor})
        assert are_bit_equal(fetcher.fetch(run.version(number), deadline_s=60), {"weight": tensor})


def test_payloads_of_nan_survive(tmp_path):
    quiet, signalling, negative = 0x7FC1, 0x7F81, 0xFFFF - 0x10000
    before = torch.zeros(8, dtype=torch.bfloat16)
    after = torch.tensor([quiet, signalling, negative, 0x7FC0] * 2, dtype=torch.int16).view(torch.bfloat16)
    run = Run(tmp_path)
    fetcher = Fetcher([run.store])
    for number, tensor in enumerate((before, after, before)):
        run.publish(number, {"weight": tensor})
        assert are_bit_equal(fetcher.fetch(run.version(number), deadline_s=60), {"weight": tensor})


def test_the_manifests_digest_is_that_of_the_published_tensors(tmp_path):
    tensors = policy()
    published = Run(tmp_path).publish(7, tensors)
    manifest = published.manifest
    assert manifest.version.digest == weights_digest(tensors) == tensors_digest(manifest.tensors)
    assert {e.name: e.digest for e in manifest.tensors} == {n: tensor_digest(t) for n, t in tensors.items()}
    assert {e.name: e.num_bytes for e in manifest.tensors} == {n: t.nbytes for n, t in tensors.items()}


def test_tensors_larger_than_a_chunk_each_arrive_under_their_own_name(tmp_path):
    # two of several chunks: the first must not end up under the second's name (E1)
    tensors = {name: torch.randn(40, 50, generator=torch.Generator().manual_seed(len(name))) for name in ("a", "bb")}
    run = Run(tmp_path)
    published = run.publish(0, tensors)
    assert len(published.manifest.chunks) > 4
    assert all(tensor.nbytes > 2 * run.settings.chunk_bytes for tensor in tensors.values())
    assert are_bit_equal(Fetcher([run.store]).fetch(run.version(0), deadline_s=60), tensors)


def test_pieces_of_a_large_tensor_are_put_together(tmp_path):
    # 2,200,000 float32 elements are 8.8 MB: two parts, the second changed nowhere
    tensors = {"weight": torch.arange(2_200_000, dtype=torch.float32)}
    run = Run(tmp_path, chunk_mb=4.0)
    fetcher = Fetcher([run.store])
    run.publish(0, tensors)
    fetcher.fetch(run.version(0), deadline_s=60)
    after = {"weight": tensors["weight"].clone()}
    after["weight"][1_000_000] = -1.0
    published = run.publish(1, after)
    assert [part.coding for part in published.manifest.delta.parts] == ["sparse", "same"]
    assert published.bytes < 60
    assert are_bit_equal(fetcher.fetch(run.version(1), deadline_s=60), after)


def test_one_in_so_many_versions_can_be_had_whole_and_every_one_from_the_one_before(tmp_path):
    run = Run(tmp_path, keyframe_every=4)
    run.chain(range(1, 10))
    manifests = [run.store.find("first", number) for number in range(1, 10)]
    assert [m.whole is not None for m in manifests] == [True, *[False] * 3, True, *[False] * 3, True]
    assert [None if m.base is None else m.base.number for m in manifests] == [None, *range(1, 9)]


def test_who_follows_never_fetches_a_whole_version_and_who_joins_fetches_one(tmp_path):
    run = Run(tmp_path, keyframe_every=4)
    follower = Fetcher([run.store])
    run.chain(range(1))
    follower.fetch(run.version(0), deadline_s=60)
    followed = []
    for number in range(1, 9):
        run.publish(number, changed(run.tensors[number - 1], 0.01, number))
        follower.fetch(run.version(number), deadline_s=60)
        chunks = {c.digest for c in run.store.find("first", number).delta.chunks}
        followed.append(follower.last.num_steps)
        assert chunks
        assert follower.last.num_bytes < 0.5 * sum(t.nbytes for t in run.tensors[0].values())
    assert followed == [1] * 8
    joiner = Fetcher([run.store])
    joiner.fetch(run.version(7), deadline_s=60)
    assert joiner.last.num_steps == 4  # whole at 4, then 5, 6, 7


def test_a_fetch_takes_the_way_of_the_fewest_bytes(tmp_path):
    run = Run(tmp_path, keyframe_every=100)
    run.chain(range(3), density=0.01)
    late = Fetcher([run.store])
    late.fetch(run.version(0), deadline_s=60)
    assert are_bit_equal(late.fetch(run.version(2), deadline_s=60), run.tensors[2])
    assert late.last.num_steps == 2  # through 1
    run.publish(3, {name: torch.zeros_like(t) for name, t in run.tensors[2].items()})  # whole is next to nothing
    run.chain(range(4, 5), density=0.01)
    late.fetch(run.version(4), deadline_s=60)
    assert run.store.find("first", 3).whole is not None
    assert late.last.num_steps == 2


def test_going_back_and_fetching_again_are_harmless(tmp_path):
    run = Run(tmp_path)
    run.chain(range(6))
    fetcher = Fetcher([run.store])
    for number in (5, 5, 2, 3, 3, 0, 5):
        assert are_bit_equal(fetcher.fetch(run.version(number), deadline_s=60), run.tensors[number])
        assert fetcher.held == run.version(number)
    fetcher.fetch(run.version(5), deadline_s=60)
    assert fetcher.last.num_bytes == 0


def test_a_new_lineage_or_another_model_begins_whole(tmp_path):
    run = Run(tmp_path)
    run.chain(range(2))
    second = version_of(run.tensors[1], 2, "second")
    assert run.publisher.publish(run.tensors[1], second).manifest.base is None
    grown = run.tensors[1] | {"model.layers.1.weight": torch.ones(3)}
    assert run.publisher.publish(grown, version_of(grown, 3, "second")).manifest.base is None
    fetcher = Fetcher([run.store])
    fetcher.fetch(run.version(1), deadline_s=60)
    assert are_bit_equal(fetcher.fetch(second, deadline_s=60), run.tensors[1])
    assert are_bit_equal(fetcher.fetch(version_of(grown, 3, "second"), deadline_s=60), grown)


def test_an_adapter_is_always_whole(tmp_path):
    run = Run(tmp_path)
    adapter = {f"model.q_proj.lora_{side}.weight": torch.randn(4, 8) for side in "AB"}
    fetcher = Fetcher([run.store])
    for number in range(3):
        published = run.publish(number, {name: tensor + number for name, tensor in adapter.items()})
        assert (published.manifest.is_adapter, published.manifest.base) == (True, None)
        assert are_bit_equal(fetcher.fetch(run.version(number), deadline_s=60), run.tensors[number])
        assert fetcher.last.num_steps == 1


def test_rounding_happens_once_before_the_digest():
    tensors = policy(dtype=torch.float32)
    dtypes = {name: torch.bfloat16 if t.is_floating_point() else t.dtype for name, t in tensors.items()}
    published = as_published(tensors, dtypes)
    assert published["model.norm.weight"].dtype == torch.bfloat16
    assert torch.equal(published["model.steps"], tensors["model.steps"])
    assert weights_digest(as_published(published, dtypes)) == weights_digest(published)


def test_publishing_again_is_harmless_and_other_content_is_refused(tmp_path):
    run = Run(tmp_path)
    run.chain(range(2))
    before = {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()}
    for _ in range(100):
        run.publish(1, run.tensors[1])
    other = changed(run.tensors[1], 0.5, 9)
    with pytest.raises(WeightsFault, match=r"version 1 .* is already published"):
        run.publisher.publish(other, version_of(other, 1))
    with pytest.raises(WeightsFault, match="its tensors have the digest"):
        run.publisher.publish(other, version_of(run.tensors[1], 2))
    assert before == {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()}
    assert run.publish(2, other).manifest.base == run.version(1)


def test_a_publisher_that_starts_again_goes_on_with_a_whole_version(tmp_path):
    run = Run(tmp_path)
    run.chain(range(3))
    again = Publisher(Store(tmp_path), run.settings)
    after = changed(run.tensors[2], 0.1, 3)
    assert again.publish(after, version_of(after, 3)).manifest.base is None
    after_that = changed(after, 0.1, 4)
    assert again.publish(after_that, version_of(after_that, 4)).manifest.base == version_of(after, 3)


def test_workers_of_this_machine_map_one_file(tmp_path):
    shared = VersionFiles(tmp_path / "shared")
    publisher = Publisher(Store(tmp_path / "store"), WeightsSettings(), files=shared)
    fetcher = Fetcher([Store(tmp_path / "store")], shared=shared)
    tensors, kept = policy(), []
    for number in range(4):
        publisher.publish(tensors, version_of(tensors, number))
        kept.append((tensors, fetcher.fetch(version_of(tensors, number), deadline_s=60)))
        assert fetcher.last.num_bytes == 0
        tensors = changed(tensors, 0.1, number)
    assert all(are_bit_equal(*pair) for pair in kept)  # a mapping outlives its file
    assert len(list(shared.directory.iterdir())) == 2
    # a damaged file is not served: chunks are, from what was mapped on
    publisher.publish(tensors, version_of(tensors, 4))
    path = max(shared.directory.iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert are_bit_equal(fetcher.fetch(version_of(tensors, 4), deadline_s=60), tensors)
    assert fetcher.last.num_steps == 1
    assert "their digest is" in fetcher.last.faults[0]


def test_any_filesystem_will_do():
    run = Run("memory://bucket/of/a/run")
    run.chain(range(6))
    other = Store("memory://bucket/of/a/run")
    assert latest(other) == run.version(5)
    assert are_bit_equal(Fetcher([other]).fetch(run.version(5), deadline_s=60), run.tensors[5])
    assert other.collect([run.version(5)], keep=1) > 0
    assert are_bit_equal(Fetcher([other]).fetch(run.version(5), deadline_s=60), run.tensors[5])


def test_a_cache_keeps_the_newest_chunks_within_its_size_also_when_it_is_opened_again(tmp_path):
    cache = ChunkCache(tmp_path, max_bytes=20_000)
    for number in range(5):
        cache.put(f"{number:064x}", bytes(6_000))
    cache.put("f" * 64, bytes(20_001))  # larger than the cache
    again = ChunkCache(tmp_path, max_bytes=20_000)
    assert [again.get(f"{number:064x}") is not None for number in range(5)] == [False, False, True, True, True]
    assert again.get("f" * 64) is None
    again.put("e" * 64, bytes(19_000))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["e" * 64]


def test_the_elements_of_a_tensor_may_change_while_it_is_published_later(tmp_path):
    """What was published stays what it was, whatever the trainer does to its own tensors."""
    run = Run(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in policy().items()}
    run.publish(0, {name: tensor.clone() for name, tensor in tensors.items()})
    publisher = Publisher(run.store, run.settings)
    publisher.publish(tensors, version_of(tensors, 0))
    words(tensors["model.norm.weight"])[:] += 1
    published = publisher.publish(tensors, version_of(tensors, 1))
    fetcher = Fetcher([run.store])
    fetcher.fetch(run.version(0), deadline_s=60)
    assert published.density == 32 / 3397
    assert are_bit_equal(fetcher.fetch(version_of(tensors, 1), deadline_s=60), tensors)


def test_a_keyframe_can_be_fetched_as_a_delta_before_its_whole_encoding_is_stored(tmp_path):
    run = Run(tmp_path, keyframe_every=1)
    run.publish(0, policy())
    follower, seen, bodies = Fetcher([run.store]), [], []
    follower.fetch(run.version(0), deadline_s=60)
    tensors = changed(policy(), 0.05, 1)
    version = version_of(tensors, 1)

    def when_stored() -> None:
        seen.append((run.store.find("first", 1).whole is not None, run.store.find("first", 1).expects_whole))
        assert are_bit_equal(follower.fetch(version, deadline_s=60), tensors)
        run.store.collect([version], keep=1)  # must not keep this manifest in memory
        bodies.append(run.store.manifest_body("first", 1))

    run.publisher.publish(tensors, version, when_stored=when_stored)
    assert seen == [(False, True)]
    (body,) = bodies  # a reader that had begun before the manifest was replaced gets one whole manifest
    assert decode_manifest(body.read(0, body.size)).version == version
    run.store.collect([version], keep=1)
    assert run.store.find("first", 1).whole is not None
    joiner = Fetcher([run.store])
    assert are_bit_equal(joiner.fetch(version, deadline_s=60), tensors)
    assert joiner.last.num_steps == 1
    assert run.store.find("first", 0) is None


def of_file(path: Path) -> TensorsOfFile:
    return TensorsOfFile(path, {name: tensor_digest(tensor) for name, tensor in load_file(path).items()})


def test_a_publisher_takes_over_the_file_of_a_version_without_a_copy(tmp_path, monkeypatch):
    shared, path = VersionFiles(tmp_path / "shared"), tmp_path / "trainer.safetensors"
    publisher = Publisher(Store(tmp_path / "store"), WeightsSettings(), files=shared)
    flattened(policy(), partial(FlatFile.of_tensors, path))
    tensors, inode = of_file(path), path.stat().st_ino
    publisher.publish(tensors, version_of(policy(), 0))
    (found,) = shared.directory.iterdir()
    assert found.stat().st_ino == inode
    del tensors
    assert not path.exists()
    assert are_bit_equal(shared.read(version_of(policy(), 0)), policy())
    # tensors in another order, and a file on another file system, are copied
    entries, _ = flattened(policy(), partial(FlatFile.of_tensors, path))
    FlatFile.of_tensors(path, entries[::-1])
    other = of_file(path)
    publisher.publish(other, version_of(other, 1))
    assert are_bit_equal(shared.read(version_of(other, 1)), dict(other))
    flattened(policy(), partial(FlatFile.of_tensors, tmp_path / "far.safetensors"))
    far = of_file(tmp_path / "far.safetensors")
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))
    publisher.publish(far, version_of(far, 2))
    assert are_bit_equal(shared.read(version_of(far, 2)), policy())


def test_the_digests_of_the_writer_of_a_file_are_published_and_a_file_that_differs_is_refused_by_readers(tmp_path):
    """The publisher does not compute the digests again."""
    run, path = Run(tmp_path), tmp_path / "trainer.safetensors"
    publisher = Publisher(run.store, WeightsSettings(), files=VersionFiles(tmp_path / "shared"))
    flattened(policy(), partial(FlatFile.of_tensors, path))
    tensors = of_file(path)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    publisher.publish(tensors, version_of(policy(), 0))
    for shared in (None, VersionFiles(tmp_path / "shared")):
        with pytest.raises(WeightsFault, match="tensors have another digest"):
            Fetcher([run.store], shared=shared).fetch(version_of(policy(), 0), deadline_s=60)
    tensors.digests = dict.fromkeys(tensors, "0" * 64)
    with pytest.raises(WeightsFault, match=r"cannot publish version 1 .*: its tensors have the digest"):
        publisher.publish(tensors, version_of(policy(), 1))
    tensors.digests = {}
    with pytest.raises(WeightsFault, match="tensors have no digest, among them"):
        publisher.publish(tensors, version_of(policy(), 1))


def test_a_fetch_reuses_the_file_before_the_last_unless_a_tensor_of_it_is_in_use(tmp_path):
    run = Run(tmp_path, keyframe_every=100)
    run.chain(range(8), density=0.01)
    fetcher, name = Fetcher([run.store]), "model.norm.weight"
    kept = fetcher.fetch(run.version(0), deadline_s=60)[name]
    for number in (1, 2, 3):
        fetcher.fetch(run.version(number), deadline_s=60)
        assert torch.equal(kept, run.tensors[0][name]), "the file of a tensor in use changed"
    places = []
    for number in (4, 5, 6, 7):
        tensors = fetcher.fetch(run.version(number), deadline_s=60)
        assert are_bit_equal(tensors, run.tensors[number])
        places.append(tensors[name].data_ptr())
        del tensors
    assert places[0] == places[2] != places[1] == places[3]
