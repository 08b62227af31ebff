"""How much of its peak a GPU reaches, by phase: defaults with their sources, or a calibration file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import Field, model_validator

from baton.settings import Settings


class Efficiency(Settings):
    """One GPU type, and its section of a calibration file. Shares are of the catalogue's peak figures."""

    train: float = Field(default=0.4, gt=0, le=1)
    """Share of FLOP/s in training. AReaL (2505.24298) figure 6a: 388 to 455 of an H800's 989 TFLOP/s."""
    backward: float = Field(default=2.0, gt=0)
    """Forward passes that a backward pass is worth; two are its arithmetic."""
    train_beside: float = Field(default=1.0, gt=0)
    """Times as long as its share of the cores explains that a train step takes while engines work on them."""
    engine_beside: float = Field(default=1.0, gt=0)
    """The same of engines while the trainer works."""
    prefill: float = Field(default=0.5, gt=0, le=1)
    """Share of FLOP/s in prefill."""
    prefill_overhead_s: float = Field(default=0.0, ge=0)
    """Fixed time of one prefill, however many sequences it has."""
    decode_compute: float = Field(default=0.5, gt=0, le=1)
    """Share of FLOP/s in decode, where compute binds."""
    decode: float = Field(default=0.7, gt=0, le=1)
    """Share of memory bandwidth in decode, and in the optimiser's update."""
    step_overhead_s: float = Field(default=1e-3, ge=0)
    """Fixed time of one decode step of one pipeline stage, whatever the batch."""
    row_overhead_s: float = Field(default=0.0, ge=0)
    """Time of one decode step for each trajectory in it."""
    trajectory_overhead_s: float = Field(default=0.0, ge=0)
    """Time of an engine for each trajectory, beside prefill and decode: its place filled, its reports, the messages
    about it."""
    handover_s: float = Field(default=0.0, ge=0)
    """From an engine's report until the next trajectory is with it. It has begun a step meanwhile, without it; 0 is an
    engine that has its queue with it."""
    link: float = Field(default=0.7, gt=0, le=1)
    """Share of link bandwidth in collectives."""
    publish: float = Field(default=0.25, gt=0, le=1)
    """Share of link bandwidth in weight publication. AReaL-Hex (2511.00796) table 2: 0.17 across types, 0.25 to 0.5
    within."""
    publish_latency_s: float = Field(default=1.0, ge=0)
    """Fixed time of one publication, whatever its size; the same table: 1.4 to 2.0 s."""
    train_overhead_s: float = Field(default=0.0, ge=0)
    """Fixed time of one train step, whatever its size."""
    memory: float = Field(default=0.9, gt=0, le=1)
    """Share of memory that may be planned."""
    host_gb_per_s: float = Field(default=25.0, gt=0)
    """Between a GPU's memory and its machine's, 10^9 bytes/s: PCIe 4.0 x16, as it is reached."""


class CalibrationSettings(Settings):
    """A calibration file: [efficiency.NAME] for GPU types, [default] for the others. `baton profile` writes one."""

    default: Efficiency = Efficiency()
    """GPU types without a section of their own, and what is left out in those."""
    efficiency: dict[str, Efficiency] = Field(default_factory=dict)
    """By GPU type."""
    notes: dict[str, str | float | int] = Field(default_factory=dict)
    """Where the figures are from; not read."""
    measured: tuple[dict[str, str | float | int], ...] = ()
    """What they were fitted to; not read."""

    def build(self) -> Efficiencies:
        given = {name: own.model_dump(exclude_unset=True) for name, own in self.efficiency.items()}
        return Efficiencies(self.default, {name: self.default.model_copy(update=own) for name, own in given.items()})


class Efficiencies(msgspec.Struct, frozen=True):
    """By GPU type."""

    default: Efficiency = Efficiency()
    by_gpu: Mapping[str, Efficiency] = {}

    def of(self, gpu: str) -> Efficiency:
        return self.by_gpu.get(gpu, self.default)


class RateSettings(Settings):
    """One GPU type of a table of rates."""

    train: float = Field(gt=0)
    """Trained tokens per second and GPU."""
    rollout: float = Field(gt=0)
    """Generated tokens per second and GPU."""


class RatesSettings(Settings):
    """A table of rates: a user's own measurements, [rates.NAME] for each GPU type, in place of the cost model."""

    rates: dict[str, RateSettings]
    """By GPU type."""
    sync_s: float = Field(default=0.0, ge=0)
    """Weight publication, seconds per step, where trainer and rollout are on one GPU type."""
    cross_sync_s: float | None = Field(default=None, ge=0)
    """The same across GPU types; the default is sync_s."""

    @model_validator(mode="after")
    def _has_rates(self) -> RatesSettings:
        if not self.rates:
            raise ValueError("rates: a table of rates needs at least one [rates.NAME]")
        return self
