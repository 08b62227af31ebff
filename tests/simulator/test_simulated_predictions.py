"""Predictions of a simulation for a run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.cost.efficiency import CalibrationSettings
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_settings, read_workload, recipe_workload
from baton.rewards.settings import RewardSettings
from baton.simulator.input_sources import RecipeSource, SimulationOptions
from baton.simulator.predictions import simulated_predictions
from baton.simulator.run import simulate
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import computed_tokens, train_speed
from baton.specs.model import read_model
from baton.specs.workload import Workload, constant
from baton.trainer.algorithm import AlgorithmSettings
from baton.types import (
    FinishReason,
    Group,
    Message,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

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


@pytest.mark.parametrize(("steps", "simulated", "window"), [(6, 6, (1, 6)), (40, 40, (8, 40)), (1000, 60, (10, 55))])
def test_predictions_are_means_over_the_steps_that_a_comparison_includes(
    steps: int, simulated: int, window: tuple[int, int], small: Any, tmp_path: Path
) -> None:
    """In `async`, the first steps fill the pipeline, and in the last ones nothing is generated. A short run has all of
    them; in a long run they do not count."""
    calibration, work = tmp_path / "calibration.toml", tmp_path / "work.toml"
    calibration.write_text("[efficiency.CPU]\ncycle_overhead_s = 1.0\n")
    work.write_text(WORK)
    recipe = load_recipe(Recipe, small.recipe)
    changes = {"rollout": {"mode": "async", "max_staleness": 4}, "run": {"steps": steps}}
    recipe = recipe.model_copy(update={k: getattr(recipe, k).model_copy(update=v) for k, v in changes.items()})
    found = simulated_predictions(recipe, calibration, work, ())
    efficiencies = read_settings(CalibrationSettings, calibration).build()
    setting = RecipeSource(recipe, efficiencies, read_workload(work)).setting(SimulationOptions(steps=simulated))
    done = simulate(setting, RunOptions(recipe.run.seed)).steps
    assert len(done) == simulated
    begin, end = window
    assert found.of("step") == pytest.approx((done[end - 1].end_s - done[begin - 1].end_s) / (end - begin))
    slot_s = [step.counts.slot_s for step in done[begin:end]]
    assert found.of("generation") == pytest.approx(sum(slot_s) / setting.slots / len(slot_s))
    assert found.of("generation")


def group_of(*rewards: float) -> Group:
    """A group whose prompt has 10 tokens, and each of whose responses has 30."""
    segment = Segment((1,) * 30, (-1.0,) * 30, 0)
    made = [Trajectory(0, index, (1,) * 10, (segment,), FinishReason.STOP) for index in range(len(rewards))]
    judged = [RewardResult(reward, {}, is_correct=reward > 0) for reward in rewards]
    members = tuple(map(ScoredTrajectory, made, judged))
    return Group(0, Prompt("0", "task", (Message("user", ""),)), members)


@pytest.mark.parametrize(
    ("passes", "zero_advantage"),
    [
        ({}, 1 / 4),
        ({"forwards_all": False}, 0.0),
        ({"backwards_all": True}, 1.0),
        ({"shares_prompts": True}, 1 / 4),
    ],
)
def test_groups_without_advantages_take_less_time_to_train(
    passes: dict[str, bool], zero_advantage: float, small: Any
) -> None:
    """One forward pass instead of a forward pass, a recomputation, and a backward pass that counts as two."""
    work = Workload("w", 4, 2, constant(10), constant(30), trained_share=0.75, **passes)  # type: ignore[arg-type]
    work = msgspec.structs.replace(work, has_proximal_forward=False, recompute=True)
    speed = train_speed(read_model(small.model), work, 10.0, 1.0)

    taught, other = group_of(0.0, 1.0), group_of(1.0, 1.0)
    taught_s, other_s = (speed.step_s([each]) - 1.0 for each in (taught, other))
    assert other_s == pytest.approx(zero_advantage * taught_s)
    assert speed.step_s([taught, other, taught, taught]) == pytest.approx(11.0)  # an average batch
    assert speed.step_s([]) == 1.0


def test_a_shared_prompt_is_computed_once_in_a_group() -> None:
    """A prompt of 10 tokens and two responses of 30: 10 + 2 · 30 tokens. The square of the prompt counts once."""
    shares = Workload("w", 1, 2, constant(10), constant(30), shares_prompts=True)
    alone = msgspec.structs.replace(shares, shares_prompts=False)
    for work, expected in ((shares, (70, 3100)), (alone, (80, 3200))):
        assert (work.computed_tokens, work.computed_squared) == expected
        assert computed_tokens(group_of(0.0, 1.0), shares_prompts=work.shares_prompts) == expected
    assert shares.trained_tokens == alone.trained_tokens == 80


def test_a_recipe_that_shares_prompts_says_so_to_the_cost_model(small: Any) -> None:
    for value in (False, True):
        recipe = load_recipe(Recipe, small.recipe, [f"trainer.share_prompts={str(value).lower()}"])
        assert recipe_workload(recipe).shares_prompts is value


@pytest.mark.parametrize(
    ("changes", "all_rows"),
    [
        ({}, False),
        ({"kl_coef": 0.1, "kl_in": "loss"}, True),
        ({"kl_coef": 0.1, "kl_in": "reward"}, True),
        ({"normalize_advantages": True}, True),
        ({"name": "rloo"}, False),
        ({"entropy_coef": 0.1}, True),
        ({"name": "ppo"}, True),
        ({"name": "reinforce_pp"}, True),
    ],
)
def test_rows_with_equal_rewards_have_a_backward_pass_if_their_loss_has_a_gradient(
    changes: dict[str, Any], all_rows: bool, small: Any
) -> None:
    algorithm = AlgorithmSettings(**changes)
    recipe = load_recipe(Recipe, small.recipe).model_copy(update={"algorithm": algorithm})
    assert recipe_workload(recipe).backwards_all == all_rows
