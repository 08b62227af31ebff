"""Runs vLLM replicas as actors on a Ray cluster. The replicas receive versions directly from the trainer
(`weights.transport`).

A replica on several machines has an actor on each of them (`VllmWorkers`). Such a replica fails as a whole: each call
of its first actor also checks its other actors, and `close` ends all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Condition, Event, Lock
from typing import Any, Final

import msgspec

from baton.clock import time_left
from baton.cluster.inventory import CPU, Machine
from baton.cluster.placement import ProcessPart, ProcessSpec
from baton.cluster.ray.connection import GET_S, START_DEADLINE_S, RayCluster, calling_ray
from baton.errors import BatonError, DeadlineExceeded, EngineFault, first_line
from baton.rollout.engines.client import START_TIMEOUT_S
from baton.rollout.engines.vllm.remote import CHECK, Done, RemoteReplica, ReplicaServer, encode
from baton.rollout.processes.protocol import Start
from baton.weights.direct.settings import DirectTransfer

RETURN_S: Final = 600.0
"""Maximum seconds to wait for the return of a replica's machine that has left the cluster."""
_POLL_S: Final = 0.5
_CHECK_S: Final = 1.0
"""Minimum seconds between two checks of an actor on a further machine (any machine of a replica except the first)."""
_CALLS: Final = 16
"""Maximum number of messages that an actor processes concurrently. The number is above 1, so that a call of vLLM's
workers that hangs until its deadline does not block other messages."""


class RayReplicas:
    """Implements `RemoteReplicas`. A failed replica is restarted as a whole, on the machines with the same names."""

    server: type[ReplicaServer] = ReplicaServer
    """Class of the actors."""

    def __init__(
        self,
        cluster: RayCluster,
        specs: Sequence[ProcessSpec],
        machines: Callable[[], Mapping[str, Machine]],
        direct: DirectTransfer,
        log: Callable[[str], None],
    ) -> None:
        """`machines`: function that returns the current machines of the cluster by their names in the plan."""
        self.direct = direct
        self._cluster, self._specs, self._machines, self._log = cluster, specs, machines, log
        self._begun: dict[int, _RayReplica] | None = None
        """Replicas in their first start, by index. The first `build` starts all concurrently; None before it."""
        self._actors: list[_RayReplica] = []
        self._closed = Event()

    def build(self, index: int, start: Start, direct: DirectTransfer) -> RemoteReplica:
        """Start a replica, for the first time or again. Raises EngineFault, DeadlineExceeded, or the error with which
        vLLM's start failed."""
        if self._begun is None:
            self._begun = {each: self._begin(each, start) for each in range(len(self._specs))}
        actor = self._begun.pop(index, None) or self._begin(index, start)
        try:
            actor.await_start()
            actor.join(direct)
        except BaseException:
            actor.close()
            raise
        return actor

    def close(self) -> None:
        """Cancel all waits for machines, and end all actors."""
        self._closed.set()
        with ExitStack() as closing:
            for actor in self._actors:
                closing.callback(actor.close)

    def _begin(self, index: int, start: Start) -> _RayReplica:
        spec, vllm, left_s = self._specs[index], start.settings["vllm"], time_left(RETURN_S)
        if (spec.gpu != CPU or spec.further) and spec.tp * spec.pp > 1:
            # with its default backend, vLLM would start one Ray actor per device in this placement group
            arguments = {"distributed_executor_backend": "mp", **vllm["arguments"]}
            vllm = {**vllm, "tensor_parallel": spec.tp, "pipeline_parallel": spec.pp, "arguments": arguments}
        settings = {**start.settings, "slots": spec.slots, "vllm": {**vllm, "replicas": 1}}
        while (lost := {*spec.machines} - (found := self._machines()).keys()) or self._closed.is_set():
            if left_s() < 0 or self._closed.wait(1.0):
                raise EngineFault(
                    f"{spec.name}: its machine {' and '.join(sorted(lost or spec.machines))} has left the cluster"
                )
        self._log(f"{spec.words}; receives weights directly")
        start = msgspec.structs.replace(start, settings=settings)
        machines = [found[name] for name in spec.machines]
        self._actors.append(_RayReplica(self._cluster, spec, machines, self.server, start))
        return self._actors[-1]


class _Further:
    """An actor on a further machine of a replica. `future`: Ray future of the last call of this actor, which is its
    start or a check."""

    def __init__(self, name: str, actor: Any, started: Any) -> None:
        """`started`: future of the actor's start."""
        self.name, self.actor, self.future = name, actor, started
        self.left_s, self.again_s = time_left(START_TIMEOUT_S + START_DEADLINE_S), time_left(_CHECK_S)


