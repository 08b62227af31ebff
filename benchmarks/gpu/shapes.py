"""Models of random weights in the shapes of Qwen3, and what the device can do at most."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from baton.specs.cluster import Gpu, gpu_types
from baton.specs.model import ModelSpec, model_spec

_QWEN3 = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "bos_token_id": None,
    "eos_token_id": None,
}
_TINY = {**_QWEN3, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7B": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "8B": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "small": {**_TINY, "head_dim": 32, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 8000},
    "tiny": {**_TINY, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320},
}


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    shapes: tuple[str, ...]
    slots: int
    contexts: tuple[int, ...]
    """Tokens before the decode steps that are timed."""
    decode_steps: int
    train_lengths: tuple[int, ...]
    """Tokens of the responses of a train step."""
    train_steps: int
    caps: tuple[int, ...]
    """Longest response of the long-tail benchmark: the first for which there is time."""
    group_size: int
    batch_groups: int
    extrapolated: tuple[int, ...]
    """Longest responses that are simulated."""

    @property
    def longest_context(self) -> int:
        """Tokens that the engines have room for."""
        return max((*self.contexts, *self.caps)) + PROMPT_TOKENS + 64


PROMPT_TOKENS = 64
FULL = Scale(
    shapes=("0.6B", "1.7B"),
    slots=64,
    contexts=(256, 1024, 4000),
    decode_steps=48,
    train_lengths=(512, 1024, 2048, 512) * 16,
    train_steps=3,
    caps=(4096, 2048, 1024, 512),
    group_size=8,
    batch_groups=8,
    extrapolated=(4096, 16384, 32768),
)
TINY = Scale(
    shapes=("tiny",),
    slots=8,
    contexts=(16, 48),
    decode_steps=4,
    train_lengths=(8, 16),
    train_steps=2,
    caps=(64, 32),
    group_size=2,
    batch_groups=4,
    extrapolated=(64, 256),
)


def make_model(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a model of random weights where it will be used."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape]))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def spec_of(shape: str) -> ModelSpec:
    """Return a shape in numbers, as the planner reads it."""
    return model_spec(Qwen3Config(**SHAPES[shape]).to_dict(), shape)


def known_gpu(device: torch.device) -> Gpu | None:
    """Return what the catalogue says of the device; None for a CPU, and for a GPU that it does not have."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    found = [gpu for name, gpu in gpu_types().items() if name in words]
    return found[0] if found else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copied_bytes_per_s(device: torch.device, size: int) -> float:
    """Measure bytes read and written per second by a copy of `size` bytes: what a kernel can have of the memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        synchronize(device)
        begin_s = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - begin_s)
    return 2 * size / min(times)
