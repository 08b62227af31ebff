"""vLLM replicas as actors on a Ray cluster, which receive versions directly from the trainer (`weights.transport`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Condition, Event
from typing import Any, Final

import msgspec

from baton.clock import time_left
from baton.cluster.inventory import CPU
from baton.cluster.placement import ProcessSpec
from baton.cluster.ray.connection import GET_S, RayCluster
from baton.errors import DeadlineExceeded, EngineFault, first_line
from baton.rollout.engines.client import START_TIMEOUT_S
from baton.rollout.engines.vllm.remote import Done, RemoteReplica, ReplicaServer, encode
from baton.rollout.processes.protocol import Start
from baton.weights.direct.settings import DirectTransfer

START_DEADLINE_S: Final = 120.0
"""Maximum seconds for Ray to grant the resources of a replica."""
RETURN_S: Final = 600.0
"""Maximum seconds that a replica waits for its machine, which has left the cluster, to join again."""
_POLL_S: Final = 0.5
_CALLS: Final = 16
"""Maximum number of messages that an actor processes at once. Calls of vLLM's workers may hang until their deadline."""


class RayReplicas:
    """Implements `RemoteReplicas`. A replica that has failed is started again as a whole, on the machine of the same
    name."""

    server: type[ReplicaServer] = ReplicaServer
    """Class of the actors."""

    def __init__(
        self,
        cluster: RayCluster,
        specs: Sequence[ProcessSpec],
        machines: Callable[[], Mapping[str, str]],
        direct: DirectTransfer,
        log: Callable[[str], None],
    ) -> None:
        """machines: returns name in the plan → node id, for the machines that are now in the cluster."""
        self.direct = direct
        self._cluster, self._specs, self._machines, self._log = cluster, specs, machines, log
        self._begun: dict[int, _RayReplica] = {}
        """Actors that start for the first time. All of them start at once."""
        self._has_begun = False
        self._actors: list[_RayReplica] = []
        self._closed = Event()

    def build(self, index: int, start: Start, direct: DirectTransfer) -> RemoteReplica:
        """Start a replica, for the first time or again. Raises the errors of vLLM's start, EngineFault and
        DeadlineExceeded."""
        if not self._has_begun:
            self._has_begun = True
            for each in range(len(self._specs)):
                self._begun[each] = self._begin(each, start)
        actor = self._begun.pop(index, None) or self._begin(index, start)
        try:
            actor.await_start()
            actor.join(direct)
        except BaseException:
            actor.close()
            raise
        return actor

    def close(self) -> None:
        """End all waits for machines, and all actors."""
        self._closed.set()
        for actor in self._actors:
            actor.close()

    def _begin(self, index: int, start: Start) -> _RayReplica:
        spec, vllm, left_s = self._specs[index], start.settings["vllm"], time_left(RETURN_S)
        if spec.gpu != CPU and spec.tp * spec.pp > 1:
            # by default, vLLM would start the processes of the devices as actors in bundles of this actor's group
            arguments = {"distributed_executor_backend": "mp", **vllm["arguments"]}
            vllm = {**vllm, "tensor_parallel": spec.tp, "pipeline_parallel": spec.pp, "arguments": arguments}
        settings = {**start.settings, "slots": -(-spec.slots // 8) * 8, "vllm": {**vllm, "replicas": 1}}
        while (node := self._machines().get(spec.machine)) is None or self._closed.is_set():
            if left_s() < 0 or self._closed.wait(1.0):
                raise EngineFault(f"{spec.name}: its machine {spec.machine} has left the cluster")
        self._log(f"{spec.words}; receives weights directly")
        start = msgspec.structs.replace(start, settings=settings)
        self._actors.append(_RayReplica(self._cluster, spec, node, self.server, start))
        return self._actors[-1]


class _RayReplica(RemoteReplica):
    """A replica in an actor, in a placement group of its own."""

    def __init__(
        self, cluster: RayCluster, spec: ProcessSpec, node: str, server: type[ReplicaServer], start: Start
    ) -> None:
        """Request the actor, which then starts vLLM."""
        super().__init__(f"{spec.name} on {spec.machine}", start)
        self._cluster, self._spec = cluster, spec
        self._is_closed, self._num_calls, self._changed = False, 0, Condition()
        """`_num_calls`: number of threads in a call of Ray. None may be in one when this process leaves the cluster."""
        self._group = cluster.reserve([(node, spec.resources)], f"baton-{spec.name}")
        options = cluster.options(self._group, 0, spec.resources, spec.threads)
        self._actor = cluster.ray.remote(server).options(**options, max_concurrency=_CALLS).remote()
        self._start = self._actor.handle.remote(encode(start))

    def await_start(self) -> None:
        """Wait until vLLM has started. Raises the error that the actor reports, EngineFault and DeadlineExceeded."""
        try:
            self._get(self._group.ready, START_DEADLINE_S)
        except DeadlineExceeded as error:
            requested = ", ".join(f"{amount:g} {unit}" for unit, amount in self._spec.resources.items())
            raise DeadlineExceeded(
                f"{self.name} was not started by Ray in {START_DEADLINE_S:.0f} s: another user holds its {requested}"
            ) from error
        self.answer(self._get(lambda: self._start, START_TIMEOUT_S + START_DEADLINE_S), Done)

    def send(self, message: bytes, timeout_s: float) -> bytes:
        answer: bytes = self._get(lambda: self._actor.handle.remote(message), timeout_s)
        return answer

    def _get(self, call: Callable[[], Any], timeout_s: float) -> Any:
        ray, left_s = self._cluster.ray, time_left(timeout_s)
        with self._changed:
            if self._is_closed:
                raise EngineFault(f"{self.name} was ended")
            self._num_calls += 1
        try:
            future = call()
            while not ray.wait([future], timeout=_POLL_S)[0]:
                if self._is_closed:
                    raise EngineFault(f"{self.name} was ended")
                if left_s() < 0:
                    raise DeadlineExceeded(f"{self.name} did not answer within {timeout_s:.0f} s")
            return ray.get(future, timeout=GET_S)
        except ray.exceptions.RayError as error:
            raise EngineFault(f"{self.name} was lost: {first_line(error)[:200]}") from error
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def close(self) -> None:
        super().close()
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_calls, GET_S)
        with suppress(Exception):  # the actor may have ended, or the connection to the cluster may be lost
            self._cluster.ray.kill(self._actor)
        with suppress(Exception):
            self._cluster.release(self._group)
