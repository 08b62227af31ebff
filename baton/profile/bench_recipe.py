"""`baton bench rollout` with the model, engine and prompts of a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import UserError
from baton.policy.load import load_policy, torch_device
from baton.policy.tokenizer import load_tokenizer
from baton.profile.bench import BenchResult, ScriptedLengths, bench_engine, bench_flat, sides_of
from baton.profile.engine import endless_engine
from baton.recipe.recipe import Recipe
from baton.run.assemble import set_up_torch
from baton.run.tokenization import PromptEncoder, TokenizedPrompts
from baton.tasks.stream import PromptStream, TaskMixture


def bench_rollout(
    recipe: Recipe, modes: Sequence[str], *, tail: float, between: float, within: float, steps: int, flat: bool
) -> BenchResult:
    """Measure rollout modes on the recipe's model and engine. With `flat`, use a fake engine whose step time does not
    depend on the number of rows. Raises UserError for a recipe with a multi-turn task."""
    if recipe.multi_turn_task is not None:
        raise UserError(
            f"task {recipe.multi_turn_task!r} is multi-turn, but `baton bench rollout` generates single-turn "
            "responses, without environments; give a recipe of single-turn tasks, or compare perf/throughput of short "
            "runs"
        )
    sides = sides_of(recipe.rollout, modes)
    longest = recipe.rollout.max_new_tokens
    lengths = ScriptedLengths(longest / tail, longest, between, within)
    if flat:
        return bench_flat(sides, lengths, steps=steps)
    set_up_torch(1)
    encoder = PromptEncoder(load_tokenizer(recipe.model.path), recipe.task)
    mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments, tool_format=encoder.tool_format)
    return bench_engine(
        lambda: endless_engine(recipe),
        sides,
        lambda: TokenizedPrompts(PromptStream(mixture, recipe.run.seed), encoder),
        lengths,
        load_policy(recipe.model, recipe.engine.dtype).state_dict(),
        on_cpu=torch_device(recipe.model.device).type == "cpu",
        steps=steps,
    )
