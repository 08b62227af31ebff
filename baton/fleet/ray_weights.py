"""Versions to every machine of a cluster through Ray's object store: put once, brought to each machine once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Final

from baton.fleet.ray_cluster import RayCluster, first_line
from baton.fleet.ray_seats import Courier
from baton.types import PolicyVersion

START_DEADLINE_S: Final = 60.0
SLOWEST_BYTES_PER_S: Final = 5e6
"""A machine that is slower than this is left to fetch chunks."""


class Broadcast:
    """Couriers, one for each machine with workers. Its methods may be called from several threads."""

    def __init__(self, cluster: RayCluster, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._couriers: dict[str, Any] = {}
        self._directories: dict[str, str] = {}
        self._lock = Lock()
        self._latest: tuple[PolicyVersion, Any] | None = None
        """Kept in the store for machines that come later."""
        self.last_s: float | None = None
        """Seconds that the last version took to all machines."""

    def directory(self, node: str) -> str:
        """Return where a machine's workers find versions, by its id; empty where it has no courier."""
        with self._lock:
            if node not in self._directories:
                self._directories[node] = self._start(node)
            return self._directories[node]

    def send(self, tensors: Mapping[str, Any], version: PolicyVersion) -> bool:
        """Bring a version to all machines; False where no machine has it now."""
        from baton.weights.shared import packed
        from baton.weights.stretch import stretched

        assert version.digest, "a version is broadcast before it has a digest"
        begin_s = time.monotonic()
        data = packed(*stretched(tensors))
        ray = self._cluster.ray
        with self._lock:
            self._latest = (version, ray.put(data))
            couriers = dict(self._couriers)
        deadline_s = START_DEADLINE_S + data.nbytes / SLOWEST_BYTES_PER_S
        futures = {self._put(courier): node for node, courier in couriers.items()}
        done, late = ray.wait(list(futures), num_returns=len(futures), timeout=deadline_s) if futures else ([], [])
        there = sum(self._has(futures[future], future) for future in done)
        for future in late:
            self._drop(futures[future], f"did not take {data.nbytes} bytes in {deadline_s:.0f} s")
        self.last_s = time.monotonic() - begin_s
        return bool(there)

    def close(self) -> None:
        """End the couriers and empty their directories."""
        ray = self._cluster.ray
        with self._lock:
            couriers, self._couriers, self._directories = list(self._couriers.values()), {}, {}
            self._latest = None
        try:
            if couriers:
                leaving = [courier.leave.remote() for courier in couriers]
                ray.wait(leaving, num_returns=len(leaving), timeout=5.0)
            for courier in couriers:
                ray.kill(courier)
        except Exception as error:  # noqa: BLE001  # of a cluster that is gone nothing need be ended
            self._say(f"couriers could not be ended: {first_line(error)}")

    def _start(self, node: str) -> str:
        ray = self._cluster.ray
        courier = ray.remote(Courier).options(**self._cluster.on_node(node)).remote()
        try:
            directory: str = ray.get(courier.where.remote(), timeout=START_DEADLINE_S)
            self._couriers[node] = courier
            if self._latest is not None:
                ray.get(self._put(courier), timeout=START_DEADLINE_S)
        except ray.exceptions.RayError as error:
            self._couriers.pop(node, None)
            self._say(f"a machine gets chunks, not whole versions: no courier there: {first_line(error)}")
            return ""
        return directory

    def _put(self, courier: Any) -> Any:
        assert self._latest is not None, "there is no version to put"
        version, data = self._latest
        return courier.put.remote(version.lineage, version.number, version.digest, data)

    def _has(self, node: str, future: Any) -> bool:
        try:
            self._cluster.ray.get(future)
        except self._cluster.ray.exceptions.RayError as error:
            self._drop(node, first_line(error))
            return False
        return True

    def _drop(self, node: str, cause: str) -> None:
        """Its workers fetch chunks from now on: what is not in their directory they ask the hub for."""
        with self._lock:
            self._couriers.pop(node, None)
            self._directories.pop(node, None)
        self._say(f"a machine gets chunks, not whole versions: {cause}")
