"""Draw the charts of a report: metrics by train step, accuracy, response lengths, time per stage. Charts without data
are omitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from baton.records.evaluation import Evaluation
from baton.records.run_directory import RecordedEvaluation
from baton.types import EpisodeFinish
from baton.views.pages.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SERIES,
    SKY,
    YELLOW,
    Chart,
    draw,
    label_of,
    stack_bars,
)
from baton.views.pages.history import VERDICTS, Curve, Floats, History, StepLengths

MARKED = 40
"""Maximum number of points of a curve that is drawn with markers."""
STAGES = {"generate": BLUE, "judge": YELLOW, "environment": SKY, "train": ORANGE, "weight_sync": GREEN}
"""Colours of the stages of a train step. The remaining time of the step is drawn as `other`."""

VERDICT_COLOURS = dict(zip(VERDICTS, (BLUE, ORANGE, GREY), strict=True))
SHADES = ((0.0, 0.10), (0.02, 0.24), (0.05, 0.40), (0.10, 0.58), (0.20, 0.78), (0.40, 1.0))
"""Pairs (share, opacity). If a cell contains at least this share of a step's responses, it is drawn with this opacity.
If several pairs apply, the last one is used."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A curve of one metric in a chart."""

    metric: str
    label: str
    colour: str = BLUE
    is_smoothed: bool = False
    """Whether to draw a moving mean in front of the raw values."""


smoothed_line = partial(ChartLine, is_smoothed=True)
"""A line with a moving mean."""


@dataclass(frozen=True, slots=True)
class LineChart:
    """A chart of metrics by train step."""

    title: str
    unit: str
    """Unit of the vertical axis. If it ends with "%", the metrics are shares, which are drawn in per cent."""
    lines: tuple[ChartLine, ...]
    note: str = ""
    is_log: bool = False
    is_left_out_if_zero: bool = False
    repeats: str = ""
    """Name of another metric. The chart is omitted if the two metrics have equal curves."""

    @property
    def scale(self) -> float:
        """Factor from the metrics' unit to the unit of the chart."""
        return 100.0 if self.unit.endswith("%") else 1.0


LEARNING = (
    LineChart("Training reward", "reward", (smoothed_line("reward/mean", "mean of the batch"),)),
    LineChart(
        "Training accuracy", "correct, %", (smoothed_line("accuracy/mean", "batch", GREEN),), repeats="reward/mean"
    ),
    LineChart(
        "Groups without a learning signal",
        "groups, %",
        (smoothed_line("reward/zero_std_frac", "all rewards equal", GREY),),
        "If all rewards of a group are equal, the group's advantages are zero.",
    ),
)
RESPONSES = (
    LineChart(
        "Response length",
        "tokens",
        (ChartLine("response_length/max", "longest", GREY), smoothed_line("response_length/mean", "mean")),
    ),
    LineChart(
        "Responses truncated at the maximum length",
        "responses, %",
        (ChartLine("response_length/clip_ratio", "truncated", ORANGE),),
    ),
)
OPTIMISATION = (
    LineChart("Entropy of the policy", "nats per token", (smoothed_line("policy/entropy", "entropy"),)),
    LineChart("Gradient norm", "norm before clipping", (smoothed_line("policy/grad_norm", "norm", PURPLE),)),
    LineChart(
        "Logprob difference, engine and trainer",
        "nats",
        (
            ChartLine("policy/logprob_diff_max", "largest difference", ORANGE),
            ChartLine("policy/logprob_diff_mean", "mean difference"),
        ),
        "Absolute difference between the engine's and the trainer's log-probabilities of the same tokens; "
        "below 1e-4 in float32 on a CPU.",
        is_log=True,
    ),
    LineChart(
        "Staleness of trained tokens",
        "policy versions",
        (ChartLine("staleness/max", "largest", GREY), ChartLine("staleness/mean", "mean")),
        is_left_out_if_zero=True,
    ),
    LineChart("Loss of the warm start", "nats per token", (ChartLine("sft/loss", "mean of 50 updates"),)),
)
EPISODES = (
    LineChart("Turns per episode", "turns", (smoothed_line("env/turns_mean", "mean"),)),
    LineChart(
        "How episodes end",
        "episodes, %",
        tuple(
            ChartLine(f"env/finish/{reason}", str(reason).replace("_", " "), colour)
            for reason, colour in zip(EpisodeFinish, (GREEN, BLUE, ORANGE, YELLOW, PURPLE, GREY), strict=True)
        ),
    ),
    LineChart(
        "Latency of environments",
        "seconds per turn",
        (
            ChartLine("env/latency_max", "longest", GREY),
            ChartLine("env/latency_p95", "95th percentile", ORANGE),
            ChartLine("env/latency_mean", "mean"),
        ),
        is_log=True,
    ),
    LineChart(
        "Train step spent waiting for environments",
        "step, %",
        (smoothed_line("env/wait_frac", "no trajectory is generated", ORANGE),),
    ),
)
SPEED = (
    LineChart(
        "Tokens per second",
        "tokens/s",
        (
            smoothed_line("perf/generate_tokens_per_s", "while generating", SKY),
            smoothed_line("perf/throughput", "over whole steps"),
        ),
    ),
)


