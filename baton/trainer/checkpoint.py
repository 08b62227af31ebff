"""Checkpoints that are whole or absent, and that any Hugging Face tool can load.

    checkpoints/step_000050/
        config.json  generation_config.json  model.safetensors     float32, for AutoModelForCausalLM.from_pretrained
        tokenizer.json  tokenizer_config.json  chat_template.jinja
                                                                   a run with [lora]: adapter_config.json and
                                                                   adapter_model.safetensors, for PeftModel
        baton/optimizer.safetensors                                the optimiser's moments, by parameter name
        baton/critic.safetensors                                   where there is a critic
        baton/state.json                                           `State`; nothing in here is pickled

A checkpoint is written beside its place, flushed to the disk and renamed into it. The hidden name of an unfinished
one is never listed, and neither is a directory without `baton/state.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from baton.errors import UserError
from baton.files import atomic_directory, remove_directory
from baton.policy.adapters import adapter_tensors, has_adapters, read_adapter
from baton.policy.load import load_model
from baton.policy.tensors import policy_tensors, weights_digest
from baton.types import PolicyVersion

_NAME = re.compile(r"step_(\d{6,})")
_FORMAT = 1
_CRITIC = "critic.safetensors"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`baton/state.json`: what a resume needs beside tensors, and what the run was made with."""

    format: int = _FORMAT
    version: PolicyVersion
    """Of the weights beside it, with their digest."""
    num_updates: int
    """Optimiser updates since the start of the run."""
    libraries: dict[str, str]
    """Name → version of what decides the bits."""
    num_threads: int
    """torch threads; another number may change the last bits."""


def write_checkpoint(
    path: Path,
    *,
    model: Any,
    tokenizer: Any,
    optimizer: Mapping[str, torch.Tensor],
    state: State,
    critic: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint of a Hugging Face model and tokenizer, atomically."""
    with atomic_directory(path) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        (directory / "baton").mkdir()
        # A copy on the host: safetensors wants tensors that lie by themselves.
        tensors = {name: tensor.cpu().clone() for name, tensor in optimizer.items()}
        save_file(tensors, directory / "baton" / "optimizer.safetensors")
        if critic is not None:
            save_file({n: t.detach().cpu().clone() for n, t in critic.items()}, directory / "baton" / _CRITIC)
        (directory / "baton" / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))


def read_state(path: Path) -> State:
    """Read what lies beside the tensors. Raises UserError when `path` is no complete checkpoint of this format."""
    file = path / "baton" / "state.json"
    try:
        state = msgspec.json.decode(file.read_bytes(), type=State)
    except FileNotFoundError as error:
        raise UserError(f"{path} is no checkpoint that can be resumed: it has no baton/state.json") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if state.format != _FORMAT:
        raise UserError(f"{file} has format {state.format}, but this version of Baton reads format {_FORMAT}")
    return state


def read_optimizer(path: Path) -> dict[str, torch.Tensor]:
    """Read the optimiser's tensors onto the CPU. Raises UserError when they are missing or cut short."""
    file = path / "baton" / "optimizer.safetensors"
    try:
        return load_file(file)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{path} cannot be resumed: its optimizer state {file.name} is missing or damaged") from error


def read_weights(path: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Read what training changes of a model like `model`, under the names of `trained_tensors`, onto the CPU."""
    if has_adapters(model):
        return read_adapter(path)
    return policy_tensors(load_model(str(path), dtype=torch.float32, device=torch.device("cpu")))


def saved_digest(saved: Mapping[str, torch.Tensor], model: PreTrainedModel) -> str:
    """Return the digest that weights read by `read_weights` have when they are published."""
    return weights_digest(adapter_tensors(model, saved) if has_adapters(model) else saved)


def read_critic(path: Path) -> dict[str, torch.Tensor]:
    """Read the critic's tensors onto the CPU. Raises UserError when they are missing or cut short."""
    try:
        return load_file(path / "baton" / _CRITIC)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{path} cannot be resumed: its critic {_CRITIC} is missing or damaged") from error


def checkpoint_path(root: Path, step: int) -> Path:
    """Return where the checkpoint after train step `step` lies."""
    return root / f"step_{step:06d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        matched = _NAME.fullmatch(path.name)
        if matched and (path / "baton" / "state.json").is_file():
            found.append((int(matched[1]), path))
    return [path for _, path in sorted(found)]


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root`, or None."""
    return next(reversed(list_checkpoints(root)), None)


def prune_checkpoints(root: Path, keep_last: int, *, keep_step: int = 0) -> list[Path]:
    """Remove all complete checkpoints but the newest `keep_last` and that of `keep_step`; return what was removed."""
    assert keep_last >= 1, "a run without its last checkpoint cannot be resumed"
    kept = checkpoint_path(root, keep_step)
    removed = [path for path in list_checkpoints(root)[:-keep_last] if path != kept]
    for path in removed:
        remove_directory(path)
    return removed
