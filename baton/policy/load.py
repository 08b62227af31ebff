"""Loads Hugging Face causal LMs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from baton.errors import UserError, first_line
from baton.policy.adapters import base_of_adapter, merge_adapter
from baton.policy.head import use_float32_head
from baton.policy.settings import DTypeChoice, DTypeName, ModelSettings, dtype_on
from baton.policy.stages import is_float32
from baton.policy.stored_tensors import StoredTensors, read_index, stored_model
from baton.policy.tensors import policy_tensors
from baton.policy.threads import keep_positions_exact
from baton.policy.tokenizer import Tokenizer, check_model_path, load_tokenizer, model_directory, split_revision
from baton.types import Message

logger = logging.getLogger(__name__)
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
_REFUSALS = (
    OSError,
    ImportError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    SafetensorError,
)


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Raise UserError for the errors with which transformers refuses a model's files. The message of the UserError
    begins with `what`. Out-of-memory errors are passed on."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except StrictDataclassError as error:  # its first line lacks the reason
        raise UserError(f"{what}: {' '.join(str(error).split())}") from error
    except _REFUSALS as error:
        raise UserError(f"{what}: {first_line(error)}") from error


def read_config(path: str, what: str) -> PretrainedConfig:
    """Return the configuration of a model's directory, or of a model in the hub cache. Raises UserError if transformers
    refuses it, with a message that begins with `what`, or if the checkpoint is quantised."""
    name, revision = split_revision(path)
    method = "modelopt" if (model_directory(path) / "hf_quant_config.json").is_file() else None
    with model_errors(what):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, revision=revision, local_files_only=True, trust_remote_code=False
        )
        for part in (config, config.get_text_config()):
            if found := part.to_dict().get("quantization_config"):
                method = found.get("quant_method", "quantization_config")
    if method is not None:
        raise UserError(
            f"model.path: {path!r} is a quantised checkpoint ({method}), and Baton trains only float weights; use the "
            "unquantised checkpoint of the model, or dequantise the model and save it first"
        )
    return config


def load_model(
    path: str, *, dtype: torch.dtype, device: torch.device, attention: str = "sdpa", head_dtype: str = "auto"
) -> PreTrainedModel:
    """Load a causal LM with weights in `dtype`, and set eval mode. If `path` is the checkpoint of an adapter, the
    adapter is merged into its base model. Raises UserError when no model can be loaded from `path`."""
    base = base_of_adapter(Path(path))
    if base is not None:
        check_model_path(path, holding="adapter_config.json")
        found = load_model(base, dtype=dtype, device=device, attention=attention, head_dtype=head_dtype)
        merged = merge_adapter(found, Path(path))
        merged.requires_grad_(True)  # needed because PEFT freezes the base model's weights
        merged.eval()  # type: ignore[no-untyped-call]
        return merged
    check_model_path(path)
    name, revision = split_revision(path)
    model: PreTrainedModel
    info: dict[str, Any]
    refused = f"model.path: no causal LM could be loaded from {path!r}"
    attention = supported_attention(read_config(path, refused), attention)
    with model_errors(refused):
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # a pair, as requested
            name,
            revision=revision,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    if info["mismatched_keys"]:
        tensor, stored, expected = min(info["mismatched_keys"])
        raise UserError(
            f"model.path: the files of {path!r} do not match its config.json: {tensor} has shape {list(stored)}, but "
            f"config.json gives {list(expected)}; copy or download the model again"
        )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"model.path: the files of {path!r} lack {', '.join(missing[:3])}{more}, which {type(model).__name__} "
            "needs; copy or download the model again"
        )
    model.name_or_path = path  # includes the revision, which checkpoints of adapters record
    _fit_head(model, head_dtype)
    keep_positions_exact(model)
    model.to(device)  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    return model


def load_policy(model: ModelSettings, dtype: DTypeChoice) -> PreTrainedModel:
    """Load a recipe's model on its device, in the dtype of the engine. Raises UserError as `load_model` does."""
    device = torch_device(model.device)
    return load_model(
        model.path,
        dtype=torch_dtype(dtype, device),
        device=device,
        attention=model.attention,
        head_dtype=model.head_dtype,
    )


