"""Packed linear layers: the same bits as plain ones, and packed anew when the weights change."""

import pytest
import torch
from torch import nn

from baton.rollout.engines.embedded.packed import PackedLinears

pytestmark = pytest.mark.numerics


def layers(dtype: torch.dtype) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 40, bias=False)).to(dtype)
    copy = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 40, bias=False)).to(dtype)
    copy.load_state_dict(plain.state_dict())
    return plain, copy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 64, 200])
def test_equal_the_plain_layers(dtype, rows):
    plain, packed = layers(dtype)
    PackedLinears(packed)
    states = torch.randn(rows, 3, 48).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(states), plain(states), rtol=0.02, atol=0.02)


def test_follow_new_weights():
    plain, packed = layers(torch.bfloat16)
    linears = PackedLinears(packed)
    states = torch.randn(16, 48).bfloat16()
    with torch.inference_mode():
        before = packed(states)
        for own, new in zip(packed.parameters(), plain.parameters(), strict=True):
            own.copy_(-2 * new)
        linears.refresh()
        for own in plain.parameters():
            own.mul_(-2)
        torch.testing.assert_close(packed(states), plain(states), rtol=0.02, atol=0.02)
        assert not torch.equal(packed(states), before)
