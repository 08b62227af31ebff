"""Configures torch's threads, determinism and float32 precision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from transformers.utils.logging import disable_progress_bar

from baton.policy.memory import share_heap


def set_up_threads(threads: int, *, deterministic: bool | None = None) -> None:
    """Set the number of torch's threads. With CUDA, also set the precision of float32 matrix products; without CUDA,
    let all threads share one heap. `deterministic`: whether torch uses deterministic algorithms; None means True
    without CUDA and False with CUDA."""
    torch.set_num_threads(threads)
    has_cuda = torch.cuda.is_available()
    set_deterministic(deterministic is True or (deterministic is None and not has_cuda))
    if has_cuda:
        # TF32 is eight times as fast as float32, and has 10 bits of mantissa instead of 23. keep_positions_exact
        # disables TF32 for positions.
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        share_heap()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own, one per saved file


def set_deterministic(is_on: bool) -> None:
    """Enable or disable torch's deterministic algorithms, which are slower than the others."""
    # cuBLAS requires this setting for deterministic results; it is read once, at the first matrix product
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(is_on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs several per cent


@contextmanager
def unordered_writes(device: torch.device) -> Iterator[None]:
    """Disable torch's deterministic algorithms on CUDA within the context, which must contain only indexed writes to
    distinct indices. Such writes are deterministic anyway, and then take one kernel launch instead of about fifteen."""
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def keep_positions_exact(model: Module) -> None:
    """Make a model on CUDA compute its rotary angles without TF32, in which positions above 2048 are not exact.
    transformers computes the angles with a matrix product (transformers issue 48428)."""
    if torch.cuda.is_available():
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_pre_hook(_without_tf32)
                module.register_forward_hook(_as_before, always_call=True)


def _without_tf32(module: Any, arguments: Any) -> None:
    module.baton_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False


def _as_before(module: Any, arguments: Any, output: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = module.baton_tf32
