"""The connection to Ray: nodes, placement groups, and its errors as Baton's. Ray is imported here when it is needed.

Ray pickles what crosses its own connections, and whoever can reach a cluster's ports can run code on it: it is for a
network and for people that are trusted, unlike the hub.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from baton.errors import UserError, first_line

_ADDRESS: Final = re.compile(r"auto|[A-Za-z0-9_.\-\[\]:]+:[0-9]{1,5}")
NODE_LABEL: Final = "ray.io/node-id"
NAMESPACE: Final = "baton"
GET_S: Final = 60.0
"""What Ray has to bring an answer that is ready: its machine may be gone since."""


class RayCluster:
    """A cluster that this process has joined as a driver."""

    def __init__(self, address: str) -> None:
        """Join. Raises UserError where Ray is missing, or no cluster is there."""
        self.ray = import_ray()
        check_address(address)
        self.address = address
        before = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=True,
                logging_level=logging.WARNING,
                include_dashboard=False,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"--ray {address}: no Ray cluster can be joined there: {first_line(error)[:200]}; allowed is HOST:PORT "
                "of a cluster that this machine is part of (ray start --head, or ray start --address HOST:PORT), "
                "or auto"
            ) from error
        if threading.current_thread() is threading.main_thread():  # Ray takes SIGTERM over: no checkpoint, no exit code
            signal.signal(signal.SIGTERM, before)

    @property
    def here(self) -> str:
        """Id of the machine that this process is on."""
        found: str = self.ray.get_runtime_context().get_node_id()
        return found

    @property
    def own_address(self) -> str:
        """Where this machine is reached by the others."""
        found: str = self.ray.util.get_node_ip_address()
        return found

    def rows(self) -> list[dict[str, Any]]:
        """What Ray knows of its nodes."""
        found: list[dict[str, Any]] = self.ray.nodes()
        return found

    def alive(self) -> frozenset[str]:
        """Ids of the nodes that Ray takes for alive. One that has lost its power it takes for dead after a while."""
        return frozenset(row["NodeID"] for row in self.rows() if row["Alive"])

    def await_signs(self, nodes: Iterable[str], deadline_s: float) -> None:
        """Return when each node has answered or is known to be gone, at the latest after `deadline_s`."""
        asked = {node: self.ray.remote(_sign).options(**self._on_node(node)).remote() for node in nodes}
        until_s = time.monotonic() + deadline_s
        while time.monotonic() < until_s:
            _, waiting = self.ray.wait(list(asked.values()), num_returns=len(asked), timeout=0.5)
            if not {node for node, future in asked.items() if future in waiting} & self.alive():
                return

    def reserve(self, bundles: Sequence[tuple[str, Mapping[str, float]]], name: str) -> Any:
        """Ask for a placement group of (node id, resources), all or nothing; it is granted later or never."""
        from ray.util import placement_group

        return placement_group(
            [dict(resources) for _, resources in bundles],
            strategy="PACK",
            name=name,
            bundle_label_selector=[{NODE_LABEL: node} for node, _ in bundles],
        )

    def release(self, group: Any) -> None:
        """Give a placement group back; what runs in it ends."""
        from ray.util import remove_placement_group

        remove_placement_group(group)

    def options(self, group: Any, index: int, resources: Mapping[str, float], threads: int) -> dict[str, Any]:
        """Return an actor's options for a bundle of a placement group.

        An actor that asks for no `GPU` sees those of its machine nevertheless: its type came by another resource.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rest = {key: amount for key, amount in resources.items() if key not in ("CPU", "GPU")}
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "resources": rest,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "max_restarts": 0,
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": str(threads),
                    "GOMP_SPINCOUNT": "10000",
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                }
            },
        }

    def _on_node(self, node: str) -> dict[str, Any]:
        """Return the options of a task that reserves nothing, on one machine."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy, "max_retries": 0}

    def leave(self) -> None:
        """Leave the cluster: what this driver started ends with it."""
        self.ray.shutdown()


def _sign() -> bool:
    return True


def import_ray() -> Any:
    """Return the module, quiet and without its usage statistics. Raises UserError where it is not installed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        raise UserError("--ray needs Ray, which is not installed: pip install 'baton-rl[ray]'") from error
    return ray


def check_address(address: str) -> None:
    """Raise UserError for what cannot be an address."""
    if not _ADDRESS.fullmatch(address):
        hint = "; run the command on a machine of the cluster, which ray:// is not for" if "://" in address else ""
        raise UserError(f"--ray: got {address!r}; allowed is HOST:PORT, or auto for this machine's cluster{hint}")
