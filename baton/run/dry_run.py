"""Estimate the memory and work of a recipe before the run starts, for `baton train --dry-run`."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from baton.cost.memory import stage_bytes
from baton.errors import UserError
from baton.policy.adapters import base_of_adapter, check_targets
from baton.policy.load import check_weight_files, model_errors, read_config, torch_device
from baton.policy.memory import available_bytes
from baton.policy.reward_model import check_generative_model, check_reward_model
from baton.policy.routing import no_replay, routers_of
from baton.policy.stages import stages_plan
from baton.policy.tensor_parallel import products_plan
from baton.policy.tokenizer import check_model_path, load_tokenizer
from baton.recipe.recipe import Recipe
from baton.recipe.support import check_support, experimental_parts
from baton.rewards.scorer import RewardScorer
from baton.run.devices import layout_of
from baton.run.memory import (
    ProcessMemory,
    change_that_fits,
    engine_terms_of,
    explain,
    gib,
    most_tokens_of,
    needed_bytes,
    processes_of,
    sleeping_bytes,
    stages_of,
)
from baton.run.tokenization import PromptEncoder
from baton.specs.model import ModelSpec
from baton.tasks.prompt_lengths import PromptLengths, measure
from baton.tasks.stream import PromptStream, TaskMixture
from baton.trainer.factory import check_not_adapted, check_vocabulary
from baton.trainer.memory import spec_of
from baton.trainer.optimizer import Schedule


class Footprint(msgspec.Struct, frozen=True):
    """The estimated memory and work of a recipe."""

    example_prompt: str
    """Text of the first training prompt, including special tokens."""
    example_prompt_tokens: int
    parameters: int
    trainer_bytes: int
    """Peak memory of one trainer rank: weights, gradients, moments, activations and copies. The assumed memory outside
    of tensors is not included."""
    engine_bytes: int
    """Memory of an embedded engine with the recipe's slots and context: weights, KV cache, copies."""
    cache_bytes: int
    """Memory of the KV cache, which is part of `engine_bytes`."""
    processes: tuple[ProcessMemory, ...]
    gpus: str
    """The GPUs of each trainer rank and engine on this machine; empty for a CPU and for other machines."""
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
    trainer and engine run on this machine. Raises UserError if a run of the recipe would not start.
    """
    trainer = recipe.trainer
    Schedule(trainer.warmup_steps, trainer.decay, recipe.run.steps).check("trainer")
    tokenizer = load_tokenizer(recipe.model.path)
    check_weight_files(recipe.model.path)
    config, spec = check_room(recipe, is_here=is_here)
    encoder = PromptEncoder(tokenizer, (*recipe.task, *recipe.eval.task))
    mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments, recipe.eval.task, encoder.tool_format)
    RewardScorer(mixture.scored_tasks, recipe.reward, mixture.answers, recipe.judge)
    with closing(mixture):
        prompts = measure(mixture, encoder.num_tokens, recipe.engine.max_context_tokens, seed=recipe.run.seed)
        held_out = mixture.held_out(recipe.eval.num_prompts, or_fewer=True) if recipe.eval.enabled else []
        prompt_ids = encoder.ids(PromptStream(mixture, recipe.run.seed).take(1)[0])
    on_cpu = _on_cpu(recipe, is_here=is_here)
    engine = engine_terms_of(recipe, spec, on_cpu=on_cpu)
    layout = layout_of(recipe) if is_here else None
    cache = next(term for term in engine if "KV cache" in term.name)
    device = torch_device(recipe.model.device) if is_here else None
    trajectories = recipe.rollout.batch_groups * recipe.rollout.group_size
    return Footprint(
        example_prompt=tokenizer.text(prompt_ids, keep_special=True),
        example_prompt_tokens=len(prompt_ids),
        parameters=round(spec.params),
        trainer_bytes=math.ceil(max(stage_bytes(*stage) for stage in stages_of(recipe, spec, on_cpu=on_cpu))),
        engine_bytes=math.ceil(sum(term.bytes(spec.num_layers) for term in engine)),
        cache_bytes=math.ceil(cache.bytes(spec.num_layers)),
        processes=processes_of(recipe, spec, on_cpu=on_cpu, layout=layout),
        gpus="" if layout is None else str(layout),
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


def trainer_bytes(recipe: Recipe, *, is_here: bool, on_cpu: bool | None = None) -> tuple[tuple[int, float], ...]:
    """Return the trainer's memory for several sizes of the microbatch. Each pair has a maximum number of tokens in a
    microbatch, and the bytes of the trainer's process or of its largest rank. The maxima are all powers of two below
    the recipe's maximum, and the recipe's maximum itself. If the trainer runs on this machine (`is_here`) without
    separate ranks, its process also contains the hub, and the bytes include the hub's memory. `on_cpu`: whether the
    trainer runs on a CPU; the default depends on `model.device`."""
    _, spec = check_room(recipe, is_here=is_here)
    on_cpu = _on_cpu(recipe, is_here=is_here) if on_cpu is None else on_cpu
    in_hub, most, found = is_here and recipe.trainer.ranks == 1, most_tokens_of(recipe), []
    for tokens in (*(2**power for power in range((most - 1).bit_length())), most):
        processes = processes_of(recipe, spec, on_cpu=on_cpu, most_tokens=tokens)
        sizes = {process.name: process.num_bytes for process in processes}
        # the name of a reward model contains text from the recipe
        own = max(size for name, size in sizes.items() if "trainer" in name and "reward model" not in name)
        found.append((tokens, float(own + in_hub * sizes.get("the hub", 0))))
    return tuple(found)


def _on_cpu(recipe: Recipe, *, is_here: bool) -> bool:
    """Return whether trainer and engine run on CPUs. On other machines, "auto" is assumed to be a GPU."""
    name = recipe.model.device
    return torch_device(name).type == "cpu" if is_here else name == "cpu"


def check_room(recipe: Recipe, *, is_here: bool) -> tuple[PretrainedConfig, ModelSpec]:
    """Return the configuration of a recipe's model, and its dimensions.

    `is_here` states whether trainer and engine run on this machine. Raises UserError if the model cannot be loaded, if
    the combination of settings is refused, if the context of the model or of a reward model is too short, or if this
    machine has too little memory. If memory is too small, the error names a change of the recipe with which the run
    fits.
    """
    path = base_of_adapter(Path(recipe.model.path)) or recipe.model.path
    refused = f"model.path: {path!r} is not a causal LM"
    config = read_config(path, refused)
    with model_errors(refused), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    check_support(choices_with(recipe, config))
    _check_trainable(recipe, model)
    if recipe.algorithm.kl_coef and recipe.algorithm.reference is not None:
        _check_reference(recipe.algorithm.reference, config)
    check_reward_models(recipe)
    positions = _max_positions(config)
    if positions is not None and recipe.engine.max_context_tokens > positions:
        raise UserError(
            f"engine.max_context_tokens: got {recipe.engine.max_context_tokens}, but the model in {path!r} supports "
            f"at most {positions} positions; lower the value"
        )
    spec = spec_of(config, sum(p.numel() for p in model.parameters()))
    if is_here:
        _check_memory(recipe, spec)
    return config, spec


def _check_trainable(recipe: Recipe, model: PreTrainedModel) -> None:
    """Raise UserError if the model cannot be divided among ranks, adapted or replayed as the recipe asks."""
    trainer = recipe.trainer
    if recipe.lora is not None:
        check_not_adapted(recipe.model.path)
        check_targets(model, recipe.lora)
    if trainer.tensor_parallel > 1:
        products_plan(model, trainer.tensor_parallel)
    if trainer.num_stages > 1:
        stages_plan(model)
    if trainer.moe_replay != "off" and not routers_of(model):
        raise no_replay(model)


def _check_reference(path: str, policy: PretrainedConfig) -> None:
    """Raise UserError if a reference model is missing or incomplete, or has another vocabulary than the policy."""
    base = path
    while (below := base_of_adapter(Path(base))) is not None:
        base = below
    try:
        if not Path(base).is_dir():
            check_model_path(base)
        check_weight_files(base)
        config = read_config(base, f"model.path: {base!r} is not a causal LM")
    except UserError as error:
        raise UserError(str(error).replace("model.path", "algorithm.reference")) from error
    check_vocabulary(path, config, policy)


def check_reward_models(recipe: Recipe) -> None:
    """Raise UserError if a reward model of the recipe cannot score the recipe's trajectories."""
    most = recipe.engine.max_context_tokens
    for reward in (each for each in recipe.reward if each.kind == "model"):
        path = reward.model or ""
        if reward.starts_server:
            longest = check_generative_model(path)
            if longest is not None and longest < reward.context_tokens:
                raise UserError(
                    f"[[reward]] context_tokens: got {reward.context_tokens}, but {path!r} reads at most {longest} "
                    "tokens; lower the value"
                )
            continue
        _, _, positions = check_reward_model(path)
        if positions is not None and positions < most:
            raise UserError(
                f"[[reward]] model: {path!r} reads at most {positions} tokens, but prompt and response may have "
                f"engine.max_context_tokens = {most}; lower that value, or use a model with a longer context"
            )


