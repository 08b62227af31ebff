"""What goes wrong, and when: from a TOML file, from a trace of preemptions, or drawn from a seed.

```toml
[[fault]]
kind = "crash"        # the worker's process ends; another takes its place after for_s (0: none does)
at_s = 120.0
worker = "w3"         # a name; without it one of those that are alive
for_s = 60.0
```

Kinds: `crash`, `hang` (it stands still and says nothing for for_s), `slow` (by factor), `leave` (it says goodbye),
`join` (one more like `worker`), `restart` (the controller dies and is back after for_s), `partition`, and
`network_fault` (of messages: loss, duplicate, reorder, delay_s; of fetches: corrupt).
"""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random
from typing import Literal, get_args

from pydantic import Field, model_validator

from baton.errors import UserError
from baton.settings import Settings
from baton.simulator.seeds import choices

Kind = Literal["crash", "hang", "slow", "join", "leave", "restart", "partition", "storm"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class FaultSettings(Settings):
    """[[fault]] one thing that goes wrong."""

    kind: Kind
    """What happens."""
    at_s: float = Field(ge=0)
    """When."""
    worker: str = ""
    """Name of the worker; without it one of those that are alive, or for `partition` and `network_fault` all."""
    for_s: float = Field(default=0.0, ge=0)
    """How long it lasts, or how long until something takes its place; 0: for good."""
    factor: float = Field(default=1.0, ge=1)
    """`slow`: everything takes so many times as long."""
    loss: float = Field(default=0.0, ge=0, le=1)
    """`network_fault`: share of messages lost, each with its connection."""
    duplicate: float = Field(default=0.0, ge=0, le=1)
    """`network_fault`: share of messages that come twice."""
    reorder: float = Field(default=0.0, ge=0, le=1)
    """`network_fault`: share of messages that are overtaken by later ones."""
    delay_s: float = Field(default=0.0, ge=0)
    """`network_fault`: longest extra delay of a message."""
    corrupt: float = Field(default=0.0, ge=0, le=1)
    """`network_fault`: share of fetched versions with a corrupt chunk."""

    @model_validator(mode="after")
    def _is_whole(self) -> FaultSettings:
        if self.kind == "slow" and self.factor == 1.0:
            raise ValueError('factor: kind = "slow" needs one above 1')
        if self.kind in ("partition", "storm", "hang") and not self.for_s:
            raise ValueError(f'for_s: kind = "{self.kind}" needs how long it lasts, in seconds above 0')
        if self.kind == "storm" and not (self.loss or self.duplicate or self.reorder or self.delay_s or self.corrupt):
            raise ValueError('kind = "storm" needs at least one of loss, duplicate, reorder, delay_s, corrupt')
        return self


class RandomSettings(Settings):
    """[random] faults drawn from the seed, beside those that are named."""

    faults: int = Field(ge=0)
    """How many."""
    until_s: float = Field(gt=0)
    """They happen before this time."""
    kinds: tuple[Kind, ...] = KINDS
    """Which."""


class SpotSettings(Settings):
    """[spot] preemptions of rented machines, from a trace."""

    trace: Path
    """CSV with columns at_s, worker, for_s: when it is taken away, how long until another is there (0: never)."""
    notice_s: float = Field(default=0.0, ge=0)
    """Warning before it is taken: with one, the worker puts down what it has and leaves."""


class FaultsSettings(Settings):
    """A fault file."""

    fault: tuple[FaultSettings, ...] = ()
    """What happens, in any order."""
    random: RandomSettings | None = None
    """Drawn from the seed."""
    spot: SpotSettings | None = None
    """From a trace."""

    def schedule(self, seed: int) -> list[FaultSettings]:
        """Return all faults in the order of time. Raises UserError for a trace that cannot be read."""
        found = list(self.fault)
        if self.random is not None:
            found += draw_faults(choices(seed, "faults"), self.random)
        if self.spot is not None:
            found += read_trace(self.spot)
        return sorted(found, key=lambda fault: fault.at_s)


def draw_faults(random: Random, wanted: RandomSettings) -> list[FaultSettings]:
    """Draw faults: when they happen, what, and how bad."""
    found = []
    for _ in range(wanted.faults):
        kind = random.choice(wanted.kinds)
        lasts_s = round(wanted.until_s * random.choice((0.01, 0.05, 0.2)) * (0.5 + random.random()), 3)
        values: dict[str, object] = {"kind": kind, "at_s": round(random.random() * wanted.until_s, 3), "for_s": lasts_s}
        if kind == "slow":
            values["factor"] = random.choice((2.0, 5.0, 20.0))
        if kind == "storm":
            for key in random.sample(("loss", "duplicate", "reorder", "delay_s", "corrupt"), 2):
                values[key] = random.choice((0.02, 0.2, 0.5)) * (4 if key == "delay_s" else 1)
        found.append(FaultSettings.model_validate(values))
    return found


def read_trace(spot: SpotSettings) -> list[FaultSettings]:
    """Read a trace of preemptions. Raises UserError naming the line."""
    if not spot.trace.is_file():
        raise UserError(f"spot.trace: there is no file {spot.trace}")
    found = []
    with spot.trace.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if not {"at_s", "worker"} <= set(rows.fieldnames or ()):
            raise UserError(f"{spot.trace}: got columns {rows.fieldnames}, a trace needs at_s, worker and for_s")
        for row in rows:
            try:
                at_s, for_s = max(0.0, float(row["at_s"]) - spot.notice_s), float(row.get("for_s") or 0)
                kind: Kind = "leave" if spot.notice_s else "crash"
                found.append(FaultSettings(kind=kind, at_s=at_s, worker=row["worker"], for_s=for_s))
            except ValueError as error:
                raise UserError(f"{spot.trace}, line {rows.line_num}: at_s and for_s are seconds, got {row}") from error
    return found