def load_empty(path: str, *, dtype: torch.dtype, attention: str = "sdpa", head_dtype: str = "auto") -> PreTrainedModel:
    """Construct the model of `path` on the meta device, in eval mode. Buffers that no file contains are computed on the
    CPU. Raises UserError when `path` has no causal LM."""
    check_model_path(path, holding="config.json" if base_of_adapter(Path(path)) is None else "adapter_config.json")
    base, meta = base_of_adapter(Path(path)) or path, torch.device("meta")
    check_model_path(base)
    read_config(base, f"model.path: {path!r} is not a causal LM")
    try:
        with meta:
            model = load_skeleton(model_directory(base), dtype=dtype, device=meta, attention=attention)
    except UserError as error:
        raise UserError(f"model.path: {path!r}: {error}") from error
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # so that only buffers are computed
    model.initialize_weights()  # type: ignore[no-untyped-call]
    model.name_or_path, model.config.dtype = base, dtype
    _fit_head(model, head_dtype)
    return model


def open_weights(path: str, model: PreTrainedModel, *, is_exact: bool = False) -> StoredTensors:
    """Return the tensors of a model's files, keyed by their names in `model`. A rank can read its own shards of each
    tensor without the other shards. Raises UserError when no model can be loaded from `path`.

    All tensors are loaded into host memory in four cases: `path` is an adapter; the files are not safetensors; the
    files do not contain the tensors that `file_layout` expects; `is_exact` is set and the files contain tensors that
    the model lacks.
    """
    found = None
    if base_of_adapter(Path(path)) is None:
        check_model_path(path)
        with model_errors(f"model.path: no causal LM could be loaded from {path!r}"):
            found = stored_model(model_directory(path), model, is_exact=is_exact)
    if found is not None:
        return found
    logger.warning(
        "%s: the weight files are not arranged like the modules of %s, so each process loads the whole model",
        path,
        type(model).__name__,
    )
    return StoredTensors.of(policy_tensors(load_model(path, dtype=torch.float32, device=torch.device("cpu"))))


def check_weight_files(path: str) -> None:
    """Raise UserError when weight files are missing or truncated. Reads only the index and the headers of the files."""
    path = base_of_adapter(Path(path)) or path
    directory = model_directory(path)
    if not directory.is_dir():
        return  # no error: check_model_path reports a missing model
    try:
        names = sorted(set(read_index(directory).values()))
    except ValueError as error:
        raise UserError(f"model.path: {error}") from error
    if (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]  # other files are not read
    names = names or [file.name for file in directory.glob("*.safetensors")]
    if not names and not list(directory.glob("pytorch_model*.bin")):
        raise UserError(f"model.path: {path!r} holds no weights; copy or download the model again")
    for name in names:
        file = directory / name
        if not file.is_file():
            raise UserError(f"model.path: {path!r} lacks {name}, which its index lists; copy or download it again")
        try:
            with safe_open(file, framework="numpy"):  # compares the file's size with its header
                pass
        except SafetensorError as error:
            raise UserError(f"model.path: {file} is damaged: {error}; copy or download it again") from error


def _fit_head(model: PreTrainedModel, head_dtype: str) -> None:
    """Make the head compute in float32 if `head_dtype` or the model's configuration requests it. `head_dtype` is stored
    in the configuration, so checkpoints, workers and vLLM use it too."""
    if head_dtype == "float32":
        model.config.head_dtype = "float32"
    if getattr(model.config, "head_dtype", None) == "float32":
        use_float32_head(model)


