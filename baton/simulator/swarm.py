"""The transport of a swarm in virtual time, with hub, workers, connections and injected faults."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from baton.clock import Clock
from baton.errors import UserError
from baton.simulator.faults import FaultSettings
from baton.simulator.inputs import EngineSpec, SwarmSpec
from baton.simulator.network import NetworkFaults, SimulatedConnection, SimulatedOutgoing
from baton.simulator.simulation import Simulation
from baton.simulator.transport import ControllerStopped, EngineTime, SimulatedTransport
from baton.simulator.worker import SimWorker
from baton.swarm import lease_events as ev
from baton.swarm.auth import AccessGrant, Role
from baton.swarm.hub.membership import Membership
from baton.swarm.hub.session import HubSession, ReceiveTimeout
from baton.swarm.hub.worker_access import Unwanted, WorkerAccess
from baton.swarm.identity import WorkerKeys
from baton.swarm.lease_broker import BrokerCommand, LeaseBroker, ReportCheck
from baton.swarm.leases import LeaseTable
from baton.swarm.messages import (
    PROTOCOL,
    FromWorker,
    Hello,
    Malformed,
    Want,
    Welcome,
    decode_from_hub,
    decode_from_worker,
)
from baton.swarm.verification.checks import ReportLimits, check_report
from baton.swarm.verification.policy import InspectionSettings, VerificationPolicy
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.verification.service import LogprobScorer, VerificationService
from baton.swarm.verification.verify import Calibration
from baton.types import FromHub, FromPort, Lease, PolicyVersion


class ObservedLeaseBroker(LeaseBroker):
    """A `LeaseBroker` that calls observers, and counts repeated leases and expelled workers."""

    def __init__(self, table: LeaseTable, check: ReportCheck, clock: Clock, swarm: Swarm) -> None:
        super().__init__(table, check, clock)
        self._swarm = swarm

    def handle(self, event: ev.Event) -> list[BrokerCommand]:
        for watch in self._swarm.watches:
            watch.on_event(event)
        found = super().handle(event)
        for watch in self._swarm.watches:
            watch.settled(event)
        return found

    def apply(self, command: ev.Command) -> BrokerCommand | None:
        for watch in self._swarm.watches:
            watch.on_command(command)
        if isinstance(command, ev.GrantLease) and self._tasks[command.task].leases:
            self._swarm.count("trajectory leased again")
        elif isinstance(command, ev.DisconnectWorker):
            self._swarm.count("worker expelled")
        return super().apply(command)


class Swarm(SimulatedTransport):
    """A `SimulatedTransport` that runs the live hub's decision code. Simulated workers may join and leave."""

    name = "the simulated swarm"

    def __init__(self, world: Simulation, network: NetworkFaults | None) -> None:
        """`network`: None if the run has no faults."""
        assert world.setting.swarm is not None, "the setting has no swarm"
        self.setting, self.clock, self.network = world.setting, world.clock, network
        self.spec: SwarmSpec = world.setting.swarm
        self.workers: list[SimWorker] = []
        self.incarnation = -1
        self.is_down = True
        self.watches, self._script, self._record = world.watches, world.script, world.record
        self._options = world.options
        self._published_s = 0.0
        self._weights = {spec.name: spec.weight for spec in self.setting.engines}
        self._keys, self.quarantine = WorkerKeys(b"simulated"), Quarantine(None)
        self._sessions: dict[SimWorker, HubSession] = {}
        """The hub's sessions with the connected workers."""
        self.members: Membership
        """State of the hub, which each start of the controller creates."""

    # ---- methods of SimulatedTransport -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a new hub. After a restart of the controller, the workers reconnect by themselves."""
        self.incarnation += 1
        self.is_down = False
        self.members, self._sessions = self._new_hub(), {}
        if not self.incarnation:
            for spec in self.setting.engines:
                self.join(spec)
        self.clock.after(self.spec.tick_s, self._tick, self.incarnation)

    @property
    def slots(self) -> int:
        return self.members.slots

    def send(self, message: FromHub) -> None:
        broker = self.members.broker
        if isinstance(message, Lease):
            self.members.execute(broker.want(self._script.limited(message)))
        else:
            self.members.execute(broker.abort(message.lease_id))

    def receive(self, timeout_s: float) -> list[FromPort]:
        inbox, messages = self.members.inbox, list[FromPort]()
        self.clock.poll(timeout_s, lambda: not inbox.empty())
        while not inbox.empty():
            messages.append(inbox.get_nowait())
        return messages

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Publish a version in the background, after all earlier versions, and then announce it."""
        begin_s = max(self.clock.now_s, self._published_s)
        self._published_s = begin_s + self.setting.publish_s
        if self._options.tracer is not None:
            self._options.tracer.span("publish", "hub", 0, begin_s, self._published_s, version=version.number)
        self.clock.at(self._published_s, self._announce, self.incarnation, version)

    def slow(self, factor: float) -> None:
        for worker in self.workers:
            worker.engine.slow(factor * worker.slowness)

    def busy(self) -> Iterable[tuple[EngineSpec, EngineTime]]:
        return [(worker.spec, worker.engine.busy) for worker in self.workers]

    def _announce(self, incarnation: int, version: PolicyVersion) -> None:
        if incarnation == self.incarnation and not self.is_down:
            self.members.announce(Want(version))

    def _tick(self, incarnation: int) -> None:
        if incarnation == self.incarnation and not self.is_down:
            self.members.tick(0.0)
            self.clock.after(self.spec.tick_s, self._tick, incarnation)

    def count(self, name: str) -> None:
        """Count a fault, or a reaction to a fault, such as `worker expelled`."""
        self._record.outcomes[name] += 1

    # ---- the hub -----------------------------------------------------------------------------------------------------

    def _new_hub(self) -> Membership:
        clock, spec = (lambda: self.clock.now_s), self.spec
        # a check takes time linear in the number of tokens; without faults, all messages are valid and are not checked
        limits = ReportLimits(vocabulary=sys.maxsize, max_context_tokens=sys.maxsize)
        check = partial(check_report, limits=limits, text=str) if self.network else lambda *_, **__: None
        broker = ObservedLeaseBroker(self._options.make_table(spec.rules), check, clock, self)
        verifier = VerificationService(
            _no_scorer,
            VerificationPolicy(InspectionSettings(), b""),
            Calibration(),
            self.quarantine,
            keep_versions=0,
            noise_seed=0,
            clock=clock,
        )
        welcome = Welcome(
            PROTOCOL, "simulated", f"{self.incarnation}", "", False, None, "", {}, self.setting.rules.on_new_version,
            "", spec.heartbeat_s, spec.report_every_s,
        )  # fmt: skip
        access = WorkerAccess(self.quarantine, self._keys)
        members = Membership(access, welcome, broker, verifier, lambda text: None, self._weights.__getitem__)
        verifier.attach(members, lambda action: action())
        return members

    def _on_message(self, worker: SimWorker, message: FromWorker) -> None:
        """Pass a message to the hub, as `Hub._converse` does."""
        session = self._sessions.get(worker)
        # ignore messages that a storm repeated or reordered: a connection begins with exactly one Hello
        if self.is_down or session is None or (session.peer is None) != isinstance(message, Hello):
            return
        try:
            session.receive(message)
        except (Malformed, Unwanted) as error:
            self._fail(worker, session, error)

    def _fail(self, worker: SimWorker, session: HubSession, error: Exception) -> None:
        session.fail(error)
        SimulatedOutgoing(worker.down).close()

    # ---- workers that join and leave ---------------------------------------------------------------------------------

    def join(self, spec: EngineSpec) -> None:
        worker = SimWorker(self.setting, spec, self.clock, self, self._options.tracer)
        draw_fault = None if self.network is None else partial(self.network.message_fault, spec.name)
        link = partial(SimulatedConnection, self.clock, self.spec.link_s, lose=worker.cut, draw_fault=draw_fault)
        worker.up = link(partial(self._on_message, worker), decode=decode_from_worker)
        worker.down = link(worker.on_message, decode=decode_from_hub)
        same = sum(other.spec.name == spec.name for other in self.workers)
        worker.engine.name += f" ({same + 1})" if same else ""
        self.workers.append(worker)
        worker.start()

    def restart(self) -> None:
        """Stop the hub and cut every connection."""
        self.is_down = True
        for worker in self.workers:
            worker.cut()

    # ---- methods of WorkerHost ---------------------------------------------------------------------------------------

    def try_connect(self, worker: SimWorker) -> bool:
        name = worker.spec.name
        if self.is_down or (self.network is not None and self.network.is_apart(name)):
            return False
        grant = AccessGrant(name, Role.WORKER, True, name, is_own=True)
        outgoing = SimulatedOutgoing(worker.down)
        session = self._sessions[worker] = HubSession(self.members, grant, "", outgoing)
        if self.network is not None:
            silent = ReceiveTimeout("silent")
            worker.up.watch(lambda: session.silence_s, lambda: self._fail(worker, session, silent))
            worker.down.watch(lambda: worker.session.silence_s, worker.on_silence)
        return True

    def fetches(self, worker: SimWorker, version: PolicyVersion) -> str:
        if self.is_down:
            return "the hub is down"
        if self.members.versions.get(version.number) != version:
            return "no such version"
        return "" if self.network is None else self.network.fetch_fault(worker.spec.name)

    def cut(self, worker: SimWorker) -> None:
        session = self._sessions.pop(worker, None)
        if session is not None and not self.is_down:
            session.close(is_stopping=False)

    def lost(self, num_tokens: int) -> None:
        self._record.unreported += num_tokens


def _no_scorer() -> LogprobScorer:
    raise AssertionError("counted tokens cannot be scored")


class FaultInjector:
    """Applies each fault to a swarm at the time of the fault."""

    def __init__(self, swarm: Swarm, faults: Sequence[FaultSettings], random: Random) -> None:
        """Raises UserError if a fault names an unknown worker."""
        self._swarm, self._random = swarm, random
        self._specs = {spec.name: spec for spec in swarm.setting.engines}
        for fault in faults:
            if fault.worker and fault.worker not in self._specs:
                known = ", ".join([*self._specs][:8]) + (", …" if len(self._specs) > 8 else "")
                raise UserError(f"fault at {fault.at_s:g} s: worker: got {fault.worker!r}, allowed are {known}")
            swarm.clock.at(fault.at_s, self._inject, fault)

    def _inject(self, fault: FaultSettings) -> None:
        swarm = self._swarm
        swarm.count(f"fault: {fault.kind}")
        match fault.kind:
            case "partition" | "storm":
                pass  # `NetworkFaults` applies them
            case "restart":
                if not swarm.is_down:
                    raise ControllerStopped(fault.for_s)
            case "join":
                swarm.join(self._specs[fault.worker or self._random.choice([*self._specs])])
            case _:
                workers = [w for w in swarm.workers if w.is_up and fault.worker in ("", w.spec.name)]
                if workers:
                    self._disturb(self._random.choice(workers), fault)

    def _disturb(self, worker: SimWorker, fault: FaultSettings) -> None:
        clock = self._swarm.clock
        match fault.kind:
            case "hang":
                worker.freeze()
                clock.after(fault.for_s, worker.thaw)
            case "slow":
                self._slow(worker, fault.factor)
                if fault.for_s:
                    clock.after(fault.for_s, self._slow, worker, 1.0)
            case "wrong":
                worker.engine.wrong = 1 + self._swarm.workers.index(worker)
                if fault.for_s:
                    clock.after(fault.for_s, setattr, worker.engine, "wrong", 0)
            case "crash" | "leave":
                worker.die() if fault.kind == "crash" else worker.leave()
                if fault.for_s:
                    clock.after(fault.for_s, self._swarm.join, worker.spec)
            case _:
                raise AssertionError(f"{fault.kind} is not a fault of one worker")

    def _slow(self, worker: SimWorker, factor: float) -> None:
        worker.slowness = factor
        worker.engine.slow(factor)
