"""LoRA with PEFT: a run trains and publishes low-rank adapters instead of the whole model.

An adapter is published as pairs of tensors `<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r]. B is
already multiplied by the scale (alpha / rank), so an engine computes W = W_0 + B A without further parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from baton.errors import Damaged, EngineFault, UserError, first_line
from baton.policy.settings import LoraSettings
from baton.policy.stages import all_tensors

_NAME = "default"
_A, _B = ".lora_A.weight", ".lora_B.weight"


def add_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
    """Freeze a model and add trainable float32 adapters. Every B starts at zero, so the model's output changes only
    after an update. The adapters are initialised on the CPU, and get values even if the model is on the meta device.
    Raises UserError when PEFT is missing, and the errors of `check_targets`."""
    _check_peft()
    from peft import LoraConfig

    check_targets(model, settings)
    path = str(model.name_or_path)
    is_local = Path(path).is_dir()
    name, _, revision = path.partition("@")
    model.name_or_path = str(Path(path).resolve()) if is_local else name  # add_adapter copies it to the configuration
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT declares int but accepts float
        target_modules=_linear_layers(model) if settings.targets == "all-linear" else list(settings.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        revision=None if is_local else revision or None,
    )
    # `_create_values` replaces these adapters, because PEFT casts them to the dtype of their layer's weight.
    with torch.device("meta"):
        model.add_adapter(config, _NAME)
    _create_values(model, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.eval()  # type: ignore[no-untyped-call]


def check_targets(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Raise UserError if no layer of the model gets an adapter, or for a target that matches no layer, a nonlinear
    layer, or a head that is tied to the embedding. The model may be on the meta device."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[no-untyped-call]
    linear = ", ".join(_linear_layers(model))
    if not linear:  # GPT-2 has Conv1D, whose weights are transposed
        raise UserError(
            f"lora: {type(model).__name__} has no layer of the class torch.nn.Linear except its head, and only these "
            "layers get adapters; remove [lora] to train all weights"
        )
    if not settings.targets:
        raise UserError(f"lora.targets: got no layers; allowed are 'all-linear', or a list of {linear}")
    for target in () if settings.targets == "all-linear" else settings.targets:
        found = [part for name, part in model.named_modules() if f".{name}".endswith(f".{target}")]
        what = f"lora.targets: got {target!r}, which"
        if not found and not any(f".{target}." in f".{name}." for name in all_tensors(model)):  # of all stages
            raise UserError(f"{what} matches no layer of {type(model).__name__}; its linear layers are {linear}")
        if not all(isinstance(part, torch.nn.Linear) for part in found):
            raise UserError(f"{what} matches a layer that is not linear; allowed are {linear}")
        if head in found and head.weight is getattr(embedding, "weight", None):
            raise UserError(
                f"{what} is the head, but {type(model).__name__} ties its head to the embedding, so the adapter would "
                f"change both; allowed are {linear}"
            )


def _create_values(model: PreTrainedModel, seed: int) -> None:
    """Replace adapters on the meta device by float32 adapters that PEFT creates on the CPU."""
    torch.manual_seed(seed)
    device = model.device
    layers: list[Any] = [module for module in model.modules() if _NAME in getattr(module, "lora_A", ())]
    for module in layers:
        for side in (module.lora_A, module.lora_B):
            side[_NAME] = torch.nn.Linear(side[_NAME].in_features, side[_NAME].out_features, bias=False)
        module.reset_lora_parameters(_NAME, init_lora_weights=True)
        module.cast_input_dtype_enabled = False  # without this, PEFT casts to float32 and autocast casts back
        for side in (module.lora_A, module.lora_B):
            if device.type != "meta":
                side[_NAME].to(device)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of all linear layers except the head, such as "q_proj", without duplicates."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = (name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head)
    return sorted({name.rpartition(".")[2] for name in layers})


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether a model has adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Disable a model's adapters within the context. For a model without adapters, the context has no effect."""
    if not has_adapters(model):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def raw_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's adapter by their names in `state_dict`, detached but not copied."""
    return {name: tensor.detach() for name, tensor in all_tensors(model).items() if ".lora_" in name}


