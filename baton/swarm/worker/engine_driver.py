"""The engine's side of a worker: leases grow here, and versions are switched between two tokens.

Single-threaded, driven by `EngineThread`, so that the network is answered whatever the engine does. What happens to
running trajectories at a switch is the run's `on_new_version`: with `resume` they are put down, and the new weights
prefill their ids and go on under the same lease; with `keep` they go on in flight; with `drain` none run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from baton.rollout.engine import Engine, EngineStats
from baton.types import FromWorker, Lease, PolicyVersion, Report, ends_lease


class EngineDriver:
    """One engine and the leases that it grows."""

    def __init__(self, engine: Engine, on_new_version: str) -> None:
        self._engine, self._resumes = engine, on_new_version == "resume"
        self._leases: dict[int, Lease] = {}
        """Each with its trajectory as far as it has been reported."""
        self._aborting: set[int] = set()
        """Those that the hub wants put down, until they are."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something to grow."""
        return bool(self._leases)

    @property
    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._engine.stats

    def lease(self, lease: Lease) -> None:
        """Begin to grow a trajectory."""
        if lease.lease_id not in self._leases:
            self._leases[lease.lease_id] = lease
            self._engine.submit(lease)

    def abort(self, lease_id: int) -> None:
        """Put a lease down; the next `step` reports what it has."""
        if lease_id in self._leases:
            self._aborting.add(lease_id)
            self._engine.abort(lease_id)

    def drop(self, lease_id: int) -> None:
        """Forget a lease; nothing more is said of it."""
        if self._leases.pop(lease_id, None) is None:
            return
        self._aborting.discard(lease_id)
        self._engine.abort(lease_id)
        if not self._leases:
            self._engine.step()  # nobody else would have it let go

    def drop_all(self) -> None:
        """Forget every lease."""
        for lease_id in list(self._leases):
            self.drop(lease_id)

    def step(self) -> list[FromWorker]:
        """Decode one token for every running lease; return what is to be reported."""
        return self._taken(self._engine.step())

    def flush(self) -> list[FromWorker]:
        """Report what has been grown so far."""
        return self._taken(self._engine.flush())

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def switch(self, tensors: Mapping[str, Any], version: PolicyVersion) -> list[FromWorker]:
        """Serve another version from the next token on; return what is to be reported of the old one."""
        carried: list[int] = []
        reports: list[FromWorker] = []
        if self._resumes:
            kept = self._leases.keys() - self._aborting
            carried = [number for number in self._leases if number in kept and not self._leases[number].is_exact]
            for number in carried:
                self._engine.abort(number)
            if carried:
                reports = self._release_leases(set(carried))
        self._engine.load_weights(tensors, version)
        for number in carried:
            if number in self._leases:
                self._engine.submit(self._leases[number])
        return reports

    def _release_leases(self, carried: set[int]) -> list[FromWorker]:
        """Have the engine let go of leases that this worker keeps: to the hub they have only grown."""
        reports: list[FromWorker] = []
        for said in self._engine.step():
            if isinstance(said, Report) and said.is_aborted and said.lease_id in carried:
                said = msgspec.structs.replace(said, is_aborted=False)
                if not said.segments:
                    continue
            reports.append(said)
        return self._taken(reports)

    def _taken(self, messages: list[FromWorker]) -> list[FromWorker]:
        """Note what was grown, and leave out what nobody wants to hear of any more."""
        found = []
        for message in messages:
            lease = self._leases.get(message.lease_id)
            if lease is None:
                continue
            found.append(message)
            if ends_lease(message):
                del self._leases[message.lease_id]
                self._aborting.discard(message.lease_id)
            elif isinstance(message, Report):
                grown = lease.trajectory.extended(message.segments)
                self._leases[message.lease_id] = msgspec.structs.replace(lease, trajectory=grown)
        return found


class EngineThread:
    """Runs a grower in a thread of its own. Everything is asked for by `do`, and done between two tokens."""

    def __init__(
        self,
        on_reports: Callable[[list[FromWorker], EngineStats], None],
        on_fault: Callable[[Exception], None],
        report_every_s: float,
    ) -> None:
        """The two callbacks are called in the engine's thread."""
        self.driver: EngineDriver | None = None
        """Made by an action, and used by actions only."""
        self.report_every_s = report_every_s
        self._on_reports, self._on_fault = on_reports, on_fault
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], None]) -> None:
        """Have something done in the engine's thread, in order."""
        self._actions.put(action)

    def close(self, timeout_s: float = 30.0) -> None:
        """End after the current token, the engine too. May be called twice."""
        self._actions.put(None)
        self._thread.join(timeout_s)

    def report(self, reports: list[FromWorker]) -> None:
        """Hand reports over, from an action."""
        if reports and self.driver is not None:
            self._on_reports(reports, self.driver.stats)

    def _drive(self) -> None:
        try:
            flushed_s = time.monotonic()
            while self._act():
                driver = self.driver
                if driver is None or not driver.is_busy:
                    continue
                reports = driver.step()
                if time.monotonic() - flushed_s >= self.report_every_s:
                    reports += driver.flush()
                    flushed_s = time.monotonic()
                if reports:
                    self._on_reports(reports, driver.stats)
        except Exception as error:  # noqa: BLE001  # whatever it is, the network thread must hear of it
            self._on_fault(error)
        finally:
            if self.driver is not None:
                self.driver.close()

    def _act(self) -> bool:
        """Do what is asked for, waiting for it only where nothing grows; False at the end."""
        while True:
            is_idle = self.driver is None or not self.driver.is_busy
            try:
                action = self._actions.get(block=is_idle)
            except Empty:
                return True
            if action is None:
                return False
            action()
