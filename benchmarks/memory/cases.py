"""The cases that are measured on fake tensors, and their split: the law's coefficients are fitted on `FITTED` alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

FITTED = ("1.7B", "14B")
"""Models on which coefficients are fitted. All others are predicted."""
SHOWN = ("1.7B", "8B", "14B", "32B", "30B-A3B")
"""Models of the table: 8, 16 and 64 ranks with 8,192 tokens per microbatch, checkpointing and bfloat16 gathers."""
DENSE = {
    "0.6B with 4 layers": (1024, 3072, 4, 16, True),
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}
"""Hidden size, MLP width, layers, query heads, and whether the head is tied, of the released Qwen3 models, and of one
with fewer layers, which CI measures. All have 8 KV heads of 128 values and a vocabulary of 151,936."""
SHARED: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}


class Case(NamedTuple):
    """What one rank trains, and how."""

    model: str
    ranks: int
    tokens: int = 8192
    """Tokens of a microbatch on this rank."""
    row: int = 2048
    """Tokens of a row."""
    dtype: str = "bfloat16"
    checkpointing: bool = True
    shard_gradients: bool = True
    lora: int = 0

    @property
    def split(self) -> str:
        return "fit" if self.model in FITTED else "check"


ALONE: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "float32"},
    {"tokens": 2048, "checkpointing": False},
    {"tokens": 2048, "checkpointing": False, "dtype": "float32"},
    {"lora": 16},
)
"""Shapes of a trainer without other ranks."""
CASES = [
    *[Case(model, ranks) for model in ("1.7B", "14B") for ranks in (8, 64)],
    *[Case(model, 8, 32768) for model in ("1.7B", "14B")],
    *[Case(model, 8, 2048, checkpointing=False) for model in ("1.7B", "14B")],
    *[Case(model, 8, shard_gradients=False) for model in ("1.7B", "14B")],
    *[Case(model, 8, lora=16) for model in ("1.7B", "14B")],
    *[Case(model, 8, dtype="float32") for model in ("1.7B", "14B")],
    *[Case(model, 16) for model in ("1.7B", "14B")],
    *[Case(model, 8, 1024, row=1024) for model in ("1.7B", "14B")],
    *[Case(model, 1, **more) for model in ("1.7B", "14B") for more in ALONE],
    *[Case(model, 8) for model in ("8B", "30B-A3B", "32B")],
    Case("8B", 8, 32768, row=32768),
    *[Case(model, 16) for model in ("8B", "30B-A3B", "32B")],
    *[Case(model, 64) for model in ("8B", "30B-A3B", "32B")],
    Case("8B", 8, 2048, checkpointing=False),
    Case("8B", 8, shard_gradients=False),
    Case("8B", 8, lora=16),
    Case("0.6B", 8),
    Case("0.6B", 8, dtype="float32"),
    *[Case(model, 8, 1024, row=1024, dtype="float32") for model in ("0.6B", "1.7B")],
    Case("0.6B with 4 layers", 8, 1024, row=1024),
]


def config_of(name: str) -> PretrainedConfig:
    """Return the configuration of a released Qwen3 model."""
    if name == "30B-A3B":
        return Qwen3MoeConfig(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            **SHARED,
        )
    hidden, mlp, layers, heads, is_tied = DENSE[name]
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=is_tied,
        **SHARED,
    )
