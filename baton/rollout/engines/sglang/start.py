"""An SGLang engine for a model in a directory, or for a configuration alone, which is given weights later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from baton.errors import UserError
from baton.policy.adapters import base_of_adapter
from baton.policy.load import end_ids, load_model, load_skeleton, save_skeleton, torch_dtype
from baton.policy.tensors import policy_tensors
from baton.policy.tokenizer import load_tokenizer
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.sglang.client import SglangLine
from baton.rollout.engines.sglang.engine import SglangEngine
from baton.rollout.engines.whole_weights import ReadBase, WholeWeights
from baton.types import PolicyVersion

_CPU = torch.device("cpu")
_BYTES_PER_TOKEN = 256
"""A stream's event says at most so much of a token: id, logprob, text."""


def sglang_of_model(path: str, settings: EngineSettings, version: PolicyVersion, *, attention: str) -> SglangEngine:
    """Have the recipe's server serve the model in a directory, a checkpoint of an adapter included, as `version`."""
    dtype = torch_dtype(settings.dtype)
    base_path = base_of_adapter(Path(path)) or path

    def read_base() -> Mapping[str, torch.Tensor]:
        return policy_tensors(load_model(base_path, dtype=dtype, device=_CPU, attention=attention))

    directory = (
        Path(base_path) if Path(base_path).is_dir() else Path(snapshot_download(base_path, local_files_only=True))
    )
    engine = _engine(directory, settings, read_base)
    try:
        engine.load_weights(policy_tensors(load_model(path, dtype=dtype, device=_CPU, attention=attention)), version)
    except BaseException:
        engine.close()
        raise
    return engine


def sglang_from_skeleton(directory: Path, base: Mapping[str, Any] | None, settings: EngineSettings) -> SglangEngine:
    """Build an engine from a directory with a model's configuration and tokenizer; it serves no version yet.

    base: tensors of the model that adapters are published for.
    """
    return _engine(directory, settings, None if base is None else lambda: base)


def _engine(directory: Path, settings: EngineSettings, read_base: ReadBase | None) -> SglangEngine:
    own = settings.sglang
    if own.url is None:
        raise UserError(
            "engine.sglang.url: got nothing, but engine.kind = 'sglang' needs a running server, such as "
            "http://127.0.0.1:30000"
        )
    key = None if own.key_variable is None else os.environ.get(own.key_variable)
    if own.key_variable is not None and not key:
        raise UserError(f"engine.sglang.key_variable: the environment has no {own.key_variable}")
    with torch.device("meta"):
        model = load_skeleton(
            directory, dtype=torch_dtype(settings.dtype), device=torch.device("meta"), attention="sdpa"
        )
    tokenizer = load_tokenizer(str(directory))
    line = SglangLine(
        own.url,
        key=key,
        longest_event=(1 << 20) + _BYTES_PER_TOKEN * settings.max_context_tokens,
        start_timeout_s=own.start_timeout_s,
        answer_timeout_s=own.answer_timeout_s,
    )
    has = line.max_context_tokens
    if has is not None and has < settings.max_context_tokens:
        line.close()
        raise UserError(
            f"engine.max_context_tokens: got {settings.max_context_tokens}, but {line.name} was started with "
            f"--context-length {has}"
        )
    ends = end_ids(model, tokenizer)
    return SglangEngine(
        line,
        WholeWeights(model, read_base),
        settings,
        ends,
        lambda ids: tokenizer.text(ids, keep_special=True),
        partial(save_skeleton, model, tokenizer),
    )
