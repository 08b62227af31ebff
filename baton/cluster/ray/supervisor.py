"""Supervises the workers of a run on a Ray cluster: executes the commands of `cluster/supervision.py`.

| thread     | consumes                         | produces                | waits for      | unblocked by          |
|------------|----------------------------------|-------------------------|----------------|-----------------------|
| supervisor | ends of actors, nodes, the clock | events; starts and ends | an actor's end | Ray, or half a second |
| planner    | machines, the current plan       | the next plan           | the solver     | its time limit        |

The threads of the hub and the controller only read worker speeds (`WorkerJoined.weight`) and the recorded fault. In a
colocated run, the controller's thread also makes workers free the memory of their GPUs and allocate it again (`sleep`,
`wake_up`). `_lock` protects the state that both the controller's thread and the supervisor's thread change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, RLock, Thread
from typing import Any, Final
from urllib.parse import urlsplit

from baton.clock import begin
from baton.cluster import supervision as sv
from baton.cluster.inventory import CPU, Machine, machines
from baton.cluster.placement import Placement, ProcessSpec
from baton.cluster.ray.actors import GRACE_S, WorkerActor, WorkerArguments, end_session
from baton.cluster.ray.connection import GET_S, START_DEADLINE_S, RayCluster, calling_ray
from baton.cluster.replanning import Replanner, ReplanResult
from baton.errors import EngineFault, RankLost, first_line
from baton.swarm.listen import is_loopback
from baton.swarm.supervisor import HubAccess
from baton.trainer.parallel.messages import HOW_TO_GO_ON

POLL_S: Final = 0.5
EXIT_S: Final = 5.0
"""If a worker does not answer, maximum seconds to wait for its exit code."""


@dataclass(slots=True)
class _RunningActor:
    spec: ProcessSpec
    node: str
    group: Any
    """Placement group of the actor; None if the actor is in the placement group of the ranks."""
    actor: Any
    watch: Any
    """Ray future that completes when the worker process ends."""
    pid: Any
    """Ray future of the process id; None when the id is known."""
    since_s: float
    """Time of the request to start the actor."""
    process: int = 0
    """Process id; 0 if it is not known yet."""


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
        """Machine id → name, for the machines that the placement or the last `_check_machines` found."""
        self._machines: tuple[Machine, ...] = ()
        """The machines that the last `_check_machines` found; empty before the first call."""
        self._weights = {spec.name: spec.weight for spec in placement.workers}
        self._tokens: dict[str, str] = {}
        self._running: dict[str, _RunningActor] = {}
        self._leaving: list[tuple[_RunningActor, Any, float]] = []
        """Actors that are leaving: (actor, Ray future of its `leave`, deadline)."""
        self.ranks: tuple[Any, Sequence[dict[str, str]]] = None, ()
        """Two values: the placement group of the ranks; and for each rank on a GPU, the environment variable that
        restricts a process to this GPU. In a colocated plan, `ranks` must be set before `begin`."""
        self._lock = RLock()
        self._is_trainers_turn = False
        """True while ranks use the GPUs that they share with workers; no worker on these GPUs is then started."""
        self._waiting: dict[str, ProcessSpec] = {}
        """Workers to start at the next `wake_up`."""
        self._ending: dict[Any, _RunningActor] = {}
        """Workers whose processes may still use memory of a shared GPU. The key of a worker is the Ray future of the
        call `end_session` that kills these processes."""
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
        if self._ending:
            with suppress(Exception):  # the connection to the cluster may be lost
                self._cluster.ray.wait(list(self._ending), num_returns=len(self._ending), timeout=GRACE_S)

    # ---- shared GPUs, called by the controller's thread --------------------------------------------------------------

    def sleep(self) -> None:
        """Wait until each worker on a rank's GPU has freed its device memory or its processes have ended. Raises
        EngineFault if a worker may still use memory."""
        with self._lock:
            if self._is_trainers_turn:
                return
            self._is_trainers_turn = True
            self._waiting = {}
        self._take_turn("sleep")
        with self._lock:
            ending, self._ending = self._ending, {}
        with calling_ray():
            for future, running in ending.items():
                try:
                    is_free = bool(self._cluster.ray.get(future, timeout=GRACE_S + GET_S))
                except self._cluster.ray.exceptions.RayError as error:
                    if running.node not in self._cluster.alive():
                        continue  # the next request to the ranks of this machine reports the loss
                    raise self._not_free(running) from error
                if not is_free:
                    raise self._not_free(running)

    def wake_up(self) -> None:
        """Let the workers allocate their memory again, and start the workers whose start was postponed since
        `sleep`."""
        with self._lock:
            is_change, self._is_trainers_turn = self._is_trainers_turn, False
        if is_change:
            self._take_turn("wake")
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                for spec in waiting.values():
                    self._start_process(spec)

    @property
    def held_bytes(self) -> int:
        """Largest amount of device memory, in bytes, that the engine of any worker on a rank's GPU uses."""
        return max(self._take_turn("held"), default=0)

    def _take_turn(self, turn: str) -> list[int]:
        """Send `sleep`, `wake` or `held` to the workers on GPUs of ranks; return the device memory in bytes that each
        worker then uses. A worker that does not answer within `rollout.stall_timeout_s` is ended."""
        ray, limit_s = self._cluster.ray, self._planner.recipe.rollout.stall_timeout_s
        with self._lock, calling_ray():
            sharing = {name: running for name, running in self._running.items() if running.spec.ranks}
            asked = {name: running.actor.use_device.remote(turn, limit_s) for name, running in sharing.items()}
        with calling_ray():
            answered = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)[0] if asked else []
        held = []
        for name, future in asked.items():
            running, cause = sharing[name], f"did not answer `{turn}` in {limit_s:.0f} s"
            if future in answered:
                with calling_ray(), suppress(ray.exceptions.RayError):
                    held.append(int(ray.get(future, timeout=GET_S)))
                    continue
            with calling_ray():
                if ray.wait([running.watch], timeout=EXIT_S)[0]:
                    cause = self._exit_cause(running.watch)
            with self._lock:
                if self._running.get(name) is running:  # else the supervisor's thread has detected its end
                    self._on_worker_exit(name, cause)
        return held

    def _not_free(self, running: _RunningActor) -> EngineFault:
        spec = running.spec
        return EngineFault(
            f"{spec.name} on {spec.machine} did not leave the GPUs that it shares with trainer ranks, and its "
            f"processes could not be ended: end them (session {running.process}), then continue with --resume"
        )

    # ---- in the supervisor's thread ----------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            with self._lock:
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
        with self._lock:
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
                    self._plan = begin(partial(self._planner.replan_workers, self._machines, self._stopping.is_set))
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
        if spec.ranks and self._is_trainers_turn:
            self._waiting[spec.name] = spec
            return
        cluster = self._cluster
        node = next(node for node, name in self._names.items() if name == spec.machine)
        self._weights[spec.name] = spec.weight
        arguments = self._worker_arguments(spec)
        group = cluster.reserve([(node, spec.resources)], f"baton-{spec.name}") if spec.resources else None
        where, bundle = (group, 0) if group is not None else (self.ranks[0], max(spec.ranks))
        options = cluster.options(where, bundle, spec)
        try:
            with calling_ray():
                actor = cluster.ray.remote(WorkerActor).options(**options, max_concurrency=4).remote(arguments)
                watch, pid = actor.watch.remote(), actor.pid.remote()
        except BaseException:
            if group is not None:
                cluster.release(group)
            raise
        self._running[spec.name] = _RunningActor(spec, node, group, actor, watch, pid, time.monotonic())
        self._log(spec.words)

    def _worker_arguments(self, spec: ProcessSpec) -> WorkerArguments:
        access, recipe = self._access, self._planner.recipe
        if spec.name not in self._tokens:
            self._tokens[spec.name] = access.token(spec.name)
        hub = urlsplit(access.url)
        host = hub.hostname or ""
        if host in ("0.0.0.0", "::"):
            host = self._cluster.own_address
        url = f"{hub.scheme}://{f'[{host}]' if ':' in host else host}:{hub.port}"
        command = [url, "--slots", str(spec.slots), "--threads", str(spec.threads)]
        command += ["--device", recipe.model.device.partition(":")[0]]  # the worker sees only its own GPUs
        command += engine_arguments(recipe.engine.kind, spec, self._planner.servers)
        if spec.ranks:
            command.append("--sleeps")
        if hub.scheme == "http" and not is_loopback(host):
            command.append("--insecure")
        return WorkerArguments(
            command=tuple(command),
            token=self._tokens[spec.name],
            certificate=access.certificate,
            threads=spec.threads,
            gpus=worker_gpus(spec, self.ranks[1]),
        )

    def _await_ends(self) -> None:
        """Wait at most half a second for a worker to start or end."""
        ray, now_s = self._cluster.ray, time.monotonic()
        futures: dict[Any, str] = {}
        with self._lock:
            for name, running in self._running.items():
                futures |= {running.watch: name} | ({running.pid: name} if running.pid is not None else {})
        if not futures:
            self._stopping.wait(POLL_S)
            return
        with calling_ray():
            ready, _ = ray.wait(list(futures), timeout=POLL_S)
        with self._lock:
            for future in ready:
                running_now = self._running.get(futures[future])
                if running_now is not None and future is running_now.pid:
                    self._on_started(futures[future], running_now)
                elif running_now is not None and future is running_now.watch:
                    self._on_worker_exit(futures[future], self._exit_cause(future))
            self._end_late(now_s)

    def _end_late(self, now_s: float) -> None:
        for name, running in list(self._running.items()):
            if running.pid is not None and now_s - running.since_s > START_DEADLINE_S:
                requested, limit = running.spec.requested, f"{START_DEADLINE_S:.0f} s"
                self._on_worker_exit(name, f"was not started by Ray in {limit}: another user holds its {requested}")

    def _on_started(self, name: str, running: _RunningActor) -> None:
        ray = self._cluster.ray
        future, running.pid = running.pid, None
        with calling_ray(), suppress(ray.exceptions.RayError):  # the future `watch` has the reason
            running.process = ray.get(future, timeout=GET_S)
            self._handle(sv.ProcessStarted(time.monotonic(), name))

    @calling_ray()
    def _exit_cause(self, future: Any) -> str:
        try:
            return str(self._cluster.ray.get(future, timeout=GET_S))
        except self._cluster.ray.exceptions.RayError as error:
            return f"ended with its actor: {first_line(error)[:200]}"

    def _on_worker_exit(self, name: str, cause: str) -> None:
        """Report the worker's end to the hub, so that the leases end at once, not after the heartbeat timeout."""
        running = self._running.pop(name)
        self._end_processes(running)
        self._access.gone(name, cause[:300])
        self._discard(running)
        self._handle(sv.ProcessEnded(time.monotonic(), name, cause))

    def _end_processes(self, running: _RunningActor) -> None:
        """End the remaining processes of a worker that uses a rank's GPU. `sleep` waits for their end."""
        if not running.process and running.pid is not None:  # its start was not reported yet
            with suppress(Exception):  # the actor may have ended
                running.process = self._cluster.ray.get(running.pid, timeout=0.1)
        if running.spec.ranks and running.process:
            self._ending[self._cluster.run_on(running.node, end_session, running.process, GRACE_S)] = running

    def _stop_process(self, name: str, cause: str, *, is_reachable: bool) -> None:
        running = self._running.pop(name, None)
        self._waiting.pop(name, None)
        if running is not None and is_reachable:
            self._log(f"{name} on {running.spec.machine} {cause}")
            self._ask_to_leave(running)
            return
        if running is not None:
            self._access.gone(name, cause)
            self._end_processes(running)
            self._discard(running)
        self._remove_token(name)

    def _remove_token(self, name: str) -> None:
        """Remove the token of a worker that has ended for good, because a hub's number of tokens is limited."""
        with self._lock:
            if name in self._tokens and name not in self._running and name not in self._waiting:
                del self._tokens[name]
                self._access.remove_token(name)

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
                if not self._stopping.is_set():
                    self._remove_token(running.spec.name)

    def _discard(self, running: _RunningActor) -> None:
        with suppress(Exception):  # the actor may have ended, or the connection to the cluster may be lost
            self._cluster.ray.kill(running.actor)
        if running.group is not None:
            self._cluster.release(running.group)

    # ---- machines ----------------------------------------------------------------------------------------------------

    def _check_machines(self) -> None:
        found = machines(self._cluster.rows(), types=self._planner.base_types, known=self._names)
        current = {machine.id for machine in found}
        with self._lock:
            self._machines = found
            for node in [node for node in self._names if node not in current]:
                self._handle(sv.MachineLost(time.monotonic(), self._names.pop(node)))
            for machine in found:
                if machine.id not in self._names:
                    self._names[machine.id] = machine.name
                    if machine.gpu is None:
                        self._log(f"machine {machine.name} has joined, but is not used: {machine.problem}")
                    else:
                        self._handle(sv.MachineJoined(time.monotonic(), machine.name))

    def _check_plan(self) -> None:
        if self._plan is not None and self._plan.done():
            result, self._plan = self._plan.result(), None
            self._handle(sv.Planned(time.monotonic(), result.workers, result.words))


