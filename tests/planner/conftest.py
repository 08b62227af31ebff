"""Fixtures of the planner's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def sleeping_engines_keep_no_memory() -> Iterator[None]:
    """The GPUs of these tests have less memory than a sleeping vLLM keeps (`SLEEPING_VLLM_BYTES`, 3 GB)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.planner.colocated.SLEEPING_VLLM_BYTES", 0.0)
        yield
