"""When torch's deterministic algorithms are used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton.policy.load import torch_dtype
from baton.policy.threads import set_deterministic, set_up_threads, unordered_writes


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    set_deterministic(before)


def is_on() -> bool:
    return torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("asked", "without_cuda"), [(None, True), (True, True), (False, False)])
def test_without_cuda_they_are_on_unless_they_are_refused(asked: bool | None, without_cuda: bool) -> None:
    set_up_threads(torch.get_num_threads(), deterministic=asked)
    assert is_on() == without_cuda


@pytest.mark.parametrize(("device", "within"), [("cuda:1", False), ("cpu", True)])
def test_writes_at_unique_indices_do_without_them_on_cuda(device: str, within: bool) -> None:
    set_deterministic(True)
    with unordered_writes(torch.device(device)):
        assert is_on() == within
    assert is_on()
    set_deterministic(False)
    with unordered_writes(torch.device(device)):
        assert not is_on()
    assert not is_on()


@pytest.mark.parametrize(("capability", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_float32_on_a_gpu_without_bfloat16(
    capability: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU of capability below 8 computes bfloat16 by emulation only, which torch counts by default."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or capability
    )
    cuda = torch.device("cuda")
    assert torch_dtype("auto", cuda) is expected
    assert torch_dtype("bfloat16", cuda) is torch.bfloat16  # who asks for it gets it
    assert torch_dtype("auto", torch.device("cpu")) is torch.float32
    assert ("Tesla T4 has no bfloat16 arithmetic" in caplog.text) == (not capability)
