"""Checks whether a recipe or a simulation has the model and the workload for which a plan was made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.errors import UserError
from baton.policy.tokenizer import model_directory, split_revision
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_workload, recipe_workload
from baton.specs.model import ModelSpec, read_model
from baton.specs.plan import Plan, PlannedWork, RewardStage
from baton.specs.workload import Workload

TOLERANCE = 0.15
"""A count or length in the recipe may differ from that in the plan by at most this fraction."""
NUMBERS = "num_layers", "hidden", "vocab"
"""Fields of `ModelSpec` that are compared. If one of them differs, recipe and plan have different models. A
`RewardStage` has only `num_layers`, so only this field is compared with it."""
Difference = tuple[str, object, object, bool]
"""Key, the recipe's value, the plan's value, and whether the plan must be refused if the values differ."""


def check_plan(plan: Plan, recipe: Recipe, file: Path) -> tuple[str, ...]:
    """Compare a plan with a recipe; return lines for the user about differences or unknown values. Raises UserError if
    a difference makes the plan's times or memory wrong."""
    if plan.work is None:
        return (f"{file} does not record its model and workload, so they are not compared with the recipe",)
    found = _differences(plan, plan.work, recipe)
    advice = "change the recipe, or make a plan with its model and workload (`baton plan --model … --workload …`)"
    _refuse(found, file, advice)
    notes = [f"{key}: got {got}, the plan has {planned}" for key, got, planned, _ in found]
    return (f"{file} is used, although values differ or are unknown: {'; '.join(notes)}",) if notes else ()


def check_inputs(plan: Plan, model: ModelSpec, work: Workload, file: Path) -> None:
    """Raise UserError if a plan was made for another model, or for a workload of another kind. The lengths of responses
    may differ, because a simulation shows their effect. A plan that does not record these values is not checked."""
    if (planned := plan.work) is None:
        return
    own, of_plan = f"{work.groups} × {work.group_size}", f"{planned.groups} × {planned.group_size}"
    far = _is_far(work.num_trajectories, planned.groups * planned.group_size)
    is_other = _is_other_model(model, planned)
    pairs: list[Difference] = [
        ("--model", f"{model.name} ({_size(model)})", f"{plan.model} ({_size(planned)})", is_other),
        ("groups × group_size", own, of_plan, far),
        ("optimiser updates per step", work.updates, planned.updates, _is_far(work.updates, planned.updates)),
        ("a critic", work.has_critic, planned.has_critic, work.has_critic != planned.has_critic),
        ("a reference model", work.has_reference, planned.has_reference, work.has_reference != planned.has_reference),
    ]
    _refuse(pairs, file, "give the model and the workload of the plan")


def _refuse(differences: Sequence[Difference], file: Path, advice: str) -> None:
    if wrong := [f"{key}: got {got}, the plan has {planned}" for key, got, planned, matters in differences if matters]:
        raise UserError(
            f"{file} was made for another run: {'; '.join(wrong)} (counts and lengths may differ by {TOLERANCE:.0%}): "
            f"{advice}"
        )


