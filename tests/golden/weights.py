"""Published versions of small tensors, whole and as differences, and the files of a hub that hold digests."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
import zstandard

from baton.files import SEAL, seal
from baton.policy.tensors import weights_digest
from baton.swarm.auth import Role, TokenFile
from baton.swarm.identity import WorkerKeys
from baton.swarm.transfer import model_digest
from baton.types import PolicyVersion
from baton.weights.publisher import Publisher
from baton.weights.settings import WeightsSettings
from baton.weights.store import Store

FILE = Path(__file__).parent / "weights.json"
LINEAGE, ADAPTER = "golden", "adapter"
TOKEN = "0" * 64
"""Digest of the token whose worker has the key."""


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    """Return a version's tensors, made of whole numbers: few elements change, then all."""
    words = (torch.arange(3000, dtype=torch.int64) * 7919 % 20011).to(torch.int16)
    words[:: 3000 // (1 + 30 * number)] += number
    words += 3 * (number // 2)
    wide = (torch.arange(64, dtype=torch.int32) * 104729 + number).view(torch.float32)
    return {
        "model.embed_tokens.weight": words.view(torch.bfloat16).reshape(60, 50),
        "model.norm.weight": wide,
        "model.steps": torch.arange(5) + number,
        "model.types": torch.arange(20, dtype=torch.uint8),
    }


def adapter() -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter."""
    names = (f"model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
    return {name: (torch.arange(32, dtype=torch.int32) * 65537).view(torch.float32).reshape(4, 8) for name in names}


def versions() -> dict[PolicyVersion, dict[str, torch.Tensor]]:
    """Return all versions, in the order in which they are published."""
    found = {PolicyVersion(LINEAGE, number): tensors_of(number) for number in range(3)} | {
        PolicyVersion(ADAPTER, 0): adapter()
    }
    return {msgspec.structs.replace(version, digest=weights_digest(t)): t for version, t in found.items()}


def published(directory: Path) -> dict[str, str]:
    """Publish all versions into a directory; return its files by name, in base64."""
    publisher = Publisher(Store(directory), WeightsSettings(keyframe_every=4, chunk_mb=2**-10))
    for version, tensors in versions().items():
        publisher.publish(tensors, version)
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): base64.b64encode(file.read_bytes()).decode() for file in files}


def token_file(path: Path) -> str:
    """Return a token file with a token of each role; digests are of secrets, and so not the same twice."""
    tokens = TokenFile(path, clock=lambda: 1_800_000_000.0)
    for role in Role:
        tokens.create(role, 3600, name=f"a-{role}", trusted=role is Role.WORKER)
    tokens.revoke("a-admin")
    return path.read_text()


def digests(directory: Path) -> dict[str, Any]:
    """Return digests that one process compares with those of another, or of an earlier one."""
    (directory / "part").mkdir(parents=True)
    (directory / "part/b.txt").write_bytes(b"b")
    (directory / "a.txt").write_bytes(b"")
    seal(directory)
    return {
        "seal": (directory / SEAL).read_text(),
        "model": model_digest(msgspec.msgpack.encode({"config.json": b"{}"})),
        "versions": {f"{version.lineage} {version.number}": version.digest for version in versions()},
    }


def keys() -> WorkerKeys:
    """Return what issues and knows the keys of workers."""
    return WorkerKeys(bytes(range(32)))


def make() -> None:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as path:
        issued = keys().issue(TOKEN)
        found = {
            "zstd": list(zstandard.ZSTD_VERSION),
            "store": published(Path(path, "store")),
            "token file": token_file(Path(path, "tokens.json")),
            "digests": digests(Path(path, "sealed")),
            "worker key": {"key": issued, "worker": keys().worker(TOKEN, issued)},
        }
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    make()
