"""What is decided of models before the first step: packing, the critic, time against memory, what a row costs."""

from __future__ import annotations

import os
import shutil

import torch
from transformers import PreTrainedModel

from baton.errors import UserError
from baton.policy.head import find_head
from baton.policy.load import torch_dtype
from baton.policy.logprobs import checkpoint_activations, compute_in, packs_as_it_pads, prefer_float32_attention
from baton.policy.packing import prefer_packed_attention
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.critic import Critic
from baton.trainer.parallel.group import SingleRank
from baton.trainer.settings import TrainerSettings


def even_tokens(model: PreTrainedModel) -> float:
    """Return at how many tokens a row's attention costs what its linear layers cost; inf where that is unknown.

    A token meets each parameter once, and on average half of its row's n tokens twice (scores and values) in each
    layer: n × layers × width multiplications against the parameters'.
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
    """Choose how the policy, a critic's trunk and the reference attend; return whether rows are packed.

    They are where it is asked for, or faster; and the model is found to score them as padded ones.
    """
    if settings.dtype == "bfloat16":
        for each in (model, trunk):
            if each is not None:
                prefer_float32_attention(each)
    if settings.packing == "never" or (settings.packing == "auto" and model.device.type != "cuda"):
        return False
    for each in (model, trunk, reference):
        if each is not None:
            prefer_packed_attention(each)
    with compute_in(torch_dtype(settings.dtype), model.device):
        is_sound = parallel.run(model, packs_as_it_pads)
    if not is_sound and settings.packing == "always":
        raise UserError(
            f"trainer.packing: got 'always', but {type(model).__name__} on {model.device} does not score trajectories "
            "that lie one behind the other as it does each by itself; allowed are 'auto' and 'never'"
        )
    return is_sound


def make_critic(model: PreTrainedModel, algorithm: AlgorithmSettings) -> Critic | None:
    """Return the critic that an algorithm wants, or None. Raises UserError where the policy cannot carry its head."""
    if algorithm.advantage != "gae":
        return None
    if algorithm.critic == "shared" and find_head(model) is None:
        raise UserError(
            f"algorithm.critic: got 'shared', but the hidden states of {type(model).__name__} are not what its logits "
            "are made of; allowed is 'separate'"
        )
    return Critic(model, is_separate=algorithm.critic == "separate")


def trade_time_and_memory(model: PreTrainedModel, settings: TrainerSettings) -> None:
    """Switch activation checkpointing and compilation on, where they are asked for. Raises UserError."""
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if settings.compile:
        _check_compiler(model.device)
        model.base_model.compile(dynamic=True)  # the head is computed apart, piece by piece


def _check_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        raise UserError("trainer.compile needs a C++ compiler (g++ or clang++), and none was found on the PATH")
