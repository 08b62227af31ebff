"""A Hugging Face tokenizer, reduced to the operations that Baton uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import snapshot_download, try_to_load_from_cache

from baton.errors import UserError, first_line
from baton.files import verify
from baton.types import Message


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Converts conversations and text to token ids, and ids to text."""

    hf: Any

    def prompt_ids(self, messages: Sequence[Message], *, is_complete: bool = False) -> tuple[int, ...]:
        """Return the ids of a conversation, followed by the ids that start the assistant's turn unless the conversation
        `is_complete`. Errors of the chat template are not caught."""
        chat = [{"role": m.role, "content": m.content} for m in messages]
        ids = self.hf.apply_chat_template(chat, add_generation_prompt=not is_complete, tokenize=True, return_dict=False)
        return tuple(int(i) for i in ids)

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids. With `keep_special`, the text includes special tokens."""
        return str(self.hf.decode(list(token_ids), skip_special_tokens=not keep_special))

    def ids(self, text: str) -> list[int]:
        """Return the ids of plain text, without adding special tokens."""
        return list(self.hf.encode(text, add_special_tokens=False))


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a model or a run. Raises UserError if it is missing or has no chat template."""
    check_model_path(path, holding="tokenizer_config.json")
    name, revision = split_revision(path)
    from transformers import AutoTokenizer  # imported here because the import is slow and few commands need it

    try:
        hf = AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=True)
    except Exception as error:  # errors of the package tokenizers have no other common base
        raise UserError(f"model.path: no tokenizer could be loaded from {path!r}: {first_line(error)}") from error
    if hf.chat_template is None:
        raise UserError(
            f"model.path: the tokenizer in {path!r} has no chat template; "
            "add a chat_template.jinja to the directory, or use an instruct model"
        )
    return Tokenizer(hf)


def split_revision(path: str) -> tuple[str, str]:
    """Split the name of a model on the hub, such as `owner/name@revision`, into name and revision. The default revision
    is `main`. The path of a directory is returned unchanged, with the revision `main`."""
    name, _, revision = ("", "", "") if Path(path).is_dir() else path.partition("@")
    return name or path, revision or "main"


def model_directory(path: str) -> Path:
    """Return the directory of a model's files: the path, or the snapshot that `check_model_path` downloaded."""
    name, revision = split_revision(path)
    found = try_to_load_from_cache(name, "config.json", revision=revision) if not Path(path).is_dir() else None
    return Path(found).parent if isinstance(found, str) else Path(path)


def check_model_path(path: str, *, holding: str = "config.json") -> None:
    """Check that `path` is a directory that contains the file `holding`, or the name of a model on the Hugging Face
    hub. Download a model that the hub cache lacks. Raises UserError if there is no such model, and Damaged if a
    checkpoint's files do not match its manifest."""
    directory, name = Path(path), split_revision(path)[0]
    looks_like_path = name.startswith((".", "/", "~", "models/")) or name.count("/") != 1 or Path(name).parent.is_dir()
    has_weights = holding != "tokenizer_config.json"
    if directory.is_dir():
        if not (directory / holding).is_file():
            raise UserError(f"model.path: {path!r} is not a Hugging Face model: the directory has no {holding}")
        verify(directory, lambda name: "/" not in name and (has_weights or not name.endswith(".safetensors")))
    elif looks_like_path:
        is_warm_start = name.startswith("models/") and name.endswith("-warmstart")  # the output of a shipped recipe
        hint = f"; `baton sft {directory.name}` writes it" if is_warm_start else ""
        raise UserError(f"model.path: there is no directory {path!r} (relative to {Path.cwd()}){hint}")
    elif not _is_cached(path, holding):
        _download(path)


_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Patterns of a model's files to download. The other files of a model on the hub are weights for other frameworks."""
_COPIES = (*(f"*/{pattern}" for pattern in _FILES if pattern != "*.jinja"), "*/*.bin", "consolidated*")
"""Patterns of files not to download: copies of the weights for other software, and subfolders except for chat
templates (`additional_chat_templates/`)."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Possible names of the weight file if a model has only one. The weights of other models are listed in an index, such
as `model.safetensors.index.json`."""
_VOCABULARIES = (
    *(("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",)),
    *(("*.model",), ("*.tiktoken",), ("tekken.json",)),
)
"""File names or patterns, one row per kind of tokenizer. A tokenizer has its configuration and all files of one row."""


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def read_index_file(path: Path) -> dict[str, str]:
    """Return a model's index: name of a tensor → name of its file. Raises ValueError for a damaged index."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_WeightIndex).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not an index of weight files; copy or download the model again") from error


def _is_cached(path: str, holding: str) -> bool:
    """Return whether the hub cache has the file `holding` and all weights, or all files of the tokenizer if `holding`
    is its configuration. After an interrupted download, the cache has only some of these files."""
    name, revision = split_revision(path)
    found = try_to_load_from_cache(name, holding, revision=revision)
    if not isinstance(found, str):
        return False
    directory = Path(found).parent
    if holding == "tokenizer_config.json":
        return any(all(any(directory.glob(pattern)) for pattern in row) for row in _VOCABULARIES)
    for weights in _WEIGHTS:
        if (directory / weights).is_file():
            return True
        if (index := directory / f"{weights}.index.json").is_file():
            try:
                return all((directory / name).is_file() for name in set(read_index_file(index).values()))
            except ValueError:
                return True  # loading the model reports a damaged index
    return False


def _download(path: str) -> None:
    name, revision = split_revision(path)
    try:
        for patterns in (_FILES, (*_FILES, "pytorch_model*.bin")):
            snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_COPIES))
            if _is_cached(path, "config.json"):
                return
    except Exception as error:  # errors of the network have no common base
        raise UserError(
            f"model.path: {path!r} is neither a directory nor in the Hugging Face cache, and it cannot be downloaded: "
            f"{first_line(error)}; check the name, or run `hf download {name}`"
        ) from error
