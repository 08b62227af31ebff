"""Configures torch's threads and determinism."""

from __future__ import annotations

import os

import torch
from transformers.utils.logging import disable_progress_bar


def set_up_threads(threads: int) -> None:
    """Set the number of torch's threads and enable deterministic algorithms."""
    torch.set_num_threads(threads)
    # cuBLAS requires this setting for deterministic results
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs several per cent
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own, one per saved file
