"""Small reward models for tests."""

from __future__ import annotations

import os
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


def servers() -> set[int]:
    """The process ids of the servers that this process's descendants have started."""
    parents: dict[int, int] = {}
    named = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        pid = int(stat.parent.name)
        try:
            parents[pid] = int(stat.read_text().rpartition(")")[2].split()[1])
            if b"vllm.entrypoints.openai.api_server" in (stat.parent / "cmdline").read_bytes():
                named.add(pid)
        except OSError:
            continue

    def is_own(pid: int) -> bool:
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        return bool(pid)

    return {pid for pid in named if is_own(pid)}
