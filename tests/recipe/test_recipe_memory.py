"""The memory tables of docs/recipes.md and docs/gpu-memory.md are what `cost/memory.py` gives for the recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.recipe.shipped import shipped_recipes
from tests.recipe.recipe_memory import BETWEEN, PAGES, RECIPES, ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "render"), PAGES.items(), ids=lambda value: getattr(value, "name", ""))
def test_a_table_is_what_the_law_gives(page: Path, render: Callable[[], str]) -> None:
    found = BETWEEN.search(page.read_text(encoding="utf-8"))
    assert found is not None, "the markers are missing"
    assert found[0] == f"{found[1]}\n{render()}\n{found[2]}", "run python -m tests.recipe.recipe_memory"


def test_the_page_describes_every_shipped_recipe_and_says_which_were_never_run() -> None:
    for name in shipped_recipes():
        assert f"`{name}`" in PAGE, name
    for name in RECIPES:
        text = (ROOT / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
        assert "Never run by the authors of Baton" in text
