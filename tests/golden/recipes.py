"""What the shipped recipes and the presets of algorithms resolve to, as a run writes it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tomli_w

from baton.recipe.load import load_recipe
from baton.recipe.presets import list_algorithms
from baton.recipe.recipe import Recipe, WarmStart
from baton.records.run_directory import without_none

HERE = Path(__file__).parent / "recipes"
RECIPES = Path(__file__).parents[2] / "recipes"
LEAST = {"run": {"name": "least"}, "model": {"path": "model"}, "task": [{"name": "chain_sum"}]}
"""A recipe with nothing but what must be given."""


def resolved() -> dict[str, dict[str, Any]]:
    """Return trees by the name of their golden file."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(RECIPES.glob("*.toml")):
        kind = WarmStart if "warmstart" in file.name else Recipe
        found[file.stem] = load_recipe(kind, file).model_dump(mode="json")
    found["defaults"] = Recipe.model_validate(LEAST).model_dump(mode="json")
    for preset in list_algorithms():
        tree = Recipe.model_validate({**LEAST, "algorithm": preset.name}).model_dump(mode="json")
        found[f"preset-{preset.name}"] = {"algorithm": tree["algorithm"], "rollout": tree["rollout"]}
    return {name: without_none(tree) for name, tree in found.items()}


def make() -> None:
    """Write the golden files."""
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    for name, tree in resolved().items():
        (HERE / f"{name}.toml").write_text(tomli_w.dumps(tree))


if __name__ == "__main__":
    make()
