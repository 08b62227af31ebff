"""Setup of the models before the first step: packing, critic, activation checkpointing, compilation, attention cost."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from baton.errors import UserError
from baton.policy.head import Head
from baton.policy.load import torch_dtype
from baton.policy.logprobs import (
    checkpoint_activations,
    compile_blocks,
    compute_in,
    packs_as_it_pads,
    prefer_float32_attention,
)
from baton.policy.packing import prefer_packed_attention
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.parallel.group import SingleRank
from baton.trainer.settings import TrainerSettings


def even_tokens(model: PreTrainedModel) -> float:
    """Return the row length, in tokens, at which attention costs as much as the linear layers; inf if unknown.

    Consider one token of a row of n tokens. The linear layers need one multiplication per parameter. Attention reads
    n/2 earlier tokens on average. For each of them, it needs layers × width multiplications for the scores and as many
    for the values. The sum is n × layers × width.
    """
    shape = model.config.get_text_config()
    heads, layers = getattr(shape, "num_attention_heads", 0), getattr(shape, "num_hidden_layers", 0)
    width = heads * (getattr(shape, "head_dim", None) or shape.hidden_size // heads) if heads else 0
    return model.num_parameters() / (layers * width) if layers * width else float("inf")


def fit_attention(
    model: PreTrainedModel,
    trunk: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    settings: TrainerSettings,
    parallel: SingleRank,
) -> bool:
    """Select the attention implementation of the policy, a critic's trunk and the reference; return whether rows are
    packed.

    Rows are packed if `trainer.packing` is 'always', or 'auto' on CUDA, and if policy and reference each give packed
    and padded rows equal scores. If the scores differ, 'always' raises UserError.
    """
    dtype = torch_dtype(settings.dtype, model.device)
    if dtype is torch.bfloat16:
        prefer_float32_attention(model, trunk)
    if settings.packing == "never" or (settings.packing == "auto" and model.device.type != "cuda"):
        return False
    prefer_packed_attention(model, trunk, reference)
    has_head = parallel.pipeline.is_last
    for each in (model,) if reference is None or reference is model else (model, reference):
        with compute_in(dtype, model.device):
            is_sound = parallel.run(each, lambda whole: packs_as_it_pads(whole, has_head=has_head))
        if parallel.largest(float(not is_sound)) == 0.0:  # on every stage
            continue
        if settings.packing == "always":
            raise UserError(
                f"trainer.packing: got 'always', but {type(each).__name__} on {model.device} does not score "
                "concatenated trajectories like separate ones; allowed are 'auto' and 'never'"
            )
        return False
    return True


def fit_sharing(
    model: PreTrainedModel, trunk: PreTrainedModel | None, reference: PreTrainedModel | None, settings: TrainerSettings
) -> bool:
    """Return whether `trainer.share_prompts` is set; if it is set, select an attention implementation that supports
    shared prompts. Raises UserError if the policy or the reference computes different scores with a shared prompt than
    with separate trajectories."""
    if not settings.share_prompts:
        return False
    prefer_packed_attention(model, trunk, reference)
    for each in (model,) if reference is None else (model, reference):
        with compute_in(torch_dtype(settings.dtype, model.device), model.device):
            is_sound = packs_as_it_pads(each, shares=(1, 3, 2))
        if not is_sound:
            raise UserError(
                f"trainer.share_prompts: got true, but {type(each).__name__} on {model.device} does not score "
                "responses to a shared prompt like separate trajectories; allowed is false"
            )
    return True


def check_critic(head: Head | None, model: PreTrainedModel, algorithm: AlgorithmSettings) -> None:
    """Raise UserError if a shared critic is configured, but `find_head` does not support the policy's head (`head` is
    None)."""
    if algorithm.advantage == "gae" and algorithm.critic == "shared" and head is None:
        raise UserError(
            f"algorithm.critic: got 'shared', but {type(model).__name__} does not compute its logits from its last "
            "hidden states; allowed is 'separate'"
        )


def trade_time_and_memory(model: PreTrainedModel, settings: TrainerSettings) -> None:
    """Enable activation checkpointing and compilation as configured. Raises UserError if `trainer.compile` or
    `adamw8bit` needs a compiler or a package that is missing."""
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if settings.compile:
        _check_compiler("trainer.compile", model.device)
        compile_blocks(model)
    if settings.optimizer == "adamw8bit":
        if find_spec("torchao") is None:
            raise UserError("trainer.optimizer: 'adamw8bit' needs torchao: run `pip install 'baton-rl[optimizer]'`")
        _check_compiler("trainer.optimizer = 'adamw8bit'", model.device)


def _check_compiler(key: str, device: torch.device) -> None:
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        raise UserError(f"{key} needs a C++ compiler, but neither g++ nor clang++ was found on the PATH")
