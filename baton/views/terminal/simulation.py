"""Print the result of a simulated run, or of a parameter sweep."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from baton.console import Console
from baton.planner.plan_from_solution import seconds
from baton.simulator.parameter_sweep import ParameterSweep, SweepPoint
from baton.simulator.result import Result
from baton.views.terminal.plan import money

RECOMMENDED = "← recommended"


def print_result(console: Console, result: Result) -> None:
    """Print the figures of one simulated run."""
    console.print(
        f"{result.mode}, {result.steps} train steps in {seconds(result.seconds)} of virtual time "
        f"(the figures of a step exclude the first {result.warm_steps} steps)",
        style="italic",
    )
    lags = ", ".join(f"{lag}: {share:.0%}" for lag, share in result.staleness.items())
    lines = [
        f"step {seconds(result.step_s)} ± {seconds(result.step_s_spread)}: train {seconds(result.train_s)}, wait for "
        f"the batch {seconds(result.wait_s)}, publication and other {seconds(max(0.0, result.other_s))}",
        f"throughput {result.trained_tokens_per_s:,.0f} trained tokens/s, {result.generated_tokens_per_s:,.0f} "
        f"generated tokens/s, {result.trajectories_per_s:,.2f} trajectories/s",
        f"staleness {result.mean_staleness:.2f} versions on average ({lags}); masked {result.masked_share:.1%}; "
        f"{result.carried_groups:.1f} groups carried, {result.carry_age:.2f} versions old",
    ]
    if result.price:
        per_million = money(result.price_per_million_tokens, result.currency)
        cost = f"cost {money(result.price, result.currency)} for the run, {per_million} per million trained tokens"
        lines.insert(2, cost)
    console.print("\n".join(lines))
    console.print(_engines(result))
    tokens = ", ".join(f"{name} {count:,}" for name, count in result.tokens.items() if count)
    console.print(f"tokens: {tokens}")
    if result.outcomes:
        outcomes = ", ".join(f"{name} × {count}" for name, count in result.outcomes.items())
        console.print(f"outcomes: {outcomes}")
    for note in result.notes:
        console.print(f"note: {note}", style="dim")


def _engines(result: Result) -> Table:
    headings = ("decode", "prefill", "load", "idle", "slots taken", "tokens/s", "preempted")
    table = Table("", *(Column(heading, justify="right") for heading in headings), box=SIMPLE_HEAD)
    for e in result.engines:
        shares = [f"{share:.0%}" for share in (e.decode, e.prefill, e.load, e.idle, e.occupancy)]
        table.add_row(f"{e.num} × {e.name}", *shares, f"{e.tokens_per_s:,.0f}", str(e.preemptions))
    table.add_row("trainer", f"{result.trainer_busy:.0%} busy", *[""] * 6)
    return table


def print_sweep(console: Console, swept: ParameterSweep) -> None:
    """Print a table of the sweep, and the recommended setting."""
    headings = ("trained tokens/s", "step", "wait", "trainer busy", "slots taken", "staleness", "masked")
    axes = (Column(axis.key, justify="right", min_width=len(axis.key), no_wrap=True) for axis in swept.axes)
    mark = Column("", min_width=len(RECOMMENDED), no_wrap=True)
    table = Table(*axes, *(Column(name, justify="right") for name in headings), mark, box=SIMPLE_HEAD)
    for place, point in enumerate(swept.points):
        values = [point.values[axis.key] for axis in swept.axes]
        table.add_row(*values, *_cells(point), RECOMMENDED if place == swept.recommended else "")
    console.print(table)
    for point in swept.points:
        if point.result is None:
            setting = ", ".join(f"{k}={v}" for k, v in point.values.items())
            console.print(f"{setting}: {point.why_not}")
    if swept.recommended is not None:
        chosen = swept.points[swept.recommended].values
        keys = " ".join(f"rollout.{k}={v}" for k, v in chosen.items())
        console.print(f"recommended: {keys}: {swept.why}")
    else:
        console.print(swept.why)


def _cells(point: SweepPoint) -> list[str]:
    r = point.result
    if r is None:
        return ["invalid combination", *[""] * 6]
    return [
        f"{r.trained_tokens_per_s:,.0f}",
        seconds(r.step_s),
        seconds(r.wait_s),
        f"{r.trainer_busy:.0%}",
        f"{r.rollout_occupancy:.0%}",
        f"{r.mean_staleness:.2f}",
        f"{r.masked_share:.1%}",
    ]
