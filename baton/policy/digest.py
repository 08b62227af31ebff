"""The digest that identifies a set of tensors on every machine. Needs no torch, so a relay can verify weights."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from blake3 import blake3

Identity = tuple[str, str, tuple[int, ...], str]
"""Name, dtype ("bfloat16"), shape and blake3 of the bytes (row-major, little-endian; hexadecimal) of a tensor."""


def identity_digest(tensors: Iterable[Identity]) -> str:
    """Return blake3 (hexadecimal) over the identities of tensors, sorted by name."""
    digest = blake3()
    for tensor in sorted(tensors):
        # JSON delimits each field, so different sets of tensors give different streams.
        digest.update(msgspec.json.encode(tensor) + b"\n")
    return digest.hexdigest()
