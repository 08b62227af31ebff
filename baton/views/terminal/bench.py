"""Print the result of `baton bench rollout`."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from baton.console import Console
from baton.profile.bench import CONTROL, BenchResult


def print_bench(console: Console, result: BenchResult) -> None:
    """Print a table of the modes, the time of a decode step by its number of rows, and the upper bound."""
    unit = "step" if result.clock == "steps" else "s"
    title = (
        f"{result.slots} slots, response lengths: mean {result.mean_tokens:g}, maximum {result.longest_tokens} tokens, "
        f"spread {result.between:g} between groups and {result.within:g} within"
    )
    console.print(title)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    headings = (f"tokens/{unit}", "× sync", f"× {CONTROL}", "of bound", "rows used", "full step", "prefilled again")
    for heading in ("mode", *headings):
        table.add_column(
            heading, justify="left" if heading == "mode" else "right", no_wrap=heading != "prefilled again"
        )
    for mode in result.modes:
        table.add_row(
            mode.mode,
            f"{mode.tokens_per_s:,.0f}",
            _ratio(mode.over_sync),
            _ratio(mode.over_control),
            f"{mode.of_bound:.0%}",
            f"{mode.occupancy:.0%}",
            "" if mode.full_step_ms is None or result.clock == "steps" else f"{mode.full_step_ms:.2f} ms",
            f"{mode.reprefilled_frac:.1%}",
        )
    console.print(table)
    if result.clock != "steps":
        curve = ", ".join(f"{width}: {ms:.2f}" for width, ms in result.step_ms_by_width.items())
        console.print(f"ms of a decode step by number of rows: {curve}")
    if result.bound_over_sync is not None:
        console.print(f"upper bound, with all slots always busy: {result.bound_over_sync:.2f} × sync")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
