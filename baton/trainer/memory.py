"""Converts a trainer's settings to the input of the memory estimate (`cost/memory.py`)."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.cost.memory import (
    MOMENTS_BYTES,
    PACKED_MOMENTS_BYTES,
    Phase,
    RankShape,
    adapter_params,
    fitting_logits,
    rank_phases,
)
from baton.errors import UserError
from baton.policy.settings import LoraSettings
from baton.specs.model import ModelSpec, model_spec
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.parallel.schedule import stage_layers
from baton.trainer.settings import TrainerSettings


def spec_of(config: Any, num_params: int | None = None) -> ModelSpec:
    """Return the dimensions of the model that a Hugging Face configuration describes. `num_params`: the model's number
    of parameters, if known. If the configuration lacks a needed key, such as the number of attention heads, or has an
    unsupported value, only its number of layers, its hidden size and its vocabulary size are used. The model then
    counts as a model with one attention head, and all other values are defaults."""
    values = {key: value for key, value in config.to_dict().items() if value is not None}
    try:
        found = model_spec(values, str(config.model_type))
    except UserError:
        text = config.get_text_config()
        plain = {key: getattr(text, key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
        found = model_spec({**plain, "num_attention_heads": 1}, str(config.model_type))
    if num_params is None:
        return found
    return msgspec.structs.replace(found, other_params=found.other_params + num_params - found.params)


def microbatch_tokens(settings: TrainerSettings, longest_tokens: int, batch_tokens: float) -> float:
    """Return the maximum number of tokens of a microbatch on one rank; arguments as in `trainer_phases`."""
    limit = max(settings.max_tokens_per_microbatch, longest_tokens)
    return max(min(limit, batch_tokens / settings.data_ranks), min(limit, longest_tokens))


def trainer_phases(
    model: ModelSpec,
    settings: TrainerSettings,
    algorithm: AlgorithmSettings,
    lora: LoraSettings | None,
    *,
    value_bytes: int,
    published_bytes: float,
    longest_tokens: int,
    batch_tokens: float,
    on_cpu: bool,
    stage: int = 0,
    float32_head: bool = False,
    max_kept: int = 0,
    sampled_tokens: float = 0.0,
    most_tokens: float = float("inf"),
    keeps_version: bool = False,
) -> tuple[Phase, ...]:
    """Return the memory phases of a train step on one rank of pipeline stage `stage`.

    `value_bytes`: bytes per value in linear layers. `published_bytes`: bytes per weight of a published version.
    `longest_tokens`: maximum length of a trajectory. `batch_tokens`: maximum number of tokens in an update. `max_kept`:
    maximum number of token ids in a sampling mask. `sampled_tokens`: number of tokens that the engine sampled for a
    batch. `most_tokens`: number of tokens of the largest microbatch; the default is the largest number that the
    settings allow. `keeps_version`: whether a trainer of a single process keeps the last published version in memory
    during a train step.
    """
    data_ranks, after = settings.data_ranks, settings.num_stages - 1 - stage
    adapter = 0.0 if lora is None else adapter_params(model, lora.rank)
    has_reference = algorithm.kl_coef and (lora is None or algorithm.reference is not None)
    tokens = microbatch_tokens(settings, longest_tokens, batch_tokens)
    alone, step_tokens = settings.ranks == 1, batch_tokens * algorithm.num_minibatches
    return rank_phases(
        model,
        RankShape(
            tokens=min(tokens, most_tokens),
            shards=settings.shard_size or data_ranks,
            split=settings.tensor_parallel,
            is_stage=settings.num_stages > 1,
            value_bytes=value_bytes,
            recomputes=settings.activation_checkpointing,
            whole_gradients=not settings.shard_gradients,
            adapter_params=adapter,
            base_bytes=value_bytes,
            moments_bytes=PACKED_MOMENTS_BYTES if settings.optimizer == "adamw8bit" else MOMENTS_BYTES,
            has_critic=algorithm.advantage == "gae" and algorithm.critic == "separate",
            reference_bytes=value_bytes if has_reference else 0.0,
            on_cpu=on_cpu,
            float32_head=float32_head,
            max_kept=max_kept,
            masked_tokens=sampled_tokens,
            replayed_tokens=step_tokens / data_ranks if settings.moe_replay != "off" else 0.0,
            reported_tokens=sampled_tokens if settings.moe_replay == "engine" else 0.0,
            published_bytes=published_bytes if alone else 0.0,
            previous_bytes=published_bytes if alone and keeps_version else 0.0,
        ),
        is_first=stage == 0,
        is_last=after == 0,
        in_flight=min(1 + after, max(1.0, batch_tokens / data_ranks / tokens)),
    )


def logits_on_gpu(
    config: Any, settings: TrainerSettings, algorithm: AlgorithmSettings, lora: LoraSettings | None, *, value_bytes: int
) -> int:
    """Return how many logits a rank on a GPU can compute at a time without an increase of its peak memory."""
    model = spec_of(config)
    phases = trainer_phases(
        model,
        settings,
        algorithm,
        lora,
        value_bytes=value_bytes,
        published_bytes=0.0,
        longest_tokens=0,
        batch_tokens=float("inf"),
        on_cpu=False,
        stage=settings.num_stages - 1,  # it has the head
    )
    return fitting_logits(phases, stage_layers(settings.stages, model.num_layers)[-1])
