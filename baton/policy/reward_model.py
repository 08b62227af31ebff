"""A reward model: a sequence classifier with one label, which scores conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from baton.errors import UserError, first_line
from baton.policy.load import model_errors, torch_device, torch_dtype
from baton.policy.settings import DTypeChoice
from baton.policy.tokenizer import Tokenizer, check_model_path, load_tokenizer, split_revision
from baton.types import Message

KEY = "[[reward]] model"
PROBE = (Message("user", "1 + 1"), Message("assistant", "2"))


class RewardModel:
    """A classifier on a device. Its own tokenizer and chat template format the conversations, as in TRL."""

    def __init__(self, path: str, device: str, dtype: DTypeChoice, batch_tokens: int) -> None:
        """Load the model from safetensors files. Python code in the model's directory is not run. Raises UserError."""
        self._tokenizer, config, self.max_positions = check_reward_model(path)
        self._device = torch_device(device, "[[reward]] devices")
        self.batch_tokens = 0 if self._device.type == "cpu" else batch_tokens
        """Maximum number of tokens of a batch, including padding. With 0, each sequence is a batch of its own. On a
        CPU, the value is always 0, so the bits of a score do not depend on the other sequences."""
        name, revision = split_revision(path)
        value_type = torch_dtype(dtype, self._device)
        with model_errors(f"{KEY}: no reward model could be loaded from {path!r}"):
            model, info = AutoModelForSequenceClassification.from_pretrained(
                name,
                revision=revision,
                config=config,
                dtype=value_type,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        if missing := sorted(info["missing_keys"]):
            raise UserError(
                f"{KEY}: the files of {path!r} lack {missing[0]}; give a model that was saved as a sequence classifier"
            )
        text = model.config.get_text_config()
        text.use_cache = False
        for own in (self._tokenizer.hf.pad_token_id, self._tokenizer.hf.eos_token_id):
            if text.pad_token_id is None:  # the model scores the last token that is not padding
                text.pad_token_id = own
        self._pad: int = text.pad_token_id
        self._model = model.to(self._device).eval()

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation that ends with a response. Errors of the chat template are not caught."""
        return list(self._tokenizer.prompt_ids(messages, is_complete=True))

    @torch.inference_mode()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence, computed in one batch, which is padded on the right."""
        longest = max(map(len, sequences))
        rows = [[*ids, *[self._pad] * (longest - len(ids))] for ids in sequences]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
        tensors = (torch.tensor(values, device=self._device) for values in (rows, mask))
        logits = self._model(*tensors).logits
        return [float(value) for value in logits[:, 0].float().tolist()]


def check_reward_model(path: str) -> tuple[Tokenizer, Any, int | None]:
    """Return the tokenizer, the configuration and the maximum context of a reward model. Download a model that the hub
    cache lacks. Raises UserError if the model is not a classifier with one label and a chat template."""
    tokenizer, config, kind, positions = _opened(path)
    if not kind.endswith("ForSequenceClassification"):
        raise UserError(
            f"{KEY}: got {path!r} with {kind}, allowed is a Hugging Face model for sequence classification; a "
            "generative reward model needs a template"
        )
    if config.num_labels != 1:
        raise UserError(f"{KEY}: got {path!r} with {config.num_labels} labels, but a reward model has 1 label")
    _check_template(path, tokenizer, PROBE)
    return tokenizer, config, positions


def check_generative_model(path: str) -> int | None:
    """Return the maximum context of a generative reward model, or None if unknown. Download a model that the hub cache
    lacks. Raises UserError if the model is not a causal LM with a chat template."""
    tokenizer, _, kind, positions = _opened(path)
    if not kind.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise UserError(f"{KEY}: got {path!r} with {kind}, but a reward model with template is a generative model")
    _check_template(path, tokenizer, PROBE[:1])
    return positions


def _opened(path: str) -> tuple[Tokenizer, Any, str, int | None]:
    """Return the tokenizer, the configuration, the architecture and the maximum context of a model."""
    try:
        check_model_path(path)
        tokenizer = load_tokenizer(path)
    except UserError as error:
        raise UserError(str(error).replace("model.path", KEY)) from error
    name, revision = split_revision(path)
    with model_errors(f"{KEY}: {path!r} has no usable configuration"):
        config = AutoConfig.from_pretrained(name, revision=revision, local_files_only=True, trust_remote_code=False)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = positions if isinstance(positions, int) and positions > 0 else None
    return tokenizer, config, next(iter(config.architectures or ()), "no architecture"), longest


def _check_template(path: str, tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    try:
        tokenizer.prompt_ids(messages, is_complete=True)
    except Exception as error:  # the chat template may raise anything
        raise UserError(f"{KEY}: the chat template of {path!r} fails: {first_line(error)}") from error
