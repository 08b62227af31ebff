"""Print the result of `baton bench rollout`."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from baton.console import Console
from baton.profile.bench import CONTROL, BenchResult


def print_bench(console: Console, result: BenchResult) -> None:
    """Print a row for each rollout mode and for an ideal engine. If the benchmark measured time (`clock` is not
    `steps`), also print the times of decode steps and of prefill."""
    is_simulated = result.clock == "steps"
    what = "simulated, without a model; all decode steps take the same time, and prefill is free: " * is_simulated
    console.print(
        f"{what}{result.slots} slots, response lengths: mean {result.mean_tokens:.4g}, maximum {result.longest_tokens} "
        f"tokens, spread {result.between:g} between groups and {result.within:g} within"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("mode", no_wrap=True)
    unit = "step" if is_simulated else "s"
    headings = [f"tokens\nper {unit}", "× sync", f"×\n{CONTROL}", "of\nideal", "prefilled\nagain"]
    for heading in headings + ["rows\nused", "full step,\nms"] * (not is_simulated):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode in result.modes:
        ratios = (_ratio(mode.over_sync), _ratio(mode.over_control), f"{mode.of_bound:.0%}")
        full_step = "" if mode.full_step_ms is None else f"{mode.full_step_ms:.2f}"
        cells = [f"{mode.tokens_per_s:,.0f}", *ratios, f"{mode.reprefilled_frac:.1%}"]
        table.add_row(mode.mode, *cells, *[f"{mode.occupancy:.0%}", full_step] * (not is_simulated))
    ideal = result.modes[0].tokens_per_s / result.modes[0].of_bound
    table.add_row("ideal", f"{ideal:,.0f}", _ratio(result.bound_over_sync), "", "100%", "0.0%")
    console.print(table)
    console.print("ideal: the engine alone; all slots are always in use, and each prompt is prefilled once")
    if not is_simulated:
        curve = ", ".join(f"{width}: {ms:.2f}" for width, ms in result.step_ms_by_width.items())
        console.print(f"ms of a decode step by number of rows: {curve}")
        console.print(f"ms of prefill per token: {result.prefill_ms_per_token:.3g}")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
