"""Computes the summary of a run, which may be complete, stopped or still running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from baton.errors import Damaged, UserError
from baton.records.evaluation import Evaluation
from baton.records.metrics import read_metrics
from baton.records.predictions import Comparison, Predictions, compare, read_predictions
from baton.records.run_directory import RecordedEvaluation, RunDirectory
from baton.rewards.warnings import EQUAL_STEPS, by_cause, nothing_to_learn
from baton.types import FailureCause

WINDOW = 5
"""Number of train steps over which the reward is averaged, at the start and at the end of the run. A run with fewer
than twice this number of steps is divided into two halves instead."""


class Change(msgspec.Struct, frozen=True):
    """The first and the latest evaluation of a run, on one task with one temperature."""

    before: Evaluation
    after: Evaluation | None
    """Latest evaluation; None if the run has only one evaluation."""

    @property
    def points(self) -> float | None:
        """Gain in accuracy, percentage points."""
        if self.before.accuracy is None or self.after is None or self.after.accuracy is None:
            return None
        return 100 * (self.after.accuracy.value - self.before.accuracy.value)


class RunReport(msgspec.Struct, frozen=True):
    """The summary of a run."""

    directory: str
    seed: int
    steps: int
    num_steps: int
    changes: tuple[Change, ...]
    evaluated_steps: tuple[int, int] | None
    """Train steps of the first and the latest evaluation; None if the run has no evaluation."""
    reward_before: float | None
    """Mean training reward of the first `WINDOW` steps, or of the first half of a short run."""
    reward_after: float | None
    """Mean training reward of the last `WINDOW` steps, or of the last half of a short run."""
    generated_tokens: float
    generate_tokens_per_s: float
    """Generated tokens divided by the time spent generating."""
    throughput_tokens_per_s: float
    """Generated tokens divided by the total time of the train steps."""
    train_time_s: float
    """Total time of the train steps, without evaluations."""
    eval_time_s: float
    predicted_by: str = ""
    """Source of the predictions; empty if the run has none."""
    predictions: tuple[Comparison, ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings about responses without a reward, steps in which the rewards of each group were equal, and unreadable
    predictions."""


def summarise(run: RunDirectory) -> RunReport:
    """Compute a run's summary from its files. Raises UserError for a warm start, which has no rewards."""
    recipe = run.recipe()
    if "sft" in recipe:
        raise UserError(
            f"{run.path} is a warm start, which has no rewards; for its loss: baton report {run.path} --html"
        )
    all_rows = read_metrics(run.path)
    rows = [row for row in all_rows if "reward/mean" in row]
    generated = _total(rows, "tokens/generated")
    train_time_s = _total(rows, "perf/step_time")
    window = max(1, min(WINDOW, len(rows) // 2))
    evaluations = run.evaluations()
    predictions: Predictions | None = None
    damage: list[str] = []
    try:
        predictions = read_predictions(run.path)
    except Damaged as error:
        damage.append(f"the report has no predictions: {error}")
    return RunReport(
        str(run.path),
        run.facts()["seed"],
        rows[-1]["step"] if rows else 0,
        recipe["run"]["steps"],
        _changes(evaluations),
        (evaluations[0].step, evaluations[-1].step) if evaluations else None,
        _mean(rows[:window], "reward/mean"),
        _mean(rows[-window:], "reward/mean"),
        generated,
        generated / max(1e-9, _total(rows, "time/generate") + _total(rows, "time/generate_hidden")),
        generated / max(1e-9, train_time_s),
        train_time_s,
        _total(all_rows, "time/eval"),
        "" if predictions is None else predictions.source,
        () if predictions is None else compare(predictions, rows),
        (*damage, *_warnings(run, recipe, rows)),
    )


def write_summary(run: RunDirectory) -> RunReport:
    """Write a run's summary into the run's directory, and return the summary."""
    report = summarise(run)
    run.write_report(msgspec.to_builtins(report))
    return report


def _warnings(run: RunDirectory, recipe: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    failed = {cause: _total(rows, f"judge/{cause}") for cause in FailureCause}
    failed = {cause: count for cause, count in failed.items() if count}
    if failed:
        responses = len(rows) * recipe["rollout"]["batch_groups"] * recipe["rollout"]["group_size"]
        yield (
            f"{sum(failed.values()):.0f} of {responses} responses could not be scored ({by_cause(failed)}) and were "
            f"not trained{_first_failure(run, rows)}"
        )
    equal = list(takewhile(lambda row: row.get("reward/zero_std_frac") == 1.0, reversed(rows)))
    if len(equal) >= EQUAL_STEPS and run.has_groups(rows[-1]["step"]):
        yield nothing_to_learn(len(equal), run.groups(rows[-1]["step"]))


def _first_failure(run: RunDirectory, rows: Sequence[dict[str, Any]]) -> str:
    step = next(row["step"] for row in rows if row.get("judge/failed"))
    members = (m for g in run.groups(step) for m in g.members) if run.has_groups(step) else ()
    failure = next((m.judgement.failure for m in members if not m.judgement.is_judged), None)
    return f"; the first, in step {step}: {failure}" if failure else ""


def _changes(evaluations: Sequence[RecordedEvaluation]) -> tuple[Change, ...]:
    if not evaluations:
        return ()
    first, last = evaluations[0].step, evaluations[-1].step
    named = [(each.step, (each.result.task, each.result.temperature), each.result) for each in evaluations]
    before = {key: result for step, key, result in named if step == first}
    after = {key: result for step, key, result in named if step == last != first}
    return tuple(Change(result, after.get(key)) for key, result in before.items())


def _total(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Return the sum of a metric over the rows in which it is a number. (Values that are not finite are written as
    null.)"""
    return float(sum(row[name] for row in rows if row.get(name) is not None))


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return _total(rows, name) / len(rows) if rows else None
