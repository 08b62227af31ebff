"""Checkpoints, which are written atomically, and which Hugging Face's `from_pretrained` can load.

    checkpoints/step_000050/
        config.json  generation_config.json  model.safetensors     float32, for AutoModelForCausalLM.from_pretrained
        tokenizer.json  tokenizer_config.json  chat_template.jinja
                                                                   a run with [lora]: adapter_config.json and
                                                                   adapter_model.safetensors, for PeftModel
        baton/optimizer.safetensors                                the optimiser's moments, by parameter name
        baton/optimizer/shard-00001-model-00001-of-00001.safetensors …
                                                                   instead, if several ranks train: a file per rank
                                                                   with this rank's shards of the moments
        baton/critic.safetensors                                   if there is a critic
        baton/state.json                                           `CheckpointState`; no file is a pickle
        baton/loop.json                                            `LoopState`, in a run
        baton/manifest.json                                        size and blake3 of all other files, in a run

A checkpoint is written under a temporary hidden name, flushed to disk and renamed. Unfinished checkpoints and
directories without `baton/state.json` are not listed. Tensors are written and read one after another, so a process
holds at most one tensor in addition to its own shards.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from baton.errors import Damaged, UserError
from baton.files import flush_to_disk, remove_directory, verify, writing
from baton.policy.adapters import adapter_tensors, has_adapters, read_adapter
from baton.policy.digest import identity_digest
from baton.policy.load import open_weights, save_configuration
from baton.policy.sharding import Gather, local
from baton.policy.stored_tensors import (
    StoredTensors,
    TensorFile,
    file_layout,
    model_files,
    write_gathered,
    write_own_shards,
)
from baton.policy.tensors import trained_tensors, weights_digest
from baton.types import PolicyVersion

_NAME = re.compile(r"step_\d{6,}")
_FORMAT = 1
_CRITIC = "critic.safetensors"
_SHARDS = "optimizer"


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `baton/state.json`: software versions, and the state from which a run resumes, without tensors."""

    format: int = _FORMAT
    version: PolicyVersion
    """Version of the checkpoint's weights, with the digest of the published tensors."""
    num_updates: int
    """Number of optimiser updates since the start of the run."""
    libraries: dict[str, str]
    """Name of a library that may affect the last bits of results → its version."""
    num_threads: int
    """Number of torch threads. A resume with another number of threads or ranks may change the last bits of results."""
    num_ranks: int = 1


def write_weights(directory: Path, model: PreTrainedModel, gather: Gather, *, is_first: bool) -> str:
    """Write a model, or only its adapter if it has one, in float32.

    Return the digest that a version with these weights has if it is published in float32. Collective: the ranks gather
    one tensor after another, and the first rank writes each tensor. Other ranks return "". Raises OSError.
    """
    tensors = trained_tensors(model)
    if not is_first:
        write_gathered(tensors, None, gather)
        return ""
    layout = None if has_adapters(model) else file_layout(model)
    if layout is None:
        found: dict[str, torch.Tensor] = {}
        write_gathered(tensors, found.__setitem__, gather)
        with writing(directory):
            model.save_pretrained(directory, state_dict=dict(found))
        return saved_digest(StoredTensors.of(found), model)
    model.config.dtype, model.config.architectures = "float32", [type(model).__name__]  # of the written weights
    with writing(directory):
        save_configuration(model, directory)
    with model_files(directory, layout, {name: tensor.dtype for name, tensor in tensors.items()}) as put:
        identities = write_gathered(tensors, put, gather)
    return identity_digest(identities)


def write_critic(directory: Path, critic: Mapping[str, torch.Tensor], gather: Gather, *, is_first: bool) -> None:
    """Write a critic's tensors. Raises OSError. Collective: all ranks must call this function."""
    if not is_first:
        write_gathered(critic, None, gather)
        return
    with TensorFile(_made(directory / "baton" / _CRITIC), {n: (t.dtype, t.shape) for n, t in critic.items()}) as file:
        write_gathered(critic, file.put, gather)


