"""The connection to a Ray cluster: its nodes and placement groups. Ray is imported only when it is needed.

Ray unpickles the data that it receives, so anyone who can reach the ports of a cluster can run code on the cluster. Use
Ray only on trusted networks and with trusted users. Baton's hub does not have this restriction.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from baton.cluster.inventory import DescribedCluster, describe, machines
from baton.cluster.placement import ProcessPart, ProcessSpec
from baton.errors import BatonError, RankLost, UserError, first_line
from baton.recipe.load import load_recipe
from baton.specs.cluster import ClusterSettings
from baton.trainer.parallel.messages import HOW_TO_GO_ON

_ADDRESS: Final = re.compile(r"auto|[A-Za-z0-9_.\-\[\]:]+:[0-9]{1,5}")
NODE_LABEL: Final = "ray.io/node-id"
NAMESPACE: Final = "baton"
START_DEADLINE_S: Final = 120.0
"""Maximum seconds for Ray to grant the resources of a process and to start its actor."""
GET_S: Final = 60.0
"""Maximum seconds to fetch a result that Ray reports as ready. The fetch may hang, because the machine with the result
may have failed in the meantime."""


@contextmanager
def calling_ray() -> Iterator[None]:
    """Raise RankLost if a call of Ray itself fails in this context. If the cluster's head node is lost, such a call
    raises errors of several types. Baton's own errors pass unchanged."""
    try:
        yield
    except BatonError:
        raise
    except Exception as error:
        cause = first_line(error)[:200]
        raise RankLost(f"the connection to the Ray cluster was lost: {cause}; {HOW_TO_GO_ON}") from error


class RayCluster:
    """A Ray cluster that this process has joined as a driver."""

    def __init__(self, address: str) -> None:
        """Join the cluster. Raises UserError if Ray is not installed or no cluster answers."""
        self.ray = import_ray()
        check_address(address)
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
                f"--ray {address}: cannot join a Ray cluster at this address: {first_line(error)[:200]}; allowed is "
                "HOST:PORT of a cluster that includes this machine (start it with ray start --head, or ray start "
                "--address HOST:PORT), or auto"
            ) from error
        if threading.current_thread() is threading.main_thread():  # Ray replaces the SIGTERM handler; restore it
            signal.signal(signal.SIGTERM, before)

    @property
    def here(self) -> str:
        return str(self.ray.get_runtime_context().get_node_id())

    @property
    def own_address(self) -> str:
        return str(self.ray.util.get_node_ip_address())

    @calling_ray()
    def rows(self) -> list[dict[str, Any]]:
        """Return one row per node with the facts that Ray reports about the node. Raises RankLost (`calling_ray`)."""
        return list(self.ray.nodes())

    def alive(self) -> frozenset[str]:
        """Return the ids of the nodes that Ray considers alive. Ray detects a power failure only after a delay."""
        return frozenset(row["NodeID"] for row in self.rows() if row["Alive"])

    @calling_ray()
    def run_on(self, node: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function on a node; return the Ray future of its result."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node, soft=False)
        return self.ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(function).remote(*arguments)

    @calling_ray()
    def await_answers(self, nodes: Iterable[str], deadline_s: float) -> None:
        """Wait until every node has answered or is no longer alive, at most `deadline_s` seconds. Raises
        RankLost (`calling_ray`)."""
        futures = {node: self.run_on(node, _answer) for node in nodes}
        until_s = time.monotonic() + deadline_s
        while time.monotonic() < until_s:
            _, waiting = self.ray.wait(list(futures.values()), num_returns=len(futures), timeout=0.5)
            if not {node for node, future in futures.items() if future in waiting} & self.alive():
                return

    @calling_ray()
    def reserve(self, bundles: Sequence[tuple[str, Mapping[str, float]]], name: str) -> Any:
        """Request a placement group with bundles of (node id, resources). Ray grants either all bundles or none. If
        resources are missing, Ray grants the bundles later or never."""
        from ray.util import placement_group

        return placement_group(
            [dict(resources) for _, resources in bundles],
            strategy="PACK",
            name=name,
            bundle_label_selector=[{NODE_LABEL: node} for node, _ in bundles],
        )

    def release(self, group: Any) -> None:
        """Release a placement group, which ends its actors. Has no effect if the connection is lost."""
        from ray.util import remove_placement_group

        with suppress(Exception):
            remove_placement_group(group)

    def options(self, group: Any, index: int, spec: ProcessSpec | ProcessPart) -> dict[str, Any]:
        """Return the options of an actor in a bundle of a placement group. An actor that requests GPUs under another
        name than `GPU` sees all GPUs of its machine, because of RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO = 0. By default, Ray
        would hide all GPUs."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": spec.resources.get("CPU", 0),
            "num_gpus": spec.resources.get("GPU", 0),
            "resources": {key: amount for key, amount in spec.resources.items() if key not in ("CPU", "GPU")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "max_restarts": 0,
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": str(spec.threads),
                    "GOMP_SPINCOUNT": "10000",
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                }
            },
        }

    def leave(self) -> None:
        """Leave the cluster. Ray ends all actors and placement groups of this driver."""
        self.ray.shutdown()


def _answer() -> bool:
    return True


def import_ray() -> Any:
    """Import Ray without its usage statistics. Raises UserError if Ray is not installed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        raise UserError("--ray needs Ray, which is not installed: run `pip install 'baton-rl[ray]'`") from error
    return ray


def check_address(address: str) -> None:
    """Raise UserError if the text does not have the form of a Ray cluster's address."""
    if not _ADDRESS.fullmatch(address):
        hint = "; ray:// is not supported, run the command on a machine of the cluster" if "://" in address else ""
        raise UserError(f"--ray: got {address!r}; allowed is HOST:PORT, or auto for this machine's cluster{hint}")


def describe_ray(address: str, *, base: Path | None, name: str, with_cpus: bool) -> DescribedCluster:
    """Return the description of the cluster at an address. Raises UserError if the cluster cannot be joined or used."""
    known = None if base is None else load_recipe(ClusterSettings, base)
    cluster = RayCluster(address)
    try:
        found = machines(cluster.rows(), types=known.gpu if known is not None else ())
    finally:
        cluster.leave()
    return describe(found, name=name, base=known, with_cpus=with_cpus)
