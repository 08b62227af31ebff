"""Recipes and the quickstart's model are found by name from any directory; files of the user come first."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from baton.errors import UserError
from baton.policy.tokenizer import check_model_path
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe, WarmStart
from baton.recipe.shipped import ROOT, shipped, shipped_recipes


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["quickstart", "recipes/quickstart.toml"])
def test_the_quickstart_and_its_model_are_found_in_an_empty_directory(name: str) -> None:
    recipe = load_recipe(Recipe, Path(name), ["run.steps=2"])
    assert (recipe.run.name, recipe.run.steps) == ("quickstart", 2)
    assert Path(recipe.model.path).is_absolute()
    assert (Path(recipe.model.path) / "model.safetensors").is_file()


def test_every_shipped_recipe_has_a_name() -> None:
    assert shipped_recipes() == [
        "countdown",
        "countdown-3b",
        "deepscaler-1.5b-async",
        "gsm8k-0.5b",
        "gsm8k-1.5b-lora",
        "knights-knaves",
        "knights-knaves-7b-lora",
        "math-7b-swarm",
        "quickstart",
        "quickstart-warmstart",
        "smollm2-calculator",
        "smollm2-calculator-warmstart",
        "smollm2-sums",
        "sokoban",
        "sokoban-3b-lora",
        "sokoban-4b",
        "sokoban-warmstart",
    ]
    assert shipped("recipes/planner/this-cpu.toml") == ROOT / "recipes" / "planner" / "this-cpu.toml"


def test_a_file_of_the_user_comes_first_and_other_paths_are_not_ours(tmp_path: Path) -> None:
    for path in (
        "nothing",
        "recipes",
        "models",
        "",
        ".",
        "../shipped/recipes/quickstart.toml",
        tmp_path / "quickstart",
    ):
        assert shipped(path) is None, path
    Path("quickstart").write_text('[run]\nname = "own"\n[model]\npath = "m"\n[[task]]\nname = "chain_sum"\n')
    assert shipped("quickstart") is None
    assert load_recipe(Recipe, Path("quickstart")).run.name == "own"


def test_a_recipe_that_does_not_exist_is_refused_with_the_shipped_names() -> None:
    with pytest.raises(UserError, match=r"there is no recipe quikstart .*; shipped are countdown, countdown-3b, deep"):
        load_recipe(Recipe, Path("quikstart"))


def test_a_recipe_of_the_other_command_is_refused_with_its_command() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(Recipe, Path("quickstart-warmstart"))
    assert str(caught.value) == (
        "quickstart-warmstart is a recipe for `baton sft`, but a recipe for `baton train` is needed"
    )
    with pytest.raises(UserError) as caught:
        load_recipe(WarmStart, Path("quickstart"))
    assert str(caught.value) == "quickstart is a recipe for `baton train`, but a recipe for `baton sft` is needed"


@pytest.mark.parametrize("name", ["sokoban", "smollm2-calculator"])
def test_a_missing_model_of_a_shipped_warm_start_is_refused_with_the_command_that_writes_it(name: str) -> None:
    path = tomllib.loads((ROOT / "recipes" / f"{name}.toml").read_text())["model"]["path"]
    assert load_recipe(WarmStart, Path(f"{name}-warmstart")).output == path
    with pytest.raises(UserError, match=rf"there is no directory .*; `baton sft {name}-warmstart` writes it"):
        check_model_path(path)
