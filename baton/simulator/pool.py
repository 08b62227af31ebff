"""Engines that share the queue of a live pool (`rollout/processes/lease_queue.py`).

All engines load new weights at the same time, and the trainer waits until all engines have loaded them. Messages take
no time, so an engine reports its tokens only at the end of a lease and when it loads weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.records.trace import Tracer
from baton.rollout.processes.lease_queue import Handover, LeaseQueue
from baton.simulator.clock import VirtualClock
from baton.simulator.engine import SimEngine
from baton.simulator.inputs import Setting
from baton.simulator.simulation import Simulation
from baton.simulator.transport import EngineTime
from baton.types import FromHub, FromWorker, Lease


class SimulatedEnginePool:
    """A `SimulatedTransport` over engines of one machine."""

    def __init__(
        self, setting: Setting, clock: VirtualClock, controller: Simulation, tracer: Tracer | None = None
    ) -> None:
        self._setting, self._clock, self._controller, self._tracer = setting, clock, controller, tracer
        self.engines: list[SimEngine] = []
        self._queue = LeaseQueue(())
        self._is_due = False
        """Whether waiting leases will be assigned at the current time."""

    def begin(self) -> None:
        setting = self._setting
        self.engines = [
            SimEngine(self._clock, spec, self, shares_prefill=setting.shares_prefill, tracer=self._tracer)
            for spec in setting.engines
        ]
        self._queue = LeaseQueue([spec.slots for spec in setting.engines])
        self._controller.capacity(setting.slots)

    def restart(self) -> None:
        raise AssertionError("faults apply to the workers of a swarm")

    def send(self, message: FromHub) -> None:
        """Send an abort, or a lease with all leases of the same time, as `EnginePool` does."""
        if not isinstance(message, Lease):
            self._hand_over(self._queue.abort(message))
            return
        self._queue.add(message)
        if not self._is_due:
            self._is_due = True
            self._clock.after(0.0, self._assign_waiting)

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
        for spec, engine in zip(self._setting.engines, self.engines, strict=True):
            busy = engine.busy if spec.name not in found else found[spec.name][2].plus(engine.busy)
            found[spec.name] = (spec.slots, spec.num_gpus, busy)
        return found

    def on_reports(self, engine: SimEngine, reports: list[FromWorker]) -> None:
        self._queue.ended(self.engines.index(engine), reports)
        self._is_due = True
        for message in reports:
            self._controller.on_message(message)
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        self._is_due = False
        self._hand_over(self._queue.assign())

    def _hand_over(self, messages: Sequence[Handover]) -> None:
        for index, message in messages:
            engine = self.engines[index]
            if isinstance(message, Lease):
                self._after_handover(engine.submit, message)
            else:
                self._after_handover(engine.abort, message.lease_id)

    def _after_handover(self, what: Callable[..., None], *about: object) -> None:
        """Call an engine after a delay of `handover_s`, because an engine process reads a message only after its next
        step has started."""
        if self._setting.handover_s:
            self._clock.after(self._setting.handover_s, what, *about)
        else:
            what(*about)
