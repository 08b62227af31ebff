"""Calibration: efficiencies that made measurements are found again, through the cost model's own functions."""

from __future__ import annotations

import msgspec
import pytest

from baton.cost.efficiency import CalibrationSettings
from baton.cost.fit import (
    Measurement,
    fit,
    predicted_s,
    rollout_s,
    with_rollout,
)
from baton.cost.train import forward_passes
from tests.cost.round_numbers import IDEAL, MODEL, PLACE, WORK


def test_efficiencies_are_recovered_from_what_they_predict() -> None:
    shares = {"train": 0.3, "prefill": 0.4, "decode": 0.6}
    times = {"step_overhead_s": 1e-4, "row_overhead_s": 1e-6, "train_overhead_s": 0.01}
    true = IDEAL.model_copy(update=shares | times)
    hidden = msgspec.structs.replace(PLACE, efficiency=true)
    asked = [Measurement("decode", b, c, 1.0) for b in (1, 16, 64) for c in (50, 400)]
    asked += [Measurement("prefill", 4, c, 1.0) for c in (50, 400)]
    asked += [Measurement("train", 64, c, 1.0) for c in (20, 100, 400)]
    points = [msgspec.structs.replace(p, seconds=predicted_s(MODEL, WORK, hidden, 2, p)) for p in asked]
    start = msgspec.structs.replace(PLACE, efficiency=IDEAL.model_copy(update={"train": 0.5, "row_overhead_s": 1e-5}))
    found, shown = fit(MODEL, WORK, start, 2, points)
    assert (found.train, found.prefill) == (pytest.approx(0.3, rel=0.02), pytest.approx(0.4, rel=0.01))
    assert all(point.predicted_s == pytest.approx(point.seconds, rel=0.03) for point in shown)


def test_a_core_with_matrix_instructions_is_faster_than_the_peak_of_the_catalogue() -> None:
    """On an H100, such a share is at most 1, and in a calibration file it is refused."""
    true = IDEAL.model_copy(update={"train": 4.0, "prefill": 3.0, "prefill_overhead_s": 0.001})
    asked = [Measurement("train", 64, c, 1.0) for c in (20, 100, 400)]
    asked += [Measurement("prefill", b, c, 1.0) for b in (1, 16) for c in (50, 400)]
    for name, train, prefill in (("CPU", 4.0, 3.0), ("H100", 1.0, 1.0)):
        place = msgspec.structs.replace(PLACE, gpu=msgspec.structs.replace(PLACE.gpu, name=name))
        hidden = msgspec.structs.replace(place, efficiency=true)
        points = [msgspec.structs.replace(p, seconds=predicted_s(MODEL, WORK, hidden, 2, p)) for p in asked]
        found, _ = fit(MODEL, WORK, place, 2, points)
        assert (found.train, found.prefill) == (pytest.approx(train, rel=0.05), pytest.approx(prefill, rel=0.05))
    assert CalibrationSettings(efficiency={"CPU": true}).build().of("CPU").train == 4.0
    with pytest.raises(ValueError, match=r"H100\.train: got 4, but a share of the peak is at most 1"):
        CalibrationSettings(efficiency={"H100": true})


def test_half_taught_batches_tell_a_backward_pass_from_a_forward_one() -> None:
    """A backward pass takes as long as 3 forward ones. Without half-taught batches it counts as the 2 it is given; also
    if untaught rows have a backward pass, so that such batches take no less time."""
    work = msgspec.structs.replace(WORK, has_proximal_forward=False, recompute=False)
    true = IDEAL.model_copy(update={"train": 0.3, "backward": 3.0, "train_overhead_s": 0.01})
    hidden = msgspec.structs.replace(PLACE, efficiency=true)
    asked = [Measurement("train", 64, c, 1.0, trained_share=share) for c in (100, 400, 900) for share in (1.0, 0.5)]
    points = [msgspec.structs.replace(p, seconds=predicted_s(MODEL, work, hidden, 2, p)) for p in asked]
    start = msgspec.structs.replace(PLACE, efficiency=IDEAL.model_copy(update={"train": 0.5}))
    found, _ = fit(MODEL, work, start, 2, points)
    assert (found.backward, found.train) == (pytest.approx(3.0, rel=0.05), pytest.approx(0.3, rel=0.05))
    assert fit(MODEL, work, start, 2, points[::2])[0].backward == 2.0
    work = msgspec.structs.replace(work, backwards_all=True)
    points = [msgspec.structs.replace(p, seconds=predicted_s(MODEL, work, hidden, 2, p)) for p in asked]
    found, shown = fit(MODEL, work, start, 2, points)
    assert found.backward == 2.0
    assert all(point.predicted_s == pytest.approx(point.seconds) for point in shown)


def test_one_sequence_alone_tells_the_fixed_time_of_a_prefill() -> None:
    true = IDEAL.model_copy(update={"prefill": 0.4, "prefill_overhead_s": 0.003})
    hidden = msgspec.structs.replace(PLACE, efficiency=true)
    asked = [Measurement("prefill", b, c, 1.0) for b in (1, 16, 64) for c in (50, 400)]
    points = [msgspec.structs.replace(p, seconds=predicted_s(MODEL, WORK, hidden, 2, p)) for p in asked]
    found, _ = fit(MODEL, WORK, PLACE, 2, points)
    assert (found.prefill, found.prefill_overhead_s) == (pytest.approx(0.4, rel=0.02), pytest.approx(0.003, rel=0.02))


def test_what_a_whole_batch_takes_beyond_prefill_and_decode_is_an_overhead_of_its_trajectories() -> None:
    """100 trajectories on 2 engines, 10 ms of each engine's time for each of its 50: half a second more."""
    work = msgspec.structs.replace(WORK, max_staleness=0, max_batch=8)
    bare_s = rollout_s(MODEL, work, PLACE, 2, Measurement("rollout", 100, 200, 1.0))
    point = Measurement("rollout", 100, 200, bare_s + 0.5)
    found, shown = with_rollout(MODEL, work, PLACE, 2, point)
    assert found.trajectory_overhead_s == pytest.approx(0.01)
    assert shown.predicted_s == pytest.approx(point.seconds)
    faster, _ = with_rollout(MODEL, work, PLACE, 2, msgspec.structs.replace(point, seconds=bare_s / 2))
    assert faster.trajectory_overhead_s == 0, "no engine gains time by a trajectory"


def test_tokens_per_second_of_a_measurement() -> None:
    """64 trajectories: a decode step makes 64 tokens, a prefill or train step reads their 100 each."""
    assert Measurement("decode", 64, 100, 0.5).tokens_per_s == 128
    assert Measurement("train", 64, 100, 0.5).tokens_per_s == 12800


def test_rows_without_an_advantage_go_forward_only() -> None:
    half = msgspec.structs.replace(WORK, recompute=False, has_proximal_forward=False, trained_share=0.5)
    assert forward_passes(half) == 1 + 0.5 * 2
    assert forward_passes(half, 3.0) == 1 + 0.5 * 3
    skipped = msgspec.structs.replace(half, has_proximal_forward=True, forwards_all=False)
    assert forward_passes(skipped) == 0.5 * (1 + 2) + 0.5 * 1
    with_kl = msgspec.structs.replace(half, backwards_all=True, has_reference=True)
    assert forward_passes(with_kl) == 1 + 2 + 1
