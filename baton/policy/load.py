"""Load any Hugging Face causal LM with its own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from baton.errors import UserError
from baton.settings import Settings
from baton.types import Message

DTypeName = Literal["float32", "bfloat16"]
"""float16 is left out: it is two hundred times slower than bfloat16 on a CPU, and needs loss scaling on a GPU."""


class ModelSettings(Settings):
    """[model] which policy is trained."""

    path: str
    """Directory of a Hugging Face causal LM (config.json, safetensors, tokenizer), or a name in the local hub cache."""
    device: str = "auto"
    """`auto` takes CUDA where there is one, else the CPU; or a torch device such as `cuda:1`."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers, for trainer and engine alike."""

    def torch_device(self) -> torch.device:
        """Resolve `auto`. Raises UserError when the named device is not there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise UserError(f"model.device: got {self.device!r}, allowed auto, cpu, cuda or cuda:N") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"model.device: got {self.device!r}, but this torch ({torch.__version__}) sees no CUDA GPU")
        return device


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A Hugging Face tokenizer behind the three things Baton asks of it."""

    hf: PreTrainedTokenizerBase

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation, up to and including the opening of the assistant's turn."""
        chat = [{"role": m.role, "content": m.content} for m in messages]
        ids = self.hf.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return tuple(int(i) for i in ids)

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids, without special tokens unless asked to keep them."""
        return str(self.hf.decode(list(token_ids), skip_special_tokens=not keep_special))

    def ids(self, text: str) -> list[int]:
        """Return the ids of plain text, with no special tokens added."""
        return list(self.hf.encode(text, add_special_tokens=False))


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a model directory. Raises UserError when it is missing or has no chat template."""
    _check_path(path)
    try:
        hf = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path: no tokenizer could be loaded from {path!r}: {_first_line(error)}") from error
    if hf.chat_template is None:
        raise UserError(
            f"model.path: the tokenizer in {path!r} has no chat template; "
            "put a chat_template.jinja beside it, or use an instruct model"
        )
    return Tokenizer(hf)


def load_model(path: str, *, dtype: torch.dtype, device: torch.device, attention: str = "sdpa") -> PreTrainedModel:
    """Load a causal LM in `dtype` whatever its file holds, in eval mode. Raises UserError with what is missing."""
    _check_path(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path: no causal LM could be loaded from {path!r}: {_first_line(error)}") from error
    return model.to(device).eval()


def end_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a response: the generation config's and the tokenizer's end-of-sequence ids."""
    found: list[int] = []
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    for ids in (configured, model.config.eos_token_id, tokenizer.hf.eos_token_id):
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))


def torch_dtype(name: DTypeName) -> torch.dtype:
    """Map a recipe's dtype name to torch's."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _check_path(path: str) -> None:
    directory = Path(path)
    looks_like_path = path.startswith((".", "/", "~")) or path.count("/") != 1 or directory.parent.is_dir()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UserError(f"model.path: {path!r} is a directory without config.json, so not a Hugging Face model")
    elif looks_like_path:
        raise UserError(f"model.path: there is no directory {path!r} (seen from {Path.cwd()})")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