def _differences(plan: Plan, planned: PlannedWork, recipe: Recipe) -> list[Difference]:
    """Return the keys whose values in recipe and plan differ or are unknown."""
    work, cut, context = recipe_workload(recipe), recipe.rollout.max_new_tokens, recipe.engine.max_context_tokens
    far = _is_far(work.num_trajectories, planned.groups * planned.group_size)
    own, of_plan = f"{work.groups} × {work.group_size}", f"{planned.groups} × {planned.group_size}"
    longest = planned.max_output_tokens or round(planned.longest_output_tokens)
    is_longer = _is_far(cut, longest) if planned.max_output_tokens else longest > cut
    pairs: list[Difference] = [
        ("rollout.batch_groups × group_size", own, of_plan, far),
        ("rollout.max_new_tokens", cut, longest, is_longer),
        ("max_staleness", work.max_staleness, plan.max_staleness, 0 in (work.max_staleness, plan.max_staleness)),
        ("optimiser updates per step", work.updates, planned.updates, _is_far(work.updates, planned.updates)),
        ("a critic", work.has_critic, planned.has_critic, work.has_critic),
        ("a reference model", work.has_reference, planned.has_reference, work.has_reference),
        ("trainer.activation_checkpointing", work.recompute, planned.recompute, planned.recompute),
    ]
    if recipe.rollout.is_colocated and not plan.is_colocated:
        pairs.append(("rollout.placement", "colocated", "separate", True))
    size, own_shards = recipe.trainer.shard_size, plan.training.shard_size
    if size is not None and not own_shards:  # otherwise the plan's value replaces the recipe's
        pairs.append(("trainer.shard_size", size, "no copies of the trainer's state", True))
    if most := planned.microbatch_tokens:  # with fewer tokens than planned, the memory suffices
        own_most = work.microbatch_tokens
        is_larger = own_most > most and _is_far(own_most, most)
        pairs.append(("trainer.max_tokens_per_microbatch", own_most, most, is_larger))
    pairs += _model_difference("model.path", recipe.model.path, plan.model, planned)
    if planned.longest_prompt_tokens >= context:
        prompts = f"prompts of {planned.longest_prompt_tokens:.0f} tokens"
        pairs.append(("engine.max_context_tokens", context, prompts, True))
    elif fixed := planned.engine_context_tokens:
        pairs.append(("engine.max_context_tokens", context, fixed, _is_far(context, fixed)))
    pairs += _reward_differences(plan, recipe)
    if recipe.fleet.workload is not None:
        mean = read_workload(Path(recipe.fleet.workload)).output.mean
        far, of_plan = _is_far(mean, planned.mean_output_tokens), f"{planned.mean_output_tokens:,.0f}"
        pairs.append(("response tokens of fleet.workload", f"{mean:,.0f}", of_plan, far))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _model_difference(key: str, name: str, of_plan: str, planned: PlannedWork | RewardStage) -> list[Difference]:
    """Compare a model of the recipe with a model of the plan. A model given by its name on the Hugging Face hub can
    be compared only if its config.json is in the local cache; nothing is downloaded."""
    hub_name = split_revision(name)[0]
    try:
        directory = model_directory(name)
    except ValueError:  # neither a directory nor a valid name
        directory = Path(name)
    if not directory.exists():
        got = f"not on this machine, so its size is unknown; `hf download {hub_name}` fetches it"
        return [(key, f"{name} ({got})", f"{of_plan} ({_size(planned)})", False)]
    model = read_model(directory)
    matters = _is_other_model(model, planned)
    if not matters and of_plan in (model.name, hub_name.rpartition("/")[2]):
        return []
    return [(key, f"{name} ({_size(model)})", f"{of_plan} ({_size(planned)})", matters)]


def _is_other_model(model: ModelSpec, planned: PlannedWork | RewardStage) -> bool:
    is_other = any(getattr(model, own) != getattr(planned, own, getattr(model, own)) for own in NUMBERS)
    return is_other or _is_far(model.params, planned.params)


def _size(model: ModelSpec | PlannedWork | RewardStage) -> str:
    return f"{model.params / 1e6:,.1f} M parameters in {model.num_layers} layers"


def _reward_differences(plan: Plan, recipe: Recipe) -> list[Difference]:
    """Compare the plan's reward model with the recipe's. `check_reward_places` checks the number of reward models."""
    stage, own = plan.reward, next((each for each in recipe.reward if each.kind == "model"), None)
    if stage is None or own is None or not stage.params:
        return []
    pairs = _model_difference("[[reward]] model", own.model or "", stage.model, stage)
    kinds = ("a classifier", "a generative model")
    is_generative, was_planned = own.starts_server, stage.context_tokens > 0
    pairs.append(("[[reward]] template", kinds[is_generative], kinds[was_planned], True))
    for key in ("concurrency", "context_tokens") if is_generative else ("batch_tokens",):
        most, planned = getattr(own, key), getattr(stage, key)  # with fewer tokens than planned, the memory suffices
        pairs.append((f"[[reward]] {key}", most, planned, most > planned and _is_far(most, planned)))
    return pairs


def check_reward_places(plan: Plan, recipe: Recipe, file: Path) -> None:
    """Raise UserError if the recipe's reward models do not match the plan's GPUs for a reward model."""
    models = [each for each in recipe.reward if each.kind == "model"]
    on_plan = [each for each in models if not each.devices]
    if plan.reward is None and on_plan:
        raise UserError(
            f"{file} has no GPU for the reward model {on_plan[0].model!r} of [[reward]]: set `reward.model` in the "
            "workload and plan again, or set devices in [[reward]] to run it on this machine"
        )
    if plan.reward is None:
        return
    where = f"{file} has GPUs for the reward model {plan.reward.model!r}"
    if not models:
        raise UserError(
            f'{where}, but the recipe has no [[reward]] of kind = "model": add it, or plan without `reward.model`'
        )
    if len(models) > 1:
        raise UserError(f'{where}, but the recipe has {len(models)} [[reward]] of kind = "model"; allowed is one')
    if not on_plan:
        raise UserError(
            f"[[reward]] devices: got {list(models[0].devices)}, but {where} ({', '.join(plan.reward.gpu_ids)}); "
            "remove the key"
        )


def _is_far(got: float, planned: float) -> bool:
    return abs(got - planned) > TOLERANCE * planned
