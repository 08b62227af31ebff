"""A run that a plan places on a Ray cluster. This process is controller and hub; everything else is actors.

plan, machines ─▶ placement ─▶ recipe with its ranks ─▶ loop.train ──RankLost──▶ last checkpoint, replan ─┐
                      ▲────────────────────────────────────────────────── at most fleet.max_restarts ◀─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cluster.inventory import CPU, Machine, machines
from baton.cluster.placement import Placement, ProcessSpec, machines_of, place, without
from baton.cluster.ray.connection import RayCluster
from baton.cluster.ray.ranks import RayRanks
from baton.cluster.ray.supervisor import RaySupervisorParts, RayWorkerSupervisor
from baton.cluster.replanning import Replanner, read_base
from baton.cluster.supervision import SupervisionRules
from baton.errors import RankLost, UserError
from baton.recipe.recipe import Recipe
from baton.specs.plan import Plan, read_plan
from baton.stop import StopRequest

if TYPE_CHECKING:
    from baton.run.loop import Loop, Observer

NOTICE_S = 60.0
"""Time limit for Ray to notice that a machine is gone after a rank on it was lost."""


@dataclass(frozen=True, slots=True)
class RayRun:
    """The arguments of one `baton train --ray` command."""

    load: Callable[[Sequence[str]], Recipe]
    """Loads the recipe with these overrides."""
    plan: Path
    address: str
    resume: bool = False
    overwrite: bool = False
    rules: SupervisionRules | None = None


def train_on_ray(order: RayRun, observer: Observer, stop: StopRequest) -> Loop:
    """Run until the last step, or until `stop` is requested; return the loop, closed.

    After the loss of a rank or a trainer machine, the run restarts from its last checkpoint with a plan for the
    remaining machines. Raises Stopped if stopped before there is a loop, UserError if the plan cannot be placed,
    RankLost after too many restarts, EngineFault if no worker is left, and what `Loop.train` raises.
    """
    plan = read_plan(order.plan)
    cluster = RayCluster(order.address)
    try:
        return _RayAttempts(order, plan, cluster, observer, stop).run()
    finally:
        cluster.leave()


class _RayAttempts:
    """The attempts of one command."""

    def __init__(self, order: RayRun, plan: Plan, cluster: RayCluster, observer: Observer, stop: StopRequest) -> None:
        self.order, self.cluster, self.observer, self.stop = order, cluster, observer, stop
        recipe = order.load([])
        self.planner = Replanner(recipe, plan, read_base(recipe.fleet.cluster))
        self.types = self.planner.base_types
        self.max_restarts = recipe.fleet.max_restarts
        self.has_begun = False
        """Whether this command has started the run, so that the next attempt resumes it."""
        self.names: dict[str, str] = {}
        """The plan's names of the machines, by id."""

    def run(self) -> Loop:
        """Attempt the run until it is complete."""
        restarts = 0
        while True:
            try:
                return self._attempt()
            except RankLost as lost:
                if restarts == self.max_restarts or self.stop.is_requested:
                    raise RankLost(f"{lost} (after {restarts} restarts; fleet.max_restarts)") from lost
                restarts += 1
                self.observer.said(f"{lost}")
                self.observer.said(f"restart {restarts} of {self.max_restarts} from the last checkpoint")
                with self.stop.interrupting():
                    self.cluster.await_signs(self.cluster.alive(), NOTICE_S)
                self._plan_what_is_left(lost)

    def _plan_what_is_left(self, lost: RankLost) -> None:
        """If a machine of the plan is gone, replan for the remaining ones. Raises RankLost if there is no plan."""
        there = self._machines(self.names)
        gone = machines_of(self.planner.plan) - {machine.name for machine in there}
        if not gone:
            return
        try:
            self.observer.said(self.planner.anew(there))
        except UserError as error:
            left = without(self.planner.plan, gone)
            if left is None:
                raise RankLost(f"{lost}; and the machines that are left cannot take over: {error}") from error
            self.observer.said(f"there is no new plan, the workers there are go on: {error}")
            self.planner.plan = left

    def _attempt(self) -> Loop:
        from baton.run.assemble import build_loop

        there = self._machines(self.names)
        placement = place(self.planner.plan, there, here=self.cluster.here)
        self.names = dict(placement.names)
        by_name = {self.names[machine.id]: machine for machine in there}
        recipe = self._recipe(placement, by_name)
        for line in (*placement.notes, *(post.words for post in placement.ranks)):
            self.observer.said(line)
        own = self._own_trainer(placement, by_name)
        ranks: list[RayRanks] = []

        def start_ranks(count: int, threads: int) -> RayRanks:
            ranks.append(RayRanks(self.cluster, placement.ranks, by_name))
            return ranks[0]

        worker_supervisor = RayWorkerSupervisor(self._crew_parts(recipe, placement))
        try:
            with self.stop.interrupting():
                loop = build_loop(
                    recipe,
                    self.observer,
                    resume=self.order.resume or self.has_begun,
                    overwrite=self.order.overwrite and not self.has_begun,
                    stop=self.stop,
                    worker_supervisor=worker_supervisor,
                    start_ranks=None if own is not None else start_ranks,
                )
            self.has_begun = True
            try:
                loop.train()
            finally:
                loop.close()
            return loop
        finally:
            worker_supervisor.close()
            for one in ranks:
                one.close()
            if own is not None:
                with suppress(Exception):  # the cluster may be gone
                    self.cluster.release(own)

    def _machines(self, names: dict[str, str] | Any) -> tuple[Machine, ...]:
        return machines(self.cluster.rows(), types=self.types, known=names)

    def _recipe(self, placement: Placement, machines: dict[str, Machine]) -> Recipe:
        """Return the recipe with the values that the placement decides: ranks, threads, the hub's address."""
        overrides = [f"trainer.ranks={len(placement.ranks)}"]
        recipe = self.order.load([])
        rank = placement.ranks[0]
        if len(placement.ranks) == 1 and rank.gpu == CPU and not recipe.run.threads:
            overrides.append(f"run.threads={rank.threads}")
        if recipe.swarm.serve is None:
            own = self.cluster.own_address
            is_alone = all(machines[post.machine].address == own for post in placement.workers)
            overrides.append(f'swarm.serve="{"127.0.0.1" if is_alone else own}:0"')
        is_wide = any(post.gpu != CPU and post.tp * post.pp > 1 for post in placement.workers)
        if recipe.engine.kind == "embedded" and is_wide:
            raise UserError(
                "--plan: a replica lies on several GPUs, and engine.kind is embedded, which runs on one; allowed is "
                'engine.kind = "vllm", or a plan whose replicas have one GPU each'
            )
        return self.order.load(overrides)

    def _own_trainer(self, placement: Placement, machines: dict[str, Machine]) -> Any:
        """Reserve resources for a trainer in this process; return None if its ranks are actors.

        A single rank that needs no GPU from Ray, on the machine of this command, runs in this process.
        """
        rank = placement.ranks[0]
        is_here = machines[rank.machine].id == self.cluster.here
        if len(placement.ranks) > 1 or not is_here or "GPU" in rank.resources:
            return None
        self.observer.said(f"{rank.name} is this process")
        return self.cluster.reserve([(self.cluster.here, rank.resources)], "baton-trainer")

    def _crew_parts(self, recipe: Recipe, placement: Placement) -> RaySupervisorParts:
        say = self.observer.said
        return RaySupervisorParts(
            self.cluster,
            placement,
            self._machines,
            self.planner.beside,
            lambda post: _engine_options(recipe, post),
            recipe.model.device,
            say,
            self.order.rules,
        )


def _engine_options(recipe: Recipe, post: ProcessSpec) -> tuple[str, ...]:
    """Return the parallel shape of a replica as options of its engine; empty if the engine has none."""
    if recipe.engine.kind != "vllm" or post.tp * post.pp == 1 or post.gpu == CPU:
        return ()
    return (f"tensor_parallel={post.tp}", f"pipeline_parallel={post.pp}")
