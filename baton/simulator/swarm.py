"""The transport of a swarm in virtual time, with hub, workers, connections and injected faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from baton.errors import UserError
from baton.records.trace import Tracer
from baton.simulator.clock import VirtualClock
from baton.simulator.faults import FaultSettings
from baton.simulator.hub import LeaseTableObserver, SimHub
from baton.simulator.inputs import EngineSpec, Setting, SwarmSpec
from baton.simulator.network import NetworkFaults, SimulatedConnection
from baton.simulator.simulation import Simulation
from baton.simulator.transport import EngineTime, GenerationRequest
from baton.simulator.worker import SimWorker
from baton.swarm.leases import LeaseTable
from baton.types import PolicyVersion


class Swarm:
    """A `SimulatedTransport` that consists of workers, which may join and leave."""

    def __init__(
        self,
        setting: Setting,
        world: Simulation,
        trouble: NetworkFaults | None = None,
        tracer: Tracer | None = None,
        make_table: Callable[..., LeaseTable] = LeaseTable,
    ) -> None:
        assert setting.swarm is not None, "the setting has no swarm"
        self.setting, self.world, self.trouble = setting, world, trouble
        self.clock: VirtualClock = world.clock
        self.spec: SwarmSpec = setting.swarm
        self.workers: list[SimWorker] = []
        self.watches: list[LeaseTableObserver] = []
        self.incarnation = -1
        self.is_down = True
        """Whether the controller is stopped."""
        self._tracer, self._make_table = tracer, make_table
        self._published_s = 0.0
        self.hub: SimHub

    # ---- methods of SimulatedTransport -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a new incarnation of the hub. After a restart, the workers reconnect by themselves."""
        self.incarnation += 1
        self.is_down = False
        table = self._make_table(self.spec.rules)
        self.hub = SimHub(table, self.clock, self.world, f"lineage {self.incarnation}", self.trouble is not None)
        self.hub.watches = self.watches
        self.hub.outcomes = self.count
        if not self.incarnation:
            for spec in self.setting.engines:
                self.join(spec)
        self.clock.after(self.spec.tick_s, self._tick, self.incarnation)

    def want(self, request: GenerationRequest) -> None:
        self.hub.want(request)

    def abort(self, lease: int) -> None:
        self.hub.abort(lease)

    def load(self, version: int) -> None:
        """Publish a version in the background, after the publication of all earlier versions, and then announce the
        version."""
        begin_s = max(self.clock.now_s, self._published_s)
        self._published_s = begin_s + self.setting.publish_s
        if self._tracer is not None:
            self._tracer.span("publish", "hub", 0, begin_s, self._published_s, version=version)
        known = PolicyVersion(self.hub.lineage, version, f"digest {version}")
        self.clock.at(self._published_s, self._announce, self.incarnation, known)
        self.world.serving(version)

    def slow(self, factor: float) -> None:
        for worker in self.workers:
            worker.engine.slow(factor * worker.slowness)

    def busy(self) -> dict[str, tuple[int, int, EngineTime]]:
        """Return name of a worker → (slots, GPUs, use of time). The times of workers with the same name are added."""
        found: dict[str, tuple[int, int, EngineTime]] = {}
        for worker in self.workers:
            spec = worker.spec
            known = found.get(spec.name)
            both = worker.engine.busy if known is None else known[2].plus(worker.engine.busy)
            found[spec.name] = (spec.slots, spec.num_gpus, both)
        return found

    def _announce(self, incarnation: int, version: PolicyVersion) -> None:
        if incarnation == self.incarnation and not self.is_down:
            self.hub.announce(version)

    def _tick(self, incarnation: int) -> None:
        if incarnation == self.incarnation and not self.is_down:
            self.hub.tick()
            self.clock.after(self.spec.tick_s, self._tick, incarnation)

    def count(self, name: str) -> None:
        self.world.record.outcomes[name] += 1

    # ---- workers that join and leave ---------------------------------------------------------------------------------

    def join(self, spec: EngineSpec) -> None:
        remembers = self.trouble is not None
        worker = SimWorker(self.setting, spec, self.clock, self, remembers=remembers, tracer=self._tracer)
        fate = None if self.trouble is None else self.trouble.fates(spec.name)
        worker.up = SimulatedConnection(
            self.clock, self.spec.link_s, lambda message: self._deliver(worker, message), worker.cut, fate
        )
        worker.down = SimulatedConnection(self.clock, self.spec.link_s, worker.on_message, worker.cut, fate)
        same = sum(other.spec.name == spec.name for other in self.workers)
        worker.engine.name += f" ({same + 1})" if same else ""
        self.workers.append(worker)
        worker.start()

    def alive(self) -> list[SimWorker]:
        return [worker for worker in self.workers if worker.is_up]

    def restart(self) -> None:
        """Stop the hub and cut every connection."""
        self.is_down = True
        for worker in self.alive():
            if worker.is_connected:
                worker.cut()
            worker.number = -1

    def _deliver(self, worker: SimWorker, message: object) -> None:
        if not self.is_down:
            self.hub.on_message(worker, message)

    # ---- methods of WorkerHost ---------------------------------------------------------------------------------------

    def connects(self, worker: SimWorker) -> bool:
        return not self.is_down and not (self.trouble is not None and self.trouble.is_apart(worker.spec.name))

    def fetches(self, worker: SimWorker, version: PolicyVersion) -> str:
        if self.is_down:
            return "the hub is down"
        if self.hub.versions.get(version.number) != version:
            return "no such version"
        return "" if self.trouble is None else self.trouble.fetch_fault(worker.spec.name)

    def cut(self, worker: SimWorker) -> None:
        if not self.is_down:
            self.hub.cut(worker)

    def lost(self, num_tokens: int) -> None:
        self.world.record.unreported += num_tokens


