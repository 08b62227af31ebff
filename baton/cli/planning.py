"""The commands that need no GPU: `baton plan`, `baton simulate`, and the group `baton cluster`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.options import (
    MODEL,
    WORKLOAD,
    Calibration,
    ClusterFile,
    Html,
    Json,
    Overrides,
    command_group,
    print_written,
    show,
)
from baton.console import err, out, print_json, wide_out


def plan(
    model: Annotated[Path, MODEL],
    workload: Annotated[Path, WORKLOAD],
    cluster: ClusterFile = None,
    offers: Annotated[Path | None, typer.Option(help="Offers TOML: machines for rent.")] = None,
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


def simulate(
    overrides: Overrides = None,
    plan: Annotated[Path | None, typer.Option(help="Plan to simulate, written by `baton plan --out`.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe to simulate on this machine.")] = None,
    model: Annotated[Path | None, MODEL] = None,
    workload: Annotated[Path | None, WORKLOAD] = None,
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
        typer.Option(metavar="KEY=A,B,…", help="Simulate these values of a [rollout] key; repeatable."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace to this file.")] = None,
    html: Html = None,
    log: Annotated[Path | None, typer.Option(help="Write every event and command to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a run in virtual time: throughput, idle time, staleness, cost, and the effect of faults.

    Starts nothing and needs no GPU. The simulation runs the scheduler of real runs; the cost model predicts how long
    generation, training and transfers take. --plan needs the --model and the --workload of the plan.
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
    if isinstance(found, ParameterSweep) and found.recommended is None:
        raise typer.Exit(1)


cluster_app = command_group("Describe a cluster for `baton plan`.")


@cluster_app.command("describe")
def describe(
    ray: Annotated[str, typer.Option(metavar="ADDRESS", help="Address of the Ray head: HOST:PORT or auto.")],
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Write the cluster TOML to this file instead of printing it.")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="Cluster TOML to take links, prices and GPU types from.")] = None,
    name: Annotated[str, typer.Option(help="Name of the cluster in plans.")] = "ray",
    with_cpus: Annotated[
        bool, typer.Option("--with-cpus", help="Include machines without a GPU; each core counts as a device.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe the machines of a Ray cluster in a file for `baton plan --cluster`.

    GPU types are taken from Ray (accelerator_type:H100) or from custom resources gpu_type_NAME. Machines of unknown
    type are not included; a message names them. Ray does not report bandwidths, so assumed values are used and
    printed.
    """
    from baton.cluster.inventory import as_toml
    from baton.cluster.ray.connection import describe_ray
    from baton.files import check_output, write_whole

    if write_to is not None:
        check_output(write_to)
    described = describe_ray(ray, base=base, name=name, with_cpus=with_cpus)
    text = as_toml(described)
    if write_to is not None:
        write_whole(write_to, text.encode())
    for note in described.notes:
        err.print(note)
    if as_json:
        content = described.settings.model_dump(exclude_none=True, exclude_defaults=True)
        print_json({**content, "notes": described.notes})
    elif write_to is not None:
        print_written(write_to)
    else:
        out.print(text, end="")
