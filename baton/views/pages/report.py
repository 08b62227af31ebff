"""Write the report of a run: one self-contained HTML page without scripts or network access.

Texts of a model are untrusted. The template escapes all values except the drawings that this package makes. A
Content-Security-Policy in the page also forbids scripts and external content.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError, safe_open

from baton.console import visible
from baton.errors import Damaged
from baton.files import write_whole
from baton.records.evaluation import Evaluation
from baton.records.run_directory import RunDirectory
from baton.records.trace import read_trace
from baton.run.summary import RunReport, summarise
from baton.run.trajectories import TextPiece, choose_examples
from baton.views.pages.history import MAX_SAMPLED_STEPS, History, read_lengths
from baton.views.pages.template import check_page, render_template
from baton.views.terminal.report import rounded

if TYPE_CHECKING:
    from baton.views.pages.canvas import Chart

MAX_CHARACTERS = 12_000
"""Maximum length of a text on the page; a note replaces the middle of a longer text."""
SLOTS_NOTE = (
    "Each row is a slot. Each bar is a lease, during which a worker generates one response until the response is "
    "finished or aborted. Dashed lines mark the start of training in a step; solid lines mark the publication of the "
    "new version."
)


class Section(msgspec.Struct, frozen=True):
    """Charts under one heading."""

    heading: str
    charts: Sequence[Chart]
    note: str = ""
    is_wide: bool = False
    """Show each chart at the full width of the page."""


def write_page(run: RunDirectory, path: Path) -> None:
    """Write the page of a run, which may still be running. Raises UserError as `check_page` does."""
    check_page(path)
    write_whole(path, render(run).encode())


def render(run: RunDirectory) -> str:
    """Return the page of a run as HTML."""
    history = History.read(run)
    recipe = run.recipe()
    summary = None if "sft" in recipe else summarise(run)
    return render_template(
        "report.html",
        {"short": short, "percent": percent, "readable": _readable},
        name=run.path.absolute().name,
        summary=summary,
        status=_status(summary, history, recipe),
        facts=list(_facts(run, recipe, summary)),
        tiles=list(_tiles(summary, history)),
        sections=[section for section in _sections(run, history) if section.charts],
        examples=list(choose_examples(run)),
        visible=visible,
        metrics={name: history.curve(name).values for name in sorted(history.names)},
        recipe=(run.path / "recipe.toml").read_text(encoding="utf-8"),
        circumstances=list(_circumstances(run.facts())),
    )


def _sections(run: RunDirectory, history: History) -> Iterator[Section]:
    from baton.views.pages import charts
    from baton.views.pages.slots import slot_pictures

    last = history.last_step
    window = charts.smoothing_window(last)
    note = f"Thin lines show single steps; thick lines show a centred mean over {window} steps."
    yield Section("Learning", list(charts.learning_charts(history)), note if last > window else "")
    samples, recorded = read_lengths(run), len(run.recorded_steps())
    note = f"Distributions use {MAX_SAMPLED_STEPS} of the {recorded:,} recorded steps, evenly spaced."
    drawn = [*charts.line_charts(history, charts.RESPONSES), *charts.length_charts(samples, last)]
    yield Section("Responses", drawn, note if recorded > len(samples) else "")
    yield Section("Episodes", list(charts.line_charts(history, charts.EPISODES)))
    yield Section("Optimisation", list(charts.line_charts(history, charts.OPTIMISATION)))
    yield Section("Speed", list(charts.speed_charts(history)))
    yield Section("Slots over time", slot_pictures(read_trace(run.path)), SLOTS_NOTE, is_wide=True)


def _status(summary: RunReport | None, history: History, recipe: dict[str, Any]) -> str:
    if summary is None:
        return f"warm start, {history.last_step:,} of {recipe['sft']['steps']:,} updates"
    if summary.steps >= summary.num_steps:
        return f"complete, {summary.steps:,} train steps"
    return f"{summary.steps:,} of {summary.num_steps:,} train steps"


def _facts(run: RunDirectory, recipe: dict[str, Any], summary: RunReport | None) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each fact that the page lists under its title."""
    recorded = run.facts()
    model = recipe.get("model", {}).get("path", "trained from scratch")
    size = _parameters(run.checkpoints)
    trained = "adapter of " if recipe.get("lora") else ""  # a checkpoint then contains only the adapter
    yield "Model", f"{model}, {trained}{short(size)} parameters" if size else model
    yield "Tasks", _mixture(recipe.get("task", ()))
    if summary is not None:
        rollout = recipe["rollout"]
        yield (
            "Batch",
            f"{rollout['batch_groups']} groups of {rollout['group_size']} trajectories, "
            f"at most {rollout['max_new_tokens']:,} tokens each",
        )
        yield "Algorithm", str(recipe["algorithm"]["name"])
        evals = f", evaluations {duration(summary.eval_time_s)}" if summary.eval_time_s else ""
        yield "Duration", f"train steps {duration(summary.train_time_s)}{evals}"
        yield "Generated", f"{short(summary.generated_tokens)} tokens"
    yield "Seed", str(recorded["seed"])
    yield "Commit", _commit(recorded.get("commit"))
    device = recipe.get("model", {}).get("device", "auto")
    yield (
        "Hardware",
        f"{recorded.get('processor') or 'unknown processor'}, {recorded.get('cores')} cores, "
        f"torch threads: {recorded.get('threads')}, device: {device}",
    )
    yield "Started", datetime.fromisoformat(recorded["started"]).strftime("%Y-%m-%d %H:%M UTC")
    if recorded.get("resumed"):
        yield "Resumed", f"{len(recorded['resumed'])} times"


