"""What identifies a set of tensors on every machine. Needs no torch: who only passes weights on can check it too."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from blake3 import blake3

Identity = tuple[str, str, tuple[int, ...], str]
"""Name, dtype ("bfloat16"), shape and blake3 of the bytes (row-major, little-endian; hexadecimal) of a tensor."""


def identity_digest(tensors: Iterable[Identity]) -> str:
    """Return blake3 (hexadecimal) over what identifies each tensor, in sorted order of the names."""
    digest = blake3()
    for tensor in sorted(tensors):
        # JSON closes each field, so no two sets of tensors share one stream.
        digest.update(msgspec.json.encode(tensor) + b"\n")
    return digest.hexdigest()
