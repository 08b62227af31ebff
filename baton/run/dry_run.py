"""Estimate the memory and work of a recipe before the run starts, for `baton train --dry-run`."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from pathlib import Path

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from baton.errors import UserError, first_line
from baton.policy.adapters import add_adapters, base_of_adapter
from baton.policy.load import check_weight_files, torch_device, torch_dtype
from baton.policy.memory import available_bytes
from baton.policy.tokenizer import load_tokenizer, split_revision
from baton.recipe.recipe import Recipe
from baton.recipe.support import check_support, experimental_parts
from baton.rewards.scorer import RewardScorer
from baton.run.tokenization import PromptEncoder
from baton.tasks.prompt_lengths import PromptLengths, measure
from baton.tasks.stream import PromptStream, TaskMixture
from baton.trainer.optimizer import check_schedule


class Footprint(msgspec.Struct, frozen=True):
    """The estimated memory and work of a recipe."""

    example_prompt: str
    """Text of the first training prompt, including special tokens."""
    example_prompt_tokens: int
    parameters: int
    trainer_bytes: int
    """Memory of one trainer rank: float32 weights, gradients and two AdamW moments of the trained parameters, and the
    weights of frozen models."""
    gradient_bytes: int
    """Memory of the gradients, which a sleeping trainer frees; included in the trainer's bytes."""
    engine_bytes: int
    """Memory of the engine's weights and of the whole KV cache."""
    cache_bytes: int
    """Memory of the KV cache; included in the engine's bytes."""
    available_bytes: int | None
    """Free memory of the trainer's device; None if the trainer runs on other machines."""
    device: str
    max_positions: int | None
    """Maximum context of the model, tokens; None if the model's configuration has no such limit."""
    prompts: tuple[PromptLengths, ...]
    """Prompt lengths of each task."""
    held_out_prompts: int
    """Number of prompts of an evaluation; 0 if the recipe disables evaluations."""
    trajectories_per_step: int
    max_generated_tokens_per_step: int
    updates_per_step: int
    experimental: tuple[str, ...]
    """Parts of this run that no test covers, according to `support.toml`."""


def footprint(recipe: Recipe, *, is_here: bool = True) -> Footprint:
    """Estimate the memory and work of a recipe.

    Opens the tasks as at the start of a run, but reads only the headers of the weights. `is_here` states whether
    trainer and engine run on this machine. Raises UserError for every recipe with which a run would not start.
    """
    trainer = recipe.trainer
    check_schedule("trainer", warmup_steps=trainer.warmup_steps, decay=trainer.decay, total_steps=recipe.run.steps)
    tokenizer = load_tokenizer(recipe.model.path)
    check_weight_files(recipe.model.path)
    config, model = check_room(recipe, is_here=is_here)
    encoder = PromptEncoder(tokenizer, (*recipe.task, *recipe.eval.task))
    mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments, recipe.eval.task, encoder.tool_format)
    RewardScorer(mixture.scored_tasks, recipe.reward, mixture.answers, recipe.judge)
    with closing(mixture):
        prompts = measure(mixture, encoder.num_tokens, recipe.engine.max_context_tokens, seed=recipe.run.seed)
        held_out = mixture.held_out(recipe.eval.num_prompts, or_fewer=True) if recipe.eval.enabled else []
        prompt_ids = encoder.ids(PromptStream(mixture, recipe.run.seed).take(1)[0])
    parameters = sum(p.numel() for p in model.parameters())
    weights_bytes, cache_bytes = _engine_bytes(recipe, config, model)
    trainer_bytes, gradient_bytes = _trainer_bytes(recipe, model)
    device = torch_device(recipe.model.device) if is_here else None
    trajectories = recipe.rollout.batch_groups * recipe.rollout.group_size
    return Footprint(
        example_prompt=tokenizer.text(prompt_ids, keep_special=True),
        example_prompt_tokens=len(prompt_ids),
        parameters=parameters,
        trainer_bytes=_rank_bytes(recipe, trainer_bytes, gradient_bytes),
        gradient_bytes=gradient_bytes,
        engine_bytes=weights_bytes + cache_bytes,
        cache_bytes=cache_bytes,
        available_bytes=None if device is None else available_bytes(device),
        device=str(device or recipe.model.device),
        max_positions=_max_positions(config),
        prompts=tuple(prompts),
        held_out_prompts=len(held_out),
        trajectories_per_step=trajectories,
        max_generated_tokens_per_step=trajectories * recipe.rollout.max_new_tokens,
        updates_per_step=recipe.algorithm.num_updates,
        experimental=experimental_parts(choices_with(recipe, config)),
    )


