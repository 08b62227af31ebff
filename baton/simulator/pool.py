"""Simulated engines with the lease queue of a live pool (`rollout/processes/lease_queue.py`).

All engines load new weights at the same time, and the trainer waits until all engines have loaded them. An engine
reports its tokens only at the end of a lease, when it loads weights, and when the controller pauses the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from baton.records.trace import Tracer
from baton.rollout.processes.lease_queue import Handover, LeaseQueue
from baton.simulator.clock import VirtualClock
from baton.simulator.engine import SimEngine
from baton.simulator.inputs import EngineSpec, Setting
from baton.simulator.scripted_trajectories import Script
from baton.simulator.transport import EngineTime, SimulatedTransport
from baton.types import FromHub, FromWorker, Lease, PolicyVersion


class SimulatedEnginePool(SimulatedTransport):
    """A `SimulatedTransport` over engines of one machine: the simulated counterpart of `EnginePool`."""

    name = "the simulated pool"

    def __init__(self, setting: Setting, clock: VirtualClock, script: Script, tracer: Tracer | None = None) -> None:
        self._setting, self._clock, self._script = setting, clock, script
        self.engines = [
            SimEngine(
                clock, spec, partial(self._on_reports, index), shares_prefill=setting.shares_prefill, tracer=tracer
            )
            for index, spec in enumerate(setting.engines)
        ]
        self._queue = LeaseQueue([spec.slots for spec in setting.engines])
        self._inbox: list[FromWorker] = []
        self._is_due = False
        """Whether leases may be waiting for free slots."""
        self._is_paused = False

    @property
    def slots(self) -> int:
        return self._setting.slots

    def send(self, message: FromHub) -> None:
        if isinstance(message, Lease):
            self._queue.add(self._script.limited(message))
            self._is_due = True
        else:
            self._hand_over(self._queue.abort(message))

    def receive(self, timeout_s: float) -> list[FromWorker]:
        self._end_pause()
        self._assign()
        self._clock.poll(timeout_s, lambda: bool(self._inbox))
        self._assign()
        messages, self._inbox = self._inbox, []
        return messages

    def flush(self) -> list[FromWorker]:
        for engine in self.engines:
            engine.pause()
        self._is_paused = True
        messages, self._inbox = self._inbox, []
        return messages

    def _end_pause(self) -> None:
        for engine in self.engines if self._is_paused else ():
            engine.go_on()
        self._is_paused = False

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        load_s = self._setting.publish_s
        for engine in self.engines:
            self._after_handover(lambda engine=engine: engine.switch(version.number, resumes=False, load_s=load_s))
        self._end_pause()
        self._clock.wait(load_s)

    def slow(self, factor: float) -> None:
        for engine in self.engines:
            engine.slow(factor)

    def busy(self) -> Iterable[tuple[EngineSpec, EngineTime]]:
        return zip(self._setting.engines, (engine.busy for engine in self.engines), strict=True)

    def _on_reports(self, index: int, reports: list[FromWorker]) -> None:
        self._inbox += reports
        self._queue.ended(index, reports)
        self._is_due = True

    def _assign(self) -> None:
        if self._is_due:
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
        """Call an engine after a delay of `handover_s` seconds, because an engine process reads messages only between
        two steps."""
        if self._setting.handover_s:
            self._clock.after(self._setting.handover_s, what, *about)
        else:
            what(*about)
