"""Lists the machines of a Ray cluster, their GPUs' type and number, and the Ray resources to request for a GPU.

The first row of this table that applies to a machine determines its GPU type:

    source                                                       set by
    resource gpu_type_NAME: n                                    the operator, also for devices that Ray does not detect
    label ray.io/accelerator-type (with resource GPU: n)         Ray
    resource accelerator_type:NAME (with resource GPU: n)        Ray
    resource CPU: n, on a machine without GPU                    Ray; type "CPU" of the catalogue, one per core
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import tomli_w

from baton.errors import UserError
from baton.recipe.load import parse_recipe
from baton.specs.cluster import ClusterSettings, catalogue

OWN_TYPE: Final = "gpu_type_"
RAY_TYPE: Final = "accelerator_type:"
TYPE_LABEL: Final = "ray.io/accelerator-type"
CPU: Final = "CPU"
_SAME: Final = {
    "A100": "A100-40",
    "A100-40G": "A100-40",
    "A100-80G": "A100-80",
    "AMD-INSTINCT-MI300X-OAM": "MI300X",
    "AMD-INSTINCT-MI300X": "MI300X",
}
"""Ray's name of a GPU type → name in the catalogue. Ray's A100 may have 40 or 80 GB, so the smaller size is assumed."""
ASSUMED_GB_PER_S: Final = 1.25
"""Assumed bandwidth between machines (10 Gbit/s), because Ray does not report it."""


class Machine(msgspec.Struct, frozen=True):
    """A machine of a Ray cluster."""

    id: str
    """Ray's node id, in hex."""
    name: str
    """Name in cluster files and plans."""
    address: str
    gpu: str | None
    """Name of the GPU type in the catalogue or in a cluster file; None if the type is not known."""
    num_gpus: int
    """Number of GPUs; on a machine of type CPU, number of cores."""
    units: tuple[str, ...]
    """Names of Ray resources. A process requests one unit of each of these resources for each GPU that it uses."""
    cpus: float
    """Number of CPU cores that Ray may assign."""
    problem: str = ""
    """Reason why the GPU type is not known; empty if it is known."""


def machines(
    rows: Iterable[Mapping[str, Any]], *, types: Collection[str] = (), known: Mapping[str, str] | None = None
) -> tuple[Machine, ...]:
    """Return the live machines from the rows of `ray.nodes()`, sorted by name.

    `types`: names of GPU types that are known in addition to the catalogue. `known`: node id → name that was assigned
    to the machine before. A machine that joins again has a new node id, so its earlier name is found by its host name.
    A machine without an assigned name gets its host name; if several machines have this host name, the start of the
    node id is appended."""
    rows, given = list(rows), known or {}
    alive = [row for row in rows if row["Alive"]]
    taken = Counter(_plain(row["NodeManagerHostname"]) for row in alive)
    taken.update(given[row["NodeID"]] for row in alive if row["NodeID"] in given)
    left = {
        _plain(row["NodeManagerHostname"]): name
        for row in rows
        if not row["Alive"] and (name := given.get(row["NodeID"])) is not None and not taken[name]
    }
    found = []
    for row in alive:
        own = _plain(row["NodeManagerHostname"])
        name = given.get(row["NodeID"]) or (left.get(own, own) if taken[own] == 1 else f"{own}-{row['NodeID'][:8]}")
        found.append(_machine(row, name, {*catalogue(), *types}))
    return tuple(sorted(found, key=lambda machine: machine.name))