def supported_attention(config: PretrainedConfig, attention: str) -> str:
    """Return `attention`, the kind of attention that the recipe requests. If it is "sdpa" and transformers has no SDPA
    for this model family, log a warning and return "eager"."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if attention != "sdpa" or kind is None or kind._supports_sdpa:
        return attention
    _warn_once(f"transformers has no SDPA attention for {kind.__name__}: using eager attention (model.attention)")
    return "eager"


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def save_configuration(model: PreTrainedModel, directory: Path) -> None:
    """Write a model's configuration and generation config."""
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def save_skeleton(model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a model's configuration and its tokenizer, without weights."""
    save_configuration(model, directory)
    tokenizer.hf.save_pretrained(directory)


def load_skeleton(directory: Path, *, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
    """Construct a model with arbitrary weights from the configuration in `directory`. Code in `directory` is never
    executed. Raises UserError when the configuration does not describe a causal LM."""
    with model_errors("the model's configuration does not give a causal LM"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=supported_attention(config, attention)
        )
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_float32(model, name):  # as `from_pretrained` does
            tensor.data = tensor.data.float()
    _fit_head(model, "auto")
    keep_positions_exact(model)
    model.to(device)  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    return model


def save_merged(path: str, directory: Path, dtype: str) -> None:
    """Write a model with its tokenizer for other software. An adapter is merged in float32, and the merged weights are
    rounded once, to `dtype`.

    The generation config names every id that ends a response, so other software ends responses at the same tokens.
    """
    tokenizer = load_tokenizer(path)
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    ends = end_ids(model, tokenizer)
    settings = model.generation_config or GenerationConfig()  # type: ignore[no-untyped-call]
    if ends:
        settings.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.hf.pad_token_id
    model.generation_config = settings
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not is_float32(model, name):
            tensor.data = tensor.data.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    tokenizer.hf.save_pretrained(directory)


def dtype_of(path: str) -> str:
    """Return the dtype that a model's configuration states. Return "float32" if the configuration cannot be read, or if
    the dtype is not in `EXPORT_DTYPES`."""
    try:
        config = AutoConfig.from_pretrained(model_directory(base_of_adapter(Path(path)) or path), local_files_only=True)
    except (OSError, ValueError, StrictDataclassError):
        return "float32"
    name = str(config.dtype).removeprefix("torch.")
    return name if name in EXPORT_DTYPES else "float32"


def end_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a response, from the generation config, the config and the tokenizer."""
    found: list[int] = []
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    own, text = (getattr(c, "eos_token_id", None) for c in (model.config, model.config.get_text_config()))
    for ids in (configured, own, text, tokenizer.hf.eos_token_id):
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))


def turn_end_id(model: PreTrainedModel, tokenizer: Tokenizer) -> int:
    """Return the id of `end_ids` with which the chat template ends a response. If the template writes none of them,
    return the tokenizer's end-of-sequence id, or the first of `end_ids` if the tokenizer has no such id."""
    ends, response = end_ids(model, tokenizer), "X"
    try:
        ids = tokenizer.prompt_ids((Message("user", "1 + 1"), Message("assistant", response)), is_complete=True)
    except Exception:  # noqa: BLE001  a template is a program and may raise any exception
        ids = ()
    num_after = next((n for n in range(len(ids)) if response in tokenizer.text(ids[-n - 1 :], keep_special=True)), 0)
    default = ends[0] if tokenizer.hf.eos_token_id is None else int(tokenizer.hf.eos_token_id)
    return next((each for each in ids[len(ids) - num_after :] if each in ends), default)


def torch_dtype(name: DTypeChoice, device: torch.device | None = None) -> torch.dtype:
    """Return the torch dtype of a recipe's dtype name. "auto" requires `device`."""
    assert name != "auto" or device is not None, 'dtype "auto" has no meaning without a device'
    kind = "cpu" if device is None else device.type
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype_here(kind, name)]


def dtype_here(device_type: str, choice: DTypeChoice) -> DTypeName:
    """Return the dtype that `choice` means on this machine. "auto" means float32 on a GPU without bfloat16."""
    if choice == "auto" and device_type == "cuda" and torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16"
        _warn_once(f'{torch.cuda.get_device_name()} has no bfloat16 arithmetic: dtype = "auto" is float32')
        return "float32"
    return dtype_on(device_type, choice)


def device_type(name: str) -> str:
    """Return the type of a recipe's device, such as "cuda". The device need not exist on this machine."""
    return torch_device(name).type if name == "auto" else name.partition(":")[0]


def torch_device(name: str, key: str = "model.device") -> torch.device:
    """Return the torch device of a recipe's device name. Raises UserError, which names `key`, if the name is invalid or
    there is no CUDA GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{key}: got {name!r}, allowed auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{key}: got {name!r}, but this torch ({torch.__version__}) finds no CUDA GPU")
    return device
