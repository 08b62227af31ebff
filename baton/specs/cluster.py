"""Hardware as data: GPUs, nodes, links and prices, read from a catalogue and a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import combinations

import msgspec
from pydantic import Field, model_validator

from baton.errors import UserError
from baton.settings import Settings

GB = 1e9
TERA = 1e12


class Gpu(msgspec.Struct, frozen=True):
    """One GPU type."""

    name: str
    flops: float
    """Peak dense bf16 FLOP/s."""
    hbm_bytes_per_s: float
    hbm_bytes: float
    link_bytes_per_s: float
    """Bandwidth between two GPUs of one node, one direction."""
    price_per_h: float
    """Price of one GPU per hour, in `currency`."""
    currency: str = "USD"


class Node(msgspec.Struct, frozen=True):
    """A machine with GPUs of one type."""

    name: str
    gpu: Gpu
    num_gpus: int
    link_bytes_per_s: float
    """Bandwidth between two GPUs of the node, one direction."""
    price_per_gpu_h: float

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """`node:index` of each GPU."""
        return tuple(f"{self.name}:{index}" for index in range(self.num_gpus))


class Cluster(msgspec.Struct, frozen=True):
    """Nodes and the links between them."""

    name: str
    nodes: tuple[Node, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]
    """[nodes, nodes] bandwidth between two nodes, one direction; the diagonal is unused."""
    latency_s: float = 2e-5
    """Latency of one message between two nodes."""

    @property
    def num_gpus(self) -> int:
        return sum(node.num_gpus for node in self.nodes)

    @property
    def price_per_h(self) -> float:
        """Price of all GPUs per hour, in `currency`."""
        return sum(node.num_gpus * node.price_per_gpu_h for node in self.nodes)

    @property
    def currency(self) -> str:
        """The single currency of all prices."""
        return self.nodes[0].gpu.currency

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(self.places)

    @property
    def places(self) -> dict[str, list[int]]:
        """GPU type → indices of its nodes in `nodes`."""
        found: dict[str, list[int]] = {}
        for place, node in enumerate(self.nodes):
            found.setdefault(node.gpu.name, []).append(place)
        return found

    def count(self) -> dict[str, int]:
        return {name: sum(self.nodes[place].num_gpus for place in own) for name, own in self.places.items()}


# ---- the TOML file ---------------------------------------------------------------------------------------------------


class GpuSettings(Settings):
    """[gpu.NAME] a new GPU type, or changes to a GPU type of the catalogue."""

    bf16_tflops: float | None = Field(default=None, gt=0)
    """Peak dense bf16, 10^12 FLOP/s."""
    hbm_gb_per_s: float | None = Field(default=None, gt=0)
    """Memory bandwidth, 10^9 bytes/s."""
    hbm_gb: float | None = Field(default=None, gt=0)
    """Memory, 10^9 bytes."""
    link_gb_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two GPUs of one node, one direction, 10^9 bytes/s."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Price of one GPU per hour."""
    currency: str | None = None
    """Currency of the price."""
    source: str | None = None
    """Source of the figures."""
    price_source: str | None = None
    """Source of the price."""


