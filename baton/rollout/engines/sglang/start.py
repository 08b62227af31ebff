"""Builds an SGLang engine, either with the weights of a model directory or with weights that are loaded later."""

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
"""Maximum bytes per token in an event of a stream: id, logprob, text."""


def sglang_of_model(path: str, settings: EngineSettings, version: PolicyVersion, *, attention: str) -> SglangEngine:
    """Build an engine and load the model of a directory, which may be an adapter, into the server as `version`."""
    files = ModelFiles(path, settings, attention)
    engine = _engine(files.base_directory(), settings, files.read_base)
    try:
        engine.load_weights(policy_tensors(files.load()), version)
    except BaseException:
        engine.close()
        raise
    return engine


def sglang_from_skeleton(directory: Path, base: Mapping[str, Any] | None, settings: EngineSettings) -> SglangEngine:
    """Build an engine from a model's configuration and tokenizer. It serves no version until weights are loaded.

    base: tensors of the base model if versions are adapters, else None.
    """
    return _engine(directory, settings, None if base is None else lambda: base)


def _engine(directory: Path, settings: EngineSettings, read_base: ReadBase | None) -> SglangEngine:
    own = settings.sglang
    if own.url is None:
        raise UserError(
            "engine.sglang.url: got nothing, but engine.kind = 'sglang' requires the URL of a running server, such as "
            "http://127.0.0.1:30000"
        )
    key = None if own.key_variable is None else os.environ.get(own.key_variable)
    if own.key_variable is not None and not key:
        raise UserError(
            f"engine.sglang.key_variable: the environment variable {own.key_variable} is not set; set it to the "
            "server's API key"
        )
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
            f"engine.max_context_tokens: got {settings.max_context_tokens}, allowed are at most {has}, because "
            f"{line.name} was started with --context-length {has}"
        )
    weights = WholeWeights(skeleton.model, read_base)
    return SglangEngine(line, weights, settings, skeleton.end_ids, skeleton.text, skeleton.save)
