"""docs/episodes.md and docs/environments.md: the recipe and the class that they print work together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.environments.adapters import load_environment
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.tasks.environment import EnvironmentTask
from baton.tasks.stream import TaskMixture

ROOT = Path(__file__).parents[2]


def block(page: str, language: str) -> str:
    """The first block of a language on a page."""
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_recipe_on_episodes_loads_and_each_of_its_environments_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guess.py").write_text(block("environments.md", "python"))
    (tmp_path / "episodes.toml").write_text(block("episodes.md", "toml"))
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Recipe, tmp_path / "episodes.toml")
    mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments)
    try:
        held_out = mixture.held_out(recipe.eval.num_prompts)
        assert {prompt.task for prompt in held_out} == {"sokoban", "guess"}
        for prompt in held_out:
            task = mixture.tasks[prompt.task]
            assert isinstance(task, EnvironmentTask)
            environment = load_environment(task.spec).make()
            first = environment.reset(seed=prompt.metadata["seed"])
            assert prompt.messages[-1].content.endswith(first)
            answers = [environment.step(str(50 + turn) if prompt.task == "guess" else "RU") for turn in range(7)]
            assert any(terminated or truncated for _, _, terminated, truncated, _ in answers)
    finally:
        for task in mixture.tasks.values():
            if isinstance(task, EnvironmentTask):
                task.close()
