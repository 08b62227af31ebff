"""Write pages of a simulated run and of a parameter sweep: self-contained HTML without scripts or network access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from baton.files import write_whole
from baton.planner.plan_from_solution import seconds
from baton.records.trace import Span
from baton.simulator.parameter_sweep import ParameterSweep, SweepPoint
from baton.simulator.result import Result
from baton.views.pages.canvas import BLUE, GREEN, GREY, ORANGE, SERIES, Chart, draw
from baton.views.pages.slots import slot_pictures
from baton.views.pages.template import render_template
from baton.views.terminal.plan import money


def write_result_page(path: Path, result: Result, spans: Sequence[Span] = ()) -> None:
    """Write the page of a simulated run to a path that has passed `check_page`."""
    parts = {"train": result.train_s, "wait for a batch": result.wait_s, "publish, other": max(0.0, result.other_s)}
    lags = {str(lag): 100 * share for lag, share in result.staleness.items()} or {"0": 0.0}
    untrained = _untrained(result)
    charts = [
        _bars("Time of a train step", parts, (ORANGE, GREY, GREEN), y="s"),
        _bars("Staleness of the tokens in the batches", lags, (BLUE,), x="versions behind the trainer", y="%"),
    ]
    if untrained:
        note = "Tokens carried at the end would be trained in later batches."
        charts.append(_bars("Tokens that were not trained", untrained, SERIES, y="% of generated", note=note))
    rows = [(f"{e.num} × {e.name}", f"{e.occupancy:.0%}", f"{e.tokens_per_s:,.0f}") for e in result.engines]
    page = render_template(
        "simulation.html",
        title=f"Simulated run, {result.mode}",
        said=f"{result.steps} train steps in {seconds(result.seconds)} of virtual time",
        tiles=_tiles(result),
        charts=charts,
        pictures=slot_pictures(spans) if spans else (),
        heading=("engines", "slots taken", "tokens/s"),
        rows=rows,
        notes=[*result.notes, *([] if untrained else ["every generated token was trained"])],
    )
    write_whole(path, page.encode())


def write_sweep_page(path: Path, swept: ParameterSweep) -> None:
    """Write the page of a parameter sweep to a path that has passed `check_page`."""
    charts = [
        _lines(swept, "Throughput", "trained tokens/s", lambda r: r.trained_tokens_per_s),
        _lines(swept, "Trainer utilisation", "%", lambda r: 100 * r.trainer_busy),
        _lines(swept, "Mean staleness", "versions", lambda r: r.mean_staleness),
        _lines(swept, "Tokens masked for staleness", "%", lambda r: 100 * r.masked_share),
    ]
    rows = [
        (
            " ".join(f"{k}={v}" for k, v in point.values.items()),
            f"{point.result.trained_tokens_per_s:,.0f}" if point.result else "—",
            ("recommended" if place == swept.recommended else "") if point.result else point.why_not,
        )
        for place, point in enumerate(swept.points)
    ]
    chosen = swept.points[swept.recommended].result if swept.recommended is not None else None
    page = render_template(
        "simulation.html",
        title=f"Parameter sweep over {', '.join(axis.key for axis in swept.axes)}",
        said=swept.why,
        tiles=_tiles(chosen) if chosen is not None else [],
        charts=charts,
        heading=("setting", "trained tokens/s", ""),
        rows=rows,
        notes=chosen.notes if chosen is not None else (),
        pictures=(),
    )
    write_whole(path, page.encode())


def _tiles(result: Result) -> list[tuple[str, str, str]]:
    price, unit = money(result.price, result.currency).split(" ", 1)
    return [
        ("Throughput", f"{result.trained_tokens_per_s:,.0f}", "trained tokens per second"),
        ("Train step", seconds(result.step_s), f"± {seconds(result.step_s_spread)}"),
        ("Trainer", f"{result.trainer_busy:.0%}", "of the time busy"),
        ("Slots", f"{result.rollout_occupancy:.0%}", "of slot time used"),
        ("Staleness", f"{result.mean_staleness:.2f}", f"versions; {result.masked_share:.1%} masked"),
        ("Price", price, f"{unit} for the run"),
    ]


def _bars(
    title: str, values: Mapping[str, float], colours: Sequence[str], *, x: str = "", y: str, note: str = ""
) -> Chart:
    """Return a bar chart of values by name. The colours are repeated if there are more bars."""

    def paint(axes: Axes) -> None:
        axes.bar([*values], [*values.values()], color=colours, width=0.7)

    return Chart(title, draw(paint, x=x, y=y, from_zero=True), note)


def _untrained(result: Result) -> dict[str, float]:
    """Return the percentages of the generated tokens that were not trained, by outcome."""
    total = max(1, result.tokens["generated"])
    accounts = {name: count for name, count in result.tokens.items() if name not in ("generated", "trained")}
    return {name: 100 * count / total for name, count in accounts.items() if count}


def _lines(swept: ParameterSweep, title: str, unit: str, value: Callable[[Result], float]) -> Chart:
    """Return a chart: the sweep's last axis is horizontal, and each combination of the other axes is a line."""
    last = swept.axes[-1]
    lines: dict[str, list[SweepPoint]] = {}
    for point in swept.points:
        name = " ".join(f"{axis.key}={point.values[axis.key]}" for axis in swept.axes[:-1])
        lines.setdefault(name, []).append(point)

    def paint(axes: Axes) -> None:
        for (name, points), colour in zip(lines.items(), cycle(SERIES), strict=False):
            ys = [value(p.result) if p.result is not None else np.nan for p in points]
            axes.plot(range(len(points)), ys, marker="o", color=colour, label=name or None)
        axes.set_xticks(range(len(last.values)), last.values)

    return Chart(title, draw(paint, x=last.key, y=unit, from_zero=True))
