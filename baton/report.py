"""What a run achieved, read from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import tomli_w
from rich.console import Console
from rich.table import Column, Table

from baton.evaluation import Evaluation
from baton.metrics import read_metrics
from baton.runs import RunDirectory, without_none

if TYPE_CHECKING:
    from baton.build import Footprint
    from baton.config import Recipe

WINDOW = 5
"""Steps averaged at either end of the reward curve."""


class Change(msgspec.Struct, frozen=True):
    """One evaluation before and after."""

    before: Evaluation
    after: Evaluation

    @property
    def points(self) -> float:
        """Gain in accuracy, percentage points."""
        return 100 * (self.after.accuracy.value - self.before.accuracy.value)


class RunReport(msgspec.Struct, frozen=True):
    """The summary of a run."""

    directory: str
    seed: int
    steps: int
    changes: tuple[Change, ...]
    reward_before: float
    """Mean training reward of the first steps."""
    reward_after: float
    """Mean training reward of the last steps."""
    generated_tokens: float
    generate_tokens_per_s: float
    """Generated tokens over the time spent generating."""
    throughput_tokens_per_s: float
    """Generated tokens over the whole time of the train steps."""
    train_time_s: float
    """Time of all train steps, evaluations left out."""


def summarise(run: RunDirectory) -> RunReport:
    """Read a run's report from its files."""
    rows = [row for row in read_metrics(run.path) if "reward/mean" in row]
    evaluations = run.evaluations()
    first, last = evaluations[0].step, evaluations[-1].step
    before = {_key(e.result): e.result for e in evaluations if e.step == first}
    after = {_key(e.result): e.result for e in evaluations if e.step == last}
    generated = _total(rows, "tokens/generated")
    train_time_s = _total(rows, "perf/step_time")
    return RunReport(
        str(run.path),
        run.facts()["seed"],
        rows[-1]["step"] if rows else 0,
        tuple(Change(before[key], after[key]) for key in before if key in after),
        _mean(rows[:WINDOW], "reward/mean"),
        _mean(rows[-WINDOW:], "reward/mean"),
        generated,
        generated / max(1e-9, _total(rows, "time/generate")),
        generated / max(1e-9, train_time_s),
        train_time_s,
    )


def print_report(console: Console, report: RunReport) -> None:
    """Print the summary as a table."""
    table = Table(title=f"{report.directory}: {report.steps} train steps, seed {report.seed}", title_justify="left")
    for heading in ("held-out accuracy", "before", "after", "gain"):
        table.add_column(heading, justify="left" if heading.startswith("held") else "right", no_wrap=True)
    for change in report.changes:
        table.add_row(
            f"{change.before.task}, {change.before.way}",
            str(change.before.accuracy),
            str(change.after.accuracy),
            f"{change.points:+.1f}",
        )
    console.print(table, soft_wrap=True)
    console.print(
        f"training reward {report.reward_before:.3f} → {report.reward_after:.3f}; "
        f"{report.generated_tokens:,.0f} tokens generated at {report.generate_tokens_per_s:,.0f} tokens/s; "
        f"whole steps {report.throughput_tokens_per_s:,.0f} tokens/s, {report.train_time_s:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"curves: {report.directory}/metrics.jsonl (and tensorboard --logdir {report.directory}/tensorboard)\n"
        f"read what it wrote: baton show {report.directory} --step {report.steps}\n"
        f"the model: {report.directory}/checkpoints/step_{report.steps:06d}",
        highlight=False,
        soft_wrap=True,
    )


def print_evaluations(console: Console, results: Sequence[Evaluation]) -> None:
    """Print evaluations as a table; the intervals are of 95 %."""
    with_pass = any(r.samples > 1 for r in results)
    headings = ("task", "sampling", "prompts", "accuracy", *(("pass@k",) if with_pass else ()), "tokens", "cut")
    table = Table(*(Column(heading, no_wrap=True) for heading in headings))
    for r in results:
        cells = [r.task, r.way, str(r.num_prompts), str(r.accuracy)]
        if with_pass:
            cells.append("" if r.samples == 1 else f"k={r.samples}: {r.pass_at_k}")
        table.add_row(*cells, f"{r.mean_length_tokens:.1f}", f"{100 * r.clip_ratio:.1f} %")
    console.print(table, soft_wrap=True)


def print_dry_run(console: Console, recipe: Recipe, needs: Footprint) -> None:
    """Print what a recipe resolves to and needs."""
    console.print(tomli_w.dumps(without_none(recipe.model_dump(mode="json"))), highlight=False, markup=False)
    console.print(
        f"first prompt ({needs.example_prompt_tokens} tokens): {needs.example_prompt}\n"
        f"parameters: {needs.parameters:,}\n"
        f"memory: trainer {_size(needs.trainer_bytes)} (float32 weights, gradients, AdamW), "
        f"engine {_size(needs.engine_bytes)} (weights and KV cache), and activations\n"
        f"each step: {needs.trajectories_per_step} trajectories of at most {recipe.rollout.max_new_tokens} tokens "
        f"({needs.max_generated_tokens_per_step:,} tokens), {needs.updates_per_step} optimiser update(s)\n"
        f"the recipe is valid; nothing was started",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _key(result: Evaluation) -> tuple[str, float]:
    return result.task, result.temperature


def _total(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows))


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return _total(rows, name) / len(rows) if rows else 0.0