def _mixture(tasks: Sequence[dict[str, Any]]) -> str:
    """Return the names of the tasks, with their weights if the weights differ."""
    weights = [task.get("weight", 1.0) for task in tasks]
    if len(set(weights)) <= 1:
        return ", ".join(task["name"] for task in tasks) or "none"
    return ", ".join(f"{task['name']} (weight {weight:g})" for task, weight in zip(tasks, weights, strict=True))


def _commit(commit: str | None) -> str:
    if commit is None:
        return "unknown"
    digest, plus, _ = commit.partition("+")
    return digest[:12] + (" with uncommitted changes" if plus else "")


def _parameters(checkpoints: Path) -> int:
    """Return the number of parameters in the latest checkpoint, from its files' headers; 0 without a checkpoint."""
    latest = max((p for p in checkpoints.glob("step_*") if p.is_dir() and not p.suffix), default=None)
    count = 0
    for file in latest.glob("*.safetensors") if latest is not None else ():
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118  # not a dict
        except SafetensorError as error:
            raise Damaged(f"{file} is damaged: {error}") from error
        count += sum(math.prod(shape) for shape in shapes)
    return count


def _tiles(summary: RunReport | None, history: History) -> Iterator[tuple[str, str, str]]:
    """Yield the main results as (label, number, detail)."""
    if summary is None:
        return
    overall = [c for c in summary.changes if c.before.task == summary.changes[-1].before.task]
    for change in overall:
        way = "greedy" if change.before.temperature == 0 else f"at {change.before.way}"
        if change.after is None:
            yield f"Accuracy, {way}", _accuracy(change.before), "one evaluation so far"
        else:
            first = summary.evaluated_steps[0] if summary.evaluated_steps else 0
            when = f"after step {first}" if first else "before training"
            yield f"Accuracy, {way}", _accuracy(change.after), f"{_accuracy(change.before)} {when}"
    if summary.reward_before is not None and summary.reward_after is not None:
        yield "Training reward", f"{summary.reward_after:.3f}", f"{summary.reward_before:.3f} in the first steps"
    lengths = history.curve("response_length/mean").values
    if len(lengths):
        yield "Response length, tokens", f"{lengths[-1]:.1f}", f"{lengths[0]:.1f} in the first step"
    if summary.steps:
        yield (
            "Throughput, tokens/s",
            short(summary.throughput_tokens_per_s),
            f"{short(summary.generate_tokens_per_s)} while generating",
        )


def _accuracy(result: Evaluation) -> str:
    return "not scored" if result.accuracy is None else percent(result.accuracy.value)


def _readable(pieces: Sequence[TextPiece]) -> Iterator[TextPiece]:
    """Escape control characters, and replace the middle of a long text by a note."""
    for piece in pieces:
        text = visible(piece.text)
        if len(text) > MAX_CHARACTERS:
            half = MAX_CHARACTERS // 2
            yield TextPiece(text[:half], piece.is_special)
            yield TextPiece(f" … {len(text) - 2 * half:,} characters omitted … ", True)
            yield TextPiece(text[-half:], piece.is_special)
        else:
            yield TextPiece(text, piece.is_special)


def _circumstances(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the command line and the package versions of run.json. Absolute paths are shortened to their last part,
    because users may publish the page."""
    command = [re.sub(r".*[/\\]", "", part) if os.path.isabs(part) else part for part in facts.get("command", ())]  # noqa: PTH117
    yield "command", " ".join(command)
    for key in ("baton", "python", "platform"):
        yield key, str(facts.get(key))
    for package, version in facts.get("packages", {}).items():
        yield package, str(version)


# ---- formatting of numbers -------------------------------------------------------------------------------------------


def short(value: float) -> str:
    """Return a number with four digits or with a unit, such as 0.1234, 1,234, 12.3 k or 4.56 M."""
    size = abs(value)
    for start, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= start:
            return f"{rounded(value / divisor)} {unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share as a percentage, such as "12.5 %"."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
