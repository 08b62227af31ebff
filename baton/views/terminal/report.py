"""Print the results of `baton report`, `baton eval`, `baton sft` and `baton train --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w
from rich.box import SIMPLE_HEAD
from rich.table import Table

from baton.console import Console, visible
from baton.records.evaluation import Evaluation, shown_share
from baton.records.predictions import TOLERANCE
from baton.records.run_directory import without_none
from baton.run.summary import RunReport

if TYPE_CHECKING:
    from baton.recipe.recipe import Recipe
    from baton.run.dry_run import Footprint
    from baton.run.memory import ProcessMemory
    from baton.run.sft import WarmStartReport


def print_report(console: Console, report: RunReport) -> None:
    """Print the summary of a run, with the accuracy of its evaluations as a table."""
    done = str(report.steps) if report.steps == report.num_steps else f"{report.steps} of {report.num_steps}"
    console.print(f"{report.directory}: {done} train steps, seed {report.seed}", style="italic")
    if report.evaluated_steps is None:
        console.print("no evaluation")
    else:
        console.print(_changes_table(report))
    if not report.steps:
        console.print("no train step is done yet")
        return
    console.print(
        f"training reward {report.reward_before:.3f} → {report.reward_after:.3f}; "
        f"{report.generated_tokens:,.0f} tokens generated at {report.generate_tokens_per_s:,.0f} tokens/s; "
        f"whole steps {report.throughput_tokens_per_s:,.0f} tokens/s, {report.train_time_s:.0f} s"
    )
    if report.predictions:
        _print_predictions(console, report)
    for warning in report.warnings:
        console.print(visible(f"warning: {warning}", keep=""))
    console.print(
        f"curves: baton report {report.directory} --html, or tensorboard --logdir {report.directory}/tensorboard\n"
        f"trajectories: baton show {report.directory} --step {report.steps}\n"
        f"checkpoints: {report.directory}/checkpoints"
    )


def _print_predictions(console: Console, report: RunReport) -> None:
    table = _table(f"predicted by {report.predicted_by}", "predicted", "measured", "difference")
    known = [each for each in report.predictions if each.error is not None]
    for each in report.predictions:
        values = (_amount(each.predicted, each.unit), _amount(each.measured, each.unit))
        unit = " points" if each.unit == "share" else " %"
        table.add_row(each.term, *values, "" if each.error is None else f"{100 * each.error:+.0f}{unit}")
    console.print(table)
    for each in report.predictions:
        if each.assumption:
            console.print(each.assumption)
    off = [each.term for each in known if each.is_off]
    lacking = [each.term for each in report.predictions if each.error is None]
    within = f"{len(known) - len(off)} of {len(known)} predictions within {100 * TOLERANCE:.0f} %"
    console.print(
        f"{within}{'; off: ' + ', '.join(off) if off else ''}"
        f"{'; not predicted or not measured: ' + ', '.join(lacking) if lacking else ''}"
    )


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "bytes":
        return _size(value)
    return f"{100 * value:.0f} %" if unit == "share" else f"{rounded(value)} {unit}"


def rounded(value: float) -> str:
    """Return a number with three significant digits. Numbers from 1000 are rounded to an integer, without exponent."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _changes_table(report: RunReport) -> Table:
    assert report.evaluated_steps is not None
    first, last = report.evaluated_steps
    has_rewards = any(
        each is not None and each.own_reward is not None for c in report.changes for each in (c.before, c.after)
    )
    headings = (f"step {first}",) if first == last else (f"step {first}", f"step {last}", "gain")
    table = _table("accuracy", *headings)
    for change in report.changes:
        before, after = change.before, change.after or change.before
        name = f"{before.task}, {before.way}"
        later = "" if change.after is None else shown_share(change.after.accuracy)
        gain = "" if change.points is None else f"{change.points:+.1f}"
        table.add_row(name, *(shown_share(before.accuracy), later, gain)[: len(headings)])
        if has_rewards and before.reward is not None and after.reward is not None:
            rewards = f"{before.reward:.3f}", f"{after.reward:.3f}", f"{after.reward - before.reward:+.3f}"
            table.add_row(f"{name}, reward", *rewards[: len(headings)])
    return table


