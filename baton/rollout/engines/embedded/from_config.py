"""Builds the embedded engine from a model directory, or from a configuration whose weights are loaded later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import UserError
from baton.policy.load import end_ids, load_model, load_skeleton, torch_device, torch_dtype
from baton.policy.tokenizer import load_tokenizer
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.types import PolicyVersion


def embedded_engine(
    path: str, settings: EngineSettings, version: PolicyVersion, *, device: str, attention: str
) -> EmbeddedEngine:
    """Build an engine that loads its own copy of the model in a directory."""
    model = load_model(path, dtype=torch_dtype(settings.dtype), device=torch_device(device), attention=attention)
    tokenizer = load_tokenizer(path)
    return EmbeddedEngine(model, tokenizer, settings, version, end_ids(model, tokenizer))


def skeleton_engine(
    directory: Path, base: Mapping[str, Any] | None, settings: EngineSettings, *, device: str, attention: str
) -> EmbeddedEngine:
    """Build an engine from a directory with a model's configuration and tokenizer; it serves no version yet.

    base: tensors of the base model, where versions are adapters. Raises UserError for a model that cannot be driven.
    """
    dtype = torch_dtype(settings.dtype)
    model = load_skeleton(directory, dtype=dtype, device=torch_device(device), attention=attention)
    if base is not None:
        missing, unexpected = model.load_state_dict(dict(base), strict=False)
        tied = set(getattr(model, "all_tied_weights_keys", {}))
        if unexpected or set(missing) - tied:
            raise UserError(f"the base model does not fit its configuration: {[*unexpected, *missing][:3]}")
    tokenizer = load_tokenizer(str(directory))
    return EmbeddedEngine(model, tokenizer, settings, PolicyVersion("", -1), end_ids(model, tokenizer))
