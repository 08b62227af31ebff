"""The parallel shapes that Baton's trainer has: one rule for its settings, the planner and the launcher."""

from __future__ import annotations

from typing import Literal

Trainer = Literal["baton", "idealised"]
"""Baton's trainer, or that of AReaL-Hex: any TP and data parallelism on each stage, without FSDP. No command carries
out plans for the latter."""


def can_train(num_stages: int, tensor_parallel: int, *, has_critic: bool = False) -> bool:
    """Return whether the trainer has this shape: pipeline stages were tested neither with tensor parallelism nor with
    a critic. All stages have the same number of ranks."""
    return num_stages == 1 or (tensor_parallel == 1 and not has_critic)


def can_split(tensor_parallel: int, *counts: float) -> bool:
    """Return whether so many ranks can split the products of a block. `counts`: its query heads, key/value heads and
    columns of its MLP."""
    return not any(count % tensor_parallel for count in counts)
