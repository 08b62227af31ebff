"""What was predicted is compared with what the run recorded; what is unknown stays unknown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.errors import Damaged
from baton.records.predictions import (
    FILE,
    MEMORY,
    Comparison,
    Prediction,
    Predictions,
    RunPredictions,
    compare,
    ratios,
    read_predictions,
)

ROW = {
    "perf/step_time": 10.0,
    "time/generate": 5.0,
    "time/train": 4.0,
    "time/weight_sync": 1.0,
    "staleness/mean": 0.5,
    "perf/trainer_peak_bytes": 1e9,
    "perf/slot_occupancy": 0.8,
    "response_length/mean": 40.0,
}


def rows(*steps: dict[str, float]) -> list[dict[str, float]]:
    return [{"step": number, **ROW, **values} for number, values in enumerate(steps, 1)]


def told(after_step: int = 0, **values: float) -> Predictions:
    terms = tuple(Prediction(name.replace("_", " "), value) for name, value in values.items())
    return Predictions("plan.json", terms, after_step)


def term(name: str, predictions: Predictions, measured: list[dict[str, float]]) -> Comparison:
    return next(each for each in compare(predictions, measured) if each.term == name)


def test_a_term_is_off_if_it_differs_by_more_than_15_percent() -> None:
    near, far = (term("step", told(step=value), rows({}, {})) for value in (9.0, 8.0))
    assert (near.predicted, near.measured, near.is_off) == (9.0, 10.0, False)
    assert near.error == pytest.approx(1 / 9)
    assert far.is_off
    assert far.error == pytest.approx(0.25)


def test_idle_shares_are_compared_in_points() -> None:
    found = term("trainer idle", told(trainer_idle=0.5), rows({}, {}))
    assert found.measured == pytest.approx(0.6)  # 1 − 4 / 10
    assert found.error == pytest.approx(0.1)
    assert not found.is_off
    slots = term("engine slots idle", told(engine_slots_idle=0.4), rows({}, {"time/generate_hidden": 2.0}))
    assert slots.measured == pytest.approx(0.44)  # 1 − 0.8 · (5 + 2) / 10, after the first step


def test_idle_shares_are_shares_of_the_time_of_all_steps() -> None:
    """In mode `partial`, long and short steps alternate. The first of the three steps is not counted."""
    measured = rows({}, {"perf/step_time": 30.0}, {"perf/step_time": 5.0})
    assert term("trainer idle", told(), measured).measured == pytest.approx(1 - (4 + 4) / (30 + 5))
    busy_s = 2 * 0.8 * 5  # occupancy · generation
    assert term("engine slots idle", told(), measured).measured == pytest.approx(1 - busy_s / (30 + 5))


def test_in_a_step_without_generation_all_slots_are_idle() -> None:
    """Such a step has no slot occupancy. The first of the three steps is not counted."""
    row = {key: value for key, value in ROW.items() if key != "perf/slot_occupancy"}
    idle = {"step": 3, **row, "time/generate": 0.0}
    found = term("engine slots idle", told(engine_slots_idle=0.5), [*rows({}, {}), idle])
    assert found.measured == pytest.approx((0.6 + 1.0) / 2)  # 1 − 0.8 · 5 / 10, and 1


def test_the_first_fifth_of_the_steps_is_left_out_and_memory_is_the_peak() -> None:
    measured = rows(
        *({"perf/step_time": 99.0, "perf/trainer_peak_bytes": 1e9} for _ in range(2)), *({} for _ in range(8))
    )
    measured[5]["perf/trainer_peak_bytes"] = 3e9
    assert term("step", told(), measured).measured == 10.0
    assert term("trainer memory", told(), measured).measured == 3e9


def test_memory_is_predicted_for_the_largest_microbatch_of_the_run() -> None:
    memory = Prediction(MEMORY, 9e9, ((1, 1e9), (1024, 2e9), (4096, 5e9), (8192, 9e9)))
    predictions = Predictions("plan.json", (memory,))
    measured = rows(*({"perf/trainer_peak_bytes": 3.6e9, "perf/trainer_peak_tokens": n} for n in (900, 2048, 2560)))
    found = term(MEMORY, predictions, measured)
    assert found.predicted == pytest.approx(3.5e9)  # half of the way from 1,024 to 4,096 tokens
    assert not found.is_off
    assert found.assumption == (
        "trainer memory is predicted for the largest microbatch of the run, 2,560 tokens; it is 8.38 GiB for 8,192 "
        "tokens, the most that the recipe allows"
    )
    assert ratios(predictions, measured[2])["measured_over_predicted/trainer_memory"] == pytest.approx(3.6 / 3.5)
    padded = term(MEMORY, predictions, rows({}, {"perf/trainer_peak_tokens": 9000}))
    assert padded.predicted == 9e9
    assert padded.assumption.endswith("with padding, the run's largest microbatch has 9,000")
    earlier = term(MEMORY, predictions, rows({}, {}))
    assert (earlier.predicted, earlier.is_off) == (9e9, True), "the recipe's most, without the metric"
    assert earlier.assumption == (
        "trainer memory is predicted for a microbatch of 8,192 tokens, the most that the recipe allows"
    )
    assert predictions.memory == memory.by_tokens
    assert msgspec.json.decode(msgspec.json.encode(predictions), type=Predictions) == predictions


def test_what_is_not_predicted_or_not_measured_has_no_error() -> None:
    unknown = term("training", told(step=1.0), rows({}))
    assert (unknown.predicted, unknown.measured, unknown.error, unknown.is_off) == (None, 4.0, None, False)
    row = {key: value for key, value in rows({})[0].items() if key != "perf/trainer_peak_bytes"}
    missing = term("trainer memory", told(trainer_memory=1e9), [row])
    assert (missing.measured, missing.error) == (None, None)
    assert all(each.measured is None for each in compare(told(step=1.0), [{"step": 1, "eval/all/greedy": 0.5}]))


def test_a_prediction_of_0_is_compared_by_difference() -> None:
    exact = term("staleness", told(staleness=0.0), rows({"staleness/mean": 0.0}))
    late = term("staleness", told(staleness=0.0), rows({"staleness/mean": 0.5}))
    assert (exact.error, exact.is_off) == (0.0, False)
    assert (late.error, late.is_off) == (0.5, True)


def test_a_swarm_transfers_in_the_background() -> None:
    assert term("transfer", told(), rows({"swarm/broadcast_s": 3.0})).measured == 3.0
    assert term("transfer", told(), rows({})).measured == 1.0


def test_only_steps_after_the_predictions_count() -> None:
    measured = rows({"time/train": 1.0}, {"time/train": 1.0}, {"time/train": 8.0})
    assert term("training", told(after_step=2), measured).measured == 8.0
    assert term("training", told(after_step=3), measured).measured is None


def test_each_row_has_the_ratios_of_what_it_measures() -> None:
    found = ratios(told(step=5.0, trainer_idle=0.3, staleness=0.0), rows({})[0])
    assert found == {
        "measured_over_predicted/step": 2.0,
        "measured_over_predicted/trainer_idle": pytest.approx(2.0),
    }


def test_predictions_are_written_once(tmp_path: Path) -> None:
    assert read_predictions(tmp_path) is None
    run = RunPredictions(tmp_path, None)
    run.replace(told(step=1.0), 0)
    run.replace(told(step=1.0), 7)
    assert read_predictions(tmp_path) == told(step=1.0), "a resumed run with the same predictions keeps them"
    run.replace(told(step=2.0), 7)
    assert run.current == read_predictions(tmp_path) == told(after_step=7, step=2.0)
    for damaged in (b"{", (tmp_path / FILE).read_bytes().replace(b"plan.json", b"plan\xff")):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(Damaged, match=r"predictions.json cannot be read"):
            read_predictions(tmp_path)
