"""Machines come and go under a running plan: the planner's answer is workers to begin, to end and to weigh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from plans import scoring
from ray_rows import row

from baton.cluster import replanning
from baton.cluster.inventory import Machine, describe, machines
from baton.cluster.placement import change, place
from baton.cluster.replanning import MEASURED_STEPS, Replanner, with_trainer, workload_of
from baton.errors import Damaged, UserError
from baton.planner.problem import Inputs
from baton.planner.replan import ReplanOption, replan
from baton.planner.solve import make_plan
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import recipe_workload, workload_of_run
from baton.records.predictions import FILE, RunPredictions, read_predictions
from baton.records.run_directory import RunDirectory
from baton.run.predictions import predictions_of_plan
from baton.specs.model import read_model
from baton.specs.plan import Plan
from baton.types import FinishReason, Group, Message, Prompt, RewardResult, ScoredTrajectory, Segment, Trajectory

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


def test_a_plan_that_is_ready_after_the_trainer_has_stopped_is_not_used(tmp_path: Path) -> None:
    """Meanwhile, another plan may be in use; this plan may need a machine that has left."""
    of, before = recipe(tmp_path), yard("h0", "l0", "l1")
    planner = Replanner(of, planned(before, of))
    current = planner.plan
    assert planner.replan_workers(yard("h0", "l0"), lambda: True).workers is None
    assert planner.plan is current


def test_a_reward_model_that_only_the_workload_has_does_not_end_a_replan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, before = recipe(tmp_path), yard("h0", "l0")
    plan = planned(before, of)
    work = msgspec.structs.replace(replanning.workload_of(of), reward_model=read_model(Path(of.model.path)))
    monkeypatch.setattr(replanning, "workload_of", lambda _: work)
    answer = Replanner(of, plan).replan_workers(yard("h0", "l0", "l1"))
    assert answer.workers is not None, answer.words


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


def test_a_trainer_whose_machines_are_listed_in_another_order_goes_on(tmp_path: Path) -> None:
    """Machines are listed by name, but the order of the plan's cluster file may be another one."""
    of, before = recipe(tmp_path), yard("h0", "h1", "l0")
    plan = planned(before, of)
    stage = plan.training.stages[0]
    stage = msgspec.structs.replace(stage, gpu="H100", gpu_ids=("h1:0", "h0:0"), tp=1, dp=2)
    training = msgspec.structs.replace(plan.training, stages=(stage,))
    planner = Replanner(of, msgspec.structs.replace(plan, training=training))
    option = ReplanOption("kept", _on(planner.plan, ("h0:0", "h1:0")), None, ())  # type: ignore[arg-type]
    kept = with_trainer(option, training)
    assert kept is not None
    assert kept.plan.training == training
    assert with_trainer(msgspec.structs.replace(option, plan=_on(planner.plan, ("h0:0", "l0:0"))), training) is None


def _on(plan: Plan, gpu_ids: tuple[str, ...]) -> Plan:
    """The plan with its trainer on other GPUs."""
    stages = (msgspec.structs.replace(plan.training.stages[0], gpu_ids=gpu_ids),)
    return msgspec.structs.replace(plan, training=msgspec.structs.replace(plan.training, stages=stages))


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


def test_a_replan_measures_the_latest_steps_and_skips_damaged_files(tmp_path: Path) -> None:
    of = recipe(tmp_path)
    run = RunDirectory(of.run.path)
    run.path.mkdir(parents=True)
    run.write_start(of.model_dump(mode="json"), seed=0, threads=1)
    steps = MEASURED_STEPS + 3
    for step in range(1, steps + 1):
        segment = Segment((1,) * step, (-1.0,) * step, step - 1)
        trajectory = Trajectory(step, 0, (1, 2), (segment,), FinishReason.STOP)
        member = ScoredTrajectory(trajectory, RewardResult(1.0, {}, False))
        run.write_groups(step, [Group(step, Prompt("p", "t", (Message("user", "2"),)), (member,))])
    measured = workload_of(of).output
    assert (measured.values[0], measured.longest) == (4, steps)
    (run.path / "trajectories" / f"step_{steps:06}.jsonl.gz").write_bytes(b"")
    measured = workload_of(of).output
    assert (measured.values[0], measured.longest) == (3, steps - 1)
    with pytest.raises(Damaged, match="it is empty"):
        workload_of_run(run.path)


def test_a_replan_keeps_the_batches_of_the_plan_which_engine_slots_does_not_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, before = recipe(tmp_path, "engine.slots=8"), yard("h0", "l0")
    plan = planned(before, of)
    larger = tuple(msgspec.structs.replace(replica, batch=40) for replica in plan.replicas)
    given: list[int] = []

    def observed(inputs: Inputs, *more: Any, **named: Any) -> Any:
        given.append(inputs.work.max_batch)
        return replan(inputs, *more, **named)

    monkeypatch.setattr("baton.cluster.replanning.replan", observed)
    Replanner(of, msgspec.structs.replace(plan, replicas=larger)).replan_workers(yard("h0", "l0", "l1"))
    assert given == [40]


def test_only_the_embedded_engine_is_planned_with_a_cache_of_fixed_size(tmp_path: Path) -> None:
    assert recipe_workload(recipe(tmp_path)).engine_context_tokens == recipe(tmp_path).engine.max_context_tokens
    paged = recipe(tmp_path, "engine.kind=sglang", "engine.processes=0", "engine.sglang.url=http://127.0.0.1:1")
    assert recipe_workload(paged).engine_context_tokens == 0


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
