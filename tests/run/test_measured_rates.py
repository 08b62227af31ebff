"""A replan uses the rates that the run of the old plan measured."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from baton.cost.efficiency import Efficiencies, Efficiency
from baton.plan import plan as make_plan
from baton.records.predictions import RunPredictions, compare, ratios, read_predictions
from baton.run.predictions import measured_rates, predictions_of_plan
from baton.specs.plan import Plan, RewardStage

ROOT = Path(__file__).parents[2]
KNOWN = Efficiencies(Efficiency(train=0.4, decode=0.6, train_overhead_s=1.0, step_overhead_s=0.01))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    file = tmp_path_factory.mktemp("work") / "work.toml"
    file.write_text("groups = 32\ngroup_size = 8\nmax_staleness = 0\nprompt_tokens.mean = 9\noutput_tokens.mean = 40\n")
    return make_plan(
        ROOT / "models" / "quickstart", file, ROOT / "recipes" / "planner" / "this-cpu.toml", colocated=True
    ).plan


def measured(plan: Plan, **changed: float) -> list[dict[str, float]]:
    """Two steps of a run that measured what the plan predicted, but for `changed`."""
    times = plan.breakdown
    row = {
        "perf/step_time": times.step_s,
        "time/generate": times.rollout_s * changed.get("generation", 1),
        "time/train": times.train_s * changed.get("training", 1),
        "time/weight_sync": times.sync_s,
        "response_length/mean": 40.0 * changed.get("length", 1),
    }
    return [{"step": step, **row} for step in (1, 2)]


def corrected(plan: Plan, **changed: float) -> Efficiency:
    with TemporaryDirectory() as directory:
        run = written(Path(directory), plan, **changed)
        return rates(plan, run)[0].of("CPU")


def rates(plan: Plan, run: Path) -> tuple[Efficiencies, tuple[str, ...]]:
    return measured_rates(KNOWN, plan, read_predictions(run), run)


def written(run: Path, plan: Plan, **changed: float) -> Path:
    """A run's directory with predictions and metrics."""
    RunPredictions(run, None).replace(predictions_of_plan(plan, "plan.json", ()), 0)
    rows = measured(plan, **changed)
    (run / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return run


def test_a_run_as_predicted_changes_nothing(plan: Plan) -> None:
    for key, value in KNOWN.default.model_dump().items():
        assert corrected(plan).model_dump()[key] == pytest.approx(value)


def test_training_that_takes_twice_as_long_halves_its_rate(plan: Plan) -> None:
    found = corrected(plan, training=2)
    assert found.train == pytest.approx(0.2)
    assert found.train_overhead_s == pytest.approx(2.0)
    assert found.decode == pytest.approx(0.6)


def test_generation_is_compared_per_token(plan: Plan) -> None:
    assert corrected(plan, generation=2, length=2).decode == pytest.approx(0.6)
    found = corrected(plan, generation=2)
    assert (found.decode, found.step_overhead_s) == (pytest.approx(0.3), pytest.approx(0.02))


def test_only_a_run_of_this_plan_corrects_it(plan: Plan, tmp_path: Path) -> None:
    assert rates(plan, tmp_path) == (KNOWN, ())
    written(tmp_path, plan, training=2)
    found, lines = rates(plan, tmp_path)
    assert found.of("CPU").train == pytest.approx(0.2)
    assert "training on CPU: measured 0.50 × the predicted rate" in lines
    other = msgspec.structs.replace(plan, breakdown=msgspec.structs.replace(plan.breakdown, step_s=1e6))
    assert rates(other, tmp_path) == (KNOWN, ())


def test_the_time_of_rewards_is_compared_unless_it_is_short_or_hidden(plan: Plan) -> None:
    times = msgspec.structs.replace(plan.breakdown, step_s=10.0, reward_s=2.0, overlaps=False)
    told = predictions_of_plan(msgspec.structs.replace(plan, breakdown=times), "plan.json", ())
    assert told.of("rewards") == 2.0
    rows = [{**row, "time/judge": 3.0} for row in measured(plan)]
    found = next(each for each in compare(told, rows) if each.term == "rewards")
    assert (found.measured, found.error, found.is_off) == (3.0, 0.5, True)
    assert ratios(told, rows[0])["measured_over_predicted/rewards"] == 1.5
    for change in ({"reward_s": 0.09}, {"overlaps": True}):
        other = msgspec.structs.replace(plan, breakdown=msgspec.structs.replace(times, **change))
        assert predictions_of_plan(other, "plan.json", ()).of("rewards") is None


@pytest.mark.parametrize(("changes", "expected"), [({}, 0.6), ({"concurrency": 4, "latency_s": 2.0}, 0.8)])
def test_the_idle_share_of_reward_models_is_compared(plan: Plan, changes: dict[str, float], expected: float) -> None:
    """Two GPUs score the batch's trajectories, one at a time for 1 s, or four at a time for 2 s each."""
    assert plan.work is not None
    num = plan.work.groups * plan.work.group_size
    stage = RewardStage("j", "CPU", ("a:0", "a:1"), 1.0, 1.0, 1.0, **changes)
    times = msgspec.structs.replace(plan.breakdown, step_s=num / 2 / 0.4)
    told = predictions_of_plan(msgspec.structs.replace(plan, breakdown=times, reward=stage), "plan.json", ())
    assert told.of("reward model idle") == pytest.approx(expected)
    row = {"step": 3.0, "perf/step_time": 10.0, "time/reward_model_busy": 7.0}
    found = next(each for each in compare(told, [row]) if each.term == "reward model idle")
    assert found.measured == pytest.approx(0.3)
    assert found.is_off
    assert predictions_of_plan(plan, "plan.json", ()).of("reward model idle") is None


def test_what_a_plan_does_not_predict_is_left_out(plan: Plan) -> None:
    found = predictions_of_plan(plan, "plan.json", ())
    assert found.of("trainer memory") is None
    assert found.of("engine slots idle") is None, "without overlap, a plan has no mean over a batch"
    assert found.of("response length") == 40
