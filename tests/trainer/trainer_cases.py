"""What the tests of this folder are made of: a tiny policy, and batches written down token by token."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from functools import cache

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from baton.policy.new_model import scratch_tokenizer
from baton.policy.settings import LoraSettings
from baton.policy.tokenizer import Tokenizer
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.settings import TrainerSettings
from baton.types import (
    Author,
    Batch,
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

VOCAB = 64

SMOOTH = {"lr": 0.02, "max_grad_norm": 1e-8}
"""Settings under which a rounding of the gradient stays a rounding of the update. AdamW divides by √v + 1e-8: with the
gradient scaled down to a norm of 1e-8, the update is about lr × gradient / 1e-8. Without it the update is about
lr × the gradient's sign, and a gradient near zero turns its last bit into an update of full size."""


INVENTED = {"max_mismatch_kl": (0.01, math.inf), "max_logprob_diff": (math.inf, math.inf)}
"""No error for behavior logprobs that no engine computed."""


def tiny_model(seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random Qwen3 in float32; with a larger init than usual, so that probabilities differ visibly."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**shape, **changes})).eval()


@cache
def tiny_tokenizer() -> Tokenizer:
    return scratch_tokenizer(["a tiny corpus"], 300)


FIRST = PolicyVersion("first", 0)


def make_trainer(
    model: PreTrainedModel | None = None,
    *,
    temperature: float = 1.0,
    max_staleness: int | None = None,
    max_new_tokens: int = 64,
    reference: PreTrainedModel | None = None,
    lora: LoraSettings | None = None,
    version: PolicyVersion = FIRST,
    publish_dtype: torch.dtype = torch.float32,
    **settings: object,
) -> LocalTrainer:
    """Settings of the algorithm and of the trainer, by name."""
    algorithm = AlgorithmSettings(**{k: settings.pop(k) for k in AlgorithmSettings.model_fields if k in settings})
    return LocalTrainer(
        model if model is not None else tiny_model(),
        tiny_tokenizer(),
        TrainerSettings(**{"lr": 1e-3, **INVENTED, **settings}),
        algorithm,
        temperature=temperature,
        total_steps=10,
        version=version,
        publish_dtype=publish_dtype,
        max_new_tokens=max_new_tokens,
        max_staleness=max_staleness,
        reference=reference,
        lora=lora,
    )


def policy(*token_ids: int, version: int = 0, logprob: float = -4.0) -> Segment:
    return Segment(token_ids, (logprob,) * len(token_ids), version)


def environment(*token_ids: int, version: int = 0) -> Segment:
    return Segment(token_ids, (0.0,) * len(token_ids), version, Author.ENVIRONMENT)


def make_group(
    group_id: int,
    rewards: Sequence[float],
    responses: Sequence[Sequence[Segment]] | None = None,
    *,
    prompt_ids: tuple[int, ...] = (2, 3),
    finish_reason: FinishReason = FinishReason.STOP,
) -> Group:
    responses = responses if responses is not None else [[policy(5 + index)] for index in range(len(rewards))]
    members = []
    for index, (reward, segments) in enumerate(zip(rewards, responses, strict=True)):
        trajectory = Trajectory(group_id, index, prompt_ids, tuple(segments), finish_reason)
        members.append(ScoredTrajectory(trajectory, RewardResult(reward, {"correct": reward}, reward == 1.0)))
    return Group(group_id, Prompt(f"prompt {group_id}", "case", ()), tuple(members))


def grpo_advantages(groups: Sequence[Group]) -> dict[int, tuple[float, ...]]:
    """GRPO's advantages by group id, written down apart from the code under test."""
    found = {}
    for group in groups:
        values = [member.judgement.reward for member in group.members]
        std = statistics.stdev(values)
        found[group.group_id] = tuple((value - statistics.fmean(values)) / (std + 1e-6) for value in values)
    return found


def random_batch(step: int, *, seed: int = 0, num_groups: int = 4, group_size: int = 3, first_id: int = 0) -> Batch:
    """Groups of random tokens with prompts and responses of different lengths, and rewards that differ."""
    rng = random.Random(1000 * seed + step)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(rng.randint(low, high))]

    groups = []
    for group_id in range(first_id, first_id + num_groups):
        responses = [[policy(*tokens(1, 12), version=step - 1)] for _ in range(group_size)]
        rewards = [1.0, *(float(rng.random() < 0.5) for _ in range(group_size - 2)), 0.0]
        groups.append(make_group(group_id, rewards, responses, prompt_ids=tuple(tokens(1, 7))))
    return Batch(step, tuple(groups))


def parameters(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def are_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)
