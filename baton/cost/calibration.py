"""Efficiencies of GPUs: published values with ranges (`specs/catalogue/achieved.toml`), or a user's measurements."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from baton.cost.efficiency import CalibrationSettings, Efficiencies, Efficiency
from baton.settings import Settings
from baton.specs.cluster import GB, TERA, Gpu, gpu_types

PEAKS = {
    "train": ("flops", TERA, "TFLOP/s"),
    "prefill": ("flops", TERA, "TFLOP/s"),
    "decode_compute": ("flops", TERA, "TFLOP/s"),
    "decode": ("hbm_bytes_per_s", GB, "GB/s"),
}
"""The efficiencies that are shares of the GPU's peak performance. Each has three values: the attribute of `Gpu` that
contains the peak, the factor that converts the unit in `achieved.toml` to the SI unit, and the name of the unit in
`achieved.toml`."""


class AchievedSettings(Settings):
    """An efficiency in `achieved.toml`, the catalogue of published efficiencies."""

    value: float
    """The value that plans use. In the section [default], an efficiency that `PEAKS` lists is a share of the GPU's
    peak. In the section of a GPU type, such an efficiency is a rate in the unit of `PEAKS`, for example TFLOP/s."""
    range: tuple[float, float]
    """Lowest and highest value that the sources allow."""
    origin: Literal["measured", "derived", "assumed"]
    """`derived`: computed from measurements of other models or GPU types."""
    source: str
    """The publication, and the table or figure in it that contains the value."""


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of the cost model, with its range and source. Values are in the units of `Efficiency`."""

    gpu: str
    """GPU type; empty for a parameter of all types."""
    key: str
    value: float
    low: float
    high: float
    origin: str
    source: str
    peak: float = 1.0
    """If the value is a share of the GPU's peak performance: this peak, in the catalogue's unit. Otherwise 1."""
    unit: str = ""

    @property
    def worst(self) -> float:
        """The end of the range that gives longer predicted times."""
        return self.high if self.key.endswith("_s") else self.low

    @property
    def best(self) -> float:
        return self.low if self.key.endswith("_s") else self.high

    @property
    def name(self) -> str:
        return f"{self.key} of {self.gpu or 'GPUs without an own value'}"

    def words(self, value: float) -> str:
        unit = self.unit or ("s" if self.key.endswith("_s") else "")
        return f"{value * self.peak:.3g} {unit}".strip()


class GpuCalibration(msgspec.Struct, frozen=True):
    """Efficiencies of GPU types, with ranges."""

    gpus: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    """First the parameters that apply to all GPU types, then the parameters of single GPU types, which override
    them."""
    own: Efficiencies
    """A user's measurements, without ranges. The measurements of a GPU type replace all parameters of this type."""

    def at(self, pick: Callable[[Parameter], float] = lambda parameter: parameter.value) -> Efficiencies:
        """Return the efficiencies with the value that `pick` selects for each parameter. The catalogue has no values
        for CPUs, so they get `own.default` unless `own` contains efficiencies of CPUs."""

        def of(gpu: str) -> Efficiency:
            values = {each.key: pick(each) for each in self.parameters if each.gpu in ("", gpu)}
            return self.own.default.model_copy(update=values)

        found = {"CPU": self.own.default, **{gpu: of(gpu) for gpu in self.gpus}}
        return Efficiencies(of(""), {**found, **self.own.by_gpu})


@cache
def achieved() -> dict[str, dict[str, AchievedSettings]]:
    """Return the content of `achieved.toml`: GPU type or `default` → name of an efficiency → value."""
    text = (files("baton.specs") / "catalogue" / "achieved.toml").read_text(encoding="utf-8")
    return {
        gpu: {key: AchievedSettings.model_validate(value) for key, value in table.items()}
        for gpu, table in tomllib.loads(text).items()
    }


def calibrate(extra: Iterable[Gpu], own: CalibrationSettings | None = None) -> GpuCalibration:
    """Return the calibration of the catalogue's GPU types and of `extra`, the GPUs of a cluster or of rental offers. A
    GPU of `extra` replaces the catalogue's GPU of the same name, because its peaks may differ.

    For GPU types that `own` names, no published values are used. For other GPU types, the keys in the section [default]
    of `own` replace the published values.
    """
    known = {**gpu_types(), **{gpu.name: gpu for gpu in extra}}
    given = own.build() if own is not None else Efficiencies()
    replaced = own.default.model_fields_set if own is not None else set()
    parameters = [_parameter("", None, key, value) for key, value in achieved()["default"].items()]
    for name, gpu in known.items():
        section = achieved().get(name.removesuffix("-paper"), {})
        parameters += [_parameter(name, gpu, key, value) for key, value in section.items()]
    gpus = tuple(name for name in known if name != "CPU" and name not in given.by_gpu)
    left = tuple(each for each in parameters if each.key not in replaced and each.gpu in ("", *gpus))
    return GpuCalibration(gpus, left, given)


def _parameter(name: str, gpu: Gpu | None, key: str, of: AchievedSettings) -> Parameter:
    peak, unit = 1.0, ""
    if gpu is not None and key in PEAKS:
        field, scale, unit = PEAKS[key]
        peak = getattr(gpu, field) / scale
    low, high = of.range
    return Parameter(name, key, of.value / peak, low / peak, high / peak, of.origin, of.source, peak, unit)
