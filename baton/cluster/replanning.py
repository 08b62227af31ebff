"""Makes a new plan after machines have joined or left the cluster: while the trainer runs, or before it restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.cluster.inventory import CPU, Machine, describe
from baton.cluster.placement import ProcessSpec, place
from baton.cost.calibration import calibrate
from baton.cost.efficiency import CalibrationSettings, Efficiency
from baton.errors import BatonError, UserError
from baton.planner.colocated import make_colocated_plan
from baton.planner.problem import Inputs
from baton.planner.replan import ReplanOption, least_moves, replan
from baton.planner.reward_stage import beside
from baton.policy.tokenizer import model_directory
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_workload, recipe_workload, workload_of_run
from baton.records.metrics import read_metrics
from baton.records.predictions import RunPredictions
from baton.run.predictions import measured_rates, predictions_of_plan
from baton.specs.cluster import ClusterSettings
from baton.specs.model import read_model
from baton.specs.plan import Plan, Training
from baton.specs.workload import LengthSettings, Workload

TIME_LIMIT_S = 30.0
SLACK = 0.02
"""A plan that moves fewer GPUs is preferred if its step time is at most this fraction above the shortest step time."""
MEASURED_STEPS = 50
"""A new plan takes the lengths of prompts and responses from at most this number of the latest recorded steps. Without
a limit, a replan would take longer as a run grows."""
NO_SERVERS = "engine.sglang.urls has no servers for other replicas"


class ReplanResult(msgspec.Struct, frozen=True):
    """The result of a replan while the trainer runs."""

    workers: tuple[ProcessSpec, ...] | None
    """The workers of the new plan; None if the current workers continue."""
    words: str


class Replanner:
    """Holds the current plan and computes the next plan."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe, self.plan = recipe, plan
        self.predictions: RunPredictions | None = None
        """The predictions of the run; None while the run is not open."""
        path = recipe.fleet.cluster
        self._base = None if path is None else load_recipe(ClusterSettings, Path(path))
        """Cluster file with the links, prices and GPU types to apply; None if the recipe names no cluster file."""
        self._known: dict[str, Efficiency] = {}
        """GPU type → efficiency that this run has measured. The current plan was made with these efficiencies."""
        self._measured = self._known
        self.servers: dict[tuple[str, ...], str] = {}
        """GPUs of a replica → URL of its SGLang server, if `engine.sglang.urls` is set."""
        self._next_worker = len(plan.replicas)
        """Number for the name of the next worker. Worker names are not reused while a hub runs."""

    @property
    def base_types(self) -> tuple[str, ...]:
        """Names of the GPU types that the cluster file defines in addition to the catalogue."""
        return () if self._base is None else tuple(self._base.gpu)

    def replan_workers(self, machines: Sequence[Machine], is_over: Callable[[], bool] = lambda: False) -> ReplanResult:
        """Make a plan that keeps the trainer on its GPUs. `machines`: machines of the cluster, with their names in the
        plan. If no such plan exists, the result keeps the current workers; no error is raised. If `is_over()` is true
        when the new plan is ready, the current plan is kept too, because the trainer has stopped in the meantime."""
        if not self.recipe.fleet.replan:
            return ReplanResult(None, "fleet.replan is off: the current workers continue")
        if self.plan.is_colocated:
            why = "in a colocated plan, engines move only when the trainer restarts"
            return ReplanResult(None, f"{why}: the current workers continue")
        if self.servers:
            return ReplanResult(None, f"{NO_SERVERS}: the current workers continue")
        try:
            options = self._options(machines)
            kept = [each for option in options if (each := with_trainer(option, self.plan.training)) is not None]
            if not kept:
                return ReplanResult(None, "no new plan keeps the trainer as it is: the current workers continue")
            chosen = least_moves(kept, SLACK)
            workers = place(chosen.plan, machines, first_worker=self._next_worker).workers
        except BatonError as error:
            return ReplanResult(None, f"there is no new plan, so the current workers continue: {error}")
        if is_over():
            return ReplanResult(None, "the trainer has stopped, so the new plan is not used")
        self._next_worker += len(workers)
        before_s = self.plan.breakdown.step_s
        self._adopt(chosen.plan)
        best_s = min(option.plan.breakdown.step_s for option in options)
        words = f"new plan ({chosen.name}): {_seconds(chosen.plan)} per step expected, previously {before_s:.3g} s"
        if best_s < chosen.plan.breakdown.step_s / (1 + SLACK):
            words += f"; {best_s:.3g} s is possible with the trainer on other GPUs: stop, plan again, then --resume"
        return ReplanResult(workers, words)

    def replan_all(self, machines: Sequence[Machine]) -> str:
        """Make a plan for a trainer that restarts; return a line for the user. Raises UserError if there is no plan."""
        if self.servers:
            raise UserError(NO_SERVERS)
        chosen = least_moves(self._options(machines), SLACK)
        self._adopt(chosen.plan)
        self._next_worker = max(self._next_worker, len(chosen.plan.replicas))
        return f"new plan ({chosen.name}) for {len(machines)} machines: {_seconds(chosen.plan)} per step expected"

    def _adopt(self, plan: Plan) -> None:
        """Make this the current plan. From the next train step on, the metrics of the run are compared with the
        predictions of this plan."""
        self.plan, self._known = plan, self._measured
        if self.predictions is not None and (old := self.predictions.current) is not None:
            new = predictions_of_plan(plan, old.source, old.memory)
            steps = max((int(row["step"]) for row in read_metrics(self.recipe.run.path)), default=0)
            self.predictions.replace(new, steps)

    def _options(self, machines: Sequence[Machine]) -> tuple[ReplanOption, ...]:
        types = {stage.gpu for stage in self.plan.training.stages} | {replica.gpu for replica in self.plan.replicas}
        described = describe(machines, name=self.plan.cluster, base=self._base, with_cpus=CPU in types)
        recipe, cluster, work, reward = self.recipe, described.settings.build(), workload_of(self.recipe), None
        if recipe.fleet.workload is None:  # engine.slots is not the limit of a plan's replicas
            most = max(work.max_batch, *(replica.batch for replica in self.plan.replicas))
            work = msgspec.structs.replace(work, max_batch=most)
        if self.plan.reward is not None:  # the reward model stays where it is
            cluster, reward = beside(cluster, self.plan.reward, {machine.name for machine in machines})
            work = msgspec.structs.replace(work, **reward.timing)
        work = msgspec.structs.replace(work, reward_model=None)
        path = recipe.fleet.calibration
        calibration = None if path is None else load_recipe(CalibrationSettings, Path(path))
        known = calibrate((node.gpu for node in cluster.nodes), calibration).at()
        known = msgspec.structs.replace(known, by_gpu={**known.by_gpu, **self._known})
        told = None if self.predictions is None else self.predictions.current
        efficiencies, lines = measured_rates(known, self.plan, told, recipe.run.path)
        self._measured = {gpu: efficiencies.of(gpu) for gpu in types} if lines else self._known
        inputs = Inputs(
            cluster=cluster,
            model=read_model(model_directory(recipe.model.path)),
            work=work,
            efficiencies=efficiencies,
        )
        if self.plan.is_colocated:
            plan = msgspec.structs.replace(make_colocated_plan(inputs), reward=reward)
            return (ReplanOption("colocated", plan, inputs, ()),)
        return replan(inputs, self.plan, reward, slack=SLACK, time_limit_s=TIME_LIMIT_S).options


