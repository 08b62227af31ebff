"""The command `baton simulate`: options and help. What it does is loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Html, Json, Overrides
from baton.console import wide_out

PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan, as baton plan --out writes it.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="A recipe, on this machine.")]
Model = Annotated[Path | None, typer.Option(help="With --plan: the model it was made for.", show_default=False)]
Load = Annotated[
    Path | None, typer.Option(help="Workload TOML, or a run's directory to measure it from.", show_default=False)
]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="With --plan: its links and own GPU types.")]
Calibration = Annotated[Path | None, typer.Option(help="Efficiencies, as baton profile writes them.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Train steps; the recipe's, or 50.", show_default=False)]
Faults = Annotated[Path | None, typer.Option(help="Fault TOML: what goes wrong, and when.", show_default=False)]
Seed = Annotated[int, typer.Option(min=0, help="Of lengths, judges and faults: the same gives the same events.")]
Correlation = Annotated[float, typer.Option(min=0, max=1, help="Of lengths within a group.")]
Drift = Annotated[float, typer.Option(help="Share by which lengths grow with each train step.")]
JudgeCv = Annotated[float, typer.Option(min=0, help="Spread of judging times, over their mean.")]
Laws = Annotated[bool, typer.Option("--laws", help="Check every law at every event; slower.")]
SweepAxes = Annotated[
    list[str] | None,
    typer.Option("--sweep", help="key=value,value,… of [rollout]; several make a table of all.", show_default=False),
]
Trace = Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace.", show_default=False)]
LogFile = Annotated[Path | None, typer.Option("--log", help="Write every event and command.", show_default=False)]


def simulate(
    overrides: Overrides = None,
    plan: PlanFile = None,
    recipe: RecipeFile = None,
    model: Model = None,
    workload: Load = None,
    cluster: ClusterFile = None,
    calibration: Calibration = None,
    steps: Steps = None,
    faults: Faults = None,
    seed: Seed = 0,
    correlation: Correlation = 0.0,
    drift: Drift = 0.0,
    judge_cv: JudgeCv = 0.0,
    laws: Laws = False,
    sweep: SweepAxes = None,
    trace: Trace = None,
    html: Html = None,
    log: LogFile = None,
    as_json: Json = False,
) -> None:
    """Let a run happen in virtual time: how fast, how idle, how stale, what it costs, what a fault does to it.

    Nothing is started and no GPU is needed. The decisions are the live run's own; engines, trainer and links take the
    times of the cost model.
    """
    asked = dict(locals())
    from baton.cli.simulation_request import SimulationRequest, run

    run(SimulationRequest(**asked), wide_out())