class _RayReplica(RemoteReplica):
    """A replica with one actor on each of its machines and with its own placement group."""

    def __init__(
        self,
        cluster: RayCluster,
        spec: ProcessSpec,
        machines: Sequence[Machine],
        server: type[ReplicaServer],
        start: Start,
    ) -> None:
        """Request the actors, which then start vLLM. Raises RankLost if Ray itself fails (`calling_ray`)."""
        super().__init__(f"{spec.name} on {' and '.join(spec.machines)}", start)
        self._cluster, self._spec = cluster, spec
        self._is_closed, self._num_calls, self._changed = False, 0, Condition()
        """`_num_calls`: number of threads that are executing a call of Ray. This process leaves the cluster only when
        the number is 0."""
        parts: tuple[ProcessSpec | ProcessPart, ...] = (spec, *spec.further)
        gpus = [gpu.rpartition(":") for gpu in spec.gpu_ids]
        bundles = [(machine.id, part.resources) for machine, part in zip(machines, parts, strict=True)]
        host, nodes = machines[0].address, [start]
        if spec.further:
            nodes = [_start_of_node(start, index, len(parts), host) for index in range(len(parts))]
        self._group = cluster.reserve(bundles, f"baton-{spec.name}")
        self._further: list[_Further] = []
        self._checking = Lock()
        self._actors: list[Any] = []
        try:
            with calling_ray():
                for index, (machine, part) in enumerate(zip(machines, parts, strict=True)):
                    options = cluster.options(self._group, index, part)
                    if spec.gpu != CPU and "GPU" not in part.resources:  # the actor sees all GPUs of its machine
                        indices = ",".join(index for name, _, index in gpus if name == part.machine)
                        options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] = indices
                    if spec.further:  # for one machine, `set_up_environment` sets 127.0.0.1
                        options["runtime_env"]["env_vars"]["VLLM_HOST_IP"] = machine.address
                    self._actors.append(cluster.ray.remote(server).options(**options, max_concurrency=_CALLS).remote())
                # if a replica has several machines, Ray passes a port of the first actor to all actors of the replica
                port = self._actors[0].free_port.remote(host) if spec.further else 0
                starts = [
                    actor.handle.remote(encode(own), port) for actor, own in zip(self._actors, nodes, strict=True)
                ]
        except BaseException:
            self.close()
            raise
        self._actor, self._start = self._actors[0], starts[0]
        for part, actor, started in zip(spec.further, self._actors[1:], starts[1:], strict=True):
            self._further.append(_Further(f"{spec.name} on {part.machine}", actor, started))

    def await_start(self) -> None:
        """Wait until vLLM has started. Raises EngineFault, DeadlineExceeded, or the error that the actor reports."""
        try:
            self._get(self._group.ready, START_DEADLINE_S)
        except DeadlineExceeded as error:
            each = " on one of these machines" if self._further else ""
            raise DeadlineExceeded(
                f"{self.name} was not started by Ray in {START_DEADLINE_S:.0f} s: another user holds its "
                f"{self._spec.requested}{each}"
            ) from error
        self.answer(self._get(lambda: self._start, START_TIMEOUT_S + START_DEADLINE_S), Done)

    def send(self, message: bytes, timeout_s: float) -> bytes:
        return bytes(self._get(lambda: self._actor.handle.remote(message), timeout_s))

    def _get(self, call: Callable[[], Any], timeout_s: float) -> Any:
        ray, left_s = self._cluster.ray, time_left(timeout_s)
        with self._changed:
            if self._is_closed:
                raise EngineFault(f"{self.name} was ended")
            self._num_calls += 1
        try:
            future = call()
            self._check_further()
            while not ray.wait([future], timeout=_POLL_S)[0]:
                self._check_further()
                if self._is_closed:
                    raise EngineFault(f"{self.name} was ended")
                if left_s() < 0:
                    raise DeadlineExceeded(f"{self.name} did not answer within {timeout_s:.0f} s")
            return ray.get(future, timeout=GET_S)
        except BatonError:
            raise
        except Exception as error:  # if the head node is lost, Ray raises errors of several types
            raise EngineFault(f"{self.name} was lost: {first_line(error)[:200]}") from error
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _check_further(self) -> None:
        """Raise EngineFault or DeadlineExceeded if an actor on a further machine reports an error, has ended, or has
        not answered its last call in time. Start the next check, at most one per actor in `_CHECK_S` seconds. Does not
        wait."""
        if not self._further or not self._checking.acquire(timeout=0):
            return
        try:
            ray = self._cluster.ray
            for each in self._further:
                if each.again_s() > 0:
                    continue
                if ray.wait([each.future], timeout=0)[0]:
                    self.answer(ray.get(each.future, timeout=GET_S), Done)
                    each.future, each.left_s = each.actor.handle.remote(CHECK), time_left(self._timeout_s)
                elif each.left_s() < 0:
                    raise DeadlineExceeded(f"{each.name} did not answer in time")
                each.again_s = time_left(_CHECK_S)
        finally:
            self._checking.release()

    def close(self) -> None:
        try:
            super().close()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.wait_for(lambda: not self._num_calls, GET_S)
            for actor in self._actors:
                with suppress(Exception):  # the actor may have ended, or the connection to the cluster may be lost
                    self._cluster.ray.kill(actor)
            self._cluster.release(self._group)


def _start_of_node(start: Start, rank: int, num_machines: int, host: str) -> Start:
    """Return the message for one machine of a replica on several machines. `host`: address of the first machine."""
    vllm, node = start.settings["vllm"], {"nnodes": num_machines, "node_rank": rank, "master_addr": host}
    settings = {**start.settings, "vllm": {**vllm, "arguments": {**vllm["arguments"], **node}}}
    return msgspec.structs.replace(start, settings=settings)
