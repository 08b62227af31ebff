"""Drives a worker's engine: generates the tokens of its leases, and switches versions between two tokens.

`EngineThread` runs the driver in a separate thread, so that the network loop never waits for the engine. The run's
`on_new_version` determines what happens to running trajectories at a switch. With `resume`, the trajectories are
aborted, prefilled under the new weights and continued under the same lease. With `keep`, the trajectories continue with
their KV cache. With `drain`, no trajectory runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from baton.rollout.engine import Engine, EngineStats, Resident
from baton.types import FromWorker, Lease, PolicyVersion, Report, ends_lease


class EngineDriver:
    """An engine and its leases."""

    def __init__(self, engine: Engine, on_new_version: str) -> None:
        self._engine, self._resumes = engine, on_new_version == "resume"
        self._leases: dict[int, Lease] = {}
        """Leases by id, each with its trajectory up to the last report."""
        self._aborting: set[int] = set()
        """Leases that the hub has aborted and that the engine has not ended yet."""

    @property
    def is_busy(self) -> bool:
        return bool(self._leases)

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def lease(self, lease: Lease) -> None:
        """Start a trajectory. Has no effect if the lease is already known."""
        if lease.lease_id not in self._leases:
            self._leases[lease.lease_id] = lease
            self._submit(lease)

    def abort(self, lease_id: int) -> None:
        """Abort a lease. The next `step` reports the lease's last tokens."""
        if lease_id in self._leases:
            self._aborting.add(lease_id)
            self._engine.abort(lease_id)

    def drop(self, lease_id: int) -> None:
        """Discard a lease without a report."""
        if self._leases.pop(lease_id, None) is None:
            return
        self._aborting.discard(lease_id)
        self._engine.abort(lease_id)
        if not self._leases:
            # `EngineThread` does not step a driver that has no leases; without this step, the slot would stay occupied
            self._engine.step()

    def drop_all(self) -> None:
        for lease_id in list(self._leases):
            self.drop(lease_id)

    def step(self) -> list[FromWorker]:
        """Decode one token for every running lease and return the reports."""
        return self._taken(self._engine.step())

    def flush(self) -> list[FromWorker]:
        """Return reports of all tokens that have not been reported."""
        return self._taken(self._engine.flush())

    def close(self) -> None:
        self._engine.close()

    def use_device(self, is_awake: bool | None) -> int:
        """False: discard all leases and let the engine sleep; True: let the engine wake up; None: change nothing.
        Return the bytes of device memory that the engine then uses."""
        engine = self._engine
        assert isinstance(engine, Resident), f"{type(engine).__name__} cannot sleep"
        if is_awake:
            engine.wake_up()
        elif is_awake is not None:
            self.drop_all()
            engine.sleep()
        return engine.held_bytes

    def switch(self, tensors: Mapping[str, Any], version: PolicyVersion) -> list[FromWorker]:
        """Switch to another version, and return the reports of tokens of the old version."""
        carried: list[int] = []
        if self._resumes:
            carried = [n for n, lease in self._leases.items() if n not in self._aborting and not lease.is_exact]
        for number in carried:
            self._engine.abort(number)
        messages = self._engine.step() if carried else []
        reports = self._taken(messages, frozenset(carried))
        ended = {message.lease_id for message in messages if isinstance(message, Report) and message.is_aborted}
        self._engine.load_weights(tensors, version)
        if late := frozenset(carried).intersection(self._leases) - ended:  # SGLang ends an abort while it loads weights
            reports += self._taken(self._engine.step(), late)
        for number in carried:
            if number in self._leases:
                self._submit(self._leases[number])
        return reports

    def _submit(self, lease: Lease) -> None:
        """Submit a lease. With `resume`, a lease that accepts several versions is submitted for exactly the engine's
        current version. The engine then uses no keys and values of older versions."""
        number = self._engine.version.number
        if self._resumes and lease.version <= number:
            lease = msgspec.structs.replace(lease, version=lease.version if lease.is_exact else number, is_exact=True)
        self._engine.submit(lease)

    def _taken(self, messages: list[FromWorker], carried: frozenset[int] = frozenset()) -> list[FromWorker]:
        """Add reported tokens to the leases, and omit messages about discarded leases. `carried`: aborted leases that
        this worker will resume, so their reports must not say that the lease is aborted."""
        found = []
        for message in messages:
            lease = self._leases.get(message.lease_id)
            if lease is None:
                continue
            if isinstance(message, Report) and message.is_aborted and message.lease_id in carried:
                message = msgspec.structs.replace(message, is_aborted=False)
                if not message.segments:
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
    """Creates a driver and runs it in a separate thread. Actions are submitted with `do` and run between two tokens."""

    def __init__(
        self,
        make_driver: Callable[[], EngineDriver],
        on_reports: Callable[[list[FromWorker], EngineStats], object],
        on_fault: Callable[[Exception], object],
        report_every_s: float,
    ) -> None:
        """All functions are called in the engine's thread."""
        self._on_reports, self._on_fault, self._report_every_s = on_reports, on_fault, report_every_s
        self._actions: SimpleQueue[Callable[[EngineDriver], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._drive, args=([make_driver],), name="engine", daemon=True)
        self._thread.start()

    def do(self, action: Callable[[EngineDriver], object]) -> None:
        """Submit an action to the engine's thread, which runs all actions in the order of their submission."""
        self._actions.put(action)

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the current token, and close the engine. May be called twice."""
        self._actions.put(None)
        self._thread.join(timeout_s)

    def _drive(self, makers: list[Callable[[], EngineDriver]]) -> None:
        driver = None
        try:
            driver = makers.pop()()  # not kept, so that the model's files are freed
            flushed_s = time.monotonic()
            while self._act(driver):
                if not driver.is_busy:
                    continue
                reports = driver.step()
                if time.monotonic() - flushed_s >= self._report_every_s:
                    reports += driver.flush()
                    flushed_s = time.monotonic()
                if reports:
                    self._on_reports(reports, driver.stats)
        except Exception as error:  # noqa: BLE001  # any error must reach the network thread
            self._on_fault(error)
        finally:
            if driver is not None:
                driver.close()

    def _act(self, driver: EngineDriver) -> bool:
        """Run the submitted actions. Wait for an action only if no lease is running. Return False after `close`."""
        while True:
            try:
                action = self._actions.get(block=not driver.is_busy)
            except Empty:
                return True
            if action is None:
                return False
            action(driver)
