"""A model that cannot be trained as its files are is refused in one sentence, before any weights are used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Gemma3Config

from baton.errors import UserError
from baton.policy.load import dtype_of, end_ids, load_empty, load_model, open_weights
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run.dry_run import check_room
from tests.conftest import write_recipe
from tests.model_families import tiny_config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model with a head of its own, and its tokenizer."""
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    tiny_tokenizer().hf.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def changed(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def loaded(path: Path) -> None:
    load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))


def empty(path: Path) -> None:
    load_empty(str(path), dtype=torch.float32)


def checked(path: Path) -> None:
    recipe = load_recipe(Recipe, write_recipe(path.parent / "recipe.toml", path, path.parent))
    check_room(recipe, is_here=True)


def adapter(directory: Path, base: Path) -> Path:
    """Write the configuration of an adapter, and return its directory."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return directory


WAYS = pytest.mark.parametrize("way", [loaded, empty, checked])


def refusal(way: Callable[[Path], None], path: Path) -> str:
    with pytest.raises(UserError) as refused:
        way(path)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.startswith("model.path: ")
    assert repr(str(path)) in sentence
    return sentence


@WAYS
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "128"}, "'hidden_size' expected int, got str"),
        ({"vocab_size": -3}, "negative dimension"),
        ({"num_attention_heads": 0}, "by zero"),
    ],
)
def test_a_configuration_with_a_wrong_value_is_refused(
    way: Callable[[Path], None], changes: dict[str, Any], reason: str, path: Path
) -> None:
    changed(path, **changes)
    assert reason in refusal(way, path)
    if "hidden_size" in changes:
        assert dtype_of(str(path)) == "float32"


def test_weights_that_do_not_match_the_configuration_are_refused(path: Path) -> None:
    changed(path, vocab_size=80)
    assert "lm_head.weight has shape [64, 32], but config.json gives [80, 32]" in refusal(loaded, path)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("lora.rank=2", "lora.targets=['nothing']"), r"lora.targets: got 'nothing', which matches no layer"),
        (("trainer.ranks=4", "trainer.tensor_parallel=4"), r"trainer.tensor_parallel: got 4, but Qwen3ForCausalLM has"),
        (("trainer.moe_replay=proximal",), r"trainer.moe_replay: Qwen3ForCausalLM has no routers"),
        (("lora.rank=2", "model.path={below}"), "model.path: .* holds an adapter, and"),
        (("algorithm.kl_coef=1", "algorithm.reference={adapted}"), "algorithm.reference: .* is damaged"),
        (("algorithm.kl_coef=1", "algorithm.reference=/nowhere"), "algorithm.reference: there is no directory"),
        (("algorithm.kl_coef=1", "algorithm.reference={cut}"), "algorithm.reference: .* is damaged"),
        (("algorithm.kl_coef=1", "algorithm.reference={other}"), "algorithm.reference: .* has a vocabulary of 48"),
    ],
)
def test_a_dry_run_refuses_what_the_trainer_cannot_do_with_the_model(
    overrides: tuple[str, ...], reason: str, path: Path, tmp_path: Path
) -> None:
    tiny_model(vocab_size=48).save_pretrained(tmp_path / "other")
    cut = shutil.copytree(path, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    below = adapter(tmp_path / "below", cut.parent if "{adapted}" in overrides[-1] else path)
    adapted = adapter(tmp_path / "adapted", below)
    file = write_recipe(tmp_path / "recipe.toml", path, tmp_path)
    places = {"cut": cut.parent, "other": tmp_path / "other", "below": below, "adapted": adapted}
    given = [each.format(**places) for each in overrides]
    with pytest.raises(UserError, match=reason) as refused:
        check_room(load_recipe(Recipe, file, given), is_here=False)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_of_an_unknown_kind_is_refused(path: Path) -> None:
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["type"] = "Unknown"
    file.write_text(json.dumps(content))
    assert "did not match any variant" in refusal(lambda path: load_tokenizer(str(path)) and None, path)


def test_too_little_memory_is_not_an_error_of_the_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError):
        loaded(path)


@WAYS
@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize(
    ("config", "method"),
    [({"quant_method": "mxfp4", "dequantize": True}, "mxfp4"), ({"load_in_4bit": True}, "quantization_config")],
)
def test_a_quantised_checkpoint_is_refused(
    way: Callable[[Path], None], is_adapter: bool, config: dict[str, Any], method: str, path: Path
) -> None:
    changed(path, quantization_config=config)
    wanted = path
    if is_adapter:
        wanted = path.parent / "adapter"
        wanted.mkdir()
        (wanted / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(path)}))
        tiny_tokenizer().hf.save_pretrained(wanted)
    with pytest.raises(UserError) as refused:
        way(wanted)
    assert f"model.path: {str(path)!r} is a quantised checkpoint ({method})" in str(refused.value)
    assert "use the unquantised checkpoint of the model, or dequantise the model" in str(refused.value)


def test_a_checkpoint_with_the_configuration_of_modelopt_is_refused(path: Path) -> None:
    (path / "hf_quant_config.json").write_text("{}")
    assert "is a quantised checkpoint (modelopt)" in refusal(loaded, path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_values_never_become_float_weights(dtype: torch.dtype, path: Path) -> None:
    """Even if the configuration does not say that the checkpoint is quantised."""
    model = load_empty(str(path), dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    scale = {f"{name}_scale_inv": torch.ones(1, 1)}
    save_file({**tensors, name: tensors[name].to(dtype), **scale}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"the files have {name} in .*8.*, so the model is quantised"):
        open_weights(str(path), model)


@pytest.mark.parametrize("num_missing", [1, 3, 5])
def test_weights_that_the_files_lack_are_not_random_numbers(num_missing: int, path: Path) -> None:
    """Also if ranks read the files: then each rank would have other numbers."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)[:num_missing]
    for name in names:
        del tensors[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def read_by_a_rank(path: Path) -> None:
        open_weights(str(path), load_empty(str(path), dtype=torch.float32))

    listed = ", ".join(names[:3]) + (" and 2 more" if num_missing == 5 else "")
    for way in (loaded, read_by_a_rank):
        assert f"lack {listed}, which Qwen3ForCausalLM needs" in refusal(way, path)


def test_a_tied_head_need_not_be_in_the_files(tmp_path: Path) -> None:
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded(tmp_path)


def test_the_end_ids_of_a_model_whose_text_part_has_a_configuration_of_its_own() -> None:
    text = tiny_config("gemma3_text").to_dict() | {"eos_token_id": [5, 6]}
    config = Gemma3Config(text_config=text, vision_config={"num_hidden_layers": 1})
    assert not hasattr(config, "eos_token_id")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = 7
    tokenizer = tiny_tokenizer()
    assert end_ids(model, tokenizer) == (7, 5, 6, tokenizer.hf.eos_token_id)