def engine_arguments(kind: str, spec: ProcessSpec, servers: Mapping[tuple[str, ...], str]) -> tuple[str, ...]:
    """Return the arguments of `baton worker` that give the URL of a replica's server or the replica's parallel shape;
    empty if the engine needs no such argument. `kind`: kind of the engine."""
    if (url := servers.get(spec.gpu_ids)) is not None:
        return ("--engine", kind, "--engine-option", f"url={url}")
    if kind != "vllm" or spec.tp * spec.pp == 1 or spec.gpu == CPU:
        return ()
    shape = ("--engine-option", f"tensor_parallel={spec.tp}", "--engine-option", f"pipeline_parallel={spec.pp}")
    return ("--engine", kind, *shape)


def worker_gpus(spec: ProcessSpec, ranks: Sequence[Mapping[str, str]]) -> tuple[tuple[str, str | int], ...]:
    """Return `WorkerArguments.gpus` of a worker. `ranks`: for each rank, the environment variable that restricts a
    process to the rank's GPU. A worker that shares no GPU with ranks needs these values only if it does not request the
    resource `GPU`, because its actor then sees all GPUs of the machine."""
    if not spec.ranks and spec.gpu != CPU and "GPU" not in spec.resources:
        return tuple(("CUDA_VISIBLE_DEVICES", int(gpu.rpartition(":")[2])) for gpu in spec.gpu_ids)
    if not ranks or not spec.ranks:
        return ()
    (name,), found, others = ranks[max(spec.ranks)], list[tuple[str, str | int]](), 0
    for gpu, rank in zip(spec.gpu_ids, spec.ranks, strict=True):
        if rank >= 0:
            found.append((name, ranks[rank][name]))
        else:  # an actor sees only its own GPUs if it requests the resource `GPU`, otherwise all GPUs
            found.append((name, others if "GPU" in spec.resources else int(gpu.rpartition(":")[2])))
            others += 1
    return tuple(found)
