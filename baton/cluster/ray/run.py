"""A run that a plan places on a Ray cluster: this process is controller and hub, everything else is actors.

plan, machines ─▶ placement ─▶ recipe with its ranks ─▶ loop.train ──RankLost──▶ last checkpoint, plan anew ─┐
                      ▲──────────────────────────────────────────────────── at most fleet.max_restarts ◀──┘
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
"""What Ray may take to notice that a machine is gone, once a rank on it is: then it is planned without."""


@dataclass(frozen=True, slots=True)
class RayRun:
    """What is to be run."""

    load: Callable[[Sequence[str]], Recipe]
    """Reads the recipe under these overrides."""
    plan: Path
    address: str
    resume: bool = False
    overwrite: bool = False
    rules: SupervisionRules | None = None


def train_on_ray(order: RayRun, observer: Observer, stop: StopRequest) -> Loop:
    """Run an order to its end, or until `stop` is requested; return the loop, closed.

    A lost rank or trainer machine sends the run back to its last checkpoint, with a plan for the machines that are
    left. Raises Stopped before there is a loop, UserError for what cannot be placed, RankLost when that has happened
    too often, EngineFault when no worker is left, and what `Loop.train` raises.
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
        """Whether the run's directory is this command's, so that to begin again is to resume."""
        self.names: dict[str, str] = {}
        """What the plan calls the machines, by id."""

    def run(self) -> Loop:
        """Attempt the run until it is through."""
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
        """Where a machine of the plan's is gone, plan for those there are. Raises RankLost where there is no plan."""
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
        """The recipe with what the placement decides: ranks, threads, where the hub listens."""
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
        """Reserve a place for the trainer in this process, or return None where it is to be an actor.

        One rank that needs no GPU of Ray's, on the machine of this command, is this process.
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
    """The shape of a replica, for an engine that has one."""
    if recipe.engine.kind != "vllm" or post.tp * post.pp == 1 or post.gpu == CPU:
        return ()
    return (f"tensor_parallel={post.tp}", f"pipeline_parallel={post.pp}")
