"""Models of the Hugging Face hub: what counts as cached, what is downloaded, and adapters of such models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from baton.errors import UserError
from baton.policy import tokenizer
from baton.policy.tokenizer import check_model_path
from baton.profile.measure import profile
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.simulator.input_sources import RecipeSource, SimulationOptions
from baton.specs.model import read_model
from tests.tasks.hub_cache import snapshot, store_model, use_cache

ROOT = Path(__file__).parents[2]
NAME = "owner/large"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
CONFIG = {"config.json": "{}", "tokenizer_config.json": "{}"}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))})}
ALL = {**CONFIG, **INDEX, **dict.fromkeys(SHARDS, ""), "tokenizer.json": "{}"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a model in an otherwise empty cache."""
    return snapshot(use_cache(tmp_path, monkeypatch), "model", NAME, "0" * 40)


def downloads(monkeypatch: pytest.MonkeyPatch, folder: Path, remote: dict[str, str]) -> list[dict[str, Any]]:
    """Let the hub have these files; return the list of the calls that download them."""
    calls: list[dict[str, Any]] = []

    def download(name: str, **arguments: Any) -> None:
        calls.append({"name": name, **arguments})
        for file, text in remote.items():
            (folder / file).write_text(text)

    monkeypatch.setattr(tokenizer, "snapshot_download", download)
    return calls


@pytest.mark.parametrize(
    ("cached", "holding", "is_complete"),
    [
        (ALL, "config.json", True),
        ({**CONFIG, "model.safetensors": ""}, "config.json", True),
        ({**CONFIG, "pytorch_model.bin": ""}, "config.json", True),
        ({**CONFIG, **INDEX, SHARDS[0]: ""}, "config.json", False),
        ({**CONFIG, SHARDS[0]: ""}, "config.json", False),
        (CONFIG, "config.json", False),
        ({**CONFIG, "model.safetensors.index.json": "damaged"}, "config.json", True),  # loading the model reports it
        ({**CONFIG, "tokenizer.json": "{}"}, "tokenizer_config.json", True),
        ({**CONFIG, "vocab.json": "{}", "merges.txt": ""}, "tokenizer_config.json", True),
        ({**CONFIG, "tokenizer.model": ""}, "tokenizer_config.json", True),
        ({**CONFIG, "vocab.json": "{}"}, "tokenizer_config.json", False),
        (CONFIG, "tokenizer_config.json", False),
    ],
)
def test_an_interrupted_download_is_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cached: dict[str, str], holding: str, is_complete: bool
) -> None:
    for file, text in cached.items():
        (folder / file).write_text(text)
    calls = downloads(monkeypatch, folder, ALL)
    check_model_path(NAME, holding=holding)
    assert len(calls) == (0 if is_complete else 1)


def test_copies_of_the_weights_are_not_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repositories of gpt-oss and Mistral have the weights twice."""
    calls = downloads(monkeypatch, folder, ALL)
    check_model_path(NAME)
    (call,) = calls
    copies = ["original/model.safetensors", "original/config.json", "metal/model.bin", "consolidated.safetensors"]
    needed = [*ALL, "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    patterns = {key: call[key] for key in ("allow_patterns", "ignore_patterns") if key in call}
    assert list(filter_repo_objects([*needed, *copies], **patterns)) == needed
    pytorch = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "original/pytorch_model.bin"]
    calls = downloads(monkeypatch, folder, {})
    (folder / SHARDS[0]).unlink()
    check_model_path(NAME)
    patterns = {key: calls[1][key] for key in patterns}
    assert list(filter_repo_objects(pytorch, **patterns)) == pytorch[:2]


@pytest.mark.parametrize("revision", [None, "0" * 40])
def test_an_adapter_of_a_hub_model_is_simulated_and_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    def measured(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr("baton.profile.measure.engine_points", measured)
    hub, model, adapter = use_cache(tmp_path, monkeypatch), ROOT / "models" / "quickstart", tmp_path / "adapter"
    adapter.mkdir()
    config = {"base_model_name_or_path": "owner/quickstart", "revision": revision}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    recipe = load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", [f"model.path={adapter}", "model.device=cpu"])
    with pytest.raises(UserError, match=r"owner/quickstart.* is neither a directory nor in the .*`hf download"):
        read_model(adapter)
    with pytest.raises(UserError, match=r"owner/quickstart"):
        profile(recipe, None, print, num_steps=1)
    store_model(hub, "owner/quickstart", model, "0" * 40)
    assert read_model(adapter) == read_model(model)
    assert RecipeSource(recipe).setting(SimulationOptions()).slots > 0
    with pytest.raises(InterruptedError):
        profile(recipe, None, print, num_steps=1)
