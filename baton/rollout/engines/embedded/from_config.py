"""Builds the embedded engine, either with the weights of a model directory or with weights that are loaded later."""

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
    """Build an engine with the weights of a model directory."""
    model = load_model(path, dtype=torch_dtype(settings.dtype), device=torch_device(device), attention=attention)
    tokenizer = load_tokenizer(path)
    return EmbeddedEngine(model, tokenizer, settings, version, end_ids(model, tokenizer))


def skeleton_engine(
    directory: Path, base: Mapping[str, Any] | None, settings: EngineSettings, *, device: str, attention: str
) -> EmbeddedEngine:
    """Build an engine from a model's configuration and tokenizer. It serves no version until weights are loaded.

    base: tensors of the base model if versions are adapters, else None. Raises UserError for an unsupported model.
    """
    dtype = torch_dtype(settings.dtype)
    model = load_skeleton(directory, dtype=dtype, device=torch_device(device), attention=attention)
    if base is not None:
        missing, unexpected = model.load_state_dict(dict(base), strict=False)
        tied = set(getattr(model, "all_tied_weights_keys", {}))
        if unexpected or set(missing) - tied:
            raise UserError(
                "the tensors of the base model do not fit its configuration: unexpected or missing are "
                f"{', '.join([*unexpected, *missing][:3])}; check that model.path is the model of the run"
            )
    tokenizer = load_tokenizer(str(directory))
    return EmbeddedEngine(model, tokenizer, settings, PolicyVersion("", -1), end_ids(model, tokenizer))
