"""A Hugging Face tokenizer, reduced to the operations that Baton uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from baton.errors import UserError, first_line
from baton.files import verify
from baton.types import Message


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Converts conversations and text to token ids, and ids to text."""

    hf: Any
    """The transformers tokenizer."""

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation, followed by the ids that start the assistant's turn."""
        chat = [{"role": m.role, "content": m.content} for m in messages]
        ids = self.hf.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return tuple(int(i) for i in ids)

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of ids of a conversation."""
        return len(self.prompt_ids(messages))

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids. With `keep_special`, the text includes special tokens."""
        return str(self.hf.decode(list(token_ids), skip_special_tokens=not keep_special))

    def ids(self, text: str) -> list[int]:
        """Return the ids of plain text, without special tokens."""
        return list(self.hf.encode(text, add_special_tokens=False))


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a model directory or a run. Raises UserError when it is missing or has no chat template."""
    check_model_path(path, holding="tokenizer_config.json")
    from transformers import AutoTokenizer  # imported here because the import is slow and few commands need it

    try:
        hf = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path: no tokenizer could be loaded from {path!r}: {first_line(error)}") from error
    if hf.chat_template is None:
        raise UserError(
            f"model.path: the tokenizer in {path!r} has no chat template; "
            "add a chat_template.jinja to the directory, or use an instruct model"
        )
    return Tokenizer(hf)


def check_model_path(path: str, *, holding: str = "config.json") -> None:
    """Raise UserError if `path` is a directory without the file `holding`, or a name that is not in the Hugging Face
    cache.

    Raises Damaged if `path` is a checkpoint whose files do not match its manifest.
    """
    directory = Path(path)
    looks_like_path = path.startswith((".", "/", "~")) or path.count("/") != 1 or directory.parent.is_dir()
    if directory.is_dir():
        if not (directory / holding).is_file():
            raise UserError(f"model.path: {path!r} is not a Hugging Face model: the directory has no {holding}")
        has_weights = holding != "tokenizer_config.json"
        verify(directory, lambda name: "/" not in name and (has_weights or not name.endswith(".safetensors")))
    elif looks_like_path:
        raise UserError(f"model.path: there is no directory {path!r} (relative to {Path.cwd()})")
    elif not isinstance(try_to_load_from_cache(path, holding), str):
        raise UserError(
            f"model.path: {path!r} is neither a directory nor in the Hugging Face cache: run `hf download {path}`"
        )