def _table(first: str, *others: str) -> Table:
    """Return an empty table for 80 columns: names in the first column wrap, and numbers are never truncated."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column(first, min_width=12, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_evaluations(console: Console, results: Sequence[Evaluation]) -> None:
    """Print evaluations as a table with 95 % intervals; pass@k has a row of its own."""
    has_rewards = any(r.own_reward is not None for r in results)
    table = _table("task", "prompts", "measure", "result", *["reward"] * has_rewards, "tokens", "cut")
    for r in results:
        measure = "greedy" if r.temperature == 0 else f"avg@{r.samples}" if r.samples > 1 else "accuracy"
        length, cut = f"{r.mean_length_tokens:.1f}", f"{100 * r.clip_ratio:.1f} %"
        reward = [f"{r.reward:.3f}" if r.reward is not None else ""] * has_rewards
        table.add_row(r.task, str(r.num_prompts), measure, shown_share(r.accuracy), *reward, length, cut)
        if r.samples > 1:
            table.add_row("", "", f"pass@{r.samples}", shown_share(r.pass_at_k))
    console.print(table)


def print_warm_start(console: Console, report: WarmStartReport, run: Path) -> None:
    """Print the results of the evaluations in a warm start, and the paths of its model and its run directory."""
    if report.evaluations:
        print_evaluations(console, report.evaluations)
    console.print(f"model: {report.output}\nrun: {run}")


def print_dry_run(console: Console, recipe: Recipe, needs: Footprint, *, keys: bool = False) -> None:
    """Print the estimated memory and work of a recipe; with `keys`, also print the resolved recipe."""
    made_for = "" if needs.max_positions is None else f", at most {needs.max_positions:,} positions"
    free = "" if needs.available_bytes is None else f"{_size(needs.available_bytes)} are free on {needs.device}"
    evaluated = (
        f"{needs.held_out_prompts} prompts of the test sets"
        if recipe.eval.task
        else f"{needs.held_out_prompts} held-out prompts (eval.num_prompts = {recipe.eval.num_prompts})"
    )
    lines = [
        f"model       {recipe.model.path}, {needs.parameters:,} parameters{made_for}",
        *(f"task        {prompts}" for prompts in needs.prompts),
        f"evaluation  {evaluated if recipe.eval.enabled else 'none (eval.enabled = false)'}",
        *(f"memory      {_memory(process)}" for process in needs.processes),
        *([f"GPUs        {needs.gpus}"] if needs.gpus else []),
        f"            {free or 'the free memory of other machines is not known here'}",
        f"each step   {needs.trajectories_per_step} trajectories of at most {recipe.rollout.max_new_tokens} tokens "
        f"({needs.max_generated_tokens_per_step:,} tokens), {needs.updates_per_step} optimiser update(s)",
        f"support     {'experimental: ' * bool(needs.experimental)}{'; '.join(needs.experimental) or 'tested'}",
        *recipe.algorithm.notes(recipe.rollout.model_dump()),
        f"first prompt ({needs.example_prompt_tokens} tokens): {needs.example_prompt}",
        *([tomli_w.dumps(without_none(recipe.model_dump(mode="json")))] if keys else []),
        f"the recipe is valid; nothing was started{'' if keys else '; --keys prints the resolved recipe'}",
    ]
    console.print("\n".join(lines))


def _memory(process: ProcessMemory) -> str:
    parts = (f"{part.name} {_size(part.num_bytes)}{' (assumed)' * part.is_assumed}" for part in process.parts)
    return f"{process.name}: {_size(process.num_bytes)} during {process.phase}: {', '.join(parts)}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{rounded(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{rounded(num_bytes)} TiB"
