"""How sure a plan is: a range that contains it, the parameter that decides who trains, and the robust plan."""

from __future__ import annotations

import math
from itertools import chain, repeat

import msgspec
import pytest

from baton.cost.calibration import GpuCalibration, Parameter
from baton.cost.efficiency import Efficiencies
from baton.planner.certainty import certainty, step_s, trains
from baton.planner.problem import Inputs
from tests.planner.planner_cases import cluster, inputs, make_plan

OWN = Efficiencies()


def asked(calibration: GpuCalibration) -> Inputs:
    of = inputs(cluster(("Fast", 2), ("Slow", 4)))
    return msgspec.structs.replace(of, efficiencies=calibration.at(), cross_types=False)


def parameter(gpu: str, key: str, value: float, low: float, high: float) -> Parameter:
    return Parameter(gpu, key, value, low, high, "assumed", "")


def test_a_plan_is_timed_as_the_planner_times_it() -> None:
    of = inputs(cluster(("Fast", 2), ("Slow", 4)))
    plan = make_plan(of)
    assert step_s(of, plan, of.efficiencies) == pytest.approx(plan.breakdown.step_s)


def test_half_of_every_speed_is_half_of_the_throughput() -> None:
    ranges = [("train", 0.4, 0.2, 0.4), ("decode", 0.7, 0.35, 0.7), ("decode_compute", 0.5, 0.25, 0.5)]
    ranges += [("prefill", 0.5, 0.25, 0.5), ("link", 0.7, 0.35, 0.7), ("publish", 0.25, 0.125, 0.25)]
    ranges += [("step_overhead_s", 1e-3, 1e-3, 2e-3), ("publish_latency_s", 1.0, 1.0, 2.0)]
    calibration = GpuCalibration(("Fast", "Slow"), tuple(parameter("", *each) for each in ranges), OWN)
    of = msgspec.structs.replace(asked(calibration), cluster=cluster(("Fast", 3)))  # whose messages have no latency
    plan = make_plan(of)
    found = certainty(of, plan, calibration, is_robust=False, time_limit_s=0)
    worst, value, best = found.tokens_per_s
    assert value == best == pytest.approx(plan.tokens_per_s)
    assert worst == pytest.approx(plan.tokens_per_s / 2)


def test_the_parameter_that_decides_who_trains_is_named_with_its_value() -> None:
    ranges = (parameter("Fast", "step_overhead_s", 1e-3, 1e-3, 0.1), parameter("Fast", "decode", 0.7, 0.69, 0.71))
    calibration = GpuCalibration(("Fast", "Slow"), ranges, OWN)
    of = asked(calibration)
    plan = make_plan(of)
    assert trains(plan) == ("Slow",)  # Fast generates, unless its decode steps are slow
    found = certainty(of, plan, calibration, is_robust=False, time_limit_s=math.inf)
    assert found.tried == found.num_parameters == 2
    assert found.change is not None
    assert found.change.parameter == "step_overhead_s of Fast"
    assert found.change.trains == ("Fast",)
    for factor, expected in ((1.01, ("Fast",)), (0.5, ("Slow",))):  # the value is bisected to 1/32 of the logarithm
        value = float(found.change.at.split()[0]) * factor
        moved = calibration.at(lambda each, to=value: to if each.key == "step_overhead_s" else each.value)  # type: ignore[misc]
        assert trains(make_plan(msgspec.structs.replace(of, efficiencies=moved))) == expected


def test_a_search_that_reaches_its_time_limit_names_the_end_of_the_range() -> None:
    ranges = (parameter("Fast", "step_overhead_s", 1e-3, 1e-3, 0.1), parameter("Fast", "decode", 0.7, 0.69, 0.71))
    calibration = GpuCalibration(("Fast", "Slow"), ranges, OWN)
    of = asked(calibration)
    plan = make_plan(of)
    for early, tried in ((1, 0), (2, 1)):  # the clock is read at the start, before each parameter and before halving
        clock = chain(repeat(0.0, early), repeat(5.0)).__next__
        found = certainty(of, plan, calibration, is_robust=False, time_limit_s=5.0, clock=clock)
        assert (found.tried, found.num_parameters) == (tried, 2)
        assert (found.change.at if found.change else None) == (None, "0.1 s")[tried]


def test_a_plan_that_is_not_the_best_has_no_parameter_that_decides_who_trains() -> None:
    calibration = GpuCalibration(("Fast", "Slow"), (parameter("Fast", "decode", 0.7, 0.69, 0.71),), OWN)
    of = asked(calibration)
    slow = Efficiencies(OWN.default, {"Fast": OWN.default.model_copy(update={"step_overhead_s": 0.1})})
    kept = make_plan(msgspec.structs.replace(of, efficiencies=slow))
    assert trains(kept) != trains(make_plan(of))  # as a replanned plan, which keeps the trainer on its GPUs
    assert certainty(of, kept, calibration, is_robust=False, time_limit_s=math.inf).change is None


def test_no_other_plan_has_a_better_worst_case_than_the_robust_one() -> None:
    ranges = (parameter("Fast", "step_overhead_s", 1e-3, 5e-4, 0.1), parameter("Slow", "train", 0.4, 0.3, 0.5))
    calibration = GpuCalibration(("Fast", "Slow"), ranges, OWN)
    of = asked(calibration)
    worst = calibration.at(lambda each: each.worst)
    hard = msgspec.structs.replace(of, efficiencies=worst)
    robust, usual = make_plan(hard), make_plan(of)
    assert robust.breakdown.step_s == pytest.approx(step_s(hard, robust, worst))
    assert robust.breakdown.step_s < step_s(of, usual, worst)
    found = certainty(hard, robust, calibration, is_robust=True, time_limit_s=0)
    assert found.tokens_per_s[0] == pytest.approx(robust.tokens_per_s)
    assert found.tokens_per_s[0] < found.tokens_per_s[1] < found.tokens_per_s[2]
