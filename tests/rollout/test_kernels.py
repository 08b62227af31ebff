"""The compiled attention of a CPU: equal to the formula, and a row depends on nothing but its own positions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from baton.errors import UserError
from baton.rollout.engines.embedded import kernels

pytestmark = pytest.mark.numerics

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
LENGTHS = [1, 2, 15, 16, 17, 31, 48, 64]


def states(group: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(group + dim)
    shapes = (len(LENGTHS), 2 * group, dim), (len(LENGTHS), 64, 2, dim), (len(LENGTHS), 64, 2, dim)
    query, keys, values = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)
    return query * 3, keys, values


@needs_compiler
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 64), (4, 128), (5, 32), (8, 80), (12, 16)])
def test_it_computes_softmax_attention(group: int, dim: int, window: int) -> None:
    """The result is rounded to bfloat16 once, so it differs from the float64 formula by 2^-8 of its value at most."""
    query, keys, values = states(group, dim)
    got = kernels.attend(query, keys, values, torch.tensor(LENGTHS, dtype=torch.int32), dim**-0.5, window)
    for row, length in enumerate(LENGTHS):
        used = slice(max(0, length - window) if window else 0, length)
        k, v = (t[row, used].double().repeat_interleave(group, 1) for t in (keys, values))
        shares = torch.einsum("hd,nhd->hn", query[row].double(), k).mul(dim**-0.5).softmax(-1)
        expected = torch.einsum("hn,nhd->hd", shares, v)
        assert torch.allclose(got[row].double(), expected, rtol=2**-8, atol=1e-4)


@needs_compiler
def test_a_row_has_the_same_bits_alone_and_whatever_lies_behind_it() -> None:
    query, keys, values = states(3, 64)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    together = kernels.attend(query, keys, values, lengths, 0.125, 0)
    for row, length in enumerate(LENGTHS):
        keys[row, length:], values[row, length:] = float("nan"), float("nan")
        alone = [t[row : row + 1] for t in (query, keys, values, lengths)]
        assert torch.equal(kernels.attend(*alone, 0.125, 0), together[row : row + 1])


@needs_compiler
def test_a_key_that_is_not_finite_says_so() -> None:
    query, keys, values = states(1, 16)
    keys[3, 2, 0, 0] = float("nan")
    found = kernels.attend(query, keys, values, torch.tensor(LENGTHS, dtype=torch.int32), 0.25, 0)
    assert found[3, 0].isnan().all()
    assert found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


@needs_compiler
def test_norms_are_replaced_only_where_the_kernel_computes_the_same() -> None:
    """A scale of 2 and a weight that is loaded later both take effect; a norm that adds 1 to its weight stays."""
    own = LlamaRMSNorm(32, eps=1e-5).to(torch.bfloat16)
    plus_one = LlamaRMSNorm(32, eps=1e-5).to(torch.bfloat16)
    forward = plus_one.forward
    plus_one.forward = lambda states: forward(states) * 2  # with the weight 1, 1 + weight
    odd = LlamaRMSNorm(24).to(torch.bfloat16)
    states = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.inference_mode():
        own.weight.copy_(torch.linspace(0.5, 2, 32))
        expected = own(states)
        assert kernels.replace_norms(torch.nn.ModuleList([own, plus_one, odd])) == 1
        assert torch.allclose(own(states).float(), expected.float(), rtol=2**-7)
        assert torch.equal(own(states[1:2]), own(states)[1:2])
        own.weight.fill_(0)
        assert not own(states).any()


@pytest.fixture
def no_library() -> Iterator[None]:
    kernels.kernels.cache_clear()
    yield
    kernels.kernels.cache_clear()


def test_without_a_compiler_a_sentence_names_the_key(no_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(UserError, match=r"engine.row_attention: on a CPU it requires a C compiler .*no-such-compiler"):
        kernels.kernels()
