"""The recipe sections [model], [lora] and [scratch]. This file does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from baton.settings import Settings

DTypeName = Literal["float32", "bfloat16"]
"""Supported dtypes. float16 is 200 times slower than bfloat16 on a CPU, and needs loss scaling on a GPU."""

DTypeChoice = Literal["auto", "float32", "bfloat16"]
"""A dtype, or "auto": bfloat16 on CUDA, float32 on a CPU and on GPUs without bfloat16 (V100, T4)."""


def dtype_on(device_type: str, choice: DTypeChoice) -> DTypeName:
    """Return the dtype that `choice` means on a type of device, such as "cuda"."""
    return choice if choice != "auto" else "bfloat16" if device_type == "cuda" else "float32"


class ModelSettings(Settings):
    """[model] The policy to train."""

    path: str
    """Directory of a Hugging Face causal LM, or the name of a model on the Hugging Face hub. `models/quickstart` is the
    shipped model. A run's directory selects the run's newest checkpoint. An adapter is merged into its base model."""
    device: str = "auto"
    """`auto` (CUDA if available, else CPU), or a torch device such as `cuda:1`."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention of transformers in trainer and engine. Models without SDPA (Gemma-2, GPT-OSS) use `eager`."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """`float32`: the head computes float32 logits and log-probabilities in trainer and engine, while other layers
    compute in bfloat16. `auto`: use the key `head_dtype` of the model's configuration, or without this key the dtype of
    the other layers. A run with `float32` writes the key into its checkpoints."""


class LoraSettings(Settings):
    """[lora] Train low-rank adapters instead of the whole model. Omit the section for full fine-tuning."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters: an adapter adds (alpha / rank) · B A to its weight."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter, given by the last part of their names, such as ["q_proj", "v_proj"].
    `all-linear` selects all linear layers except the head. Fused experts get no adapter, because they are not linear
    layers."""


class ScratchSettings(Settings):
    """[scratch] Shape of a randomly initialised model."""

    vocab_size: int = Field(default=512, ge=265)
    """Vocabulary size of a byte-level BPE tokenizer: 256 bytes, 5 special tokens, 4 tags such as `<answer>`, and the
    merges. Each digit and symbol is one token. With the minimum 265, there are no merges."""
    hidden_size: int = Field(default=128, ge=1)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1)
    """Number of transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Number of query heads. A head has hidden_size / num_heads values, rounded down; this must be an even number."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Number of key/value heads, a divisor of `num_heads`."""
    intermediate_size: int = Field(default=384, ge=1)
    """Width of the gated MLP."""
    max_context_tokens: int = Field(default=1024, ge=1)
    """Maximum length of prompt plus response."""

    @model_validator(mode="after")
    def _heads_fit(self) -> ScratchSettings:
        size = self.hidden_size // self.num_heads
        if size < 2 or size % 2:
            raise ValueError(
                f"num_heads: got {self.num_heads} with hidden_size = {self.hidden_size}, so a head has {size} values; "
                "allowed are even numbers of values above 0"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: got {self.num_kv_heads} with num_heads = {self.num_heads}; allowed are divisors of it"
            )
        return self