class FaultInjector:
    """Applies faults to a swarm at their times."""

    def __init__(self, swarm: Swarm, faults: Sequence[FaultSettings], random: Random) -> None:
        """Raises UserError if a fault names an unknown worker."""
        self._swarm, self._random = swarm, random
        self._specs = {spec.name: spec for spec in swarm.setting.engines}
        for fault in faults:
            if fault.worker and fault.worker not in self._specs:
                known = ", ".join([*self._specs][:8]) + (", …" if len(self._specs) > 8 else "")
                raise UserError(f"fault at {fault.at_s:g} s: worker: got {fault.worker!r}, allowed are {known}")
            swarm.clock.at(fault.at_s, self._happen, fault)

    def _happen(self, fault: FaultSettings) -> None:
        swarm = self._swarm
        swarm.count(f"fault: {fault.kind}")
        if fault.kind in ("partition", "storm"):
            return
        if fault.kind == "restart":
            if not swarm.is_down:
                swarm.world.restart(fault.for_s)
            return
        if fault.kind == "join":
            name = fault.worker or self._random.choice([*self._specs])
            swarm.join(self._specs[name])
            return
        worker = self._victim(fault)
        if worker is not None:
            self._strike(worker, fault)

    def _victim(self, fault: FaultSettings) -> SimWorker | None:
        alive = [w for w in self._swarm.alive() if fault.worker in ("", w.spec.name)]
        return self._random.choice(alive) if alive else None

    def _strike(self, worker: SimWorker, fault: FaultSettings) -> None:
        clock = self._swarm.clock
        match fault.kind:
            case "hang":
                worker.freeze()
                clock.after(fault.for_s, worker.thaw)
            case "slow":
                self._slow(worker, fault.factor)
                if fault.for_s:
                    clock.after(fault.for_s, self._slow, worker, 1.0)
            case "crash" | "leave":
                worker.die() if fault.kind == "crash" else worker.leave()
                if fault.for_s:
                    clock.after(fault.for_s, self._replace, worker)
            case _:
                raise AssertionError(f"{fault.kind} is not a fault of one worker")

    def _replace(self, worker: SimWorker) -> None:
        self._swarm.join(worker.spec)

    def _slow(self, worker: SimWorker, factor: float) -> None:
        worker.slowness = factor
        worker.engine.slow(factor)
