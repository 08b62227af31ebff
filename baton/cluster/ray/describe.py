"""Describes a running Ray cluster for the planner."""

from __future__ import annotations

from pathlib import Path

from baton.cluster.inventory import DescribedCluster, describe, machines
from baton.cluster.ray.connection import RayCluster
from baton.recipe.load import load_recipe
from baton.specs.cluster import ClusterSettings


def describe_ray(address: str, *, base: Path | None, name: str, with_cpus: bool) -> DescribedCluster:
    """Return the description of the cluster at an address. Raises UserError if it cannot be joined or used."""
    known = None if base is None else load_recipe(ClusterSettings, base)
    cluster = RayCluster(address)
    try:
        found = machines(cluster.rows(), types=known.gpu if known is not None else ())
    finally:
        cluster.leave()
    return describe(found, name=name, base=known, with_cpus=with_cpus)
