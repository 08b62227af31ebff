"""Supervises the workers of a run on a Ray cluster: executes the commands of `cluster/supervision.py`.

| thread     | consumes                         | produces                | waits for      | unblocked by          |
|------------|----------------------------------|-------------------------|----------------|-----------------------|
| supervisor | ends of actors, nodes, the clock | events; starts and ends | an actor's end | Ray, or half a second |
| planner    | machines, the current plan       | the next plan           | the solver     | its time limit        |

The threads of the hub and the controller only read worker weights (`WorkerJoined.weight`) and the recorded fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import Any, Final
from urllib.parse import urlsplit

from baton.clock import begin
from baton.cluster import supervision as sv
from baton.cluster.inventory import CPU, Machine, machines
from baton.cluster.placement import Placement, ProcessSpec
from baton.cluster.ray.actors import GRACE_S, WorkerActor, WorkerArguments
from baton.cluster.ray.connection import GET_S, RayCluster
from baton.cluster.replanning import Replanner, ReplanResult
from baton.errors import EngineFault, RankLost, first_line
from baton.recipe.recipe import Recipe
from baton.swarm.listen import is_loopback
from baton.swarm.supervisor import HubAccess
from baton.trainer.parallel.messages import HOW_TO_GO_ON

POLL_S: Final = 0.5
START_DEADLINE_S: Final = 120.0
"""Maximum seconds for Ray to grant the resources of a worker and to start its actor."""


@dataclass(slots=True)
class _RunningActor:
    """The actor of a worker."""

    spec: ProcessSpec
    group: Any
    """Placement group of the actor."""
    actor: Any
    watch: Any
    """Ray future that completes when the worker process ends."""
    pid: Any
    """Ray future of the process id; None when the id is known."""
    since_s: float
    """Time of the request to start the actor."""


class RayWorkerSupervisor:
    """The run's workers as actors on a Ray cluster, and the thread that supervises them."""

    def __init__(
        self,
        cluster: RayCluster,
        placement: Placement,
        planner: Replanner,
        log: Callable[[str], None],
        rules: sv.SupervisionRules | None = None,
    ) -> None:
        self._cluster, self._planner, self._log = cluster, planner, log
        self._supervision = sv.Supervision(placement, rules)
        self._names = dict(placement.names)
        """Machine id → name, for the current machines."""
        self._known = self._current_machines()
        self._weights = {spec.name: spec.weight for spec in placement.workers}
        self._tokens: dict[str, str] = {}
        self._running: dict[str, _RunningActor] = {}
        self._leaving: list[tuple[_RunningActor, Any, float]] = []
        """Actors that are leaving: (actor, Ray future of its `leave`, deadline)."""
        self.pids: dict[str, int] = {}
        """Worker name → process id."""
        self._plan: Future[ReplanResult] | None = None
        self._hub: HubAccess | None = None
        self._fault: Exception | None = None
        self._stopping = Event()
        self._thread = Thread(target=self._supervise, name="ray-supervisor", daemon=True)

    # ---- called by other threads -------------------------------------------------------------------------------------

    def begin(self, hub: HubAccess) -> None:
        self._hub = hub
        self._thread.start()

    def weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def check_health(self) -> None:
        """Raise RankLost if a machine with a rank has left the cluster, EngineFault if no worker is left."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * GRACE_S)
        for running in list(self._running.values()):
            self._ask_to_leave(running)
        self._running.clear()
        while self._leaving:
            self._remove_left()
            time.sleep(0.02)

    # ---- in the supervisor's thread ----------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self._apply_commands(self._supervision.start())
            while not self._stopping.is_set():
                self._await_ends()
                self._check_machines()
                self._check_plan()
                self._remove_left()
                self._handle(sv.SupervisionTick(time.monotonic()))
        except Exception as error:  # noqa: BLE001  # raised by `check_health` in the controller's thread
            self._fault = self._fault or error

    def _handle(self, event: sv.Event) -> None:
        self._apply_commands(self._supervision.handle(event))

    def _apply_commands(self, commands: list[sv.Command]) -> None:
        for command in commands:
            match command:
                case sv.StartProcess(spec=spec):
                    self._start_process(spec)
                case sv.StopProcess(name=name, cause=cause, is_reachable=is_reachable):
                    self._stop_process(name, cause, is_reachable=is_reachable)
                case sv.SetWorkerWeight(spec=spec):
                    self._weights[spec.name] = spec.weight
                    self._access.weigh(spec.name, spec.weight)
                    self._log(f"new share: {spec.words}")
                case sv.Replan():
                    known, names = tuple(self._known.values()), dict(self._names)  # copies for the planner's thread
                    self._plan = begin(partial(self._planner.replan_workers, known, names))
                case sv.TrainerLost(machine=machine):
                    self._fault = self._fault or RankLost(
                        f"machine {machine}, which runs a trainer rank, has left the cluster; {HOW_TO_GO_ON}"
                    )
                case sv.Fail(cause=cause):
                    self._fault = self._fault or EngineFault(cause)
                case sv.LogMessage(text=text):
                    self._log(text)

    @property
    def _access(self) -> HubAccess:
        assert self._hub is not None, "`begin` was not called"
        return self._hub

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _start_process(self, spec: ProcessSpec) -> None:
        cluster = self._cluster
        node = next(node for node, name in self._names.items() if name == spec.machine)
        self._weights[spec.name] = spec.weight
        group = cluster.reserve([(node, spec.resources)], f"baton-{spec.name}")
        actor_class = cluster.ray.remote(WorkerActor).options(
            **cluster.options(group, 0, spec.resources, spec.threads), max_concurrency=4
        )
        actor = actor_class.remote(self._worker_arguments(spec))
        self._running[spec.name] = _RunningActor(
            spec, group, actor, actor.watch.remote(), actor.pid.remote(), time.monotonic()
        )
        self._log(spec.words)

    def _worker_arguments(self, spec: ProcessSpec) -> WorkerArguments:
        access = self._access
        if spec.name not in self._tokens:
            self._tokens[spec.name] = access.token(spec.name)
        hub = urlsplit(access.url)
        host = hub.hostname or ""
        if host in ("0.0.0.0", "::"):
            host = self._cluster.own_address
        url = f"{hub.scheme}://{f'[{host}]' if ':' in host else host}:{hub.port}"
        return WorkerArguments(
            name=spec.name,
            url=url,
            token=self._tokens[spec.name],
            certificate=access.certificate,
            is_insecure=hub.scheme == "http" and not is_loopback(host),
            slots=spec.slots,
            threads=spec.threads,
            device=self._planner.recipe.model.device,
            engine=self._planner.recipe.engine.kind,
            options=_engine_options(self._planner.recipe, spec, self._planner.servers),
        )

    def _await_ends(self) -> None:
        """Wait at most half a second for a worker to start or end."""
        ray, now_s = self._cluster.ray, time.monotonic()
        futures: dict[Any, str] = {}
        for name, running in self._running.items():
            futures |= {running.watch: name} | ({running.pid: name} if running.pid is not None else {})
        if not futures:
            self._stopping.wait(POLL_S)
            return
        ready, _ = ray.wait(list(futures), timeout=POLL_S)
        for future in ready:
            name = futures[future]
            if name in self._running and future is self._running[name].pid:
                self._on_started(name, self._running[name])
            elif name in self._running:
                self._on_worker_exit(name, self._exit_cause(future))
        for name, running in list(self._running.items()):
            if running.pid is not None and now_s - running.since_s > START_DEADLINE_S:
                requested = ", ".join(f"{amount:g} {unit}" for unit, amount in running.spec.resources.items())
                self._on_worker_exit(
                    name,
                    f"was not started by Ray in {START_DEADLINE_S:.0f} s: another user holds its {requested}",
                )

    def _on_started(self, name: str, running: _RunningActor) -> None:
        ray = self._cluster.ray
        future, running.pid = running.pid, None
        with suppress(ray.exceptions.RayError):  # the future `watch` has the reason
            self.pids[name] = ray.get(future, timeout=GET_S)
            self._handle(sv.ProcessStarted(time.monotonic(), name))

    def _exit_cause(self, future: Any) -> str:
        ray = self._cluster.ray
        try:
            cause: str = ray.get(future, timeout=GET_S)
        except ray.exceptions.RayError as error:
            return f"ended with its actor: {first_line(error)[:200]}"
        return cause

    def _on_worker_exit(self, name: str, cause: str) -> None:
        """Report the worker's end to the hub, so that its leases end at once and not after the heartbeat timeout."""
        running = self._running.pop(name)
        self.pids.pop(name, None)
        self._access.gone(name, cause[:300])
        self._discard(running)
        self._handle(sv.ProcessEnded(time.monotonic(), name, cause))

    def _stop_process(self, name: str, cause: str, *, is_reachable: bool) -> None:
        running = self._running.pop(name, None)
        self.pids.pop(name, None)
        if running is None:
            return
        if is_reachable:
            self._log(f"{name} on {running.spec.machine} {cause}")
            self._ask_to_leave(running)
        else:
            self._access.gone(name, cause)
            self._discard(running)

    def _ask_to_leave(self, running: _RunningActor) -> None:
        """Ask a worker to leave; `_remove_left` removes its actor later."""
        with suppress(Exception):  # the actor may have ended
            self._leaving.append((running, running.actor.leave.remote(), time.monotonic() + GRACE_S + 5.0))

    def _remove_left(self) -> None:
        ray = self._cluster.ray
        for leaving in list(self._leaving):
            running, future, until_s = leaving
            try:
                is_done = bool(ray.wait([future], timeout=0)[0])
            except Exception:  # noqa: BLE001  # the connection to the cluster is lost, and its actors have ended
                is_done = True
            if is_done or time.monotonic() > until_s:
                self._leaving.remove(leaving)
                self._discard(running)

    def _discard(self, running: _RunningActor) -> None:
        with suppress(Exception):  # the actor may have ended, or the connection to the cluster may be lost
            self._cluster.ray.kill(running.actor)
        with suppress(Exception):
            self._cluster.release(running.group)

    # ---- machines ----------------------------------------------------------------------------------------------------

    def _check_machines(self) -> None:
        current = self._current_machines()
        for node in [node for node in self._known if node not in current]:
            self._known.pop(node)
            self._handle(sv.MachineLost(time.monotonic(), self._names.pop(node)))
        for node, machine in current.items():
            if node not in self._known:
                self._known[node], self._names[node] = machine, machine.name
                if machine.gpu is None:
                    self._log(f"machine {machine.name} has joined, but is not used: {machine.problem}")
                else:
                    self._handle(sv.MachineJoined(time.monotonic(), machine.name))

    def _current_machines(self) -> dict[str, Machine]:
        found = machines(self._cluster.rows(), types=self._planner.base_types, known=self._names)
        return {machine.id: machine for machine in found}

    def _check_plan(self) -> None:
        if self._plan is not None and self._plan.done():
            result, self._plan = self._plan.result(), None
            self._handle(sv.Planned(time.monotonic(), result.workers, result.words))


def _engine_options(recipe: Recipe, spec: ProcessSpec, servers: Mapping[tuple[str, ...], str]) -> tuple[str, ...]:
    """Return engine options with the parallel shape of a replica, or with the URL of its server; empty if the engine
    has no such options."""
    if (url := servers.get(spec.gpu_ids)) is not None:
        return (f"url={url}",)
    if recipe.engine.kind != "vllm" or spec.tp * spec.pp == 1 or spec.gpu == CPU:
        return ()
    return (f"tensor_parallel={spec.tp}", f"pipeline_parallel={spec.pp}")