def _engine_bytes(recipe: Recipe, config: PretrainedConfig, model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of the engine's weights and of its KV cache, both in the engine's dtype."""
    width = torch_dtype(recipe.engine.dtype).itemsize
    parameters = sum(p.numel() for p in model.parameters())
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_bytes_per_token = 2 * text.num_hidden_layers * heads * head_dim * width
    return width * parameters, recipe.engine.slots * recipe.engine.max_context_tokens * int(kv_bytes_per_token)


def _trainer_bytes(recipe: Recipe, model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of the whole trainer, and the part of these bytes that gradients take.

    The trainer's bytes are weights, gradients and moments of the policy (or its adapter) and of a separate critic, and
    the weights of a reference model.
    """
    whole = sum(p.numel() for p in model.parameters())
    trained, needed = whole, 16 * whole  # float32: 4 bytes each for weight, gradient and two AdamW moments
    if recipe.algorithm.advantage == "gae" and recipe.algorithm.critic == "separate":
        critic = sum(p.numel() for p in model.base_model.parameters())
        trained, needed = trained + critic, needed + 16 * critic
    if recipe.algorithm.kl_coef and (recipe.lora is None or recipe.algorithm.reference is not None):
        needed += torch_dtype(recipe.trainer.dtype).itemsize * whole
    if recipe.lora is not None:
        model = deepcopy(model)  # of no size, on the meta device; the caller's model gets no adapters
        add_adapters(model, recipe.lora, recipe.run.seed)
        adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
        trained += adapter - whole
        needed += 4 * whole + 16 * adapter - 16 * whole
    return needed, 4 * trained


def _rank_bytes(recipe: Recipe, trainer_bytes: int, gradient_bytes: int) -> int:
    """Return the bytes of one rank: its shard of the trainer's tensors, and the gradients of the other ranks' shards.

    A rank keeps whole gradients until the end of an update, unless `trainer.shard_gradients` is set.
    """
    ranks = recipe.trainer.ranks
    whole = 0 if recipe.trainer.shard_gradients or ranks == 1 else gradient_bytes - gradient_bytes // ranks
    return -(-trainer_bytes // ranks) + whole


def check_room(recipe: Recipe, *, is_here: bool) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return the configuration of a recipe's model, and the model without memory for its weights (meta device).

    `is_here` states whether trainer and engine run on this machine. Raises UserError if the model's context or this
    machine's memory is too small. Activations are not counted, so the run may still exceed the memory.
    """
    path = base_of_adapter(Path(recipe.model.path)) or recipe.model.path
    name, revision = split_revision(path)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path: {path!r} is not a causal LM: {first_line(error)}") from error
    check_support(choices_with(recipe, config))
    positions = _max_positions(config)
    if positions is not None and recipe.engine.max_context_tokens > positions:
        raise UserError(
            f"engine.max_context_tokens: got {recipe.engine.max_context_tokens}, but the model in {path!r} supports "
            f"at most {positions} positions; lower the value"
        )
    if is_here and recipe.rollout.is_colocated:
        _check_turns(recipe, config, model)
    elif is_here:
        _check_side_by_side(recipe, config, model)
    return config, model


def choices_with(recipe: Recipe, config: PretrainedConfig) -> dict[str, tuple[str, ...]]:
    """Return the run's values on the axes of `support.toml`, including its architecture and this machine's platform."""
    device = torch_device(recipe.model.device).type
    return {**recipe.choices(), "architecture": (str(config.model_type),), "platform": (device,)}


def _max_positions(config: PretrainedConfig) -> int | None:
    """Return the model's maximum context including rotary scaling; None if its configuration has no such limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    scaling = getattr(text, "rope_scaling", None) or {}
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    original = scaling.get("original_max_position_embeddings") or positions if factor else positions
    return max(positions, int(original * (factor or 1)))


def _check_side_by_side(recipe: Recipe, config: PretrainedConfig, model: PreTrainedModel) -> None:
    device = torch_device(recipe.model.device)
    weights, cache = _engine_bytes(recipe, config, model)
    ranks = recipe.trainer.ranks if device.type == "cpu" else 1
    needed = {"the trainer": ranks * _rank_bytes(recipe, *_trainer_bytes(recipe, model))}
    advice = {"the trainer": "use a smaller model, or [lora]"}
    if recipe.engine.kind == "embedded" and (recipe.swarm.workers or not recipe.swarm.is_on):
        engines = max(1, recipe.engine.processes, recipe.swarm.workers)
        each = "" if engines == 1 else f" of {engines} engines"
        needed |= {f"the KV cache{each}": engines * cache, f"the weights{each}": engines * weights}
        advice |= {f"the KV cache{each}": "lower engine.slots or engine.max_context_tokens"}
        advice |= {f"the weights{each}": 'use a smaller model or fewer engines, or set engine.dtype = "bfloat16"'}
    free = available_bytes(device)
    if sum(needed.values()) > free:
        first, *others = sorted(needed, key=lambda name: -needed[name])
        beside = "".join(f", {name} {gib(needed[name])}" for name in others)
        raise UserError(
            f"{first} needs {gib(needed[first])}{beside}, but {gib(free)} are free on {device}: {advice[first]}"
        )


def gib(num_bytes: int) -> str:
    """Return a size for the user."""
    return f"{num_bytes / 2**30:.3g} GiB"


def _check_turns(recipe: Recipe, config: PretrainedConfig, model: PreTrainedModel) -> None:
    """Raise UserError if the shared device cannot hold the engine alone or the trainer alone."""
    engine = sum(_engine_bytes(recipe, config, model))
    trainer, gradients = _trainer_bytes(recipe, model)
    device, host = torch_device(recipe.model.device), torch.device("cpu")
    resting = trainer - gradients
    if device.type == "cpu":  # on a CPU a sleeping trainer stays in the same memory
        engine += resting
    else:
        _check_fits(resting, host, "the sleeping trainer")
    _check_fits(engine, device, "the engine")
    _check_fits(trainer, device, "the trainer")


def _check_fits(needed: int, device: torch.device, what: str) -> None:
    available = available_bytes(device)
    if needed > available:
        raise UserError(
            f'rollout.placement: got "colocated", but {what} needs {needed / 1e9:.2f} GB and {device} has '
            f"{available / 1e9:.2f} GB free; use a smaller model or [lora], or lower engine.slots or "
            "engine.max_context_tokens"
        )
