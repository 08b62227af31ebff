"""Builds an SGLang engine from a model directory, or from a configuration whose weights are loaded later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import UserError
from baton.policy.tensors import policy_tensors
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.sglang.client import SglangClient
from baton.rollout.engines.sglang.engine import SglangEngine
from baton.rollout.engines.whole_weights import ModelFiles, ReadBase, Skeleton, WholeWeights
from baton.types import PolicyVersion

_BYTES_PER_TOKEN = 256
"""Upper bound of the bytes per token in a stream's event: id, logprob, text."""


def sglang_of_model(path: str, settings: EngineSettings, version: PolicyVersion, *, attention: str) -> SglangEngine:
    """Load the model in a directory into the recipe's server as `version`; it may be an adapter's checkpoint."""
    files = ModelFiles(path, settings, attention)
    engine = _engine(files.base_directory(), settings, files.read_base)
    try:
        engine.load_weights(policy_tensors(files.load()), version)
    except BaseException:
        engine.close()
        raise
    return engine


def sglang_from_skeleton(directory: Path, base: Mapping[str, Any] | None, settings: EngineSettings) -> SglangEngine:
    """Build an engine from a directory with a model's configuration and tokenizer; it serves no version yet.

    base: tensors of the base model, where versions are adapters.
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
    skeleton = Skeleton(directory, settings)
    line = SglangClient(
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
    weights = WholeWeights(skeleton.model, read_base)
    return SglangEngine(line, weights, settings, skeleton.end_ids, skeleton.text, skeleton.save)
