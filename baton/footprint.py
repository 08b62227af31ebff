"""What a recipe will need, as far as it can be known before starting: `baton train --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from baton.config import Recipe
from baton.policy.adapters import add_adapters
from baton.policy.load import torch_dtype
from baton.policy.tokenizer import load_tokenizer
from baton.tasks.rewards import Judge
from baton.tasks.stream import PromptStream, TaskMixture


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a recipe will need, as far as it can be known before starting."""

    example_prompt: str
    """The first training prompt as the engine will see it, special tokens included."""
    example_prompt_tokens: int
    parameters: int
    trainer_bytes: int
    """float32 master weights, gradients and two AdamW moments of what is trained; a frozen model's weights."""
    engine_bytes: int
    """The engine's weights and its whole KV cache."""
    trajectories_per_step: int
    max_generated_tokens_per_step: int
    updates_per_step: int


def footprint(recipe: Recipe) -> Footprint:
    """Work out memory and work of a recipe; opens its tasks as a start would, but reads no weights."""
    tokenizer = load_tokenizer(recipe.model.path)
    mixture = TaskMixture(recipe.task, recipe.answer)
    Judge(mixture.tasks, recipe.reward, recipe.answer.format, recipe.judge)
    mixture.held_out(recipe.eval.num_prompts)
    prompt_ids = tokenizer.prompt_ids(PromptStream(mixture, recipe.run.seed).take(1)[0].messages)
    config = AutoConfig.from_pretrained(recipe.model.path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    parameters = sum(p.numel() for p in model.parameters())
    width = torch_dtype(recipe.engine.dtype).itemsize
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_bytes_per_token = 2 * text.num_hidden_layers * heads * head_dim * width
    trajectories = recipe.rollout.batch_groups * recipe.rollout.group_size
    return Footprint(
        example_prompt=tokenizer.text(prompt_ids, keep_special=True),
        example_prompt_tokens=len(prompt_ids),
        parameters=parameters,
        trainer_bytes=_trainer_bytes(recipe, model),
        engine_bytes=width * parameters + recipe.engine.slots * recipe.engine.max_context_tokens * kv_bytes_per_token,
        trajectories_per_step=trajectories,
        max_generated_tokens_per_step=trajectories * recipe.rollout.max_new_tokens,
        updates_per_step=recipe.algorithm.num_updates,
    )


def _trainer_bytes(recipe: Recipe, model: PreTrainedModel) -> int:
    """Weights, gradients and moments of the policy or its adapter, of a separate critic, and a reference model."""
    whole = sum(p.numel() for p in model.parameters())
    needed = 16 * whole
    if recipe.algorithm.advantage == "gae" and recipe.algorithm.critic == "separate":
        needed += 16 * sum(p.numel() for p in model.base_model.parameters())
    if recipe.algorithm.kl_coef and (recipe.lora is None or recipe.algorithm.reference is not None):
        needed += torch_dtype(recipe.trainer.dtype).itemsize * whole
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, recipe.run.seed)
        adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needed += 4 * whole + 16 * adapter - 16 * whole
    return needed
