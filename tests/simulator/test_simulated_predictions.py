"""Predictions of a simulation for a run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rewards.settings import RewardSettings
from baton.simulator.predictions import simulated_predictions

WORK = "groups = 1\ngroup_size = 1\nprompt_tokens = { mean = 9 }\noutput_tokens = { mean = 12 }\n"


@pytest.mark.parametrize(("seconds", "has_model"), [(0.001, True), (0.0, True), (0.001, False)])
def test_the_idle_share_of_a_reward_model_follows_from_its_measured_time(
    seconds: float, has_model: bool, small: Any, tmp_path: Path
) -> None:
    calibration, work = tmp_path / "calibration.toml", tmp_path / "work.toml"
    calibration.write_text(f"[efficiency.CPU]\nreward_model_s = {seconds}\ncycle_overhead_s = 1.0\n")
    work.write_text(WORK)
    recipe = load_recipe(Recipe, small.recipe)
    if has_model:
        recipe = recipe.model_copy(update={"reward": (RewardSettings(kind="model", model="m"),)})
    found = simulated_predictions(recipe, calibration, work, ())
    num, step_s = recipe.rollout.batch_groups * recipe.rollout.group_size, found.of("step")
    assert step_s is not None
    expected = pytest.approx(1 - seconds * num / step_s) if seconds and has_model else None
    assert found.of("reward model idle") == expected
