"""Calibration: efficiencies that made measurements are found again, through the cost model's own functions."""

from __future__ import annotations

import msgspec
import pytest

from baton.cost.fit import Measured, fit, predicted_s, rollout_s, with_rollout
from baton.cost.train import forward_passes
from tests.cost.round_numbers import IDEAL, MODEL, PLACE, WORK


def test_efficiencies_are_recovered_from_what_they_predict() -> None:
    true = msgspec.structs.replace(
        IDEAL, train=0.3, prefill=0.4, decode=0.6, step_overhead_s=1e-4, row_overhead_s=1e-6, train_overhead_s=0.01
    )
    hidden = msgspec.structs.replace(PLACE, efficiency=true)
    asked = [Measured("decode", b, c, 1.0) for b in (1, 16, 64) for c in (50, 400)]
    asked += [Measured("prefill", 4, c, 1.0) for c in (50, 400)]
    asked += [Measured("train", 64, c, 1.0) for c in (20, 100, 400)]
    points = [msgspec.structs.replace(p, seconds=predicted_s(MODEL, WORK, hidden, 2, p)) for p in asked]
    start = msgspec.structs.replace(PLACE, efficiency=msgspec.structs.replace(IDEAL, train=0.5, row_overhead_s=1e-5))
    found, shown = fit(MODEL, WORK, start, 2, points)
    assert (found.train, found.prefill) == (pytest.approx(0.3, rel=0.02), pytest.approx(0.4, rel=0.01))
    assert all(point.predicted_s == pytest.approx(point.seconds, rel=0.03) for point in shown)


def test_what_a_whole_batch_takes_beyond_prefill_and_decode_is_an_overhead_of_its_trajectories() -> None:
    """100 trajectories on 2 engines, 10 ms of each engine's time for each of its 50: half a second more."""
    work = msgspec.structs.replace(WORK, max_staleness=0, max_batch=8)
    bare_s = rollout_s(MODEL, work, PLACE, 2, Measured("rollout", 100, 200, 1.0))
    point = Measured("rollout", 100, 200, bare_s + 0.5)
    found, shown = with_rollout(MODEL, work, PLACE, 2, point)
    assert found.trajectory_overhead_s == pytest.approx(0.01)
    assert shown.predicted_s == pytest.approx(point.seconds)
    faster, _ = with_rollout(MODEL, work, PLACE, 2, msgspec.structs.replace(point, seconds=bare_s / 2))
    assert faster.trajectory_overhead_s == 0, "no engine gains time by a trajectory"


def test_tokens_per_second_of_a_measurement() -> None:
    """64 trajectories: a decode step makes 64 tokens, a prefill or train step reads their 100 each."""
    assert Measured("decode", 64, 100, 0.5).tokens_per_s == 128
    assert Measured("train", 64, 100, 0.5).tokens_per_s == 12800


def test_rows_without_an_advantage_go_forward_only() -> None:
    half = msgspec.structs.replace(WORK, recompute=False, has_proximal_forward=False, trained_share=0.5)
    assert forward_passes(half) == 1 + 0.5 * 2
