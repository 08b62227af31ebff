"""(b) Train steps of one device: tokens per second, and the share of its peak that the model's own FLOPs are."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from shapes import PROMPT_TOKENS, Scale, make_model, spec_of, synchronize

from baton.policy.new_model import scratch_tokenizer
from baton.specs.model import ModelSpec
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


def measure_train(shape: str, scale: Scale, device: torch.device, peak_flops: float | None) -> dict[str, Any]:
    """Time whole train steps: proximal pass where there is one, forward, backward, AdamW."""
    on_cuda = device.type == "cuda"
    settings = TrainerSettings(
        dtype="bfloat16" if on_cuda else "float32",
        max_tokens_per_microbatch=8192,
        activation_checkpointing=on_cuda,
        max_mismatch_kl=(1e9, 1e9),  # the batches have invented log-probabilities
        max_logprob_diff=(1e9, 1e9),
    )
    trainer = LocalTrainer(
        make_model(shape, torch.float32, device),
        scratch_tokenizer(["a corpus"], 300),
        settings,
        AlgorithmSettings(),
        temperature=1.0,
        total_steps=100,
        version=PolicyVersion("bench", 0),
        max_new_tokens=max(scale.train_lengths),
    )
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for step in range(1, scale.train_steps + 2):
        batch = _batch(step, scale)
        synchronize(device)
        begin_s = time.perf_counter()
        trainer.step(batch)
        synchronize(device)
        times.append(time.perf_counter() - begin_s)
    step_s = statistics.median(times[1:])  # the first one makes moments and kernels
    lengths = [PROMPT_TOKENS + n for n in scale.train_lengths]
    flops = 3 * forward_flops(spec_of(shape), lengths)
    return {
        "shape": shape,
        "dtype": settings.dtype,
        "activation_checkpointing": settings.activation_checkpointing,
        "tokens": sum(lengths),
        "trajectories": len(lengths),
        "step_s": step_s,
        "all_step_s": times,
        "tokens_per_s": sum(lengths) / step_s,
        "flops": flops,
        "mfu": flops / step_s / peak_flops if peak_flops else None,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_cuda else trainer.held_bytes,
    }


def forward_flops(spec: ModelSpec, lengths: list[int]) -> float:
    """Of one forward pass; a training step is worth three, recomputation not counted."""
    linear = spec.num_layers * spec.layer_flops_per_token + spec.head_flops_per_token
    pairs = sum(n * n for n in lengths) / 2
    return sum(lengths) * linear + spec.num_layers * spec.attention_flops_per_pair * pairs


def _batch(step: int, scale: Scale) -> Batch:
    """Groups of two with unlike rewards, so that every token has a gradient."""
    groups = []
    lengths = list(scale.train_lengths)
    for index in range(0, len(lengths), 2):
        prompt_ids = tuple((step + 7 * i + index) % 300 for i in range(PROMPT_TOKENS))
        members = []
        for member, length in enumerate(lengths[index : index + 2]):
            ids = tuple((step * 13 + 5 * i + member) % 300 for i in range(length))
            segment = Segment(ids, (-5.0,) * length, step - 1, Author.POLICY)
            trajectory = Trajectory(index, member, prompt_ids, (segment,), FinishReason.LENGTH)
            members.append(ScoredTrajectory(trajectory, RewardResult(float(member), {}, False)))
        groups.append(Group(index, Prompt(str(index), "bench", ()), tuple(members)))
    return Batch(step, tuple(groups))