def learning_charts(history: History) -> Iterator[Chart]:
    """Draw accuracy, the reward, and the parts of the reward if the reward has several parts."""
    yield from accuracy_charts(history)
    yield from line_charts(history, LEARNING)
    parts = [name for name in history.names if name.startswith("reward/") and name.count("/") == 2]
    if len(parts) > 1:
        named = zip(parts, cycle(SERIES), strict=False)
        lines = tuple(smoothed_line(name, label_of(name.split("/")[1]), colour) for name, colour in named)
        yield from line_charts(history, (LineChart("Parts of the reward", "unweighted", lines),))


def line_charts(history: History, charts: Sequence[LineChart]) -> Iterator[Chart]:
    """Draw the charts whose metrics have at least one value."""
    for chart in charts:
        curves = [(line, history.curve(line.metric)) for line in chart.lines]
        curves = [(line, curve) for line, curve in curves if len(curve.steps)]
        is_zero = all(not curve.values.any() for _, curve in curves)
        if not curves or (chart.is_left_out_if_zero and is_zero):
            continue
        one, other = curves[0][1], history.curve(chart.repeats)
        if np.array_equal(one.steps, other.steps) and np.array_equal(one.values, other.values):
            continue
        svg = draw(partial(_paint_lines, chart=chart, curves=curves), y=chart.unit, last_step=history.last_step)
        yield Chart(chart.title, svg, chart.note)


