"""Published rates of GPUs: absolute units, ranges, and a user's measurements in their place."""

from __future__ import annotations

import pytest

from baton.cost.calibration import achieved, calibrate
from baton.cost.efficiency import CalibrationSettings, Efficiency
from baton.specs.cluster import gpu_types


def test_each_published_value_is_a_key_of_the_model_and_lies_in_its_range() -> None:
    for gpu, table in achieved().items():
        assert gpu == "default" or gpu in gpu_types()
        for key, value in table.items():
            assert key in Efficiency.model_fields
            assert value.range[0] <= value.value <= value.range[1], f"{gpu}.{key}"
            assert value.source


def test_a_gpu_with_two_published_peaks_achieves_the_same() -> None:
    published, gpus = calibrate().at(), gpu_types()
    for key, peak in (("train", "flops"), ("decode", "hbm_bytes_per_s")):
        reached = [getattr(published.of(name), key) * getattr(gpus[name], peak) for name in ("H800", "H800-paper")]
        assert reached[0] == pytest.approx(reached[1])


def test_the_worst_end_of_every_range_is_slower() -> None:
    calibration = calibrate()
    worst, best = calibration.at(lambda each: each.worst).of("H20"), calibration.at(lambda each: each.best).of("H20")
    assert worst.train < best.train
    assert worst.step_overhead_s > best.step_overhead_s


def test_measurements_replace_a_type_and_defaults_replace_a_key() -> None:
    own = CalibrationSettings.model_validate({"default": {"train": 0.2}, "efficiency": {"H20": {"decode": 0.6}}})
    found = calibrate(own=own).at()
    assert found.of("H800").train == 0.2
    assert found.of("H800").rollout == calibrate().at().of("H800").rollout
    assert found.of("H20") == Efficiency(train=0.2, decode=0.6)


def test_a_cpu_has_no_published_rates() -> None:
    assert calibrate().at().of("CPU") == Efficiency()
