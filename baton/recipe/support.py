"""Read `support.toml`, which states what is tested, experimental or refused; check runs against it.

A run is a mapping from axis to values, such as {"mode": ("async",), "engine": ("vllm",)}. Axes whose values are unknown
are absent from the mapping. The header of `support.toml` defines its entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from itertools import combinations

import msgspec

from baton.errors import UserError

Run = Mapping[str, tuple[str, ...]]


class SupportAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One dimension in which runs differ."""

    name: str
    title: str
    default: str
    crossed: bool = False
    """Whether the values of this axis are combined with those of the other crossed axes. A pair of non-default values
    on two crossed axes needs a test, or it is experimental."""


class SupportEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The status of the runs that match `when`. Exactly one of `test`, `experimental` and `refused` is given."""

    when: dict[str, tuple[str, ...]]
    """Values by axis: a run matches if, on every axis of `when`, it has one of the listed values."""
    test: str = ""
    experimental: str = ""
    refused: str = ""

    def describes(self, axis: str, value: str) -> bool:
        """Return True if `value` is one of the values that `when` lists for `axis`."""
        return value in self.when.get(axis, ())

    def matched(self, run: Run) -> dict[str, str] | None:
        """Return the run's matching value on each axis of `when`; None if the run does not match."""
        found = {axis: next((v for v in run.get(axis, ()) if v in values), None) for axis, values in self.when.items()}
        return None if None in found.values() else {axis: str(value) for axis, value in found.items()}


class SupportTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `support.toml`."""

    axis: tuple[SupportAxis, ...]
    support: tuple[SupportEntry, ...]


@cache
def support_table() -> SupportTable:
    """Read `support.toml`, which is part of the package."""
    return msgspec.toml.decode(files("baton.recipe").joinpath("support.toml").read_bytes(), type=SupportTable)


def check_support(run: Run) -> None:
    """Raise UserError if the table refuses the run."""
    for entry in support_table().support:
        if entry.refused and (values := entry.matched(run)) is not None:
            raise UserError(entry.refused.format(**values))


def experimental_parts(run: Run) -> tuple[str, ...]:
    """Return each value and each pair of values of a run that no test covers, with the reason."""
    table, found, doubtful = support_table(), [], set()
    for axis in table.axis:
        for value in run.get(axis.name, ()):
            entry = next((e for e in table.support if is_single(e, axis.name) and e.describes(axis.name, value)), None)
            if entry is None or entry.experimental:
                doubtful.add((axis.name, value))
                found.append(f"{axis.name} {value} ({entry.experimental if entry else 'no test covers it'})")
    special = [(a.name, v) for a in table.axis if a.crossed for v in run.get(a.name, ()) if v != a.default]
    for one, other in combinations(special, 2):
        if {one, other} & doubtful:
            continue  # one of the two values is already in the list
        both = (e for e in table.support if e.describes(*one) and e.describes(*other))
        entry = next((e for e in both if e.matched(run) is not None), None)
        if entry is None or entry.experimental:
            reason = entry.experimental if entry else "no test covers the two together"
            found.append(f"{one[0]} {one[1]} with {other[0]} {other[1]} ({reason})")
    return tuple(found)


def is_single(entry: SupportEntry, axis: str) -> bool:
    """Return True if `entry` describes values of `axis` alone, or only default values of several axes."""
    defaults = {each.name: (each.default,) for each in support_table().axis}
    return axis in entry.when and (len(entry.when) == 1 or entry.when.items() <= defaults.items())