def smoothing_window(num_steps: int) -> int:
    """Return the width of the moving mean in train steps: about a twentieth of the run, odd, and at least 5."""
    return max(5, num_steps // 20 | 1)


def _paint_lines(axes: Axes, *, chart: LineChart, curves: Sequence[tuple[ChartLine, Curve]]) -> None:
    if chart.is_log and any((curve.values > 0).any() for _, curve in curves):
        axes.set_yscale("log")
    for line, curve in curves:
        values = chart.scale * curve.values
        marker = "o" if len(values) <= MARKED else None
        window = smoothing_window(len(values))
        if line.is_smoothed and len(values) > window:
            alpha = 0.5 if len(values) <= 200 else 0.3
            axes.plot(curve.steps, values, marker=marker, color=line.colour, alpha=alpha, lw=0.9, ms=2.5)
            mean = chart.scale * curve.smoothed(window)
            axes.plot(curve.steps, mean, color=line.colour, lw=2.2, label=line.label)
        else:
            axes.plot(curve.steps, values, marker=marker, color=line.colour, ms=3, label=line.label)
    if axes.get_yscale() == "linear" and all(curve.values.min() >= 0 for _, curve in curves):
        axes.set_ylim(bottom=0, top=1.05 * max(curve.values.max() * chart.scale for _, curve in curves) or 1.0)


# ---- accuracy ------------------------------------------------------------------------------------------------------


def accuracy_charts(history: History) -> Iterator[Chart]:
    """Draw accuracy over all tasks and by task, with 95 % intervals."""
    if not history.evaluations:
        return
    tasks = list(dict.fromkeys(e.result.task for e in history.evaluations))
    overall = tasks[-1]  # `all` if the run has several tasks
    yield _accuracy_chart(
        "Accuracy",
        history,
        [e for e in history.evaluations if e.result.task == overall],
        lambda result: "greedy" if result.temperature == 0 else f"sampled at {result.way}",
        "Bars are 95 % intervals. All evaluations use the same prompts, which are never trained on.",
    )
    if len(tasks) > 1:
        yield _accuracy_chart(
            "Accuracy by task",
            history,
            [e for e in history.evaluations if e.result.task != overall and e.result.temperature],
            lambda result: result.task,
            "Sampled responses; bars are 95 % intervals.",
        )


def _accuracy_chart(
    title: str,
    history: History,
    evaluations: Sequence[RecordedEvaluation],
    label: Callable[[Evaluation], str],
    note: str,
) -> Chart:
    labels = list(dict.fromkeys(label(e.result) for e in evaluations))

    def paint(axes: Axes) -> None:
        dodge = 0.006 * max(1, history.last_step)  # shifts the curves sideways, so that their intervals do not overlap
        for i, name in enumerate(labels):
            mine = [(e.step, e.result.accuracy) for e in evaluations if label(e.result) == name]
            shares = [share for _, share in mine if share is not None]
            values = np.array([100 * s.value for s in shares])
            below = values - np.array([100 * s.low for s in shares])
            above = np.array([100 * s.high for s in shares]) - values
            x = np.array([step for step, share in mine if share is not None]) + dodge * (i - (len(labels) - 1) / 2)
            # every value is within its interval, but a difference can round to -1e-17, which errorbar refuses
            errors = np.maximum(0, [below, above])
            colour = SERIES[i % len(SERIES)]
            axes.errorbar(x, values, errors, marker="o", color=colour, elinewidth=1, capsize=2.5, label=label_of(name))
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(102, high))

    return Chart(title, draw(paint, y="correct, %", last_step=history.last_step), note)


# ---- response lengths ----------------------------------------------------------------------------------------------