def write_optimizer(directory: Path, moments: Mapping[str, torch.Tensor], rank: int | None, first: int = 0) -> None:
    """Write the optimiser's moments. If several ranks train, write this rank's shards of the moments. `rank`: this
    rank, or None if only one process trains. `first`: first rank of this rank's pipeline stage. Raises OSError."""
    if rank is None:
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in moments.items()}
        with TensorFile(_made(directory / "baton" / "optimizer.safetensors"), specs) as file:
            for name, tensor in moments.items():
                file.put(name, tensor)
        return
    path = _made(directory / "baton" / _SHARDS / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors")
    write_own_shards(path, moments, rank=rank, first=first)


def write_state(directory: Path, tokenizer: Any, state: CheckpointState) -> None:
    """Write a Hugging Face tokenizer, and then `baton/state.json`, which marks the checkpoint as complete."""
    with writing(directory):
        tokenizer.save_pretrained(directory)
    path = _made(directory / "baton" / "state.json")
    with writing(path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(state)))


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read_state(path: Path) -> CheckpointState:
    """Read the state of a checkpoint. Raises UserError if `path` is not a complete checkpoint of this format."""
    file = path / "baton" / "state.json"
    try:
        state = msgspec.json.decode(file.read_bytes(), type=CheckpointState)
    except FileNotFoundError as error:
        raise UserError(f"{path} is not a checkpoint of Baton: it has no baton/state.json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if state.format != _FORMAT:
        raise UserError(f"{file} has format {state.format}, but this version of Baton reads format {_FORMAT}")
    return state


def read_optimizer(path: Path, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the optimiser's tensors, which any number of ranks may have written.

    Each tensor is sharded like its parameter. A tensor that matches no parameter is not read, and is returned as a meta
    tensor. Raises UserError if the files are missing or damaged.
    """
    shards = path / "baton" / _SHARDS
    place = shards if shards.is_dir() else path / "baton" / "optimizer.safetensors"
    try:
        stored = StoredTensors.in_files(sorted(shards.glob("*.safetensors")) if place is shards else [place])
        found = {}
        for name, shape in stored.shapes.items():
            key, _, parameter = name.partition("/")
            like = parameters.get(parameter)
            if like is not None and "." in key:  # 8-bit moments, which only a trainer without ranks has
                found[name] = stored.whole(name).to(like.device)
            elif like is None or shape not in ((), tuple(like.shape)):
                found[name] = torch.empty(shape, device="meta")
            else:
                found[name] = stored.like(name, like if shape else torch.empty(()), local(like).device)
    except (FileNotFoundError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} cannot be resumed: its optimizer state {place.name} is missing or damaged") from error
    return found


def read_weights(path: Path, model: PreTrainedModel) -> StoredTensors:
    """Return the trained tensors of a checkpoint, named as `trained_tensors(model)` names them."""
    return (
        StoredTensors.of(read_adapter(path)) if has_adapters(model) else open_weights(str(path), model, is_exact=True)
    )


def saved_digest(saved: StoredTensors, model: PreTrainedModel) -> str:
    """Return the digest that a version with a checkpoint's weights has if it is published in float32. `saved`: result
    of `read_weights`."""
    if not has_adapters(model):
        return saved.digest()
    return weights_digest(adapter_tensors(model, {name: saved.whole(name) for name in saved.shapes}))


def read_critic(path: Path) -> StoredTensors:
    """Return the critic's tensors. Raises UserError if the file is missing or damaged."""
    try:
        return StoredTensors.in_files([path / "baton" / _CRITIC])
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


def newest_intact_checkpoint(root: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest complete checkpoint whose files match its manifest, or None if there is no checkpoint. `say`
    receives a warning for each damaged checkpoint. Raises Damaged when all checkpoints are damaged."""
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
    """Rename the checkpoints of all steps after `after_step`, so that no resume uses them. The caller has found that
    all of them are damaged."""
    for path in list_checkpoints(root):
        if checkpoint_step(path) > after_step:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    flush_to_disk(root)


def prune_checkpoints(root: Path, keep_last: int, *, keep_step: int = 0) -> list[Path]:
    """Remove all checkpoints except the newest `keep_last` and the checkpoint of step `keep_step`. Return the removed
    paths."""
    assert keep_last >= 1, "a run whose last checkpoint was removed cannot be resumed"
    kept = checkpoint_path(root, keep_step)
    removed = [path for path in list_checkpoints(root)[:-keep_last] if path != kept]
    for path in removed:
        remove_directory(path)
    return removed
