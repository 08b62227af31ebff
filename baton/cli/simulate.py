"""The command `baton simulate`: simulate a run in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from baton.errors import UserError

if TYPE_CHECKING:
    from baton.records.trace import Span
    from baton.simulator.input_sources import SettingSource
    from baton.simulator.parameter_sweep import ParameterSweep
    from baton.simulator.result import Result


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
    laws: Annotated[bool, typer.Option("--laws", help="Check every invariant at every event; slower.")] = False,
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

    Starts nothing and needs no GPU. The code of a real run makes the scheduling decisions; the cost model gives the
    times of engines, trainer and links. --plan needs the --model and the --workload of the plan.
    """
    from baton.recipe.load import load_recipe
    from baton.simulator.faults import FaultsSettings
    from baton.simulator.input_sources import SimulationOptions, recorded_groups
    from baton.simulator.parameter_sweep import read_axes
    from baton.simulator.parameter_sweep import sweep as sweep_parameters
    from baton.simulator.request import SimulationRequest, run_request
    from baton.simulator.run import RunOptions
    from baton.views.terminal.simulation import print_result, print_sweep

    source = _source(plan, recipe, model, workload, cluster, calibration)
    simulation_options = SimulationOptions(
        tuple(overrides or ()),
        steps,
        correlation,
        drift,
        judge_cv,
        recorded=recorded_groups(workload) if workload is not None and workload.is_dir() else (),
        is_detailed=faults is not None or laws,
    )
    if html is not None:
        from baton.views.pages.template import check_page

        check_page(html)
    failing = FaultsSettings() if faults is None else load_recipe(FaultsSettings, faults)
    options = RunOptions(seed, failing.schedule(seed), laws)
    if sweep:
        swept = sweep_parameters(source, simulation_options, read_axes(sweep), options)
        _write_sweep(swept, html)
        show(swept, print_sweep, as_json=as_json, console=wide_out())
    else:
        is_traced = trace is not None or html is not None
        result, spans = run_request(SimulationRequest(source.setting(simulation_options), options, log, is_traced))
        _write_result(result, spans, html, trace)
        show(result, print_result, as_json=as_json, console=wide_out())
    if not as_json:
        print_written(log, html, trace)


def _write_sweep(swept: ParameterSweep, html: Path | None) -> None:
    if html is not None:
        from baton.views.pages.simulation import write_sweep_page

        write_sweep_page(html, swept)


def _write_result(result: Result, spans: Sequence[Span], html: Path | None, trace: Path | None) -> None:
    if trace is not None:
        from baton.files import write_whole
        from baton.records.trace import chrome_trace

        write_whole(trace, chrome_trace(spans))
    if html is not None:
        from baton.views.pages.simulation import write_result_page

        write_result_page(html, result, spans)


def _source(
    plan: Path | None,
    recipe: Path | None,
    model: Path | None,
    workload: Path | None,
    cluster: Path | None,
    calibration: Path | None,
) -> SettingSource:
    from baton.cost.efficiency import CalibrationSettings, Efficiencies
    from baton.recipe.workload import read_cluster, read_settings, read_workload
    from baton.simulator.input_sources import PlanSource, RecipeSource
    from baton.specs.model import read_model
    from baton.specs.plan import read_plan

    efficiencies = None if calibration is None else read_settings(CalibrationSettings, calibration).build()
    work = None if workload is None else read_workload(workload)
    if recipe is not None and plan is None:
        return RecipeSource(recipe, efficiencies, work)
    if plan is None or recipe is not None:
        raise UserError("give exactly one of --plan (GPUs of a plan) and --recipe (this machine)")
    found = read_plan(plan)
    if model is None or work is None:
        raise UserError("--plan needs --model and --workload: give the model and the workload of the plan")
    links = None if cluster is None else read_cluster(cluster)
    return PlanSource(found, read_model(model), work, efficiencies or Efficiencies(), links)
