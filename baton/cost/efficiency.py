"""Efficiencies: the share of its peak performance that a GPU reaches in each phase, and fixed times. A calibration file
replaces the defaults of this module."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import Field, model_validator

from baton.cost.memory import RUNTIME_BYTES
from baton.settings import Settings


def most_share(gpu: str) -> float:
    """Return the largest share of the catalogue's peak that a GPU type can reach. For CPU cores, this share exceeds 1,
    because the catalogue states their peak without matrix instructions."""
    return 100.0 if gpu == "CPU" else 1.0


class Efficiency(Settings):
    """The efficiency of one GPU type: a section of a calibration file. Shares are relative to the peaks of the
    catalogue."""

    train: float = Field(default=0.4, gt=0)
    """Achieved share of peak FLOP/s in training. AReaL (2505.24298) figure 6a: 388 to 455 of an H800's 989 TFLOP/s."""
    backward: float = Field(default=2.0, gt=0)
    """Time of a backward pass divided by the time of a forward pass. The default 2 is the ratio of their FLOPs."""
    train_beside: float = Field(default=1.0, gt=0)
    """Slowdown of a train step by engines that run on other cores of the same machine: the ratio of its time with
    engines to its time without engines. In both cases, the trainer has the same number of cores."""
    engine_beside: float = Field(default=1.0, gt=0)
    """Slowdown of engines by a trainer that runs on other cores of the same machine: the ratio of their time with the
    trainer to their time without the trainer. In both cases, the engines have the same number of cores."""
    prefill: float = Field(default=0.5, gt=0)
    """Achieved share of peak FLOP/s in prefill."""
    prefill_overhead_s: float = Field(default=0.0, ge=0)
    """Fixed time of one prefill, independent of the number of sequences."""
    decode_compute: float = Field(default=0.5, gt=0)
    """Achieved share of peak FLOP/s when decode is compute-bound."""
    decode: float = Field(default=0.7, gt=0)
    """Achieved share of peak memory bandwidth in decode and in the optimiser update."""
    step_overhead_s: float = Field(default=1e-3, ge=0)
    """Fixed time of a decode step of one pipeline stage, independent of the batch."""
    row_overhead_s: float = Field(default=0.0, ge=0)
    """Additional time of a decode step per running trajectory."""
    trajectory_overhead_s: float = Field(default=0.0, ge=0)
    """Engine time per trajectory in addition to prefill and decode: slot allocation, reports and messages."""
    handover_s: float = Field(default=0.0, ge=0)
    """Time from the report of a finished trajectory until the engine receives the next trajectory for the empty slot. 0
    for an engine that has a queue of further trajectories."""
    rollout: float = Field(default=1.0, gt=0, le=1)
    """Ratio of an engine's mean speed over a whole rollout to its speed while all slots are in use. Interruptions,
    unequal load and waiting make this value less than 1."""
    link: float = Field(default=0.7, gt=0, le=1)
    """Achieved share of link bandwidth in collectives."""
    publish: float = Field(default=0.25, gt=0, le=1)
    """Achieved share of link bandwidth in weight publication. AReaL-Hex (2511.00796), table 2, reports 0.17 if trainer
    and engines have different GPU types, and 0.25 to 0.5 if they have the same type."""
    publish_latency_s: float = Field(default=1.0, ge=0)
    """Fixed time of one publication, independent of the size of the weights. AReaL-Hex table 2: 1.4 to 2.0 s."""
    train_overhead_s: float = Field(default=0.0, ge=0)
    """Fixed time of one train step, independent of the batch."""
    cycle_overhead_s: float = Field(default=0.0, ge=0)
    """Time that a train step takes in addition to generation, scoring, training and publication, for example for the
    journal and metrics."""
    runtime_gb: float = Field(default=RUNTIME_BYTES / 1e9, gt=0)
    """Memory, in 10^9 bytes, of a trainer process on a CPU, excluding its tensors. Predictions of a run use this value;
    plans do not."""
    reward_model_s: float = Field(default=0.0, ge=0)
    """For each process of the reward model: ratio of the seconds that it works on a batch to the number of trajectories
    in the batch. 0 if no reward model was measured. Predictions of a run use this value; plans do not."""
    memory: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU memory that a plan may use."""
    host_gb_per_s: float = Field(default=25.0, gt=0)
    """Achieved bandwidth between GPU and host memory, 10^9 bytes/s. The default is for PCIe 4.0 x16."""

    @property
    def between_steps_s(self) -> float:
        """Fixed time from the end of a train step until engines generate with the new version."""
        return self.cycle_overhead_s + self.publish_latency_s


class CalibrationSettings(Settings):
    """A calibration file: [efficiency.NAME] for single GPU types, [default] for all others. `baton profile` writes
    such a file."""

    default: Efficiency = Efficiency()
    """Efficiency of GPU types without a section. Sections that omit a key also get its value from this entry."""
    efficiency: dict[str, Efficiency] = Field(default_factory=dict)
    """Efficiency by GPU type."""
    notes: dict[str, str | float | int] = Field(default_factory=dict)
    """Origin of the figures. Baton does not read these notes."""
    measured: tuple[dict[str, str | float | int], ...] = ()
    """Measurements that the figures were fitted to. Baton does not read these measurements."""

    @model_validator(mode="after")
    def _has_possible_shares(self) -> CalibrationSettings:
        for gpu, own in {"default": self.default, **self.efficiency}.items():
            for key in ("train", "prefill", "decode_compute", "decode"):
                if (share := getattr(own, key)) > (most := most_share(gpu)):
                    raise ValueError(f"{gpu}.{key}: got {share:g}, but a share of the peak is at most {most:g}")
        return self

    def build(self) -> Efficiencies:
        given = {name: own.model_dump(exclude_unset=True) for name, own in self.efficiency.items()}
        return Efficiencies(self.default, {name: self.default.model_copy(update=own) for name, own in given.items()})


class Efficiencies(msgspec.Struct, frozen=True):
    """Efficiency by GPU type."""

    default: Efficiency = Efficiency()
    by_gpu: Mapping[str, Efficiency] = {}

    def of(self, gpu: str) -> Efficiency:
        return self.by_gpu.get(gpu, self.default)


class RateSettings(Settings):
    """[rates.NAME] measured rates of one GPU type."""

    train: float = Field(gt=0)
    """Trained tokens per second and GPU."""
    rollout: float = Field(gt=0)
    """Generated tokens per second and GPU."""


class RatesSettings(Settings):
    """A table of rates: a user's measurements for each GPU type, which replace the cost model."""

    rates: dict[str, RateSettings]
    """Rates by GPU type."""
    sync_s: float = Field(default=0.0, ge=0)
    """Seconds of weight publication per step if trainer and engines have the same GPU type."""
    cross_sync_s: float | None = Field(default=None, ge=0)
    """Seconds of weight publication per step if trainer and engines have different GPU types; the default is sync_s."""

    @model_validator(mode="after")
    def _has_rates(self) -> RatesSettings:
        if not self.rates:
            raise ValueError("rates: a table of rates needs at least one [rates.NAME]")
        return self
