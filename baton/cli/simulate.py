"""The command `baton simulate`: simulate a run in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import (
    Calibration,
    ClusterFile,
    Html,
    Json,
    OptionalModel,
    OptionalWorkload,
    Overrides,
    print_written,
    show,
)
from baton.console import wide_out


def simulate(
    overrides: Overrides = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Plan to simulate, written by `baton plan --out`.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Recipe to simulate on this machine.")] = None,
    model: OptionalModel = None,
    workload: OptionalWorkload = None,
    cluster: ClusterFile = None,
    calibration: Calibration = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train steps; default: the recipe's, or 50.")] = None,
    faults: Annotated[Path | None, typer.Option(help="Faults TOML: failures and their times.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, reward times and faults.")] = 0,
    correlation: Annotated[float, typer.Option(min=0, max=1, help="Correlation of lengths within a group.")] = 0.0,
    drift: Annotated[float, typer.Option(help="Relative growth of lengths per train step.")] = 0.0,
    judge_cv: Annotated[
        float, typer.Option(min=0, help="Standard deviation of reward times divided by their mean.")
    ] = 0.0,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=A,B,…", help="Simulate these values of a [rollout] key; repeatable."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace to this file.")] = None,
    html: Html = None,
    log: Annotated[Path | None, typer.Option("--log", help="Write every event and command to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a run in virtual time: throughput, idle time, staleness, cost, and the effect of faults.

    Starts nothing and needs no GPU. Scheduling uses the code of a real run. The cost model gives the times of engines,
    trainer and links. --plan needs the --model and the --workload of the plan.
    """
    from baton.simulate import simulate as run_simulation
    from baton.simulator.parameter_sweep import ParameterSweep
    from baton.views.terminal.simulation import print_result, print_sweep

    found = run_simulation(
        recipe,
        overrides or (),
        plan=plan,
        model=model,
        workload=workload,
        cluster=cluster,
        calibration=calibration,
        steps=steps,
        faults=faults,
        seed=seed,
        correlation=correlation,
        drift=drift,
        judge_cv=judge_cv,
        sweep=sweep or (),
        log=log,
        trace=trace,
        html=html,
    )
    if isinstance(found, ParameterSweep):
        show(found, print_sweep, as_json=as_json, console=wide_out())
    else:
        show(found, print_result, as_json=as_json, console=wide_out())
    if not as_json:
        print_written(log, html, trace)
