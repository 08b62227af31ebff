"""Faults of the network: lost, late and repeated messages, and failed fetches, during a `partition` or a `storm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from baton.simulator.clock import VirtualClock
from baton.simulator.faults import FaultSettings
from baton.simulator.wire import MessageFault

FINE = MessageFault()


class NetworkFaults:
    """The partitions and storms of a run."""

    def __init__(self, faults: Sequence[FaultSettings], clock: VirtualClock, random: Random) -> None:
        self._storms = [fault for fault in faults if fault.kind in ("partition", "storm")]
        self._clock, self._random = clock, random

    def fates(self, worker: str) -> Callable[[], MessageFault]:
        return lambda: self._fate(worker)

    def is_apart(self, worker: str) -> bool:
        return any(network_fault.kind == "partition" for network_fault in self._over(worker))

    def fetch_fault(self, worker: str) -> str:
        """Return why a fetch that completes now failed, or an empty string."""
        for network_fault in self._over(worker):
            if network_fault.kind == "partition":
                return "the store cannot be reached"
            if network_fault.corrupt and self._random.random() < network_fault.corrupt:
                return "the digest of a chunk does not match"
        return ""

    def _over(self, worker: str) -> list[FaultSettings]:
        """Return the network faults that affect a worker now."""
        now_s = self._clock.now_s
        return [s for s in self._storms if s.at_s <= now_s < s.at_s + s.for_s and s.worker in ("", worker)]

    def _fate(self, worker: str) -> MessageFault:
        network_faults = self._over(worker)
        if not network_faults:
            return FINE
        draw, delay_s = self._random.random, 0.0
        is_lost = is_doubled = is_late = False
        for network_fault in network_faults:
            if network_fault.kind == "partition":
                delay_s = max(delay_s, network_fault.at_s + network_fault.for_s - self._clock.now_s)
            if network_fault.delay_s:
                delay_s += draw() * network_fault.delay_s
            is_lost |= bool(network_fault.loss) and draw() < network_fault.loss
            is_doubled |= bool(network_fault.duplicate) and draw() < network_fault.duplicate
            if network_fault.reorder and draw() < network_fault.reorder:
                is_late, delay_s = True, delay_s + draw()
        return MessageFault(delay_s, is_lost, is_doubled, is_late)
