"""Versions, tokens and keys of an earlier commit are read, and new ones have the same bytes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import torch
import zstandard

from baton.files import SEAL, seal, verify
from baton.swarm.auth import TokenFile
from baton.types import PolicyVersion
from baton.weights.fetcher import Fetcher
from baton.weights.manifest import Manifest, decode_manifest, encode_manifest
from baton.weights.store import Store
from tests.golden.weights import FILE, TOKEN, digests, keys, published, versions

GOLDEN: dict[str, Any] = msgspec.json.decode(FILE.read_bytes())


def kind(manifest: Manifest) -> str:
    return "adapter" if manifest.is_adapter else "delta" if manifest.whole is None else "keyframe"


def golden_store(directory: Path) -> dict[str, bytes]:
    """Write the golden store's files."""
    files = {name: base64.b64decode(text) for name, text in GOLDEN["store"].items()}
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return files


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_versions_are_fetched_to_the_bit(tmp_path: Path) -> None:
    golden_store(tmp_path)
    fetcher = Fetcher([Store(tmp_path)])
    kinds, codings = set(), set()
    for version, wanted in versions().items():
        found = fetcher.fetch(version, deadline_s=60)
        assert found.keys() == wanted.keys()
        assert all(found[name].dtype == tensor.dtype for name, tensor in wanted.items())
        assert all(bits(found[name]) == bits(tensor) for name, tensor in wanted.items())
        manifest = Store(tmp_path).find(version.lineage, version.number)
        assert manifest is not None
        kinds.add(kind(manifest))
        codings |= {part.coding for way in manifest.ways for part in way.parts}
    assert kinds == {"keyframe", "delta", "adapter"}
    assert codings == {"same", "sparse", "dense", "full"}


def test_manifests_are_encoded_to_the_golden_bytes(tmp_path: Path) -> None:
    files = golden_store(tmp_path)
    manifests = [data for name, data in files.items() if name.startswith("versions/")]
    assert len(manifests) == len(versions())
    assert [encode_manifest(decode_manifest(data)) for data in manifests] == manifests


def test_versions_are_published_as_the_golden_files(tmp_path: Path) -> None:
    """Chunks are squeezed by zstd, of which another release may give other bytes."""
    made = published(tmp_path)
    if list(zstandard.ZSTD_VERSION) == GOLDEN["zstd"]:
        assert made == GOLDEN["store"]
    manifests = {name for name in GOLDEN["store"] if name.startswith("versions/")}
    assert {name for name in made if name.startswith("versions/")} == manifests
    for name in manifests:
        new, old = (decode_manifest(base64.b64decode(files[name])) for files in (made, GOLDEN["store"]))
        assert (new.version, new.tensors, kind(new)) == (old.version, old.tensors, kind(old))


def test_a_token_file_is_read_and_written_to_the_golden_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(GOLDEN["token file"])
    path.chmod(0o600)
    tokens = TokenFile(path)
    assert {token.name: token.state(1_800_000_001.0) for token in tokens.tokens()} == {
        "a-worker": "valid",
        "a-admin": "revoked",
        "a-relay": "valid",
    }
    tokens.revoke("a-admin")  # which writes the file again
    assert path.read_text() == GOLDEN["token file"]


def test_a_key_of_a_worker_is_known() -> None:
    assert keys().worker(TOKEN, GOLDEN["worker key"]["key"]) == GOLDEN["worker key"]["worker"]


def test_digests_are_the_golden_ones(tmp_path: Path) -> None:
    assert digests(tmp_path / "new") == GOLDEN["digests"]
    old = tmp_path / "old"
    (old / "part").mkdir(parents=True)
    (old / "part/b.txt").write_bytes(b"b")
    (old / "a.txt").write_bytes(b"")
    seal(old)
    (old / SEAL).write_text(GOLDEN["digests"]["seal"])
    verify(old)


def test_no_version_is_without_its_digest() -> None:
    assert all(isinstance(version, PolicyVersion) and len(version.digest) == 64 for version in versions())