def choices_with(recipe: Recipe, config: PretrainedConfig) -> dict[str, tuple[str, ...]]:
    """Return the run's value on each axis of `support.toml`, including the model's architecture and this machine's
    platform."""
    device = torch_device(recipe.model.device).type
    platform = "rocm" if device == "cuda" and torch.version.hip else device
    return {**recipe.choices(), "architecture": (str(config.model_type),), "platform": (platform,)}


def _max_positions(config: PretrainedConfig) -> int | None:
    """Return the model's maximum context including rotary scaling; None if its configuration has no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    scaling = getattr(text, "rope_scaling", None) or {}
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    original = scaling.get("original_max_position_embeddings") or positions if factor else positions
    return max(positions, int(original * (factor or 1)))


def _check_memory(recipe: Recipe, model: ModelSpec) -> None:
    device = torch_device(recipe.model.device)
    free, on_cpu = available_bytes(device), device.type == "cpu"

    def processes(changed: Recipe) -> tuple[ProcessMemory, ...]:
        return processes_of(changed, model, on_cpu=on_cpu, layout=layout_of(changed))

    def fits(changed: Recipe) -> bool:
        return needed_bytes(processes(changed), on_cpu=on_cpu) <= free

    if not fits(recipe):
        own = [process for process in processes(recipe) if on_cpu or not process.on_host]
        raise UserError(explain(own, free, str(device), change_that_fits(recipe, fits)))
    if on_cpu:
        return
    uses: dict[str, float] = {}
    if recipe.rollout.is_colocated:
        stages = stages_of(recipe, model, on_cpu=False)
        ranks = sum(sleeping_bytes(phases, count) for phases, count in stages) * recipe.trainer.ranks // len(stages)
        uses['the sleeping trainer (rollout.placement = "colocated")'] = ranks
    uses |= {process.name: process.num_bytes for process in processes(recipe) if process.on_host}
    host = available_bytes(torch.device("cpu"))
    if sum(uses.values()) > host:
        needs = " and ".join(f"{name} needs {gib(num_bytes)}" for name, num_bytes in uses.items())
        raise UserError(
            f"{needs}, but {gib(host)} are free in host memory; use a smaller model or [lora], or disable "
            'checkpoint.background and rollout.placement = "colocated"'
        )
