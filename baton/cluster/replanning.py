"""Replanning after machines joined or left, for the workers of a running trainer or for a trainer that restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from pydantic import BaseModel

from baton.cluster.inventory import CPU, Machine, describe
from baton.cluster.placement import ProcessSpec, place
from baton.cost.efficiency import CalibrationSettings, Efficiencies
from baton.errors import BatonError, UserError
from baton.planner.instance import Inputs
from baton.planner.replan import ReplanOption, replan
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_workload, recipe_workload, workload_of_run
from baton.specs.cluster import ClusterSettings
from baton.specs.model import read_model
from baton.specs.plan import Plan
from baton.specs.workload import LengthSettings, Workload

Kind = TypeVar("Kind", bound=BaseModel)
TIME_LIMIT_S = 30.0


class ReplanResult(msgspec.Struct, frozen=True):
    """The result of replanning for a running run."""

    workers: tuple[ProcessSpec, ...] | None
    """The workers of the new plan; None keeps the current ones."""
    words: str


class Replanner:
    """Holds the current plan and computes the next one."""

    def __init__(self, recipe: Recipe, plan: Plan, base: ClusterSettings | None) -> None:
        """base: a cluster file whose links, prices and GPU types apply."""
        self.recipe, self.plan, self._base = recipe, plan, base
        self._next_worker = len(plan.replicas)
        """Worker names are not reused while a hub runs."""

    @property
    def base_types(self) -> tuple[str, ...]:
        """GPU types of the cluster file, in addition to the catalogue's."""
        return () if self._base is None else tuple(self._base.gpu)

    def beside(self, machines: Sequence[Machine], names: Mapping[str, str]) -> ReplanResult:
        """Replan for a trainer that stays where it is. names: the plan's names of the machines, by id.

        Does not raise if no plan is found: the current workers continue.
        """
        if not self.recipe.fleet.replan:
            return ReplanResult(None, "fleet.replan is off: the workers there are go on")
        named = tuple(msgspec.structs.replace(machine, name=names[machine.id]) for machine in machines)
        try:
            options = self._options(named)
            kept = [one for one in options if _trains_on(one.plan) == _trains_on(self.plan)]
            if not kept:
                return ReplanResult(None, "no plan keeps the trainer where it is: the workers there are go on")
            chosen = self._least_moves(kept)
            workers = place(chosen.plan, named, first_worker=self._next_worker).workers
        except BatonError as error:
            return ReplanResult(None, f"there is no new plan, the workers there are go on: {error}")
        self._next_worker += len(workers)
        before_s, self.plan = self.plan.breakdown.step_s, chosen.plan
        best_s = min(one.plan.breakdown.step_s for one in options)
        words = f"planned anew ({chosen.name}): {_seconds(chosen.plan)} a step expected, before it was {before_s:.3g} s"
        if best_s < chosen.plan.breakdown.step_s / (1 + self.recipe.fleet.slack):
            words += f"; {best_s:.3g} s would be had by moving the trainer: stop, plan, --resume"
        return ReplanResult(workers, words)

    def anew(self, machines: Sequence[Machine]) -> str:
        """Replan for a trainer that restarts on any machines; return a message. Raises UserError if there
        is no plan."""
        chosen = self._least_moves(self._options(machines))
        self.plan, self._next_worker = chosen.plan, max(self._next_worker, len(chosen.plan.replicas))
        return f"planned anew ({chosen.name}) for {len(machines)} machines: {_seconds(chosen.plan)} a step expected"

    def _options(self, machines: Sequence[Machine]) -> tuple[ReplanOption, ...]:
        types = {stage.gpu for stage in self.plan.training.stages} | {replica.gpu for replica in self.plan.replicas}
        described = describe(machines, name=self.plan.cluster, base=self._base, with_cpus=CPU in types)
        recipe = self.recipe
        calibration = recipe.fleet.calibration
        inputs = Inputs(
            cluster=described.settings.build(),
            model=read_model(Path(recipe.model.path)),
            work=workload_of(recipe),
            efficiencies=Efficiencies() if calibration is None else _read(CalibrationSettings, calibration).build(),
            cross_types=False,
        )
        return replan(inputs, self.plan, slack=recipe.fleet.slack, time_limit_s=TIME_LIMIT_S).options

    def _least_moves(self, options: Sequence[ReplanOption]) -> ReplanOption:
        """Return the option with the fewest moves among those within `slack` of the fastest."""
        fastest = min(one.plan.breakdown.step_s for one in options)
        near = [one for one in options if one.plan.breakdown.step_s <= fastest * (1 + self.recipe.fleet.slack)]
        return min(near, key=lambda one: (len(one.moved), one.plan.breakdown.step_s))


def workload_of(recipe: Recipe) -> Workload:
    """Return the workload of a run: from its file, or measured from its records, or with responses of
    maximum length."""
    if recipe.fleet.workload is not None:
        return read_workload(Path(recipe.fleet.workload))
    try:
        return workload_of_run(recipe.run.path)
    except UserError:  # nothing is recorded yet
        longest, room = recipe.rollout.max_new_tokens, recipe.engine.max_context_tokens
        return msgspec.structs.replace(
            recipe_workload(recipe),
            prompt=LengthSettings(mean=max(1, room - longest)).build(),
            output=LengthSettings(mean=longest).build(),
        )


def read_base(path: str | None) -> ClusterSettings | None:
    """Read a cluster file whose links, prices and GPU types apply; None without a path."""
    return None if path is None else _read(ClusterSettings, path)


def _read(kind: type[Kind], path: str) -> Kind:
    return load_recipe(kind, Path(path))


def _trains_on(plan: Plan) -> frozenset[str]:
    return frozenset(plan.training.gpu_ids)


def _seconds(plan: Plan) -> str:
    return f"{plan.breakdown.step_s:.3g} s"
