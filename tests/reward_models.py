"""Small reward models for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification


def make_reward_model(directory: Path, policy: Path, *, labels: int = 1, positions: int = 256) -> Path:
    """A classifier with random weights, and the policy's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=positions,
        initializer_range=0.5,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
