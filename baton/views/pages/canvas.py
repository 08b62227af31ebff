"""Draw charts with matplotlib as inline SVG, in the fonts and colours of the page.

The page has a light and a dark colour scheme. Figures therefore use placeholder colours, which `to_svg` replaces by CSS
variables of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from baton.console import visible

SERIES = tuple(f"#01020{i}" for i in range(1, 8))
"""Placeholders of the page's data colours `--s1` to `--s7`, which colour-blind readers can distinguish."""
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, GREY = SERIES
INK, RULE = "#010208", "#010209"
"""Placeholders of the colours of text and of grid lines."""
_VARIABLES = {
    **{colour: f"var(--s{i})" for i, colour in enumerate(SERIES, start=1)},
    INK: "var(--ink-2)",
    RULE: "var(--rule)",
}
WIDTH_IN, HEIGHT_IN = 5.0, 2.85
LEGEND_CHARACTERS = 58
"""Maximum number of characters per line of the legend; a marker counts as four characters."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "baton",  # without a fixed salt, ids are random, and the pages of two equal runs differ
    "text.parse_math": False,  # a "$" in a task's or metric's name is text
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.left": False,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.2,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "lines.solid_capstyle": "round",
    "hatch.linewidth": 0.8,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with title and note."""

    title: str
    svg: str
    note: str = ""
    """Explanation for the reader, plain text."""


def draw(
    paint: Callable[[Axes], None],
    *,
    x: str = "train step",
    y: str,
    last_step: int | None = None,
    from_zero: bool = False,
) -> str:
    """Return the SVG of a chart.

    `paint` draws on empty axes. `x` and `y` are the labels of the axes, with units. If the horizontal axis is train
    steps, `last_step` is the end of its range. With `from_zero`, the vertical axis begins at zero.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if last_step is not None:
            end = max(1, last_step)
            axes.set_xlim(-0.02 * end, 1.02 * end)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
        paint(axes)
        if from_zero:
            axes.set_ylim(bottom=0)
        _tick(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            widths = [len(label) + 4 for label in labels]
            columns = len(labels) if sum(widths) <= LEGEND_CHARACTERS else max(1, LEGEND_CHARACTERS // max(widths))
            axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)
        page = StringIO()
        figure.savefig(
            page, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return to_svg(page.getvalue())


def label_of(name: str) -> str:
    """Return an untrusted name as a curve's label, never with "_" first, because matplotlib omits such labels."""
    return visible(f" {name}" if name.startswith("_") else name)


def stack_bars(
    axes: Axes, lefts: NDArray[np.float64], bars: Iterable[tuple[str, str, NDArray[np.float64]]], **style: Any
) -> None:
    """Draw stacked bars. `bars` has the label, the colour and the heights of each series."""
    bottom = np.zeros(len(lefts))
    for label, colour, heights in bars:
        axes.bar(lefts, heights, bottom=bottom, color=colour, label=label, **style)
        bottom = bottom + heights


def _tick(axes: Axes) -> None:
    """Place the vertical ticks at round numbers. Label them in plain text, because `_STYLE` disables math text."""
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.set_ylim(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high)))
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if max(map(abs, axes.get_ylim())) >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def to_svg(drawing: str) -> str:
    """Convert matplotlib's SVG file to an `<svg>` element of a page: remove its header, sizes, fonts and unused ids."""
    svg = drawing[drawing.index("<svg") :]
    svg = re.sub(r"<style.*?</style>|<metadata.*?</metadata>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    svg = re.sub(r' xmlns(?::\w+)?="[^"]*"| version="[^"]*"', "", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    svg = re.sub("|".join(_VARIABLES), lambda m: _VARIABLES[m[0]], svg)
    return re.sub(r">\s+<", "><", svg).replace("<svg ", '<svg role="img" ', 1).strip()
