"""The memory of the trainer is predicted for the largest microbatch of a run; planner and dry run assume the most."""

from __future__ import annotations

from pathlib import Path

from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.run.dry_run import footprint, trainer_bytes
from baton.run.memory import most_tokens_of

ROOT = Path(__file__).parents[2]


def recipe(*overrides: str) -> Recipe:
    given = [f'model.path="{ROOT}/models/quickstart"', 'model.device="cpu"', *overrides]
    return load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", given)


def test_the_most_tokens_of_a_microbatch_are_those_of_the_longest_trajectories() -> None:
    assert most_tokens_of(recipe("trainer.max_tokens_per_microbatch=2048")) == 2048
    assert most_tokens_of(recipe("trainer.max_tokens_per_microbatch=64")) == 192, "the context: a trajectory alone"
    few = recipe("rollout.batch_groups=1", "rollout.group_size=4")
    assert most_tokens_of(few) == 4 * 192, "the whole batch"


def test_the_last_prediction_is_that_of_the_dry_run_and_fewer_tokens_need_less() -> None:
    own = recipe("engine.processes=1")
    found = trainer_bytes(own, is_here=True)
    trainer = next(process for process in footprint(own).processes if process.name == "the trainer")
    assert found[-1] == (2048, trainer.num_bytes)
    assert [tokens for tokens, _ in found] == [2**power for power in range(12)]
    sizes = [num_bytes for _, num_bytes in found]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.9 * sizes[-1]
