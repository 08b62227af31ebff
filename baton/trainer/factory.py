"""Constructs a trainer from plain values, in this process or in each rank."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from baton.errors import UserError
from baton.policy.adapters import base_of_adapter
from baton.policy.load import load_empty, load_model, open_weights, torch_device, torch_dtype
from baton.policy.settings import LoraSettings
from baton.policy.tokenizer import Tokenizer
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.parallel.group import SingleRank
from baton.trainer.parallel.messages import TrainerSetup
from baton.trainer.settings import TrainerSettings


def make_trainer(setup: TrainerSetup, tokenizer: Tokenizer, parallel: SingleRank | None = None) -> LocalTrainer:
    """Load the models and construct a trainer. Raises UserError for a model that cannot be loaded or trained.

    With several ranks, each rank constructs the models on the meta device, shards them, and reads only its own shards
    from the model's files. With adapters, the frozen weights of the model are stored in the dtype in which linear
    layers compute.
    """
    settings = TrainerSettings.model_validate(setup.trainer)
    algorithm = AlgorithmSettings.model_validate(setup.algorithm)
    lora = None if setup.lora is None else LoraSettings.model_validate(setup.lora)
    if lora is not None:
        check_not_adapted(setup.model_path)
    device = torch_device(setup.device)
    dtype = torch.float32 if lora is None else torch_dtype(settings.dtype, device)
    model = _load(setup, setup.model_path, dtype, device, parallel)
    reference = None
    if algorithm.kl_coef and (lora is None or algorithm.reference is not None):
        reference = _load_reference(setup, settings, algorithm.reference, model, device, parallel)
    return LocalTrainer(
        model,
        tokenizer,
        settings,
        algorithm,
        temperature=setup.temperature,
        total_steps=setup.total_steps,
        version=setup.version,
        max_new_tokens=setup.max_new_tokens,
        max_staleness=setup.max_staleness,
        reference=reference,
        lora=lora,
        seed=setup.seed,
        publish_dtype=getattr(torch, setup.publish_dtype),
        parallel=parallel,
    )


def _load(
    setup: TrainerSetup, path: str, dtype: torch.dtype, device: torch.device, parallel: SingleRank | None
) -> PreTrainedModel:
    if parallel is None:
        return load_model(path, dtype=dtype, device=device, attention=setup.attention, head_dtype=setup.head_dtype)
    model = load_empty(path, dtype=dtype, attention=setup.attention, head_dtype=setup.head_dtype)
    parallel.fill_later(model, open_weights(path, model))
    return model


def _load_reference(
    setup: TrainerSetup,
    settings: TrainerSettings,
    path: str | None,
    policy: PreTrainedModel,
    device: torch.device,
    parallel: SingleRank | None,
) -> PreTrainedModel:
    """Load the frozen reference model. Raises UserError if reference and policy have different vocabulary sizes."""
    try:
        model = _load(setup, path or setup.model_path, torch_dtype(settings.dtype, device), device, parallel)
    except UserError as error:
        raise UserError(str(error).replace("model.path", "algorithm.reference")) from error
    check_vocabulary(path, model.config, policy.config)
    return model.requires_grad_(False)


def check_not_adapted(path: str) -> None:
    """Raise UserError if `path` holds an adapter, for a run that trains adapters itself."""
    if base_of_adapter(Path(path)) is not None:
        raise UserError(
            f"model.path: {path!r} holds an adapter, and [lora] would train a second one that cannot be loaded without "
            "the first; resume the adapter's run with --resume, or remove [lora] to train the merged model"
        )


def check_vocabulary(path: str | None, reference: PretrainedConfig, policy: PretrainedConfig) -> None:
    """Raise UserError if the reference model in `path` and the policy have different vocabulary sizes."""
    sizes = reference.get_text_config().vocab_size, policy.get_text_config().vocab_size
    if sizes[0] != sizes[1]:
        raise UserError(
            f"algorithm.reference: {path!r} has a vocabulary of {sizes[0]} tokens and the policy one of {sizes[1]}; "
            "allowed is a model with the policy's vocabulary"
        )
