"""The workers of a run on a Ray cluster: executes the commands of `cluster/supervision.py`.

| thread  | consumes                       | produces                   | waits for      | unblocked by          |
|---------|--------------------------------|----------------------------|----------------|-----------------------|
| crew    | ends of actors, nodes, clock   | events; actors start, stop | an actor's end | Ray, or half a second |
| planner | machines, the current plan     | the next plan              | the solver     | its time limit        |

The threads of the hub and the controller only read `weight` and the recorded fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Final
from urllib.parse import urlsplit

from baton.clock import begin
from baton.cluster import supervision as sv
from baton.cluster.inventory import Machine
from baton.cluster.placement import Placement, ProcessSpec
from baton.cluster.ray.actors import GRACE_S, WorkerActor, WorkerArguments
from baton.cluster.ray.connection import GET_S, RayCluster
from baton.cluster.replanning import ReplanResult
from baton.errors import EngineFault, RankLost, first_line
from baton.swarm.listen import is_loopback
from baton.swarm.supervisor import HubAccess
from baton.trainer.parallel.messages import HOW_TO_GO_ON

POLL_S: Final = 0.5
START_DEADLINE_S: Final = 120.0
"""Time limit for Ray to grant a worker's bundle and start its actor."""


@dataclass(frozen=True, slots=True)
class RaySupervisorParts:
    """The parts and functions that the supervisor uses."""

    cluster: RayCluster
    placement: Placement
    machines: Callable[[Mapping[str, str]], tuple[Machine, ...]]
    """Returns the current machines, given the names by id that are already assigned."""
    replan: Callable[[tuple[Machine, ...], Mapping[str, str]], ReplanResult]
    options: Callable[[ProcessSpec], tuple[str, ...]]
    """Returns a worker's engine options that are not in the recipe."""
    device: str
    say: Callable[[str], None]
    rules: sv.SupervisionRules | None = None


@dataclass(slots=True)
class _RunningActor:
    """A worker's actor."""

    post: ProcessSpec
    group: Any
    actor: Any
    watch: Any
    """Future of the end of its process."""
    pid: Any
    """Future of its process id; None once that is known."""
    since_s: float


