"""The command `baton plan`: decide which GPUs train and which generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.options import Calibration, ClusterFile, Html, Json, Model, Workload, print_written
from baton.console import print_json, wide_out


def plan(
    model: Model,
    workload: Workload,
    cluster: ClusterFile = None,
    offers: Annotated[Path | None, typer.Option(help="Offers TOML: machines for rent.", show_default=False)] = None,
    budget: Annotated[
        float | None, typer.Option(help="With --offers: maximise throughput within this price per hour.")
    ] = None,
    target_throughput: Annotated[
        float | None,
        typer.Option(help="With --offers: minimise the price of at least this many trained tokens per second."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare with plans on one GPU type, with fixed splits and with colocation."),
    ] = False,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="Use the same GPUs for trainer and engines, alternately.")
    ] = False,
    method: Annotated[
        Literal["exact", "paper"],
        typer.Option(help="exact: Baton's search; paper: the method of AReaL-Hex (equation 3)."),
    ] = "exact",
    trainer: Annotated[
        Literal["baton", "idealised"],
        typer.Option(help="Trainer of the plan. Plans for the idealised trainer of AReaL-Hex are for comparison only."),
    ] = "baton",
    symmetric_only: Annotated[bool, typer.Option("--symmetric-only", help="Train on GPUs of one type only.")] = False,
    mixed_stages: Annotated[
        bool,
        typer.Option(
            "--mixed-stages",
            help="Also consider stages whose ranks are on two GPU types, with rows in proportion to their speeds.",
        ),
    ] = False,
    robust: Annotated[
        bool, typer.Option("--robust", help="Maximise the worst throughput within the ranges of the calibration.")
    ] = False,
    rates: Annotated[
        Path | None,
        typer.Option(help="TOML with measured tokens per second of each GPU type; replaces the cost model."),
    ] = None,
    calibration: Calibration = None,
    running: Annotated[
        Path | None, typer.Option("--from", help="Replan a running plan (JSON): prefer plans that move few GPUs.")
    ] = None,
    lost: Annotated[str | None, typer.Option(help="Machines that the cluster has lost, separated by commas.")] = None,
    slack: Annotated[
        float,
        typer.Option(min=0, help="With --from: accept a plan that is slower by this fraction if it moves fewer GPUs."),
    ] = 0.02,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Maximum seconds of search; the remaining gap to the optimum is reported.")
    ] = 60.0,
    write_to: Annotated[Path | None, typer.Option("--out", help="Write the plan as JSON to this file.")] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Plan which GPUs train and which generate, with the expected speed and cost.

    Starts nothing and needs no GPU. --cluster gives the best plan for existing GPUs. --offers, with --budget or
    --target-throughput, also selects the machines to rent.
    """
    from baton.plan import plan as make_plan
    from baton.views.terminal.plan import print_plan

    result = make_plan(
        model,
        workload,
        cluster,
        offers=offers,
        budget=budget,
        target_throughput=target_throughput,
        compare=compare,
        colocated=colocated,
        method=method,
        trainer=trainer,
        symmetric_only=symmetric_only,
        mixed_stages=mixed_stages,
        robust=robust,
        rates=rates,
        calibration=calibration,
        running=running,
        lost=[name.strip() for name in (lost or "").split(",") if name.strip()],
        slack=slack,
        time_limit=time_limit,
        write_to=write_to,
        html=html,
    )
    if as_json:
        print_json(result.public())
    else:
        print_plan(wide_out(), result)
        print_written(write_to, html)
