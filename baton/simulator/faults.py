"""What goes wrong, and when: from a TOML file, from a trace of preemptions, or drawn from a seed.

```toml
[[fault]]
kind = "crash"        # the worker's process ends; another takes its place after for_s (0: none does)
at_s = 120.0
worker = "w3"         # a name; without it one of those that are alive
for_s = 60.0
```

Kinds: `crash`, `hang` (it stands still and says nothing for for_s), `slow` (by factor), `leave` (it says goodbye),
`join` (one more like `worker`), `restart` (the controller dies and is back after for_s), `partition`, and `storm` (of
messages: loss, duplicate, reorder, delay_s; of fetches: corrupt).
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
from baton.simulator.swarm import Swarm
from baton.simulator.trouble import Storm
from baton.simulator.worker import SimWorker

Kind = Literal["crash", "hang", "slow", "join", "leave", "restart", "partition", "storm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LASTING = ("slow", "partition", "storm", "hang")


class FaultSettings(Settings):
    """[[fault]] one thing that goes wrong."""

    kind: Kind
    """What happens."""
    at_s: float = Field(ge=0)
    """When."""
    worker: str = ""
    """Name of the worker; without it one of those that are alive, or for `partition` and `storm` all."""
    for_s: float = Field(default=0.0, ge=0)
    """How long it lasts, or how long until something takes its place; 0: for good."""
    factor: float = Field(default=1.0, ge=1)
    """`slow`: everything takes so many times as long."""
    loss: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of messages lost, each with its connection."""
    duplicate: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of messages that come twice."""
    reorder: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of messages that are overtaken by later ones."""
    delay_s: float = Field(default=0.0, ge=0)
    """`storm`: longest extra delay of a message."""
    corrupt: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of fetched versions with a corrupt chunk."""

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


def storms(faults: list[FaultSettings]) -> list[Storm]:
    """Return the trouble on the wires among them."""
    return [
        Storm(
            fault.at_s,
            fault.at_s + fault.for_s,
            fault.worker,
            fault.loss,
            fault.duplicate,
            fault.reorder,
            fault.delay_s,
            fault.corrupt,
            fault.kind == "partition",
        )
        for fault in faults
        if fault.kind in ("partition", "storm")
    ]


class Fate:
    """Lets faults happen to a swarm."""

    def __init__(self, swarm: Swarm, faults: list[FaultSettings], random: Random) -> None:
        """Raises UserError for a worker that there is not."""
        self._swarm, self._random = swarm, random
        self._specs = {spec.name: spec for spec in swarm.setting.engines}
        for fault in faults:
            if fault.worker and fault.worker not in self._specs:
                known = ", ".join([*self._specs][:8]) + (", …" if len(self._specs) > 8 else "")
                raise UserError(f"fault at {fault.at_s:g} s: worker: got {fault.worker!r}, the workers are {known}")
            swarm.clock.at(fault.at_s, self._happen, fault)

    def _happen(self, fault: FaultSettings) -> None:
        swarm = self._swarm
        swarm.count(f"fault: {fault.kind}")
        if fault.kind in ("partition", "storm"):
            return
        if fault.kind == "restart":
            if not swarm.is_down:
                swarm.world.restart(fault.for_s)
            return
        if fault.kind == "join":
            name = fault.worker or self._random.choice([*self._specs])
            swarm.join(self._specs[name])
            return
        worker = self._victim(fault)
        if worker is not None:
            self._strike(worker, fault)

    def _victim(self, fault: FaultSettings) -> SimWorker | None:
        alive = [w for w in self._swarm.alive() if fault.worker in ("", w.spec.name)]
        return self._random.choice(alive) if alive else None

    def _strike(self, worker: SimWorker, fault: FaultSettings) -> None:
        clock = self._swarm.clock
        match fault.kind:
            case "hang":
                worker.freeze()
                clock.after(fault.for_s, worker.thaw)
            case "slow":
                self._slow(worker, fault.factor)
                if fault.for_s:
                    clock.after(fault.for_s, self._slow, worker, 1.0)
            case "crash" | "leave":
                worker.die() if fault.kind == "crash" else worker.leave()
                if fault.for_s:
                    clock.after(fault.for_s, self._replace, worker)

    def _replace(self, worker: SimWorker) -> None:
        self._swarm.join(worker.spec)

    def _slow(self, worker: SimWorker, factor: float) -> None:
        worker.slowness = factor
        worker.engine.slow(factor)
