"""Runs a plan on a Ray cluster. This process is the controller and the hub; workers and ranks are Ray actors.

plan, machines ─▶ placement ─▶ recipe with its ranks ─▶ loop.train ──RankLost──▶ last checkpoint, replan ─┐
                      ▲──────────────────────────────────────────────────────── at most MAX_RESTARTS ◀─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from baton.cluster.inventory import CPU, Machine, machines
from baton.cluster.placement import Placement, check_engines, machines_of, place, servers_of, without
from baton.cluster.plan_check import check_plan, check_reward_places
from baton.cluster.ray.connection import RayCluster
from baton.cluster.ray.ranks import RayRanks
from baton.cluster.ray.replicas import RayReplicas
from baton.cluster.ray.rewards import RayRewards
from baton.cluster.ray.supervisor import RayWorkerSupervisor
from baton.cluster.replanning import Replanner
from baton.cluster.supervision import SupervisionRules
from baton.errors import RankLost, UserError
from baton.policy.load import torch_device
from baton.policy.settings import dtype_on
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.run.predictions import predictions_of_plan
from baton.specs.plan import read_plan
from baton.stop import StopRequest
from baton.swarm.listen import is_loopback
from baton.weights.direct.settings import DirectTransfer

if TYPE_CHECKING:
    from baton.run.loop import Loop, Observer

MAX_RESTARTS = 3
"""Maximum number of restarts of a run. After the loss of a rank or a machine, the run restarts from its last
checkpoint."""
SERVER_ANSWER_S = 30.0
"""Before the run starts, maximum seconds to wait for the answer of an SGLang server."""
NOTICE_S = 60.0
"""After the loss of a rank, maximum seconds to wait until it is known whether the rank's machine is lost too."""


@dataclass(frozen=True, slots=True)
class RayRun:
    """The arguments of one `baton train --ray` command."""

    load: Callable[[Sequence[str]], Recipe]
    """Function that returns the recipe with the given overrides."""
    plan: Path
    address: str
    resume: bool = False
    overwrite: bool = False
    rules: SupervisionRules | None = None


def train_on_ray(order: RayRun, observer: Observer, stop: StopRequest) -> Loop:
    """Run until the last step or a stop request; return the closed loop.

    After the loss of a rank or a trainer machine, the run restarts from its last checkpoint with a plan for the
    remaining machines. Raises Stopped if the stop request arrives before the loop exists. Raises UserError if the plan
    does not fit the machines or the recipe, RankLost after `MAX_RESTARTS` restarts, EngineFault if no worker is left,
    and the errors of `Loop.train`.
    """
    plan = read_plan(order.plan)
    recipe = order.load([])
    check_reward_places(plan, recipe, order.plan)
    for note in check_plan(plan, recipe, order.plan):
        observer.said(note)
    cluster = RayCluster(order.address)
    try:
        return _RayAttempts(order, Replanner(recipe, plan), cluster, observer, stop).run()
    finally:
        cluster.leave()