def length_charts(samples: Sequence[StepLengths], last_step: int) -> Iterator[Chart]:
    """Draw the distribution of lengths over training, mean lengths by verdict, and early and late histograms."""
    if not samples:
        return
    longest = max(s.lengths.max() for s in samples)
    yield _heat_map(samples, longest, last_step)
    yield _by_verdict(samples, last_step)
    third = max(1, len(samples) // 3)
    edges = np.linspace(0, longest + 1, 21)
    yield _histogram("Early", samples[:third], edges)
    if len(samples) > 1:
        yield _histogram("Late", samples[-third:], edges)


def _heat_map(samples: Sequence[StepLengths], longest: float, last_step: int) -> Chart:
    steps = np.array([s.step for s in samples], float)
    middles = (steps[1:] + steps[:-1]) / 2
    lefts = np.concatenate(([steps[0] - 0.5 if len(steps) == 1 else steps[0] - (middles[0] - steps[0])], middles))
    rights = np.concatenate((middles, [steps[-1] + (steps[-1] - lefts[-1])]))
    edges = np.linspace(0, longest + 1, 25)
    boxes: list[list[Path]] = [[] for _ in SHADES]
    for sample, left, right in zip(samples, lefts, rights, strict=True):
        shares = np.histogram(sample.lengths, edges)[0] / len(sample.lengths)
        for share, low, high in zip(shares, edges[:-1], edges[1:], strict=True):
            if share > 0:
                shade = max(i for i, (start, _) in enumerate(SHADES) if share >= start)
                # one compound path per shade: an SVG element per cell would make the page large
                boxes[shade].append(Path([(left, low), (right, low), (right, high), (left, high), (left, low)]))

    def paint(axes: Axes) -> None:
        axes.grid(visible=False)
        for paths, (_, opacity) in zip(boxes, SHADES, strict=True):
            if paths:
                axes.add_patch(PathPatch(Path.make_compound_path(*paths), fc=BLUE, alpha=opacity, lw=0))
        for i, (start, opacity) in enumerate(SHADES):
            words = f"< {100 * SHADES[1][0]:.0f} %" if i == 0 else f"≥ {100 * start:.0f}"
            axes.add_patch(Rectangle((0, 0), 0, 0, fc=BLUE, alpha=opacity, lw=0, label=words))
        axes.set_xlim(min(-0.02 * last_step, lefts[0]), max(1.02 * last_step, rights[-1]))
        axes.set_ylim(0, edges[-1])

    note = "A stronger colour means that a larger share of the step's responses has this length."
    return Chart("Response lengths over training", draw(paint, y="tokens", last_step=last_step), note)


def _by_verdict(samples: Sequence[StepLengths], last_step: int) -> Chart:
    def paint(axes: Axes) -> None:
        for name, colour in VERDICT_COLOURS.items():
            found = [(s.step, s.lengths[s.verdicts == name]) for s in samples]
            points = [(step, lengths.mean()) for step, lengths in found if len(lengths)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", ms=3, color=colour, label=name)

    return Chart("Mean length by verdict", draw(paint, y="tokens", last_step=last_step, from_zero=True))


def _histogram(when: str, samples: Sequence[StepLengths], edges: Floats) -> Chart:
    lengths = np.concatenate([s.lengths for s in samples])
    verdicts = np.concatenate([s.verdicts for s in samples])
    present = [name for name in VERDICTS if (verdicts == name).any()]

    def paint(axes: Axes) -> None:
        shares = {name: 100 * np.histogram(lengths[verdicts == name], edges)[0] / len(lengths) for name in present}
        bars = ((name, VERDICT_COLOURS[name], shares[name]) for name in present)
        stack_bars(axes, edges[:-1], bars, width=0.92 * np.diff(edges), align="edge")
        axes.set_xlim(0, edges[-1])

    means = ", ".join(f"{name} {lengths[verdicts == name].mean():.1f}" for name in present)
    first, last = samples[0].step, samples[-1].step
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    return Chart(f"{when} lengths, {span}", draw(paint, x="tokens", y="responses, %"), f"Mean tokens: {means}.")


# ---- time ----------------------------------------------------------------------------------------------------------


def speed_charts(history: History) -> Iterator[Chart]:
    """Draw tokens per second, and the time of each stage of a train step."""
    yield from line_charts(history, SPEED)
    whole = history.curve("perf/step_time")
    if not len(whole.steps):
        return
    curves = {stage: history.curve(f"time/{stage}") for stage in STAGES}
    by_stage = {stage: _on(curve, whole.steps) for stage, curve in curves.items() if len(curve.steps)}
    by_stage["other"] = np.maximum(0, whole.values - sum(by_stage.values()))
    colours = [STAGES.get(stage, GREY) for stage in by_stage]
    window = smoothing_window(len(whole.steps)) if len(whole.steps) > MARKED else 1
    stacked = [Curve(whole.steps, seconds).smoothed(window) for seconds in by_stage.values()]

    def paint(axes: Axes) -> None:
        names = [name.replace("_", " ") for name in by_stage]
        if len(whole.steps) <= MARKED:
            stack_bars(axes, whole.steps, zip(names, colours, stacked, strict=True))
        else:
            axes.stackplot(whole.steps, stacked, colors=colours, labels=names, linewidth=0)

    note = f"Mean of {window} steps." if window > 1 else ""
    svg = draw(paint, y="seconds", last_step=history.last_step, from_zero=True)
    yield Chart("Where the time of a step goes", svg, note)


def _on(curve: Curve, steps: np.ndarray) -> np.ndarray:
    """Return the values of a curve at the given steps, shape [steps]; 0 at steps without a value."""
    known = dict(zip(curve.steps, curve.values, strict=True))
    return np.array([known.get(step, 0.0) for step in steps])