class MachineSettings(Settings):
    """A machine type: its GPUs, their links and their price."""

    gpu: str
    """GPU type: a name of the catalogue or of a [gpu.NAME] section."""
    gpus: int = Field(default=8, ge=1)
    """GPUs per machine."""
    link_gb_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two GPUs of a machine, one direction, 10^9 bytes/s; the default is the bandwidth of the GPU
    type."""
    price_per_gpu_hour: float | None = Field(default=None, gt=0)
    """Price of one GPU per hour; the default is the price of the GPU type."""


class NodeSettings(MachineSettings):
    """[[nodes]] identical machines."""

    count: int = Field(default=1, ge=1, le=100_000)
    """Number of identical machines."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the machines. If `count` is above 1, the names end with -0, -1, …. Default: the GPU's name in lower
    case."""

    @property
    def names(self) -> list[str]:
        """The name of each machine."""
        name = self.name or self.gpu.lower()
        return [name] if self.count == 1 else [f"{name}-{index}" for index in range(self.count)]


class BetweenSettings(Settings):
    """[[links.between]] bandwidth between two GPU types, or between two named machines."""

    ends: tuple[str, str]
    """Two GPU types or two machine names. The same type twice means the bandwidth between machines of that type."""
    gb_per_s: float = Field(gt=0)
    """Bandwidth in one direction, 10^9 bytes/s."""


class LinkSettings(Settings):
    """[links] bandwidth between machines."""

    inter_node_gb_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two machines of one GPU type, one direction, 10^9 bytes/s."""
    cross_type_gb_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between machines of different GPU types, 10^9 bytes/s; the default is inter_node_gb_per_s."""
    latency_us: float = Field(default=20.0, ge=0)
    """Latency of one message between two machines, microseconds."""
    between: tuple[BetweenSettings, ...] = ()
    """Bandwidths of single pairs, which override inter_node_gb_per_s and cross_type_gb_per_s."""


class ClusterSettings(Settings):
    """A cluster file."""

    name: str
    """Name of the cluster in plans."""
    links: LinkSettings = LinkSettings()
    """Bandwidth between machines."""
    nodes: tuple[NodeSettings, ...] = Field(min_length=1)
    """The machines."""
    gpu: dict[str, GpuSettings] = Field(default_factory=dict)
    """New GPU types, or changes to GPU types of the catalogue, by name."""

    @model_validator(mode="after")
    def _is_whole(self) -> ClusterSettings:
        self.build()
        return self

    def build(self) -> Cluster:
        """Build the cluster. Raises UserError for an unknown GPU, a missing bandwidth, duplicate machine names,
        mixed currencies, or entries that contradict each other."""
        gpus = gpu_types(self.gpu)
        nodes = tuple(_nodes(self.nodes, gpus))
        names = [node.name for node in nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"nodes: two machines are named {twice[0]!r}; give each group of machines another name")
        currencies = sorted({node.gpu.currency for node in nodes})
        if len(currencies) > 1:
            raise UserError(
                f"nodes: prices are in {' and in '.join(currencies)}, which cannot be added; give price_per_hour and "
                "currency in a [gpu.NAME] section for each GPU type"
            )
        return Cluster(self.name, nodes, _bandwidths(self.links, nodes), self.links.latency_us * 1e-6)


@cache
def catalogue() -> Mapping[str, GpuSettings]:
    """Return the GPU types that Baton includes, by name."""
    text = (files("baton.specs") / "catalogue" / "gpus.toml").read_text(encoding="utf-8")
    return {name: GpuSettings.model_validate(table) for name, table in tomllib.loads(text).items()}


def gpu_types(own: Mapping[str, GpuSettings] = {}) -> dict[str, Gpu]:
    """Return all GPU types by name: those of the catalogue, with the changes and additions in `own`. Raises
    UserError if a new GPU type lacks a value."""
    found = {}
    for name in dict.fromkeys([*catalogue(), *own]):
        layers = [layer[name] for layer in (catalogue(), own) if name in layer]
        values = {key: value for layer in layers for key, value in layer.model_dump(exclude_none=True).items()}
        needed = ("bf16_tflops", "hbm_gb_per_s", "hbm_gb", "link_gb_per_s", "price_per_hour")
        missing = [key for key in needed if key not in values]
        if missing:
            raise UserError(f"gpu.{name}: {', '.join(missing)} is missing; the catalogue has no GPU of this name")
        found[name] = Gpu(
            name=name,
            flops=values["bf16_tflops"] * TERA,
            hbm_bytes_per_s=values["hbm_gb_per_s"] * GB,
            hbm_bytes=values["hbm_gb"] * GB,
            link_bytes_per_s=values["link_gb_per_s"] * GB,
            price_per_h=values["price_per_hour"],
            currency=values.get("currency") or "USD",
        )
    return found


def find_gpu(name: str, gpus: Mapping[str, Gpu], where: str) -> Gpu:
    """Return a GPU type by name. If the name is unknown, raises UserError with `where` and the allowed names."""
    if name not in gpus:
        lower = {known.lower(): known for known in gpus}
        near = get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
        hint = f"did you mean {lower[near[0]]!r}? " if near else ""
        raise UserError(
            f"{where}: unknown GPU {name!r}; {hint}allowed are {', '.join(gpus)}, or a type defined in [gpu.{name}]"
        )
    return gpus[name]


def _nodes(groups: Sequence[NodeSettings], gpus: Mapping[str, Gpu]) -> Sequence[Node]:
    found = []
    for place, group in enumerate(groups):
        gpu = find_gpu(group.gpu, gpus, f"nodes.{place}.gpu")
        link = group.link_gb_per_s * GB if group.link_gb_per_s else gpu.link_bytes_per_s
        price = group.price_per_gpu_hour or gpu.price_per_h
        found += [Node(each, gpu, group.gpus, link, price) for each in group.names]
    return found


def _bandwidths(links: LinkSettings, nodes: Sequence[Node]) -> tuple[tuple[float, ...], ...]:
    given: dict[frozenset[int] | frozenset[str], float] = {}
    """Bandwidth between two nodes, by their indices, or between nodes of two GPU types, by the names of the types."""
    index = {node.name: place for place, node in enumerate(nodes)}
    types = {node.gpu.name for node in nodes}
    for place, between in enumerate(links.between):
        where = f"links.between.{place}"
        first, second = between.ends
        ends: frozenset[int] | frozenset[str]
        if first in index and second in index:
            if first == second:
                raise UserError(
                    f"{where}.ends: got {first!r} twice; the bandwidth within a machine is nodes.link_gb_per_s"
                )
            ends = frozenset((index[first], index[second]))
        elif first in types and second in types:
            ends = frozenset((first, second))
        else:
            raise UserError(
                f"{where}.ends: got {first!r} and {second!r}; allowed are two GPU types ({', '.join(sorted(types))}) "
                f"or two machines ({', '.join(list(index)[:6])}{', …' if len(index) > 6 else ''})"
            )
        rate = between.gb_per_s * GB
        if given.setdefault(ends, rate) != rate:
            raise UserError(
                f"{where}: got {rate / GB:g} GB/s, but an earlier entry has {given[ends] / GB:g} for the same ends"
            )
    rows = [[0.0] * len(nodes) for _ in nodes]
    for a, b in combinations(range(len(nodes)), 2):
        types_of_pair = frozenset((nodes[a].gpu.name, nodes[b].gpu.name))
        found = given.get(frozenset((a, b)), given.get(types_of_pair))
        rows[a][b] = rows[b][a] = _general_rate(links, nodes[a], nodes[b]) if found is None else found
    return tuple(map(tuple, rows))


def _general_rate(links: LinkSettings, one: Node, other: Node) -> float:
    is_cross = one.gpu.name != other.gpu.name
    given = links.cross_type_gb_per_s if is_cross and links.cross_type_gb_per_s else links.inter_node_gb_per_s
    if given is None:
        key = "links.cross_type_gb_per_s" if is_cross else "links.inter_node_gb_per_s"
        raise UserError(f"{key} is missing; it gives the bandwidth between {one.name} and {other.name}")
    return given * GB
