"""A plan is used only for the model and the workload for which it was made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import plan_of, replica, stage
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.cluster.plan_check import check_plan
from baton.errors import UserError
from baton.plan import plan as make_plan
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import recipe_workload
from baton.specs.model import read_model
from baton.specs.plan import Plan, PlannedWork, write_plan
from baton.specs.workload import LengthSettings

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
        ({"recompute": True}, (), "trainer.activation_checkpointing: got False, the plan has True"),
    ],
)
def test_a_plan_for_another_run_is_refused(changes: dict[str, Any], overrides: tuple[str, ...], words: str) -> None:
    assert re.search(words, refusal(planned(**changes), *overrides))


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


def test_the_lengths_of_fleet_workload_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "work.toml"
    file.write_text("groups = 32\ngroup_size = 8\nprompt_tokens = { mean = 9 }\noutput_tokens = { mean = 80 }\n")
    words = refusal(planned(), f'fleet.workload="{file}"')
    assert "response tokens of fleet.workload: got 80, the plan has 40" in words


def test_a_dry_run_compares_the_plan_too(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(planned(), file)
    start = ["train", str(ROOT / "recipes" / "quickstart.toml"), "--dry-run", "--plan", str(file), "--ray", "auto"]
    with pytest.raises(UserError, match=r"plan.json was made for another run: .*got 32 × 4"):
        CliRunner().invoke(cli.app, [*start, "rollout.group_size=4"], catch_exceptions=False)


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
