"""Machines come and go under a running plan: the planner's answer is workers to begin, to end and to weigh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from plans import scoring
from ray_rows import row

from baton.cluster.inventory import Machine, describe, machines
from baton.cluster.placement import change, place
from baton.cluster.replanning import Replanner, workload_of
from baton.errors import UserError
from baton.planner.instance import Inputs
from baton.planner.replan import ReplanOption, replan
from baton.planner.solve import make_plan
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.predictions import FILE, RunPredictions, read_predictions
from baton.run.predictions import predictions_of_plan
from baton.specs.model import read_model
from baton.specs.plan import Plan

pytest.importorskip("highspy")
ROOT = Path(__file__).parents[2]


def recipe(tmp_path: Path, *more: str) -> Recipe:
    given = [f"run.directory={tmp_path}", f"model.path={ROOT / 'models' / 'quickstart'}", *more]
    return load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", given)


def yard(*names: str) -> tuple[Machine, ...]:
    """Machines by type: h… have an H100, l… two L20."""
    return machines(
        [row(name, CPU=2, **({"gpu_type_H100": 1} if name[0] == "h" else {"gpu_type_L20": 2})) for name in names]
    )


def planned(found: tuple[Machine, ...], of: Recipe) -> Plan:
    described = describe(found, name="yard").settings.build()
    return make_plan(Inputs(described, read_model(Path(of.model.path)), workload_of(of), cross_types=False))


def test_a_lost_machine_loses_its_workers_and_the_trainer_stays(tmp_path: Path) -> None:
    of, before = recipe(tmp_path), yard("h0", "l0", "l1")
    plan = planned(before, of)
    now = place(plan, before).workers
    planner = Replanner(of, plan)
    answer = planner.replan_workers(yard("h0", "l0"))
    assert answer.workers is not None, answer.words
    made = change([post for post in now if post.machine != "l1"], answer.workers)
    assert not made.ended, "who is left goes on"
    assert {post.machine for post in answer.workers} <= {"h0", "l0"}
    assert set(planner.plan.training.gpu_ids) == set(plan.training.gpu_ids)
    assert sum(post.share for post in answer.workers) == pytest.approx(1.0)


def test_a_machine_that_joins_gets_workers_under_names_that_nobody_had(tmp_path: Path) -> None:
    of, before = recipe(tmp_path), yard("h0", "l0")
    plan = planned(before, of)
    now = place(plan, before).workers
    answer = Replanner(of, plan).replan_workers(yard("h0", "l0", "l1"))
    assert answer.workers is not None, answer.words
    made = change(now, answer.workers)
    assert "l1" in {post.machine for post in made.begun}
    assert not {post.name for post in made.begun} & {post.name for post in now}


def test_a_plan_with_another_shape_of_the_trainer_is_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPUs are the same, but the trainer continues with the old shape, so the new plan's times would be wrong."""
    of, before = recipe(tmp_path), yard("h0", "l0")
    plan = planned(before, of)

    def reshaped(option: ReplanOption) -> ReplanOption:
        training = msgspec.structs.replace(option.plan.training, shard_size=option.plan.training.shard_size + 1)
        return msgspec.structs.replace(option, plan=msgspec.structs.replace(option.plan, training=training))

    def replanned(*given: Any, **named: Any) -> Any:
        return SimpleNamespace(options=tuple(map(reshaped, replan(*given, **named).options)))

    monkeypatch.setattr("baton.cluster.replanning.replan", replanned)
    answer = Replanner(of, plan).replan_workers(yard("h0", "l0", "l1"))
    assert answer.workers is None
    assert answer.words == "no new plan keeps the trainer as it is: the current workers continue"


def test_the_reward_model_stays_on_the_gpus_that_are_left(tmp_path: Path) -> None:
    of, before = recipe(tmp_path), yard("h0", "l0", "l1", "l2")
    plan = planned(yard("h0", "l0", "l1"), of)
    plan = msgspec.structs.replace(plan, reward=scoring("L20", "l2:0", "l2:1"))
    assert len(place(plan, before).rewards) == 2
    planner = Replanner(of, plan)
    answer = planner.replan_workers(yard("h0", "l0", "l2"))
    assert answer.workers is not None, answer.words
    assert {post.machine for post in answer.workers} <= {"h0", "l0"}, "the reward model has l2"
    assert planner.plan.reward is not None
    assert planner.plan.reward.gpu_ids == ("l2:0", "l2:1")
    answer = planner.replan_workers(yard("h0", "l0"))
    assert answer.workers is None
    assert "no GPU of the reward model is left" in answer.words


def test_a_new_plan_replaces_the_predictions_of_the_run_also_if_their_file_is_damaged(tmp_path: Path) -> None:
    of, before = recipe(tmp_path), yard("h0", "l0", "l1")
    plan = planned(before, of)
    planner = Replanner(of, plan)
    of.run.path.mkdir(parents=True)
    planner.predictions = RunPredictions(of.run.path, None)
    planner.predictions.replace(predictions_of_plan(plan, "plan.json", ((64, 5e9),)), 0)
    (of.run.path / FILE).write_text("{")
    assert planner.replan_workers(yard("h0", "l0")).workers is not None
    assert planner.predictions.current == read_predictions(of.run.path)
    assert planner.predictions.current == predictions_of_plan(planner.plan, "plan.json", ((64, 5e9),))


def test_what_cannot_be_planned_leaves_things_as_they_are_and_says_why(tmp_path: Path) -> None:
    of, before = recipe(tmp_path), yard("h0", "l0")
    plan = planned(before, of)
    off = Replanner(recipe(tmp_path, "fleet.replan=false"), plan)
    assert off.replan_workers(before).words.startswith("fleet.replan is off")
    missing = Replanner(recipe(tmp_path, "fleet.workload=nowhere.toml"), plan)
    answer = missing.replan_workers(before)
    assert answer.workers is None
    assert "nowhere.toml" in answer.words
    unknown = machines([row("x", GPU=1)])
    assert "no machine of the cluster can be used in a plan" in Replanner(of, plan).replan_workers(unknown).words


def test_a_trainer_that_begins_again_is_planned_wherever_there_is_room(tmp_path: Path) -> None:
    of, before = recipe(tmp_path), yard("h0", "l0", "h1")
    plan = planned(before, of)
    trained = {gpu.rpartition(":")[0] for gpu in plan.training.gpu_ids}
    left = tuple(machine for machine in before if machine.name not in trained)
    planner = Replanner(of, plan)
    assert planner.replan_all(left).startswith("new plan (")
    placed = place(planner.plan, left)
    assert placed.ranks
    assert not placed.training_machines & trained
    with pytest.raises(UserError):
        planner.replan_all(machines([row("x", GPU=1)]))
