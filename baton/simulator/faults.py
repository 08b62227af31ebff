"""Faults of a simulated run, which come from a TOML file or from a trace of preemptions, or are drawn at random.

```toml
[[fault]]
kind = "crash"        # the worker's process ends; a replacement starts after for_s (0: never)
at_s = 120.0
worker = "w3"         # a name; without it one of the running workers
for_s = 60.0
```

Kinds: `crash`; `hang` (no progress and no messages for for_s); `slow` (by factor); `leave` (the worker reports its
tokens and ends); `join` (a worker like `worker` is added); `wrong` (the worker generates other tokens than correct
workers, for for_s seconds or, if for_s is 0, until the worker ends); `restart` (the controller stops, and resumes after
for_s); `partition` (messages are delayed until the end of the partition, and fetches fail). A `storm` causes faults of
messages (loss, duplicate, reorder, delay_s) and of fetches (corrupt).
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

Kind = Literal["crash", "hang", "slow", "join", "leave", "restart", "partition", "storm", "wrong"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DRAWN = tuple(kind for kind in KINDS if kind != "wrong")
"""Kinds from which random faults are drawn by default: all kinds that can happen to a correct worker."""


class FaultSettings(Settings):
    """[[fault]] One fault."""

    kind: Kind
    """Kind of the fault."""
    at_s: float = Field(ge=0)
    """Virtual time of the fault."""
    worker: str = ""
    """Name of the affected worker. Default: all workers for `partition` and `storm`, otherwise a random running
    worker."""
    for_s: float = Field(default=0.0, ge=0)
    """Duration of the fault in seconds; for `crash`, time until a replacement starts. 0: permanent."""
    factor: float = Field(default=1.0, ge=1)
    """`slow`: factor by which all times of the worker are multiplied."""
    loss: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of messages that are lost. Each lost message also cuts the connection."""
    duplicate: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of messages that arrive twice."""
    reorder: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of messages that arrive after messages that were sent later."""
    delay_s: float = Field(default=0.0, ge=0)
    """`storm`: maximum additional delay of a message."""
    corrupt: float = Field(default=0.0, ge=0, le=1)
    """`storm`: share of fetched versions that have a corrupt chunk."""

    @model_validator(mode="after")
    def _is_whole(self) -> FaultSettings:
        if self.kind == "slow" and self.factor == 1.0:
            raise ValueError('factor: kind = "slow" needs a factor above 1')
        if self.kind in ("partition", "storm", "hang") and not self.for_s:
            raise ValueError(f'for_s: kind = "{self.kind}" needs a duration in seconds, above 0')
        if self.kind == "storm" and not (self.loss or self.duplicate or self.reorder or self.delay_s or self.corrupt):
            raise ValueError('kind = "storm" needs at least one of loss, duplicate, reorder, delay_s, corrupt')
        return self


class RandomSettings(Settings):
    """[random] Faults that are drawn from the run's seed, in addition to the listed faults."""

    faults: int = Field(ge=0)
    """Number of faults."""
    until_s: float = Field(gt=0)
    """All random faults begin before this virtual time."""
    kinds: tuple[Kind, ...] = Field(default=DRAWN, min_length=1)
    """Kinds of fault to draw from."""


class SpotSettings(Settings):
    """[spot] Preemptions of rented machines, read from a trace."""

    trace: Path
    """CSV file of preemptions. Columns: at_s (time), worker (name), for_s (time from the preemption to the start of a
    replacement; 0: never)."""
    notice_s: float = Field(default=0.0, ge=0)
    """Time from the warning to the preemption. With a positive value, the worker reports its tokens and leaves at the
    time of the warning. With 0, the worker crashes at the preemption."""


class FaultsSettings(Settings):
    """A fault file."""

    fault: tuple[FaultSettings, ...] = ()
    """The listed faults, in any order."""
    random: RandomSettings | None = None
    """Faults that are drawn at random; None if no fault is drawn."""
    spot: SpotSettings | None = None
    """Preemptions that a trace contains; None if there is no trace."""

    def schedule(self, seed: int) -> list[FaultSettings]:
        """Return all faults sorted by time. Raises UserError for a trace that cannot be read."""
        found = list(self.fault)
        if self.random is not None:
            found += draw_faults(choices(seed, "faults"), self.random)
        if self.spot is not None:
            found += read_trace(self.spot)
        return sorted(found, key=lambda fault: fault.at_s)


def draw_faults(random: Random, wanted: RandomSettings) -> list[FaultSettings]:
    """Draw the time, kind, duration and strength of each fault."""
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
    """Read a trace of preemptions. Raises UserError if the file cannot be read, or if a line is invalid; the error
    then names the line."""
    if not spot.trace.is_file():
        raise UserError(f"spot.trace: there is no file {spot.trace}")
    try:
        with spot.trace.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
            columns = reader.fieldnames or ()
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{spot.trace} is not a CSV file in UTF-8: {error}") from error
    if not {"at_s", "worker"} <= set(columns):
        given = ", ".join(columns) or "none"
        raise UserError(f"{spot.trace}: got columns {given}; a trace needs at_s and worker, and may have for_s")
    kind: Kind = "leave" if spot.notice_s else "crash"
    found = []
    for line, row in rows:
        try:
            preempted_s, for_s = float(row["at_s"]), float(row.get("for_s") or 0)
            at_s = max(preempted_s - spot.notice_s, 0.0)  # NaN stays NaN, which FaultSettings refuses
            if for_s > 0:  # `for_s` begins at the preemption
                for_s += preempted_s - at_s
            found.append(FaultSettings(kind=kind, at_s=at_s, worker=row["worker"], for_s=for_s))
        except (TypeError, ValueError) as error:  # a short line has None in its last columns
            raise UserError(f"{spot.trace}, line {line}: at_s and for_s are seconds, got {row}") from error
    return found
