"""Checks whether a recipe has the model and the workload for which a plan was made."""

from __future__ import annotations

from pathlib import Path

from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_workload, recipe_workload
from baton.specs.model import read_model
from baton.specs.plan import Plan, PlannedWork

TOLERANCE = 0.15
"""A plan is still used if a count or a length in the recipe differs from the plan's by at most this fraction."""


def check_plan(plan: Plan, recipe: Recipe, file: Path) -> tuple[str, ...]:
    """Compare a plan with a recipe; return lines for the user about differences or unknown values. Raises UserError if
    a difference makes the plan's times or memory wrong."""
    if plan.work is None:
        return (f"{file} does not record its model and workload, so they are not compared with the recipe",)
    found = _differences(plan, plan.work, recipe)
    if wrong := [f"{key}: got {got}, the plan has {planned}" for key, got, planned, matters in found if matters]:
        raise UserError(
            f"{file} was made for another run: {'; '.join(wrong)} (counts and lengths may differ by {TOLERANCE:.0%}): "
            "change the recipe, or make a plan with its model and workload (`baton plan --model … --workload …`)"
        )
    notes = [f"{key}: got {got}, the plan has {planned}" for key, got, planned, _ in found]
    return (f"{file} is used, although it differs from the recipe: {'; '.join(notes)}",) if notes else ()


def _differences(plan: Plan, planned: PlannedWork, recipe: Recipe) -> list[tuple[str, object, object, bool]]:
    """Return (key, value of the recipe, value of the plan, whether the difference matters)."""
    work, cut, context = recipe_workload(recipe), recipe.rollout.max_new_tokens, recipe.engine.max_context_tokens
    far = _is_far(work.num_trajectories, planned.groups * planned.group_size)
    own, of_plan = f"{work.groups} × {work.group_size}", f"{planned.groups} × {planned.group_size}"
    longest = planned.max_output_tokens or round(planned.longest_output_tokens)
    is_longer = _is_far(cut, longest) if planned.max_output_tokens else longest > cut
    pairs: list[tuple[str, object, object, bool]] = [
        ("rollout.batch_groups × group_size", own, of_plan, far),
        ("rollout.max_new_tokens", cut, longest, is_longer),
        ("max_staleness", work.max_staleness, plan.max_staleness, 0 in (work.max_staleness, plan.max_staleness)),
        ("optimiser updates per step", work.updates, planned.updates, _is_far(work.updates, planned.updates)),
        ("a critic", work.has_critic, planned.has_critic, work.has_critic),
        ("a reference model", work.has_reference, planned.has_reference, work.has_reference),
        ("trainer.activation_checkpointing", work.recompute, planned.recompute, planned.recompute),
    ]
    if most := planned.microbatch_tokens:  # with fewer tokens than planned, the memory suffices
        own_most = work.microbatch_tokens
        is_larger = own_most > most and _is_far(own_most, most)
        pairs.append(("trainer.max_tokens_per_microbatch", own_most, most, is_larger))
    if Path(recipe.model.path).exists():  # a name on the Hugging Face hub is not compared
        model = read_model(Path(recipe.model.path))
        same = (model.num_layers, model.hidden, model.vocab) == (planned.num_layers, planned.hidden, planned.vocab)
        got, of_plan = (f"{x.params / 1e6:,.1f} M parameters in {x.num_layers} layers" for x in (model, planned))
        matters = not same or _is_far(model.params, planned.params)
        if matters or model.name != plan.model:
            pairs.append(("model.path", f"{recipe.model.path} ({got})", f"{plan.model} ({of_plan})", matters))
    if planned.longest_prompt_tokens >= context:
        prompts = f"prompts of {planned.longest_prompt_tokens:.0f} tokens"
        pairs.append(("engine.max_context_tokens", context, prompts, True))
    elif fixed := planned.engine_context_tokens:
        pairs.append(("engine.max_context_tokens", context, fixed, _is_far(context, fixed)))
    if recipe.fleet.workload is not None:
        mean = read_workload(Path(recipe.fleet.workload)).output.mean
        far, of_plan = _is_far(mean, planned.mean_output_tokens), f"{planned.mean_output_tokens:.3g}"
        pairs.append(("response tokens of fleet.workload", f"{mean:.3g}", of_plan, far))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _is_far(got: float, planned: float) -> bool:
    return abs(got - planned) > TOLERANCE * planned
