"""Starts the reward model of a plan: one actor on each GPU of the reward stage.

The run's scoring thread starts the actors, sends calls to them, and restarts an actor that has ended or hangs, as it
does with local processes (`baton/rewards/pool.py`). The resources stay reserved during a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from baton.cluster.inventory import CPU, Machine
from baton.cluster.placement import ProcessSpec
from baton.cluster.ray.actors import RewardActor
from baton.cluster.ray.connection import START_DEADLINE_S, RayCluster
from baton.errors import UserError, first_line
from baton.rewards import scorer_protocol as protocol
from baton.rewards.pool import Launch, MachineGone, ScorerProcess, WorkerExited
from baton.rewards.scorer_protocol import Calls, Outcomes


class RayRewards:
    """The resources of a plan's reward model, which are reserved until `close`."""

    def __init__(
        self,
        cluster: RayCluster,
        specs: Sequence[ProcessSpec],
        machines: Mapping[str, Machine],
        device: str,
        log: Callable[[str], None],
    ) -> None:
        """`machines`: name in the plan → machine. `device`: `model.device` of the recipe, without the index of a
        GPU."""
        self._cluster, self._specs, self._machines, self._log = cluster, specs, machines, log
        self._device = device
        self._groups: list[Any] = []
        self._has_begun: set[str] = set()
        try:
            for spec in specs:
                bundles = [(machines[spec.machine].id, spec.resources)]
                self._groups.append(cluster.reserve(bundles, f"baton-{spec.name}"))
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> tuple[tuple[str, Launch], ...]:
        """The device of each process, and the function that starts the process."""
        return tuple(
            ("cpu" if spec.gpu == CPU else self._device, partial(self._launch, index))
            for index, spec in enumerate(self._specs)
        )

    def close(self) -> None:
        """Release the resources, which ends the actors."""
        for group in self._groups:
            self._cluster.release(group)
        self._groups = []

    async def _launch(self, index: int) -> ScorerProcess:
        spec, group = self._specs[index], self._groups[index]
        name = f"{spec.name} on {spec.machine}"
        self._log(f"{name} is started again" if spec.name in self._has_begun else spec.words)
        self._has_begun.add(spec.name)
        actor_class = self._cluster.ray.remote(RewardActor).options(**self._cluster.options(group, 0, spec))
        # an actor sees only its own GPU if it requests the resource `GPU`, otherwise all GPUs
        gpu = 0 if "GPU" in spec.resources else int(spec.gpu_ids[0].rpartition(":")[2])
        actor = actor_class.remote(str(Path.cwd()), gpu)
        try:
            await self._await_start(spec, actor)
        except BaseException:
            with suppress(Exception):  # the connection to the cluster may be lost
                self._cluster.ray.kill(actor)
            raise
        return _ActorProcess(self._cluster.ray, actor, lambda cause: self._log(f"{name} {cause}"))

    async def _await_start(self, spec: ProcessSpec, actor: Any) -> None:
        started = asyncio.wrap_future(actor.pid.remote().future())
        loop = asyncio.get_running_loop()
        until_s = loop.time() + START_DEADLINE_S
        while not (await asyncio.wait([started], timeout=1.0))[0]:
            if self._machines[spec.machine].id not in self._cluster.alive():
                raise self._gone(spec)
            if loop.time() > until_s:
                raise UserError(
                    f"Ray did not start {spec.name} on {spec.machine} in {START_DEADLINE_S:.0f} s: another user of the "
                    f"cluster holds its {spec.requested}"
                )
        try:
            await started
        except self._cluster.ray.exceptions.RayError as error:
            if self._machines[spec.machine].id not in self._cluster.alive():
                raise self._gone(spec) from error
            raise UserError(f"{spec.name} on {spec.machine} cannot start: {first_line(error)[:200]}") from error

    def _gone(self, spec: ProcessSpec) -> MachineGone:
        return MachineGone(
            f"{spec.name} has lost its machine {spec.machine}, which has left the cluster; make a plan for the "
            "remaining machines, then continue with --resume"
        )


class _ActorProcess:
    """Implements `ScorerProcess` with a `RewardActor`. All methods run in the event loop of the scoring thread."""

    def __init__(self, ray: Any, actor: Any, on_end: Callable[[str], None]) -> None:
        self.is_alive = True
        self._ray, self._actor, self._on_end = ray, actor, on_end

    async def set_up(self, setup: protocol.ScorerSetup) -> protocol.ScorerReady:
        reply = await self._reply(self._actor.set_up.remote(protocol.encode(setup)))
        return msgspec.msgpack.decode(reply, type=protocol.ScorerReady)

    async def ask(self, spec: int, calls: Calls, deadline_s: float, timeout_s: float) -> Outcomes:
        if not self.is_alive:
            raise WorkerExited("has ended")
        request = protocol.encode(protocol.ScoreRequest(0, spec, calls, deadline_s))
        reply = await asyncio.wait_for(self._reply(self._actor.ask.remote(request)), timeout_s)
        return msgspec.msgpack.decode(reply, type=protocol.CallResult).outcomes

    def kill(self) -> None:
        if self.is_alive:
            self.is_alive = False
            with suppress(Exception):  # the connection to the cluster may be lost
                self._ray.kill(self._actor)

    async def ended(self) -> None:
        """Return immediately. The caller need not wait for the end of this actor, because Ray starts another actor on
        the same resources only after this actor has ended."""

    async def _reply(self, future: Any) -> bytes:
        try:
            return bytes(await asyncio.wrap_future(future.future()))
        except self._ray.exceptions.RayError as error:
            cause = f"was lost: {first_line(error)[:200]}"
            if self.is_alive:  # not killed by this process
                self._on_end(cause)
            self.kill()
            raise WorkerExited(cause) from error
