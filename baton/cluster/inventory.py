"""The machines of a Ray cluster as the planner describes them: GPU type and count, and the Ray resources of each GPU.

The GPU type comes from the first of these sources that a machine has:

    resource  gpu_type_NAME: n        set by the operator; also for devices that Ray does not detect
    label     ray.io/accelerator-type, or resource accelerator_type:NAME, with GPU: n      detected by Ray
    neither, and no GPU               one "CPU" per core, a type of the catalogue
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import tomli_w

from baton.errors import UserError
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
"""Ray's names → the catalogue's. Ray's A100 may have 40 or 80 GB; 40 GB is the safe assumption."""
ASSUMED_GB_PER_S: Final = 1.25
"""Assumed bandwidth between machines, 10 Gbit/s: Ray does not report it."""


class Machine(msgspec.Struct, frozen=True):
    """One machine of a Ray cluster."""

    id: str
    """Ray's node id, in hex."""
    name: str
    """Name in cluster files and plans."""
    address: str
    gpu: str | None
    """Type, by its name in the catalogue or a cluster file; None if it is not known."""
    num_gpus: int
    """On a machine of type CPU: its cores."""
    units: tuple[str, ...]
    """Ray resources; each GPU takes one of every resource named here."""
    cpus: float
    why: str = ""
    """Why the type is not known; empty if it is."""


def machines(
    rows: Iterable[Mapping[str, Any]], *, types: Collection[str] = (), known: Mapping[str, str] | None = None
) -> tuple[Machine, ...]:
    """Return the live machines from the rows of `ray.nodes()`, sorted by name.

    types: GPU types in addition to the catalogue's. known: names that are already assigned, by id. Other machines are
    named by their host name; if several have the same one, the start of the node id is appended.
    """
    alive = [row for row in rows if row["Alive"]]
    given = known or {}
    taken = Counter(_plain(row["NodeManagerHostname"]) for row in alive)
    taken.update(given[row["NodeID"]] for row in alive if row["NodeID"] in given)
    found = []
    for row in alive:
        own = _plain(row["NodeManagerHostname"])
        name = given.get(row["NodeID"]) or (own if taken[own] == 1 else f"{own}-{row['NodeID'][:8]}")
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
    why = ""
    if len(own) > 1:
        gpu, why = None, f"it has two types ({', '.join(own)})"
    elif num < 1:
        gpu, why = None, "it has no device and no core for Ray"
    elif gpu is None and given is None:
        why = f"it has {num} GPUs whose type Ray does not say"
    elif gpu is None:
        why = f"the type {given!r} is not in the catalogue"
    return Machine(row["NodeID"], name, row["NodeManagerAddress"], gpu, num, units, cpus, why)


class DescribedCluster(msgspec.Struct, frozen=True):
    """The content of a cluster file, and notes for the user."""

    settings: ClusterSettings
    notes: tuple[str, ...]


def describe(
    found: Sequence[Machine], *, name: str, base: ClusterSettings | None = None, with_cpus: bool = False
) -> DescribedCluster:
    """Return the cluster that the planner may use. Raises UserError if no machine is usable.

    base: a cluster file whose links, prices and GPU types apply. with_cpus: also use machines without a GPU; a cluster
    without any GPU is always described by its cores.
    """
    notes = [f"{m.name} is left out: {m.why}; {_way_out(m)}" for m in found if m.gpu is None]
    of_use = [machine for machine in found if machine.gpu is not None]
    if not with_cpus and any(machine.gpu != CPU for machine in of_use):
        for machine in [m for m in of_use if m.gpu == CPU]:
            notes.append(f"{machine.name} is left out: it has no GPU; --with-cpus takes its {machine.num_gpus} cores")
            of_use.remove(machine)
    if not of_use:
        raise UserError("no machine of the cluster can be planned with: " + ("; ".join(notes) or "there is none"))
    return DescribedCluster(_settings(of_use, name, base, notes), tuple(notes))


def _way_out(machine: Machine) -> str:
    return f"""start Ray there with --resources '{{"{OWN_TYPE}NAME": {machine.num_gpus or 1}}}' and a known NAME"""


def _settings(of_use: Sequence[Machine], name: str, base: ClusterSettings | None, notes: list[str]) -> ClusterSettings:
    by_name = {} if base is None else {node.name: node for node in base.nodes if node.count == 1}
    tree: dict[str, Any] = {"name": name, "nodes": []}
    for machine in of_use:
        node: dict[str, Any] = {"gpu": machine.gpu, "gpus": machine.num_gpus, "name": machine.name}
        before = by_name.get(machine.name)
        if before is not None and before.gpu == machine.gpu:
            node |= before.model_dump(include={"link_gb_per_s", "price_per_gpu_hour"}, exclude_none=True)
        tree["nodes"].append(node)
    if base is not None:
        there = {machine.name for machine in of_use} | {machine.gpu for machine in of_use}
        links = base.links.model_dump(exclude_none=True)
        links["between"] = [one for one in links["between"] if set(one["ends"]) <= there]
        tree |= {"links": links, "gpu": {key: gpu.model_dump(exclude_none=True) for key, gpu in base.gpu.items()}}
    else:
        tree["links"] = {"inter_node_gb_per_s": ASSUMED_GB_PER_S}
        if len(of_use) > 1:
            notes.append(f"links.inter_node_gb_per_s = {ASSUMED_GB_PER_S} is assumed: Ray does not know it, measure it")
    return ClusterSettings.model_validate(tree)


def as_toml(described: DescribedCluster) -> str:
    """Return the text of a cluster file, with the notes above it."""
    settings = described.settings.model_dump(exclude_none=True, exclude_defaults=True)
    head = "".join(f"# {note}\n" for note in ("As `baton cluster describe` found it.", *described.notes))
    return f"{head}\n{tomli_w.dumps(settings)}"
