"""When torch's deterministic algorithms are used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
