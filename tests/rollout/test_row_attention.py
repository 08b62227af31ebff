"""Attention over each row's own length, or that of its class. The kernel itself needs CUDA; plain products with its
signature stand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded import row_attention
from baton.rollout.engines.embedded.length_classes import SlotRange
from baton.rollout.engines.embedded.network import Network
from tests.model_families import tiny_config

pytestmark = pytest.mark.numerics


class Kernel:
    """What `varlen_attn` promises, by its documentation; it looks at no position that a row does not use."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        num_splits: int,
    ) -> Tensor:
        self.calls += 1
        assert (max_q, enable_gqa, num_splits) == (1, True, 1)
        assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32
        assert cu_seq_k.diff().tolist() == [max_k] * len(query)
        found = []
        for row, states in enumerate(query):  # [heads, head_dim]
            begin, count = int(cu_seq_k[row]), int(seqused_k[row])
            first = 0 if window_size == (-1, -1) else max(0, count - 1 - window_size[0])
            used = slice(begin + first, begin + count)
            repeat = states.shape[0] // key.shape[1]
            keys, values = (t[used].repeat_interleave(repeat, 1) for t in (key, value))  # [n, heads, head_dim]
            weights = torch.einsum("hd,nhd->hn", states, keys).mul(scale).softmax(-1)
            found.append(torch.einsum("hn,nhd->hd", weights, values))
        return torch.stack(found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(row_attention, "varlen_attn", made)
    return made


def masked() -> PreTrainedModel:
    """A model whose tokens see nine positions by the mask alone: attention is not given the window."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("phimoe", sliding_window=9, initializer_range=0.3)).eval()


def windowed() -> PreTrainedModel:
    """A model whose tokens see nine positions."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=9, initializer_range=0.3)).eval()


@pytest.mark.parametrize("name", ["qwen3", "llama", "windowed", "masked"])
def test_it_says_what_scanning_as_far_as_the_longest_says(
    name: str, load: Callable[[str], PreTrainedModel], kernel: Kernel
) -> None:
    """Rows of many lengths in slots with garbage behind them; and prefill goes the way it went."""

    def logits(*, by_row: bool) -> Tensor:
        model = {"windowed": windowed, "masked": masked}.get(name, lambda: load(name))()
        network = Network(model, 16, 64, attends_by_row=by_row)
        generator = torch.Generator().manual_seed(1)
        positions = torch.arange(16) * 3 + 1
        for slot, position in enumerate(positions.tolist()):
            ids = torch.randint(80, (position,), generator=generator).tolist()
            with torch.inference_mode():
                network.cache.write(slot, network.prefill([ids])[0])
        assert network.kv_lengths[-1] == 64
        assert (len(network.kv_lengths) == 1) == by_row, "one shape serves every length"
        return network.decode(torch.arange(16), positions, 64).clone()

    expected = logits(by_row=False)
    assert kernel.calls == 0
    assert torch.allclose(logits(by_row=True), expected, atol=1e-4, rtol=1e-4)
    assert kernel.calls > 0


def test_positions_behind_a_row_do_not_reach_it(load: Callable[[str], PreTrainedModel], kernel: Kernel) -> None:
    network = Network(load("qwen3"), 16, 64, attends_by_row=True)
    positions = torch.full((16,), 5)
    before = network.decode(torch.arange(16), positions, 64).clone()
    with torch.inference_mode():
        for tensor in network.cache.tensors:
            tensor[:, 6:] = float("nan")
    assert torch.equal(network.decode(torch.arange(16), positions, 64), before)


RANGES = [SlotRange(0, 5, 16), SlotRange(5, 11, 32), SlotRange(11, 16, 64)]


@pytest.mark.parametrize("name", ["qwen3", "llama", "windowed"])
def test_classes_of_rows_say_what_scanning_as_far_as_the_longest_says(
    name: str, load: Callable[[str], PreTrainedModel]
) -> None:
    """Positions behind the range of a row hold NaN, which no row may read."""
    network = Network(windowed() if name == "windowed" else load(name), 16, 64)
    positions = torch.tensor([0, 15, 3, 9, 1, 31, 16, 20, 8, 2, 30, 63, 40, 33, 0, 5])
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for tensor in network.cache.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        expected = network.decode_ranges(torch.arange(16), positions, 64)
        for begin, end, kv_length in RANGES:
            for tensor in network.cache.tensors:
                tensor[begin:end, kv_length:] = float("nan")
        got = network.decode_ranges(torch.arange(16), positions, 64, RANGES)
    assert torch.allclose(got, expected, atol=1e-5, rtol=1e-5)


def test_classes_that_change_bits_are_never_used(
    load: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_class = row_attention.attend_by_class
    monkeypatch.setattr(row_attention, "attend_by_class", lambda *a, **k: by_class(*a, **k) * (1 + 2**-20))
    assert Network(load("qwen3"), 16, 128).classes is None


def test_a_model_with_another_attention_keeps_it() -> None:
    model = windowed()
    model.set_attn_implementation("eager")
    assert Network(model, 16, 128).classes is None
    assert model.config._attn_implementation == "eager"


def test_what_the_kernel_does_not_know_goes_the_ordinary_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(row_attention, "sdpa_attention_forward", lambda *a, **k: seen.append(k) or (a[1], None))
    states = torch.zeros(2, 4, 1, 8)
    rows = row_attention.Rows.of(torch.tensor([3, 4]), 16)
    row_attention.attend_by_row(windowed())
    attention = ALL_ATTENTION_FUNCTIONS[row_attention.NAME]
    attention(torch.nn.Identity(), states, states, states, None, rows, s_aux=torch.ones(4))
    row_attention.attend_by_row(windowed())
    attention = ALL_ATTENTION_FUNCTIONS[row_attention.NAME]
    attention(torch.nn.Identity(), states, states, states, None, None, scaling=1.0)
    assert (kernel.calls, len(seen)) == (0, 2)


def test_rows_lie_one_slot_behind_the_other_with_their_own_lengths() -> None:
    rows = row_attention.Rows.of(torch.tensor([0, 7]), 64)
    assert rows.query_starts.tolist() == [0, 1, 2]
    assert rows.starts.tolist() == [0, 64, 128]
    assert rows.lengths_W.tolist() == [1, 8]


def test_it_is_for_bfloat16() -> None:
    with pytest.raises(ValueError, match='requires dtype = "bfloat16", not "float32"'):
        EngineSettings(row_attention=True, dtype="float32")
    EngineSettings(row_attention=True, dtype="bfloat16")
