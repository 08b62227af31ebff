"""The command `baton plan`: decide which GPUs train and which generate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from baton.cli.options import Calibration, ClusterFile, Html, Json, Model, Workload, print_written
from baton.console import print_json, wide_out
from baton.errors import UserError

if TYPE_CHECKING:
    from baton.planner.instance import Inputs


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
        Literal["exact", "paper"], typer.Option(help="Exact search, or the method of AReaL-Hex (equation 3).")
    ] = "exact",
    symmetric_only: Annotated[
        bool, typer.Option("--symmetric-only", help="Do not train in a pipeline across GPU types.")
    ] = False,
    rates: Annotated[
        Path | None,
        typer.Option(help="Measured tokens per second of each GPU type (TOML), instead of the cost model."),
    ] = None,
    calibration: Calibration = None,
    running: Annotated[
        Path | None, typer.Option("--from", help="The running plan: replan, and prefer plans that move few GPUs.")
    ] = None,
    lost: Annotated[str | None, typer.Option(help="Machines that the cluster has lost, separated by commas.")] = None,
    slack: Annotated[
        float,
        typer.Option(min=0, help="With --from: accepted increase of the step time to move fewer GPUs, a fraction."),
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
    _check_options(
        {
            "--cluster": cluster,
            "--offers": offers,
            "--budget": budget,
            "--target-throughput": target_throughput,
            "--from": running,
            "--lost": lost,
            "--rates": rates,
            "--calibration": calibration,
            "--colocated": colocated or None,
            "--method": None if method == "exact" else method,
        }
    )
    if html is not None:
        from baton.views.pages.template import check_page

        check_page(html)

    from baton.planner.rental import OffersSettings
    from baton.planner.request import PlanRequest, run_request
    from baton.recipe.workload import read_settings
    from baton.specs.plan import read_plan, write_plan
    from baton.views.terminal.plan import print_plan

    request = PlanRequest(
        _inputs(model, workload, cluster, lost, calibration, rates, cross_types=not symmetric_only),
        offers=None if offers is None else read_settings(OffersSettings, offers),
        price_per_h=budget,
        tokens_per_s=target_throughput,
        running=None if running is None else read_plan(running),
        slack=slack,
        is_colocated=colocated,
        method=method,
        compares=compare or html is not None,
        time_limit_s=time_limit,
    )
    result = run_request(request)
    if write_to is not None:
        write_plan(result.plan, write_to)
    if html is not None:
        from baton.views.pages.plan import write_plan_page

        write_plan_page(html, result, result.price_curve())
    if as_json:
        print_json(result.public())
    else:
        print_plan(wide_out(), result)
        print_written(write_to, html)


def _check_options(values: Mapping[str, object]) -> None:
    """Raise UserError for options that contradict each other. Options that are not given have the value None."""
    given = {name for name, value in values.items() if value is not None}
    limits = given & {"--budget", "--target-throughput"}
    for name in sorted(limits):
        if not (limit := cast(float, values[name])) > 0:
            raise UserError(f"{name}: got {limit:g}, allowed are positive numbers")
    contradictions = {
        "--budget and --target-throughput exclude each other: fix the price or the throughput": len(limits) == 2,
        "--offers needs --budget or --target-throughput, and each of these needs --offers": (
            ("--offers" in given) != bool(limits)
        ),
        "give --cluster (existing GPUs), or --offers with --budget or --target-throughput": (
            ("--offers" in given) == ("--cluster" in given)
        ),
        "--from replans a cluster: give --cluster with it, without --offers and --colocated": (
            "--from" in given and bool(given & {"--offers", "--colocated"})
        ),
        "--colocated and --method apply to a --cluster: use them to plan the rented machines afterwards": (
            "--offers" in given and bool(given & {"--colocated", "--method"})
        ),
        "--rates and --calibration exclude each other: measured rates replace the cost model": (
            given >= {"--rates", "--calibration"}
        ),
        "--lost names machines of a cluster: give --cluster": "--lost" in given and "--cluster" not in given,
    }
    for sentence, holds in contradictions.items():
        if holds:
            raise UserError(sentence)


def _inputs(
    model: Path,
    workload: Path,
    cluster: Path | None,
    lost: str | None,
    calibration: Path | None,
    rates: Path | None,
    *,
    cross_types: bool,
) -> Inputs:
    """Read the files of a request. Without `cluster`, the cluster is empty."""
    from baton.cost.efficiency import CalibrationSettings, Efficiencies, RatesSettings
    from baton.planner.instance import Inputs
    from baton.planner.replan import without_nodes
    from baton.recipe.workload import read_cluster, read_settings, read_workload
    from baton.specs.cluster import Cluster
    from baton.specs.model import read_model

    existing = Cluster("none", (), ()) if cluster is None else read_cluster(cluster)
    if lost is not None:
        existing = without_nodes(existing, [name.strip() for name in lost.split(",") if name.strip()])
    return Inputs(
        cluster=existing,
        model=read_model(model),
        work=read_workload(workload),
        efficiencies=Efficiencies() if calibration is None else read_settings(CalibrationSettings, calibration).build(),
        rates=None if rates is None else read_settings(RatesSettings, rates),
        cross_types=cross_types,
    )
