"""What a recipe will need, as far as it can be known before starting: `baton train --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from baton.config import Recipe
from baton.errors import UserError
from baton.policy.adapters import add_adapters
from baton.policy.load import torch_device, torch_dtype
from baton.policy.memory import available_bytes
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
    """float32 master weights, gradients and two AdamW moments of what is trained; a frozen model's weights. Of
    each rank, where there are several."""
    gradient_bytes: int
    """Of these, what a trainer at rest does not keep."""
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
    engine_bytes = _engine_bytes(recipe, config, parameters)
    trainer_bytes, gradient_bytes = _trainer_bytes(recipe, model)
    trajectories = recipe.rollout.batch_groups * recipe.rollout.group_size
    return Footprint(
        example_prompt=tokenizer.text(prompt_ids, keep_special=True),
        example_prompt_tokens=len(prompt_ids),
        parameters=parameters,
        trainer_bytes=_rank_bytes(recipe, trainer_bytes, gradient_bytes),
        gradient_bytes=gradient_bytes,
        engine_bytes=engine_bytes,
        trajectories_per_step=trajectories,
        max_generated_tokens_per_step=trajectories * recipe.rollout.max_new_tokens,
        updates_per_step=recipe.algorithm.num_updates,
    )


def _engine_bytes(recipe: Recipe, config: PretrainedConfig, parameters: int) -> int:
    """Weights and slots in the engine's dtype."""
    width = torch_dtype(recipe.engine.dtype).itemsize
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_bytes_per_token = 2 * text.num_hidden_layers * heads * head_dim * width
    return int(width * parameters + recipe.engine.slots * recipe.engine.max_context_tokens * kv_bytes_per_token)


def _trainer_bytes(recipe: Recipe, model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of the trainer, and those of its gradients among them.

    Weights, gradients and moments of the policy or its adapter, of a separate critic, and a reference model.
    """
    whole = sum(p.numel() for p in model.parameters())
    trained, needed = whole, 16 * whole
    if recipe.algorithm.advantage == "gae" and recipe.algorithm.critic == "separate":
        critic = sum(p.numel() for p in model.base_model.parameters())
        trained, needed = trained + critic, needed + 16 * critic
    if recipe.algorithm.kl_coef and (recipe.lora is None or recipe.algorithm.reference is not None):
        needed += torch_dtype(recipe.trainer.dtype).itemsize * whole
    if recipe.lora is not None:
        add_adapters(model, recipe.lora, recipe.run.seed)
        adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
        trained += adapter - whole
        needed += 4 * whole + 16 * adapter - 16 * whole
    return needed, 4 * trained


def _rank_bytes(recipe: Recipe, trainer_bytes: int, gradient_bytes: int) -> int:
    """What one rank has of it: a shard of everything; until an update's end whole gradients, unless they are cut."""
    ranks = recipe.trainer.ranks
    whole = 0 if recipe.trainer.shard_gradients or ranks == 1 else gradient_bytes - gradient_bytes // ranks
    return -(-trainer_bytes // ranks) + whole


def check_room(recipe: Recipe) -> None:
    """Raise UserError where one device cannot hold what trainer or engine has in its turn, before either is made.

    Activations come on top of a trainer's turn, so that what is let through may still be too much.
    """
    config = AutoConfig.from_pretrained(recipe.model.path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    engine = _engine_bytes(recipe, config, sum(p.numel() for p in model.parameters()))
    trainer, gradients = _trainer_bytes(recipe, model)
    device, host = torch_device(recipe.model.device), torch.device("cpu")
    resting = trainer - gradients
    if device.type == "cpu":  # there is nowhere to go: at rest it stays where it is
        engine += resting
    else:
        _check_fits(resting, host, "what the trainer keeps in host memory while it rests")
    _check_fits(engine, device, "the engine's turn")
    _check_fits(trainer, device, "the trainer's turn")


def _check_fits(needed: int, device: torch.device, what: str) -> None:
    available = available_bytes(device)
    if needed > available:
        raise UserError(
            f'rollout.placement: got "colocated", but {what} needs {needed / 1e9:.2f} GB and {device} has '
            f"{available / 1e9:.2f} GB free; allowed is a smaller model, [lora], or fewer engine.slots and "
            "engine.max_context_tokens"
        )
