"""Engines that share one queue, like `rollout/processes/pool.py`: a lease is sent to an engine when the engine has a
free slot.

All engines load new weights at the same time, and the trainer waits until all engines have loaded them. Messages take
no time, so an engine reports its tokens only at the end of a lease and when it loads weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from baton.records.trace import Tracer
from baton.simulator.clock import VirtualClock
from baton.simulator.engine import SimEngine
from baton.simulator.inputs import Setting
from baton.simulator.simulation import Simulation
from baton.simulator.transport import EngineTime
from baton.types import FromHub, FromWorker, Lease, ends_lease


class SimulatedEnginePool:
    """A `SimulatedTransport` over engines of one machine."""

    def __init__(
        self, setting: Setting, clock: VirtualClock, controller: Simulation, tracer: Tracer | None = None
    ) -> None:
        self._setting, self._clock, self._controller, self._tracer = setting, clock, controller, tracer
        self.engines: list[SimEngine] = []
        self._gone: list[SimEngine] = []
        self._queue: dict[int, Lease] = {}
        self._held: dict[int, SimEngine] = {}
        self._given: Counter[int] = Counter()
        """`id` of an engine → number of its leases, including leases that are being sent to the engine."""

    def begin(self) -> None:
        setting = self._setting
        self.engines = [
            SimEngine(self._clock, spec, self, shares_prefill=setting.shares_prefill, tracer=self._tracer)
            for spec in setting.engines
        ]
        self._controller.capacity(setting.slots)

    def restart(self) -> None:
        """Stop the engines. In a live run, they are child processes of the controller and end with it."""
        for engine in self.engines:
            engine.stop()
        self._gone += self.engines
        self._queue, self._held, self._given = {}, {}, Counter()

    def send(self, message: FromHub) -> None:
        """Send a lease or an abort. A waiting lease is sent to an engine before its abort, so that every abort takes
        the same path."""
        if isinstance(message, Lease):
            self._queue[message.lease_id] = message
            self._assign_waiting()
            return
        waiting = self._queue.pop(message.lease_id, None)
        if waiting is not None:
            self._hand_over(self.engines[0], waiting)
        engine = self._held.get(message.lease_id)
        if engine is not None:
            self._after_handover(engine.abort, message.lease_id)

    def load(self, version: int) -> None:
        begin_s, load_s = self._clock.now_s, self._setting.publish_s
        for engine in self.engines:
            self._after_handover(lambda engine=engine: engine.switch(version, resumes=False, load_s=load_s))
        if self._tracer is not None:
            self._tracer.span("publish", "trainer", 0, begin_s, begin_s + load_s, version=version)
        self._clock.after(load_s, self._controller.serving, version)

    def slow(self, factor: float) -> None:
        for engine in self.engines:
            engine.slow(factor)

    def busy(self) -> dict[str, tuple[int, int, EngineTime]]:
        found: dict[str, tuple[int, int, EngineTime]] = {}
        for place, engine in enumerate((*self._gone, *self.engines)):
            spec = self._setting.engines[place % len(self._setting.engines)]
            busy = engine.busy if spec.name not in found else found[spec.name][2].plus(engine.busy)
            found[spec.name] = (spec.slots, spec.num_gpus, busy)
        return found

    def on_reports(self, engine: SimEngine, reports: list[FromWorker]) -> None:
        for message in reports:
            if ends_lease(message):
                self._given[id(self._held.pop(message.lease_id))] -= 1
            self._controller.on_message(message)
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        """Send waiting leases to the engine with the fewest leases. Leases of one group are sent to the same engine
        while that engine has free slots."""
        while self._queue:
            engine = min(self.engines, key=self._num_assigned) if len(self.engines) > 1 else self.engines[0]
            if self._num_assigned(engine) >= engine.slots:
                return
            group_id = next(iter(self._queue.values())).trajectory.group_id
            while self._queue and self._num_assigned(engine) < engine.slots:
                lease = next(iter(self._queue))
                if self._queue[lease].trajectory.group_id != group_id:
                    break
                self._hand_over(engine, self._queue.pop(lease))

    def _hand_over(self, engine: SimEngine, lease: Lease) -> None:
        self._held[lease.lease_id] = engine
        self._given[id(engine)] += 1
        self._after_handover(engine.submit, lease)

    def _after_handover(self, what: Callable[..., None], *about: object) -> None:
        """Call an engine after a delay of `handover_s`, because an engine process reads a message only after its next
        step has started."""
        if self._setting.handover_s:
            self._clock.after(self._setting.handover_s, what, *about)
        else:
            what(*about)

    def _num_assigned(self, engine: SimEngine) -> int:
        return self._given[id(engine)]
