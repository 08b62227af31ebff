"""A model that cannot be trained as its files are is refused in one sentence, before any weights are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from baton.errors import UserError
from baton.policy.load import dtype_of, load_empty, load_model
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run.dry_run import check_room
from tests.conftest import write_recipe


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