def _plain(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", host) or "machine"


def _machine(row: Mapping[str, Any], name: str, types: Collection[str]) -> Machine:
    resources, labels = row["Resources"], row.get("Labels") or {}
    cpus, gpus = float(resources.get("CPU", 0.0)), int(resources.get("GPU", 0.0))
    own = [key for key in resources if key.startswith(OWN_TYPE)]
    of_ray = [key.removeprefix(RAY_TYPE) for key in resources if key.startswith(RAY_TYPE)]
    given: str | None = None
    units: tuple[str, ...]
    if own:
        given, num = own[0].removeprefix(OWN_TYPE), int(resources[own[0]])
        units = (own[0], "GPU") if gpus >= num else (own[0],)
    elif gpus:
        given, num, units = labels.get(TYPE_LABEL) or (of_ray[0] if of_ray else None), gpus, ("GPU",)
    else:
        given, num, units = CPU, int(cpus), ("CPU",)
    by_lower = {known.lower(): known for known in types}
    gpu = by_lower.get((_SAME.get((given or "").upper(), given) or "").lower())
    problem = ""
    if len(own) > 1:
        gpu, problem = None, f"it has two GPU types ({', '.join(own)})"
    elif num < 1:
        gpu, problem = None, "it offers Ray neither a GPU nor a core"
    elif gpu is None and given is None:
        problem = f"Ray does not report the type of its {num} GPUs"
    elif gpu is None:
        problem = f"the type {given!r} is not in the catalogue"
    return Machine(row["NodeID"], name, row["NodeManagerAddress"], gpu, num, units, cpus, problem)


class DescribedCluster(msgspec.Struct, frozen=True):
    """A description of the cluster for the planner, and notes for the user."""

    settings: ClusterSettings
    notes: tuple[str, ...]


def describe(
    found: Sequence[Machine], *, name: str, base: ClusterSettings | None = None, with_cpus: bool = False
) -> DescribedCluster:
    """Describe the machines that the planner may use. Raises UserError if no machine is usable.

    `base`: a cluster file with the links, prices and GPU types to apply. `with_cpus`: whether machines without a GPU
    are included. If no usable machine has a GPU, all usable machines are included."""
    notes = [f"{m.name} is not used: {m.problem}; {_advice(m)}" for m in found if m.gpu is None]
    usable = [machine for machine in found if machine.gpu is not None]
    if not with_cpus and any(machine.gpu != CPU for machine in usable):
        for machine in [m for m in usable if m.gpu == CPU]:
            notes.append(f"{machine.name} is not used: it has no GPU; --with-cpus uses its {machine.num_gpus} cores")
            usable.remove(machine)
    if not usable:
        raise UserError(
            "no machine of the cluster can be used in a plan: " + ("; ".join(notes) or "the cluster has none")
        )
    return DescribedCluster(_settings(usable, name, base, notes), tuple(notes))


def _advice(machine: Machine) -> str:
    return (
        f"""start Ray on it with --resources '{{"{OWN_TYPE}NAME": {machine.num_gpus or 1}}}', """
        "where NAME is a known GPU type"
    )


def _settings(usable: Sequence[Machine], name: str, base: ClusterSettings | None, notes: list[str]) -> ClusterSettings:
    by_name = {} if base is None else {name: node for node in base.nodes for name in node.names}
    tree: dict[str, Any] = {"name": name, "nodes": []}
    for machine in usable:
        node: dict[str, Any] = {"gpu": machine.gpu, "gpus": machine.num_gpus, "name": machine.name}
        described = by_name.get(machine.name)
        if described is not None and described.gpu == machine.gpu:
            node |= described.model_dump(include={"link_gb_per_s", "price_per_gpu_hour"}, exclude_none=True)
        tree["nodes"].append(node)
    if base is not None:
        present = {machine.name for machine in usable} | {machine.gpu for machine in usable}
        links = base.links.model_dump(exclude_none=True)
        links["between"] = [link for link in links["between"] if set(link["ends"]) <= present]
        tree |= {"links": links, "gpu": {key: gpu.model_dump(exclude_none=True) for key, gpu in base.gpu.items()}}
    else:
        tree["links"] = {"inter_node_gb_per_s": ASSUMED_GB_PER_S}
        if len(usable) > 1:
            notes.append(
                f"links.inter_node_gb_per_s = {ASSUMED_GB_PER_S} is an assumption: Ray does not report it, measure it"
            )
    return parse_recipe(ClusterSettings, tree, "the machines of the cluster")


def as_toml(described: DescribedCluster) -> str:
    """Return the text of a cluster file, with the notes as comments at its start."""
    settings = described.settings.model_dump(exclude_none=True, exclude_defaults=True)
    head = "".join(f"# {note}\n" for note in ("Written by `baton cluster describe`.", *described.notes))
    return f"{head}\n{tomli_w.dumps(settings)}"
