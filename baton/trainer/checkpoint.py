"""Checkpoints that are complete or absent, and that any Hugging Face tool can load.

    checkpoints/step_000050/
        config.json  generation_config.json  model.safetensors     float32, for AutoModelForCausalLM.from_pretrained
        tokenizer.json  tokenizer_config.json  chat_template.jinja
                                                                   a run with [lora]: adapter_config.json and
                                                                   adapter_model.safetensors, for PeftModel
        baton/optimizer.safetensors                                the optimiser's moments, by parameter name
        baton/optimizer/shard-00001-model-00001-of-00001.safetensors …
                                                                   moments of several ranks, one file of shards each
        baton/critic.safetensors                                   if there is a critic
        baton/state.json                                           `CheckpointState`; no file is a pickle
        baton/loop.json                                            `LoopState`, in a run
        baton/manifest.json                                        size and blake3 of all other files, in a run

A checkpoint is written under a temporary hidden name, flushed to disk and renamed. Unfinished checkpoints and
directories without `baton/state.json` are not listed.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from baton.errors import Damaged, UserError
from baton.files import atomic_directory, flush_to_disk, remove_directory, verify, writing
from baton.policy.adapters import adapter_tensors, has_adapters, read_adapter
from baton.policy.load import load_model
from baton.policy.sharding import sharded_like
from baton.policy.tensors import policy_tensors, weights_digest
from baton.types import PolicyVersion

_NAME = re.compile(r"step_\d{6,}")
_FORMAT = 1
_CRITIC = "critic.safetensors"
_SHARDS = "optimizer"


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `baton/state.json`: the state to resume from, except tensors, and the software that wrote it."""

    format: int = _FORMAT
    version: PolicyVersion
    """Version of the checkpoint's weights, with their digest."""
    num_updates: int
    """Number of optimiser updates since the start of the run."""
    libraries: dict[str, str]
    """Name → version of each library that affects the bits of the result."""
    num_threads: int
    """Number of torch threads. Another number of threads or ranks may change the last bits."""
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointParts:
    """The contents of a checkpoint, except the optimiser's moments."""

    model: Any
    """A Hugging Face model."""
    weights: Mapping[str, torch.Tensor]
    """The model's trained tensors, unsharded."""
    tokenizer: Any
    """The model's Hugging Face tokenizer."""
    state: CheckpointState
    critic: Mapping[str, torch.Tensor] | None = None


def write_checkpoint(path: Path, parts: CheckpointParts, optimizer: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint atomically."""
    with atomic_directory(path) as directory:
        write_parts(directory, parts)
        _save_tensors(optimizer, directory / "baton" / "optimizer.safetensors")


def write_parts(directory: Path, parts: CheckpointParts) -> None:
    """Write a checkpoint except the optimiser's moments; `state.json` is last, because it marks a complete one."""
    with writing(directory):
        parts.model.save_pretrained(directory, state_dict=dict(parts.weights))
        parts.tokenizer.save_pretrained(directory)
    (directory / "baton").mkdir(exist_ok=True)
    if parts.critic is not None:
        _save_tensors(parts.critic, directory / "baton" / _CRITIC)
    state = directory / "baton" / "state.json"
    with writing(state):
        state.write_bytes(msgspec.json.format(msgspec.json.encode(parts.state)))


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    with writing(path):
        # Copied, because safetensors refuses tensors that share memory.
        save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, path)


