"""The parallel shapes that Baton's trainer supports. The trainer's settings, the planner and the launcher use these
rules."""

from __future__ import annotations

from typing import Literal

Trainer = Literal["baton", "idealised"]
"""`baton`: Baton's trainer. `idealised`: the trainer of AReaL-Hex, which does not use FSDP, and whose stages may each
have any tensor and data parallelism. Baton cannot execute plans for this trainer."""


def can_train(num_stages: int, tensor_parallel: int, *, has_critic: bool = False) -> bool:
    """Return whether the trainer supports this shape. Several pipeline stages are supported only without tensor
    parallelism and without a critic, because other combinations were not tested. All stages must have the same number
    of ranks, which this function does not check."""
    return num_stages == 1 or (tensor_parallel == 1 and not has_critic)


def can_split(tensor_parallel: int, *counts: float) -> bool:
    """Return whether `tensor_parallel` ranks can split the matrix products of a block. `counts`: numbers of query
    heads, key/value heads and MLP columns of the block."""
    return not any(count % tensor_parallel for count in counts)
