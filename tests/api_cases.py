"""Rows and keys with which a test calls the public API on a tiny model."""

from __future__ import annotations

from typing import Any

QUESTIONS = [{"prompt": f"{i}+{i % 3}", "answer": str(i + i % 3), "level": i % 2} for i in range(40)]
CONFIG: dict[str, Any] = {
    "run.threads": 1,
    "model.device": "cpu",
    "answer.instruct": False,
    "rollout.batch_groups": 2,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 8,
    "engine.slots": 8,
    "engine.max_context_tokens": 64,
    "eval.num_prompts": 2,
    "eval.greedy": False,
    "eval.every": 0,
}
