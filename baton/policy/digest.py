"""A digest of a set of tensors, which is the same on every machine. This file does not import torch, so that a relay,
which only forwards weights, can verify them without torch."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from blake3 import blake3

Identity = tuple[str, str, tuple[int, ...], str]
"""Name, dtype (such as "bfloat16"), shape and digest of a tensor. The digest is blake3 (hexadecimal) of the tensor's
bytes in row-major order, little-endian."""


def identity_digest(tensors: Iterable[Identity]) -> str:
    """Return one digest of a set of tensors: blake3 (hexadecimal) of their identities, sorted by name."""
    digest = blake3()
    for tensor in sorted(tensors):
        # JSON delimits each field, so different sets of tensors always give different bytes to hash.
        digest.update(msgspec.json.encode(tensor) + b"\n")
    return digest.hexdigest()