def adapter_tensors(model: PreTrainedModel, raw: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return an adapter in its published form: B is multiplied by the scale. `raw`: the adapter's tensors, as
    `raw_tensors` returns them; by default those of the model's adapter."""
    raw = raw_tensors(model) if raw is None else raw
    config: Any = model.peft_config[_NAME]
    found = {}
    for name, low in raw.items():
        if name.endswith(ending := f".lora_A.{_NAME}.weight"):
            module = name.removesuffix(ending)
            high = raw[f"{module}.lora_B.{_NAME}.weight"]
            found[module + _A], found[module + _B] = low, high * (config.lora_alpha / config.r)
    return found


def read_adapter(directory: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint's adapter, with the names of `raw_tensors`. Raises UserError if it is missing or damaged."""
    file = directory / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(f"{directory} holds no adapter (adapter_model.safetensors), but this run trains one ([lora])")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {error}") from error
    return {
        name.removeprefix("base_model.model.")
        .replace(_A, f".lora_A.{_NAME}.weight")
        .replace(_B, f".lora_B.{_NAME}.weight"): tensor
        for name, tensor in tensors.items()
    }


def merge_adapter(base: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Merge a checkpoint's adapter into its base model, and return the merged model. Raises UserError if PEFT or the
    adapter is missing, or if the adapter is damaged or does not fit the base model."""
    _check_peft()
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # warnings about PEFT's own use of another library
        try:
            found: Any = PeftModel.from_pretrained(base, str(directory))
            if found.peft_config[_NAME].is_prompt_learning:
                raise ValueError("it is a learned prompt, which cannot be merged into the weights of its base model")
            merged: PreTrainedModel = found.merge_and_unload()
        except torch.OutOfMemoryError:
            raise  # the caller names the keys to change
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"model.path: the adapter in '{directory}' could not be loaded: {first_line(error)}"
            ) from error
    return merged


def base_of_adapter(directory: Path) -> str | None:
    """Return the path or hub name of the base model of the adapter in a directory, or None if there is no adapter."""
    file = directory / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        base, revision = config["base_model_name_or_path"], config.get("revision")
        if not base or not isinstance(base, str):
            raise Damaged(f"{file} names no base model: set base_model_name_or_path to its directory or hub name")
        return f"{base}@{revision}" if revision and not Path(base).is_dir() else base
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from error


def _check_peft() -> None:
    if find_spec("peft") is None:
        raise UserError("LoRA needs PEFT: run `pip install 'baton-rl[lora]'`")
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        raise UserError(
            f"LoRA: transformers {version('transformers')} needs PEFT {MIN_PEFT_VERSION} or newer, got "
            f"{version('peft')}: run `pip install 'baton-rl[lora]'`, which installs versions that match"
        ) from error


def is_adapter(tensors: Mapping[str, Any]) -> bool:
    """Return whether published tensors form an adapter instead of a whole model."""
    return bool(tensors) and all(name.endswith((_A, _B)) for name in tensors)


def adapted_modules(own: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules that an adapter changes. `own`: the engine's weights. Raises EngineFault if a
    tensor of the adapter matches no weight in name and shape."""
    modules = [name.removesuffix(_A) for name in tensors if name.endswith(_A)]
    for module in modules:
        weight, low, high = own.get(f"{module}.weight"), tensors[module + _A], tensors.get(module + _B)
        shape = None if high is None else (high.shape[0], low.shape[1])
        if weight is None or high is None or tuple(weight.shape) != shape or high.shape[1] != low.shape[0]:
            has = "no weight" if weight is None else f"shape {tuple(weight.shape)}"
            raise EngineFault(f"a new adapter does not fit: {module} has {has} in the engine, {shape} in the adapter")
    return modules


def write_adapter(tensors: Mapping[str, Any], directory: Path) -> None:
    """Write a published adapter in PEFT's format, with the scale 1, because B is already multiplied by the scale."""
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_A))
    targets = sorted({name.removesuffix(_A).rpartition(".")[2] for name in tensors if name.endswith(_A)})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")


class BaseWeights:
    """Original values of the engine's weights that a merged adapter has changed. They are copied before the merge, and
    are needed to remove the adapter when another adapter replaces it."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Drop the copies. Call after a whole model was loaded, which is the base of the next adapter."""
        self._kept.clear()

    @torch.inference_mode()
    def put_back(self, own: Mapping[str, torch.Tensor]) -> None:
        """Copy the base weights back into the engine's weights `own`, which removes the adapter; drop the copies."""
        for module, weight in self._kept.items():
            own[f"{module}.weight"].copy_(weight)
        self._kept.clear()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._kept.values())

    def merged(self, own: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over (name, W_0 + B A) of the weights that the adapter changes, computed in float32 and cast to the
        weight's dtype. `own`: the engine's weights. `tensors`: the published adapter. Raises EngineFault, before any
        change, as `adapted_modules` does."""
        modules = adapted_modules(own, tensors)
        for module in modules:
            self._kept.setdefault(module, own[f"{module}.weight"].detach().clone())
        return ((f"{module}.weight", self._merge(module, tensors)) for module in modules)

    @torch.inference_mode()
    def _merge(self, module: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        base = self._kept[module]
        low, high = (tensors[module + end].to(base.device).float() for end in (_A, _B))
        found: torch.Tensor = (base.float() + high @ low).to(base.dtype)
        return found