class RayWorkerSupervisor:
    """The run's workers as actors on a Ray cluster, and the thread that supervises them."""

    def __init__(self, parts: RaySupervisorParts) -> None:
        self._parts = parts
        self._supervision = sv.Supervision(parts.placement, parts.rules)
        self._names = dict(parts.placement.names)
        """Names of the current machines, by id."""
        self._known = {m.id: m for m in parts.machines(self._names)}
        self._weights = {post.name: post.weight for post in parts.placement.workers}
        self._tokens: dict[str, str] = {}
        self._seats: dict[str, _RunningActor] = {}
        self._leaving: list[tuple[_RunningActor, Any, float]] = []
        """(actor, future of its `leave`, deadline)"""
        self.pids: dict[str, int] = {}
        """Process ids of the workers, by name."""
        self._plan: Future[ReplanResult] | None = None
        self._hub: HubAccess | None = None
        self._fault: Exception | None = None
        self._stopping = Event()
        self._thread = Thread(target=self._supervise, name="crew", daemon=True)

    # ---- called by other threads -------------------------------------------------------------------------------------

    def begin(self, hub: HubAccess) -> None:
        self._hub = hub
        self._thread.start()

    def weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def check_health(self) -> None:
        """Raise RankLost if a machine with a rank is gone, EngineFault if no worker is left."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * GRACE_S)
        for seat in list(self._seats.values()):
            self._dismiss(seat)
        self._seats.clear()
        while self._leaving:
            self._see_off()
            time.sleep(0.02)

    # ---- in the supervisor's thread ----------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self._apply_commands(self._supervision.start())
            while not self._stopping.is_set():
                self._await_ends()
                self._look_at_machines()
                self._look_at_plan()
                self._see_off()
                self._handle(sv.SupervisionTick(time.monotonic()))
        except Exception as error:  # noqa: BLE001  # raised by `check_health` in the controller's thread
            self._fault = self._fault or error

    def _handle(self, event: sv.Event) -> None:
        self._apply_commands(self._supervision.handle(event))

    def _apply_commands(self, commands: list[sv.Command]) -> None:
        for command in commands:
            match command:
                case sv.StartProcess(post=post):
                    self._start_process(post)
                case sv.StopProcess(name=name, cause=cause, is_there=is_there):
                    self._stop_process(name, cause, is_there=is_there)
                case sv.SetWorkerWeight(post=post):
                    self._weights[post.name] = post.weight
                    self._access.weigh(post.name, post.weight)
                    self._parts.say(f"{post.words}, from now on")
                case sv.Replan():
                    machines = tuple(self._known.values())
                    names = dict(self._names)
                    self._plan = begin(lambda machines=machines, names=names: self._parts.replan(machines, names))  # type: ignore[misc]
                case sv.TrainerLost(machine=machine):
                    self._fault = self._fault or RankLost(f"machine {machine}, which trains, is gone; {HOW_TO_GO_ON}")
                case sv.Fail(cause=cause):
                    self._fault = self._fault or EngineFault(cause)
                case sv.LogMessage(text=text):
                    self._parts.say(text)

    @property
    def _access(self) -> HubAccess:
        assert self._hub is not None, "a crew acts before it has begun"
        return self._hub

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _start_process(self, post: ProcessSpec) -> None:
        parts, cluster = self._parts, self._parts.cluster
        node = next(node for node, name in self._names.items() if name == post.machine)
        self._weights[post.name] = post.weight
        group = cluster.reserve([(node, post.resources)], f"baton-{post.name}")
        seat = cluster.ray.remote(WorkerActor).options(
            **cluster.options(group, 0, post.resources, post.threads), max_concurrency=4
        )
        actor = seat.remote(self._start_worker(post))
        self._seats[post.name] = _RunningActor(
            post, group, actor, actor.watch.remote(), actor.pid.remote(), time.monotonic()
        )
        parts.say(post.words)

    def _start_worker(self, post: ProcessSpec) -> WorkerArguments:
        access = self._access
        if post.name not in self._tokens:
            self._tokens[post.name] = access.token(post.name)
        where = urlsplit(access.url)
        host = where.hostname or ""
        if host in ("0.0.0.0", "::"):
            host = self._parts.cluster.own_address
        url = f"{where.scheme}://{f'[{host}]' if ':' in host else host}:{where.port}"
        return WorkerArguments(
            name=post.name,
            url=url,
            token=self._tokens[post.name],
            certificate=access.certificate,
            is_insecure=where.scheme == "http" and not is_loopback(host),
            slots=post.slots,
            threads=post.threads,
            device=self._parts.device,
            options=self._parts.options(post),
        )

    def _await_ends(self) -> None:
        """Wait at most half a second for a worker to start or end."""
        ray, now_s = self._parts.cluster.ray, time.monotonic()
        futures: dict[Any, str] = {}
        for name, seat in self._seats.items():
            futures |= {seat.watch: name} | ({seat.pid: name} if seat.pid is not None else {})
        if not futures:
            self._stopping.wait(POLL_S)
            return
        ready, _ = ray.wait(list(futures), timeout=POLL_S)
        for future in ready:
            name = futures[future]
            if name in self._seats and future is self._seats[name].pid:
                self._learn_pid(name, self._seats[name])
            elif name in self._seats:
                self._on_worker_exit(name, self._last_words(future))
        for name, seat in list(self._seats.items()):
            if seat.pid is not None and now_s - seat.since_s > START_DEADLINE_S:
                asked = ", ".join(f"{amount:g} {what}" for what, amount in seat.post.resources.items())
                self._on_worker_exit(
                    name, f"was not started by Ray in {START_DEADLINE_S:.0f} s: somebody else has its {asked}"
                )

    def _learn_pid(self, name: str, seat: _RunningActor) -> None:
        ray = self._parts.cluster.ray
        future, seat.pid = seat.pid, None
        with suppress(ray.exceptions.RayError):  # its `watch` future has the reason
            self.pids[name] = ray.get(future, timeout=GET_S)
            self._handle(sv.ProcessStarted(time.monotonic(), name))

    def _last_words(self, future: Any) -> str:
        ray = self._parts.cluster.ray
        try:
            words: str = ray.get(future, timeout=GET_S)
        except ray.exceptions.RayError as error:
            return f"ended with its actor: {first_line(error)[:200]}"
        return words

    def _on_worker_exit(self, name: str, cause: str) -> None:
        """Report the worker's end to the hub, which revokes its leases at once instead of after the
        heartbeat timeout."""
        seat = self._seats.pop(name)
        self.pids.pop(name, None)
        self._access.gone(name, cause[:300])
        self._discard(seat)
        self._handle(sv.ProcessEnded(time.monotonic(), name, cause))

    def _stop_process(self, name: str, cause: str, *, is_there: bool) -> None:
        seat = self._seats.pop(name, None)
        self.pids.pop(name, None)
        if seat is None:
            return
        if is_there:
            self._parts.say(f"{name} on {seat.post.machine} {cause}")
            self._dismiss(seat)
        else:
            self._access.gone(name, cause)
            self._discard(seat)

    def _dismiss(self, seat: _RunningActor) -> None:
        """Ask a worker to leave; `_see_off` removes its actor later."""
        with suppress(Exception):  # the actor may be gone
            self._leaving.append((seat, seat.actor.leave.remote(), time.monotonic() + GRACE_S + 5.0))

    def _see_off(self) -> None:
        ray = self._parts.cluster.ray
        for one in list(self._leaving):
            seat, future, until_s = one
            try:
                is_done = bool(ray.wait([future], timeout=0)[0])
            except Exception:  # noqa: BLE001  # the cluster is gone, and its actors with it
                is_done = True
            if is_done or time.monotonic() > until_s:
                self._leaving.remove(one)
                self._discard(seat)

    def _discard(self, seat: _RunningActor) -> None:
        with suppress(Exception):  # the actor or the cluster may be gone
            self._parts.cluster.ray.kill(seat.actor)
        with suppress(Exception):
            self._parts.cluster.release(seat.group)

    # ---- machines ----------------------------------------------------------------------------------------------------

    def _look_at_machines(self) -> None:
        there = {machine.id: machine for machine in self._parts.machines(self._names)}
        for node in [node for node in self._known if node not in there]:
            self._known.pop(node)
            self._handle(sv.MachineLost(time.monotonic(), self._names.pop(node)))
        for node, machine in there.items():
            if node not in self._known:
                self._known[node], self._names[node] = machine, machine.name
                if machine.gpu is None:
                    self._parts.say(f"machine {machine.name} is there, but cannot be planned with: {machine.why}")
                else:
                    self._handle(sv.MachineJoined(time.monotonic(), machine.name))

    def _look_at_plan(self) -> None:
        if self._plan is not None and self._plan.done():
            answer, self._plan = self._plan.result(), None
            self._handle(sv.Planned(time.monotonic(), answer.workers, answer.words))
