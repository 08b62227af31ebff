"""The models and the requests of the engine benchmark: all made here from seeds, nothing is downloaded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from baton.policy.tokenizer import Tokenizer

VOCABULARY = 512
PROMPT_TOKENS = 16
MEAN_TOKENS = 24
LONGEST_TOKENS = 4 * MEAN_TOKENS
"""Of the lognormal workload: the least spread that counts, so the least that a plain batch can waste."""
SIGMA = 1.0
SIZES = {
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384},
    "10M": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024},
    "30M": {"hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 1536},
}
"""Qwen3 shapes; half as many key/value heads as query heads."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how many tokens are generated for it, whatever they are."""

    prompt_ids: tuple[int, ...]
    num_tokens: int


def requests(workload: str, count: int, seed: int) -> list[Request]:
    """Return requests with distinct random prompts; lengths `lognormal` (clipped, mean as `equal`) or `equal`."""
    rng = random.Random(seed)
    draws = [rng.lognormvariate(0.0, SIGMA) for _ in range(count)]
    lengths = [MEAN_TOKENS] * count if workload == "equal" else _scaled(draws)
    return [
        Request(tuple(rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)), num_tokens) for num_tokens in lengths
    ]


def _scaled(draws: list[float]) -> list[int]:
    """Scale draws so that, clipped to 1 … LONGEST_TOKENS, their mean is MEAN_TOKENS."""
    low, high = 0.0, 10.0 * MEAN_TOKENS
    for _ in range(60):
        scale = (low + high) / 2
        lengths = [min(LONGEST_TOKENS, max(1, round(scale * draw))) for draw in draws]
        low, high = (scale, high) if sum(lengths) < MEAN_TOKENS * len(draws) else (low, scale)
    return lengths


def save_model(size: str, directory: Path) -> int:
    """Save a randomly initialised Qwen3 in float32; return its number of parameters."""
    torch.manual_seed(0)
    shape = SIZES[size]
    config = Qwen3Config(
        **shape,
        vocab_size=VOCABULARY,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return model.num_parameters()


def load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a fresh copy, with the attention that is transformers' default."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()


def tokenizer() -> Tokenizer:
    """One word per id; no text is made here, but an engine wants one."""
    raw = RawTokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0"))
