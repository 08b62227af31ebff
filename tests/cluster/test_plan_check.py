"""A plan is used only for the model and the workload for which it was made."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import plan_of, replica, scoring, stage
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.cluster.plan_check import check_inputs, check_plan, check_reward_places
from baton.errors import UserError
from baton.plan import plan as make_plan
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import recipe_workload
from baton.rewards.settings import RewardSettings
from baton.specs.model import read_model
from baton.specs.plan import Plan, PlannedWork, write_plan
from baton.specs.workload import LengthSettings
from tests.tasks.hub_cache import COMMIT, store_model, use_cache

ROOT = Path(__file__).parents[2]
FILE = Path("plan.json")


def recipe(*overrides: str) -> Recipe:
    return load_recipe(
        Recipe, ROOT / "recipes" / "quickstart.toml", [f'model.path="{ROOT}/models/quickstart"', *overrides]
    )


def planned(*overrides: str, **changes: Any) -> Plan:
    """A plan for the quickstart with responses of at most 128 tokens."""
    own = recipe(*overrides)
    work = msgspec.structs.replace(recipe_workload(own), output=LengthSettings(mean=40).build())
    of = PlannedWork.of(read_model(Path(own.model.path)), work)
    return plan_of(
        [stage("L20", "a:0")],
        [replica("L20", "a:1", share=1.0)],
        model="quickstart",
        max_staleness=work.max_staleness,
        work=msgspec.structs.replace(of, **changes),
    )


def refusal(plan: Plan, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_plan(plan, recipe(*overrides), FILE)
    assert "\n" not in str(caught.value)
    assert "make a plan" in str(caught.value)
    return str(caught.value)


def test_a_plan_made_for_the_recipe_is_used_without_a_word() -> None:
    assert check_plan(planned(), recipe(), FILE) == ()


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({"num_layers": 28}, (), "model.path: got .*0.8 M parameters in 4 layers.*0.8 M parameters in 28 layers"),
        ({"params": 2e6}, (), "model.path: got .*2.0 M"),
        ({}, ("rollout.group_size=16",), "group_size: got 32 × 16, the plan has 32 × 8"),
        ({}, ("rollout.batch_groups=8",), "group_size: got 8 × 8, the plan has 32 × 8"),
        ({}, ("rollout.max_new_tokens=64",), "rollout.max_new_tokens: got 64, the plan has 128"),
        ({"max_output_tokens": 0, "longest_output_tokens": 200.0}, (), "max_new_tokens: got 128, the plan has 200"),
        ({"engine_context_tokens": 512}, (), "engine.max_context_tokens: got 192, the plan has 512"),
        ({"longest_prompt_tokens": 300.0}, (), "engine.max_context_tokens: got 192, the plan has prompts of 300"),
        ({}, ('rollout.mode="async"',), "max_staleness: got 4, the plan has 0"),
        ({}, ("algorithm.kl_coef=0.01",), "a reference model: got True, the plan has False"),
        ({}, ("trainer.max_tokens_per_microbatch=4096",), "max_tokens_per_microbatch: got 4096, the plan has 2048"),
        ({}, ("trainer.ranks=4", "trainer.shard_size=2"), "trainer.shard_size: got 2, the plan has no copies"),
        ({"recompute": True}, (), "trainer.activation_checkpointing: got False, the plan has True"),
    ],
)
def test_a_plan_for_another_run_is_refused(changes: dict[str, Any], overrides: tuple[str, ...], words: str) -> None:
    assert re.search(words, refusal(planned(**changes), *overrides))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 28}, "--model: got .*in 4 layers.*in 28 layers"),
        ({"params": 2e6}, "--model: got .*2.0 M"),
        ({"groups": 64}, "groups × group_size: got 32 × 8, the plan has 64 × 8"),
        ({"updates": 4}, "optimiser updates per step: got 1, the plan has 4"),
        ({"has_reference": True}, "a reference model: got False, the plan has True"),
    ],
)
def test_a_plan_is_simulated_only_with_its_model_and_workload(changes: dict[str, Any], words: str) -> None:
    own = recipe()
    model = read_model(Path(own.model.path))
    work = msgspec.structs.replace(recipe_workload(own), output=LengthSettings(mean=40).build())
    check_inputs(planned(), model, work, FILE)
    check_inputs(msgspec.structs.replace(planned(), work=None), model, work, FILE)
    check_inputs(planned(mean_output_tokens=1234.5), model, work, FILE)  # a simulation shows what other lengths change
    with pytest.raises(UserError, match=words) as caught:
        check_inputs(planned(**changes), model, work, FILE)
    assert "\n" not in str(caught.value)


def test_one_sentence_names_all_differences_that_matter() -> None:
    words = refusal(planned(), "rollout.group_size=4", "rollout.max_new_tokens=64")
    assert "32 × 4" in words
    assert "got 64" in words


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({}, ("rollout.batch_groups=64", "rollout.group_size=4"), "got 64 × 4, the plan has 32 × 8"),
        ({}, ("rollout.batch_groups=33",), "got 33 × 8, the plan has 32 × 8"),
        ({}, ("rollout.max_new_tokens=120",), "got 120, the plan has 128"),
        ({"max_output_tokens": 0}, (), "max_new_tokens: got 128, the plan has 40"),
        ({"microbatch_tokens": 8192}, (), "trainer.max_tokens_per_microbatch: got 2048, the plan has 8192"),
        ({"has_critic": True}, (), "a critic: got False, the plan has True"),
    ],
)
def test_a_harmless_difference_is_said(changes: dict[str, Any], overrides: tuple[str, ...], words: str) -> None:
    (note,) = check_plan(planned(**changes), recipe(*overrides), FILE)
    assert words in note
    assert "plan.json is used, although" in note


def test_another_model_of_the_same_shape_is_said() -> None:
    other = msgspec.structs.replace(planned(), model="quickstart-tuned")
    (note,) = check_plan(other, recipe(), FILE)
    assert "the plan has quickstart-tuned (0.8 M parameters in 4 layers)" in note


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(tmp_path / "cache", monkeypatch)


def test_a_model_of_the_hub_is_compared_if_its_config_is_in_the_cache(hub: Path) -> None:
    store_model(hub, "owner/quickstart", ROOT / "models" / "quickstart")
    own = "model.path='owner/quickstart'"
    assert check_plan(planned(), recipe(own), FILE) == ()
    words = refusal(planned(num_layers=28), own)
    assert "model.path: got owner/quickstart (0.8 M parameters in 4 layers), the plan has quickstart" in words
    revised = f"model.path='owner/quickstart@{COMMIT}'"
    assert check_plan(planned(), recipe(revised), FILE) == ()
    assert "in 28 layers" in refusal(planned(num_layers=28), revised)
    (note,) = check_plan(msgspec.structs.replace(planned(), model="tuned"), recipe(own), FILE)
    assert "the plan has tuned (0.8 M parameters in 4 layers)" in note


def test_an_adapter_of_a_hub_model_is_compared_if_the_config_of_its_base_is_in_the_cache(
    hub: Path, tmp_path: Path
) -> None:
    store_model(hub, "owner/quickstart", ROOT / "models" / "quickstart")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/quickstart"}')
    own = f"model.path='{tmp_path}'"
    assert check_plan(planned(), recipe(own), FILE) == ()
    assert "in 28 layers" in refusal(planned(num_layers=28), own)


def test_a_model_of_the_hub_that_is_not_in_the_cache_is_named_in_one_sentence(hub: Path) -> None:
    (note,) = check_plan(planned(num_layers=28), recipe("model.path='Qwen/Qwen2.5-7B'"), FILE)
    assert note == (
        "plan.json is used, although values differ or are unknown: model.path: got Qwen/Qwen2.5-7B (not on this "
        "machine, so its size is unknown; `hf download Qwen/Qwen2.5-7B` fetches it), the plan has quickstart "
        "(0.8 M parameters in 28 layers)"
    )
    assert "group_size" in refusal(planned(), "model.path='Qwen/Qwen2.5-7B'", "rollout.group_size=16")


def test_a_reward_model_of_the_hub_is_compared_too(hub: Path) -> None:
    store_model(hub, "owner/judge", ROOT / "models" / "quickstart")
    spec = read_model(ROOT / "models" / "quickstart")
    own = {"model": "judge", "params": spec.params, "num_layers": spec.num_layers, "batch_tokens": 16384}
    plan = msgspec.structs.replace(planned(), reward=scoring("L20", "b:0", **own))
    assert check_plan(plan, with_reward("owner/judge"), FILE) == ()
    plan = msgspec.structs.replace(planned(), reward=scoring("L20", "b:0", **{**own, "num_layers": 28}))
    with pytest.raises(UserError, match=r"\[\[reward\]\] model: got owner/judge .* the plan has judge .* in 28 layers"):
        check_plan(plan, with_reward("owner/judge"), FILE)


def test_the_lengths_of_fleet_workload_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "work.toml"
    file.write_text("groups = 32\ngroup_size = 8\nprompt_tokens = { mean = 9 }\noutput_tokens = { mean = 80 }\n")
    words = refusal(planned(), f'fleet.workload="{file}"')
    assert "response tokens of fleet.workload: got 80, the plan has 40" in words


def with_reward(model: str, **keys: Any) -> Recipe:
    own = {"kind": "model", "model": model, **keys}
    return recipe().model_copy(update={"reward": (RewardSettings.model_validate(own),)})


def test_the_reward_model_of_the_plan_is_that_of_the_recipe() -> None:
    directory = str(ROOT / "models" / "quickstart")
    spec = read_model(Path(directory))
    own = {"model": spec.name, "params": spec.params, "num_layers": spec.num_layers, "batch_tokens": 16384}

    def differences(recipe: Recipe, **changes: Any) -> str:
        plan = msgspec.structs.replace(planned(), reward=scoring("L20", "b:0", **{**own, **changes}))
        try:
            return " ".join(check_plan(plan, recipe, FILE))
        except UserError as error:
            return f"refused: {error}"

    assert differences(with_reward(directory)) == ""
    found = differences(with_reward(directory), num_layers=28)
    assert re.search(r"refused: .*\[\[reward\]\] model: got .*in 4 layers.*the plan has .*in 28 layers", found)
    found = differences(with_reward(directory, batch_tokens=32768))
    assert "refused" in found
    assert "[[reward]] batch_tokens: got 32768, the plan has 16384" in found
    assert "plan.json is used, although" in differences(with_reward(directory, batch_tokens=8192))
    assert "the plan has other (0.8 M" in differences(with_reward(directory), model="other")
    found = differences(with_reward("someone/judge-of-the-hub"))
    assert "[[reward]] model: got someone/judge-of-the-hub (not on this machine, so its size is unknown;" in found


@pytest.mark.parametrize(
    ("reward", "recipe", "words"),
    [
        (False, with_reward("m"), "has no GPU for the reward model 'm' of [[reward]]"),
        (False, with_reward("m", devices=["cpu"]), ""),
        (True, with_reward("m"), ""),
        (True, recipe(), 'the recipe has no [[reward]] of kind = "model"'),
        (True, with_reward("m", devices=["cpu"]), "devices: got ['cpu'], but plan.json has GPUs for the reward model"),
        (True, with_reward("m", kind="http", url="http://h", template="{prompt}"), "has no [[reward]] of kind"),
    ],
)  # fmt: skip
def test_a_reward_model_runs_either_where_the_plan_or_where_the_recipe_says(
    reward: bool, recipe: Recipe, words: str
) -> None:
    plan = planned()
    if reward:
        plan = msgspec.structs.replace(plan, reward=scoring("L20", "b:0"))
    with pytest.raises(UserError, match=re.escape(words)) if words else nullcontext():
        check_reward_places(plan, recipe, FILE)
    two = recipe.model_copy(update={"reward": recipe.reward * 2})
    if reward and not words:
        with pytest.raises(UserError, match="has 2 "):
            check_reward_places(plan, two, FILE)


def test_a_dry_run_compares_the_plan_too(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(planned(), file)
    start = ["train", str(ROOT / "recipes" / "quickstart.toml"), "--dry-run", "--plan", str(file), "--ray", "auto"]
    with pytest.raises(UserError, match=r"plan.json was made for another run: .*got 32 × 4"):
        CliRunner().invoke(cli.app, [*start, "rollout.group_size=4"], catch_exceptions=False)
    with pytest.raises(UserError, match=r"plan.json has no GPU for the reward model 'm'"):
        CliRunner().invoke(cli.app, [*start, 'reward=[{kind = "model", model = "m"}]'], catch_exceptions=False)


def test_the_planner_records_the_work_of_its_inputs(tmp_path: Path) -> None:
    file = tmp_path / "work.toml"
    file.write_text(
        "groups = 32\ngroup_size = 8\nmax_staleness = 0\nprompt_tokens = { mean = 9 }\n"
        'output_tokens = { kind = "lognormal", mean = 40, max = 128 }\n'
        "algorithm = { recompute = false, microbatch_tokens = 2048 }\n"
    )
    cluster = ROOT / "recipes" / "planner" / "this-cpu.toml"
    found = make_plan(ROOT / "models" / "quickstart", file, cluster, colocated=True).plan
    assert check_plan(found, recipe(), FILE) == ()
    assert "32 × 4" in refusal(found, "rollout.group_size=4")


def test_a_plan_without_numbers_is_used_and_this_is_said() -> None:
    (note,) = check_plan(msgspec.structs.replace(planned(), work=None), recipe("rollout.group_size=4"), FILE)
    assert "does not record its model and workload" in note