def write_shards(directory: Path, optimizer: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's shards of the optimiser's moments. Raises OSError. Collective: all ranks must call it.

    The files are safetensors, because torch's format for distributed checkpoints contains a pickle.
    """
    place = directory / "baton" / _SHARDS
    place.mkdir(parents=True, exist_ok=True)
    try:
        save(dict(optimizer), storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True))
    except CheckpointException as error:
        found = [failure[0] for failure in error.failures.values() if isinstance(failure[0], OSError)]
        code = next((each.errno for each in found if each.errno), errno.EIO)
        raise OSError(code, f"the optimizer's shards could not be written: {error}", str(place)) from error


def read_state(path: Path) -> CheckpointState:
    """Read the state of a checkpoint. Raises UserError if `path` is not a complete checkpoint of this format."""
    file = path / "baton" / "state.json"
    try:
        state = msgspec.json.decode(file.read_bytes(), type=CheckpointState)
    except FileNotFoundError as error:
        raise UserError(f"{path} is not a checkpoint of Baton: it has no baton/state.json") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if state.format != _FORMAT:
        raise UserError(f"{file} has format {state.format}, but this version of Baton reads format {_FORMAT}")
    return state


def read_optimizer(path: Path, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the optimiser's tensors, written by any number of ranks. Each is sharded like its parameter.

    Raises UserError if the files are missing or damaged.
    """
    shards = path / "baton" / _SHARDS
    place = shards if shards.is_dir() else path / "baton" / "optimizer.safetensors"
    try:
        if place is shards:
            return _read_shards(shards, parameters)
        found = load_file(place)
    except (FileNotFoundError, SafetensorError, CheckpointException, ValueError) as error:
        raise UserError(f"{path} cannot be resumed: its optimizer state {place.name} is missing or damaged") from error
    return {name: _as_its_parameter(name, tensor, parameters) for name, tensor in found.items()}


def _as_its_parameter(name: str, tensor: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    like = parameters.get(name.partition("/")[2])
    return tensor if like is None or like.shape != tensor.shape else sharded_like(tensor, like)


def _read_shards(directory: Path, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    reader = HuggingFaceStorageReader(str(directory))
    known = reader.read_metadata().state_dict_metadata
    if not known:
        return {}
    found = {}
    for name, entry in known.items():
        assert isinstance(entry, TensorStorageMetadata), f"{name} in {directory} is not a tensor"
        found[name] = _as_its_parameter(name, torch.zeros(entry.size, dtype=entry.properties.dtype), parameters)
    load(found, storage_reader=reader, no_dist=not dist.is_initialized())
    return found


def read_weights(path: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Read the trained tensors of a checkpoint onto the CPU, named as `trained_tensors(model)` names them."""
    if has_adapters(model):
        return read_adapter(path)
    return policy_tensors(load_model(str(path), dtype=torch.float32, device=torch.device("cpu")))


def saved_digest(saved: Mapping[str, torch.Tensor], model: PreTrainedModel) -> str:
    """Return the digest that weights from `read_weights` have when they are published in float32."""
    return weights_digest(adapter_tensors(model, saved) if has_adapters(model) else saved)


def read_critic(path: Path) -> dict[str, torch.Tensor]:
    """Read the critic's tensors onto the CPU. Raises UserError if the file is missing or damaged."""
    try:
        return load_file(path / "baton" / _CRITIC)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{path} cannot be resumed: its critic {_CRITIC} is missing or damaged") from error


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint after train step `step`."""
    return root / f"step_{step:06d}"


def checkpoint_step(path: Path) -> int:
    """Return the train step of a path that `list_checkpoints` returned."""
    return int(path.name[len("step_") :])


def list_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest first."""
    there = root.iterdir() if root.is_dir() else ()
    found = [path for path in there if _NAME.fullmatch(path.name) and (path / "baton" / "state.json").is_file()]
    return sorted(found, key=checkpoint_step)


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root`, or None."""
    return next(reversed(list_checkpoints(root)), None)


def newest_intact_checkpoint(root: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest complete checkpoint whose files match its manifest, or None if there is no checkpoint.

    `say` receives a warning for each damaged checkpoint. Raises Damaged when all checkpoints are damaged.
    """
    found = list_checkpoints(root)
    for path in reversed(found):
        try:
            verify(path)
        except Damaged as error:
            say(f"warning: {error}; falling back to the previous checkpoint")
        else:
            return path
    if found:
        raise Damaged(f"every checkpoint in {root} is damaged: remove them to start the run again with its recipe")
    return None


def set_aside_checkpoints(root: Path, after_step: int) -> None:
    """Rename the damaged checkpoints of steps after `after_step`, so that no resume uses them."""
    for path in list_checkpoints(root):
        if checkpoint_step(path) > after_step:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    flush_to_disk(root)


def prune_checkpoints(root: Path, keep_last: int, *, keep_step: int = 0) -> list[Path]:
    """Remove checkpoints except the newest `keep_last` and the one of `keep_step`; return the removed paths."""
    assert keep_last >= 1, "a run whose last checkpoint was removed cannot be resumed"
    kept = checkpoint_path(root, keep_step)
    removed = [path for path in list_checkpoints(root)[:-keep_last] if path != kept]
    for path in removed:
        remove_directory(path)
    return removed
