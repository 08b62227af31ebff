"""How much of its peak a GPU reaches, by phase: defaults with their sources, or a calibration file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import Field, model_validator

from baton.settings import Settings


class Efficiency(msgspec.Struct, frozen=True):
    """Of one GPU type. Shares are of the catalogue's peak figures."""

    train: float = 0.4
    """Of FLOP/s in training. AReaL (2505.24298) figure 6a: 388 to 455 of an H800's 989 TFLOP/s."""
    backward: float = 2.0
    """Forward passes that a backward pass is worth; two are its arithmetic."""
    train_beside: float = 1.0
    """Times as long as its share of the cores explains that a train step takes while engines work on them."""
    engine_beside: float = 1.0
    """The same of engines while the trainer works."""
    prefill: float = 0.5
    """Of FLOP/s in prefill."""
    prefill_overhead_s: float = 0.0
    """Of one prefill, however many sequences it has."""
    decode_compute: float = 0.5
    """Of FLOP/s in decode, where compute binds."""
    decode: float = 0.7
    """Of memory bandwidth in decode, and in the optimiser's update."""
    step_overhead_s: float = 1e-3
    """Of one decode step of one pipeline stage, whatever the batch."""
    row_overhead_s: float = 0.0
    """Of one decode step, for each trajectory in it."""
    trajectory_overhead_s: float = 0.0
    """Of an engine's time, for each trajectory: its place filled, its reports, the messages about it."""
    handover_s: float = 0.0
    """From an engine's report until the next trajectory is with it. It has begun a step meanwhile, without it; 0 is an
    engine that has its queue with it."""
    link: float = 0.7
    """Of link bandwidth in collectives."""
    publish: float = 0.25
    """Of link bandwidth in weight publication. AReaL-Hex (2511.00796) table 2: 0.17 across types, 0.25 to 0.5
    within."""
    publish_latency_s: float = 1.0
    """Of one publication, whatever its size; the same table: 1.4 to 2.0 s."""
    train_overhead_s: float = 0.0
    """Of one train step, whatever its size."""
    memory: float = 0.9
    """Share of memory that may be planned."""
    host_gb_per_s: float = 25.0
    """Between a GPU's memory and its machine's, 10^9 bytes/s: PCIe 4.0 x16, as it is reached."""


DEFAULT = Efficiency()


class EfficiencySettings(Settings):
    """One GPU type of a calibration file; what is left out keeps its default."""

    train: float | None = Field(default=None, gt=0, le=1)
    """Share of peak FLOP/s in training."""
    backward: float | None = Field(default=None, gt=0)
    """Forward passes that a backward pass is worth."""
    train_beside: float | None = Field(default=None, gt=0)
    """Factor on a train step while engines work on the same cores."""
    engine_beside: float | None = Field(default=None, gt=0)
    """Factor on engines while the trainer works on the same cores."""
    prefill: float | None = Field(default=None, gt=0, le=1)
    """Share of peak FLOP/s in prefill."""
    prefill_overhead_s: float | None = Field(default=None, ge=0)
    """Fixed time of a prefill."""
    decode_compute: float | None = Field(default=None, gt=0, le=1)
    """Share of peak FLOP/s in decode."""
    decode: float | None = Field(default=None, gt=0, le=1)
    """Share of memory bandwidth in decode."""
    step_overhead_s: float | None = Field(default=None, ge=0)
    """Fixed time of a decode step."""
    row_overhead_s: float | None = Field(default=None, ge=0)
    """Time of a decode step for each trajectory in it."""
    trajectory_overhead_s: float | None = Field(default=None, ge=0)
    """Time of an engine for each trajectory, beside prefill and decode."""
    handover_s: float | None = Field(default=None, ge=0)
    """From an engine's report until the next trajectory is with it."""
    link: float | None = Field(default=None, gt=0, le=1)
    """Share of link bandwidth in collectives."""
    publish: float | None = Field(default=None, gt=0, le=1)
    """Share of link bandwidth in weight publication."""
    publish_latency_s: float | None = Field(default=None, ge=0)
    """Fixed time of a publication."""
    train_overhead_s: float | None = Field(default=None, ge=0)
    """Fixed time of a train step."""
    memory: float | None = Field(default=None, gt=0, le=1)
    """Share of memory that may be planned."""
    host_gb_per_s: float | None = Field(default=None, gt=0)
    """Between a GPU's memory and its machine's, 10^9 bytes/s."""


class CalibrationSettings(Settings):
    """A calibration file: [efficiency.NAME] for GPU types, [default] for the others. `baton profile` writes one."""

    default: EfficiencySettings = EfficiencySettings()
    """GPU types without a section of their own."""
    efficiency: dict[str, EfficiencySettings] = Field(default_factory=dict)
    """By GPU type."""
    notes: dict[str, str | float | int] = Field(default_factory=dict)
    """Where the figures are from; not read."""
    measured: tuple[dict[str, str | float | int], ...] = ()
    """What they were fitted to; not read."""

    def build(self) -> Efficiencies:
        """Return the efficiencies of all GPU types."""
        base = _changed(DEFAULT, self.default)
        return Efficiencies(base, {name: _changed(base, changes) for name, changes in self.efficiency.items()})


class Efficiencies(msgspec.Struct, frozen=True):
    """By GPU type."""

    default: Efficiency = DEFAULT
    by_gpu: Mapping[str, Efficiency] = {}

    def of(self, gpu: str) -> Efficiency:
        """Return those of a GPU type."""
        return self.by_gpu.get(gpu, self.default)


def _changed(base: Efficiency, changes: EfficiencySettings) -> Efficiency:
    return msgspec.structs.replace(base, **changes.model_dump(exclude_none=True))


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
