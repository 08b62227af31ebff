"""Draw charts of response lengths: over training, and by verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from baton.views.pages.canvas import BLUE, GREY, ORANGE, Chart, draw, stack_bars
from baton.views.pages.history import VERDICTS, Floats, StepLengths

COLOURS = dict(zip(VERDICTS, (BLUE, ORANGE, GREY), strict=True))
SHADES = ((0.0, 0.10), (0.02, 0.24), (0.05, 0.40), (0.10, 0.58), (0.20, 0.78), (0.40, 1.0))
"""Pairs (share, opacity). If a cell contains at least this share of a step's responses, it is drawn with this opacity.
If several pairs apply, the last one is used."""


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
        for name, colour in COLOURS.items():
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
        bars = ((name, COLOURS[name], shares[name]) for name in present)
        stack_bars(axes, edges[:-1], bars, width=0.92 * np.diff(edges), align="edge")
        axes.set_xlim(0, edges[-1])

    means = ", ".join(f"{name} {lengths[verdicts == name].mean():.1f}" for name in present)
    first, last = samples[0].step, samples[-1].step
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    return Chart(f"{when} lengths, {span}", draw(paint, x="tokens", y="responses, %"), f"Mean tokens: {means}.")