def with_trainer(option: ReplanOption, running: Training) -> ReplanOption | None:
    """Return the option with the trainer's GPUs in the running trainer's order. A new plan may list the same GPUs in
    another order, for example because the order of the machines has changed. Return None if the option changes the
    trainer's GPUs or how they split model and batch, because a running trainer cannot apply such a change."""
    training = option.plan.training
    if _shape(training) != _shape(running):
        return None
    stages = tuple(
        msgspec.structs.replace(new, gpu_ids=old.gpu_ids)
        for new, old in zip(training.stages, running.stages, strict=True)
    )
    plan = msgspec.structs.replace(option.plan, training=msgspec.structs.replace(training, stages=stages))
    return msgspec.structs.replace(option, plan=plan)


def _shape(training: Training) -> tuple[object, ...]:
    stages = [(stage.gpu, len(stage.gpu_ids), stage.tp, stage.dp, stage.layers) for stage in training.stages]
    return sorted(training.gpu_ids), stages, training.shard_gradients, training.shard_size, training.is_mixed


def workload_of(recipe: Recipe) -> Workload:
    """Return the workload of a run, from `fleet.workload` if this key is set, else from the run's records. Without
    records, all responses are assumed to have the maximum length."""
    if recipe.fleet.workload is not None:
        return read_workload(Path(recipe.fleet.workload))
    try:
        return workload_of_run(recipe.run.path, MEASURED_STEPS)
    except UserError:  # the run has no records yet, or has a multi-turn task
        longest, room = recipe.rollout.max_new_tokens, recipe.engine.max_context_tokens
        return msgspec.structs.replace(
            recipe_workload(recipe),
            prompt=LengthSettings(mean=max(1, room - longest)).build(),
            output=LengthSettings(mean=longest).build(),
        )


def _seconds(plan: Plan) -> str:
    return f"{plan.breakdown.step_s:.3g} s"