class _RayAttempts:
    """The attempts of one command to run a plan."""

    def __init__(
        self, order: RayRun, planner: Replanner, cluster: RayCluster, observer: Observer, stop: StopRequest
    ) -> None:
        self.order, self.planner, self.cluster, self.observer, self.stop = order, planner, cluster, observer, stop
        self.has_begun = False
        """True if an attempt of this command has started the run; the next attempt then resumes the run."""
        self.names: dict[str, str] = {}
        """Machine id → name of the machine in the plan."""

    def run(self) -> Loop:
        """Start attempts until one of them ends without the loss of a rank; return the loop of that attempt."""
        restarts = 0
        while True:
            try:
                return self._attempt()
            except RankLost as lost:
                if restarts == MAX_RESTARTS or self.stop.is_requested:
                    raise RankLost(f"{lost} (after {restarts} restarts)") from lost
                restarts += 1
                self.observer.said(f"{lost}")
                self.observer.said(f"restart {restarts} of {MAX_RESTARTS} from the last checkpoint")
                with self.stop.interrupting():
                    self.cluster.await_answers(self.cluster.alive(), NOTICE_S)
                self._replan(lost)

    def _replan(self, lost: RankLost) -> None:
        """If the cluster has lost a machine of the plan, make a plan for the remaining machines. If no plan exists for
        the remaining machines, continue with the current plan without the lost workers. Raises RankLost if the current
        plan cannot continue either: the trainer used a lost machine, or no worker is left."""
        remaining = self._machines()
        missing = machines_of(self.planner.plan) - {machine.name for machine in remaining}
        if not missing:
            return
        try:
            self.observer.said(self.planner.replan_all(remaining))
        except UserError as error:
            left = without(self.planner.plan, missing)
            if left is None:
                raise RankLost(f"{lost}; there is no plan for the remaining machines: {error}") from error
            self.observer.said(f"there is no new plan, so the remaining workers continue: {error}")
            self.planner.plan = left

    def _attempt(self) -> Loop:
        from baton.run.assemble import RemoteParts, build_loop
        from baton.run.dry_run import trainer_bytes

        current = self._machines()
        placement = place(self.planner.plan, current, here=self.cluster.here)
        self.names = dict(placement.names)
        by_name = {self.names[machine.id]: machine for machine in current}
        recipe = self._recipe(placement, by_name)
        for spec in placement.ranks:
            self.observer.said(spec.words)
        with ExitStack() as ending:  # closes in the reverse order
            own = self._own_trainer(placement, by_name)
            if own is not None:
                ending.callback(self.cluster.release, own)
            device = recipe.model.device.partition(":")[0]
            rewards = RayRewards(self.cluster, placement.rewards, by_name, device, self.observer.said)
            ending.callback(rewards.close)
            ranks = ending.enter_context(ExitStack())

            def start_ranks(count: int, threads: int) -> RayRanks:
                started = RayRanks(self.cluster, placement.ranks, by_name)
                ranks.callback(started.close)
                if supervisor is not None:
                    supervisor.ranks = started.group, started.visible if placement.ranks[0].gpu != CPU else ()
                return started

            supervisor, replicas = None, self._replicas(recipe, placement, by_name)
            if replicas is None:
                said, rules = self.observer.said, self.order.rules
                supervisor = RayWorkerSupervisor(self.cluster, placement, self.planner, said, rules)
                supervisor.ranks = own, ()
                ending.callback(supervisor.close)
            else:
                ending.callback(replicas.close)
            remote = RemoteParts(
                supervisor=supervisor,
                start_ranks=None if own is not None else start_ranks,
                reward_places=rewards.places,
                replicas=replicas,
            )
            with self.stop.interrupting():
                loop = build_loop(
                    recipe,
                    self.observer,
                    resume=self.order.resume or self.has_begun,
                    overwrite=self.order.overwrite and not self.has_begun,
                    stop=self.stop,
                    remote=remote,
                )
            ending.callback(loop.close)
            if replicas is not None:
                ending.callback(replicas.close)  # before `loop.close`, because it cancels waits for machines
            self.has_begun = True
            is_cpu = placement.ranks[0].gpu == CPU
            memory = trainer_bytes(recipe, is_here=False, on_cpu=is_cpu)
            self.planner.predictions = loop.predictions
            predicted = predictions_of_plan(self.planner.plan, str(self.order.plan), memory)
            loop.predictions.replace(predicted, loop.state.step)
            loop.train()
        return loop

    def _machines(self) -> tuple[Machine, ...]:
        return machines(self.cluster.rows(), types=self.planner.base_types, known=self.names)

    def _recipe(self, placement: Placement, machines: dict[str, Machine]) -> Recipe:
        """Return the recipe with the ranks, the threads and the hub's address that the placement requires."""
        overrides = [*placement.overrides, "fleet.ray=true"]
        recipe, rank = self.planner.recipe, placement.ranks[0]
        if len(placement.ranks) == 1 and rank.gpu == CPU and not recipe.run.threads:
            overrides.append(f"run.threads={rank.threads}")
        for key, dtype in {"trainer": recipe.trainer.dtype, "engine": recipe.engine.dtype}.items():
            if dtype == "auto":  # decided here, because this machine may have no GPU
                overrides.append(f"{key}.dtype={dtype_on('cpu' if rank.gpu == CPU else 'cuda', dtype)}")
        if recipe.weights.transport != "store":
            overrides.append(f"engine.vllm.replicas={len(placement.workers)}")
        elif recipe.swarm.serve is None:
            own = self.cluster.own_address
            is_alone = all(machines[spec.machine].address == own for spec in placement.workers)
            overrides.append(f'swarm.serve="{"127.0.0.1" if is_alone else own}:0"')
        check_engines(recipe.engine, placement.workers, recipe.weights.transport)
        if recipe.engine.kind == "sglang" and recipe.engine.sglang.urls and not self.planner.servers:
            self.planner.servers = self._servers(recipe.engine, placement, machines)
        return self.order.load(overrides)

    def _replicas(self, recipe: Recipe, placement: Placement, machines: Mapping[str, Machine]) -> RayReplicas | None:
        """Return the engines of a run with direct weight transfers; None if workers load versions from the weight
        store. Raises UserError for a plan or a recipe with which direct transfers were never tested."""
        got, rank, workers = recipe.weights.transport, placement.ranks[0], placement.workers
        if got == "store":
            return None
        if len({spec.gpu == CPU for spec in (rank, *workers)}) > 1:
            why = f"the trainer is on {rank.gpu} and a replica on {', '.join(sorted({spec.gpu for spec in workers}))}"
        elif self.planner.plan.is_colocated or recipe.rollout.is_colocated:
            why = "trainer and engines use the same GPUs"
        else:
            why = "engine.vllm.lora_rank is set" if recipe.engine.vllm.lora_rank else ""
        if why:
            raise UserError(
                f'weights.transport: got "{got}" with --ray, but {why}, which was never tested; use "store"'
            )
        host, is_here = machines[rank.machine].address, machines[rank.machine].id == self.cluster.here
        gpu = None if rank.gpu == CPU else (torch_device(recipe.model.device).index or 0) if is_here else 0
        direct = DirectTransfer("gloo" if gpu is None else "nccl", gpu=gpu, host=host, is_remote=True)
        said = self.observer.said
        return RayReplicas(self.cluster, workers, lambda: {m.name: m for m in self._machines()}, direct, said)

    def _servers(
        self, engine: EngineSettings, placement: Placement, machines: dict[str, Machine]
    ) -> dict[tuple[str, ...], str]:
        """Map the GPUs of each replica to the URL of its SGLang server. Raises UserError if a server does not
        answer."""
        from baton.rollout.engines.sglang.client import ask_servers
        from baton.rollout.engines.sglang.engine import api_key

        own = engine.sglang
        for url, spec in zip(own.urls, placement.workers, strict=False):
            if is_loopback(urlsplit(url).hostname or "") and machines[spec.machine].address != self.cluster.own_address:
                raise UserError(
                    f"engine.sglang.urls: got {url} for the replica on {spec.machine}, which is not the machine of "
                    "this command; give the server's address on the network"
                )
        infos = ask_servers(own.urls, key=api_key(own), timeout_s=SERVER_ANSWER_S)
        return servers_of(engine, self.planner.plan, infos)

    def _own_trainer(self, placement: Placement, machines: dict[str, Machine]) -> Any:
        """Reserve resources for a trainer in this process; return None if the ranks are actors. The trainer runs in
        this process if it has exactly one rank, and this rank is on this machine and requests no GPU from Ray. In a
        colocated plan, a rank on a GPU is always an actor, because the actor reports which GPU the worker must
        share."""
        rank = placement.ranks[0]
        is_here = machines[rank.machine].id == self.cluster.here
        is_shared_gpu = self.planner.plan.is_colocated and rank.gpu != CPU
        if len(placement.ranks) > 1 or not is_here or "GPU" in rank.resources or is_shared_gpu:
            return None
        self.observer.said(f"{rank.name} runs in this process")
        return self.cluster.reserve([(self.cluster.here, rank.resources)], "baton-trainer")
