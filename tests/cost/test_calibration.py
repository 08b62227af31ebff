"""Published rates of GPUs: absolute units, ranges, and a user's measurements in their place."""

from __future__ import annotations

import pytest

from baton.cost.calibration import achieved, calibrate
from baton.cost.efficiency import CalibrationSettings, Efficiency
from baton.specs.cluster import GpuSettings, gpu_types


def test_each_published_value_is_a_key_of_the_model_and_lies_in_its_range() -> None:
    for gpu, table in achieved().items():
        assert gpu == "default" or gpu in gpu_types()
        for key, value in table.items():
            assert key in Efficiency.model_fields
            assert value.range[0] <= value.value <= value.range[1], f"{gpu}.{key}"
            assert value.source


def test_a_gpu_with_two_published_peaks_achieves_the_same() -> None:
    published, gpus = calibrate([]).at(), gpu_types()
    for key, peak in (("train", "flops"), ("decode", "hbm_bytes_per_s")):
        reached = [getattr(published.of(name), key) * getattr(gpus[name], peak) for name in ("H800", "H800-paper")]
        assert reached[0] == pytest.approx(reached[1])


def test_the_worst_end_of_every_range_is_slower() -> None:
    calibration = calibrate([])
    worst, best = calibration.at(lambda each: each.worst).of("H20"), calibration.at(lambda each: each.best).of("H20")
    assert worst.train < best.train
    assert worst.step_overhead_s > best.step_overhead_s


def test_measurements_replace_a_type_and_defaults_replace_a_key() -> None:
    own = CalibrationSettings.model_validate({"default": {"train": 0.2}, "efficiency": {"H20": {"decode": 0.6}}})
    found = calibrate([], own).at()
    assert found.of("H800").train == 0.2
    assert found.of("H800").rollout == calibrate([]).at().of("H800").rollout
    assert found.of("H20") == Efficiency(train=0.2, decode=0.6)


def test_a_cpu_has_no_published_rates() -> None:
    assert calibrate([]).at().of("CPU") == Efficiency()


def test_a_gpu_type_that_the_catalogue_lacks_has_the_published_defaults() -> None:
    own = {"Own": GpuSettings(bf16_tflops=100, hbm_gb_per_s=1000, hbm_gb=24, link_gb_per_s=10, price_per_hour=1)}
    expected = {key: value.value for key, value in achieved()["default"].items()}
    assert expected["rollout"] < 1 == Efficiency().rollout
    for found in (calibrate([]).at(), calibrate(gpu_types(own).values()).at()):  # unknown, and named
        assert found.of("Own") == Efficiency(**expected)
    measured = CalibrationSettings.model_validate({"default": {"rollout": 0.8}})
    assert calibrate([], measured).at().of("Own") == Efficiency(**{**expected, "rollout": 0.8})
