"""The commands `baton plan` and `baton profile`: options and help. What they do is loaded when they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.options import Html, Json, Overrides, RecipePath
from baton.console import err, out, print_json, wide_out

Model = Annotated[Path, typer.Option(help="Hugging Face model directory, or its config.json; weights are not needed.")]
Load = Annotated[Path, typer.Option(help="Workload TOML, or a run's directory to measure it from.")]
Cluster = Annotated[Path | None, typer.Option(help="Cluster TOML: the GPUs there are.", show_default=False)]
Offers = Annotated[Path | None, typer.Option(help="Offers TOML: what can be rented.", show_default=False)]
Budget = Annotated[float | None, typer.Option(help="Price per hour: what to rent of the offers for most throughput.")]
Target = Annotated[
    float | None, typer.Option(help="Trained tokens per second: the cheapest of the offers that reaches it.")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Beside it: one GPU type at equal price, 75/25 and 50/50, taking turns.")
]
Colocated = Annotated[bool, typer.Option("--colocated", help="Trainer and engines take turns on the same GPUs.")]
HowToDivide = Annotated[
    Literal["exact", "paper"], typer.Option(help="How to divide: exact with a bound, or paper (equation 3).")
]
Symmetric = Annotated[
    bool, typer.Option("--symmetric-only", help="No training pipeline across GPU types (FSDP, Megatron).")
]
Rates = Annotated[
    Path | None,
    typer.Option(help="Your measured tokens per second and GPU, in place of the model.", show_default=False),
]
Calibration = Annotated[
    Path | None, typer.Option(help="Efficiencies by GPU type, as baton profile writes them.", show_default=False)
]
Running = Annotated[
    Path | None,
    typer.Option("--from", help="A running plan: the best new one that moves least.", show_default=False),
]
Lost = Annotated[
    str | None, typer.Option(help="Machines of the cluster that are gone, with commas between.", show_default=False)
]
Slack = Annotated[float, typer.Option(min=0, help="With --from: share of the step time given up to move less.")]
Limit = Annotated[float, typer.Option(min=1, help="Seconds of search; then the gap so far is reported.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the plan as JSON.", show_default=False)]


def plan(
    model: Model,
    workload: Load,
    cluster: Cluster = None,
    offers: Offers = None,
    budget: Budget = None,
    target_throughput: Target = None,
    compare: Compare = False,
    colocated: Colocated = False,
    method: HowToDivide = "exact",
    symmetric_only: Symmetric = False,
    rates: Rates = None,
    calibration: Calibration = None,
    running: Running = None,
    lost: Lost = None,
    slack: Slack = 0.02,
    time_limit: Limit = 60.0,
    write_to: Out = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Say which GPUs should train and which generate, how fast that is and what it costs.

    Nothing is started and no GPU is needed. With --cluster: the best plan of the GPUs there are. With --offers and
    --budget or --target-throughput: what to rent.
    """
    asked = dict(locals())
    from baton.cli.plan_request import PlanRequest, run

    run(PlanRequest(**asked), wide_out())


FileUnder = Annotated[
    str | None, typer.Option(help="Name of the catalogue to file it under; the default is this device's.")
]
AsLoad = Annotated[bool, typer.Option("--as-load", hidden=True, help="Generate until killed, beside a measurement.")]
CalibrationOut = Annotated[Path, typer.Option("--out", help="Where the calibration file goes.")]


def profile(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpu: FileUnder = None,
    write_to: CalibrationOut = Path("calibration.toml"),
    as_json: Json = False,
    as_load: AsLoad = False,
) -> None:
    """Measure this device: decode, prefill and training over batch and context; write a calibration file.

    It takes the recipe's model, engine and trainer, about a minute for the quickstart. The planner reads the file.
    """
    from baton.profile import keep_busy, write_calibration
    from baton.profile import profile as measure
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe

    loaded = load_recipe(Recipe, recipe, overrides or ())
    if as_load:
        keep_busy(loaded)

    def say(text: str) -> None:
        (err if as_json else out).print(text, soft_wrap=True)

    companion = [sys.executable, "-m", "baton", "profile", str(recipe), *(overrides or ()), "--as-load"]
    found = measure(loaded, gpu, say, companion)
    write_calibration(found, write_to)
    if as_json:
        print_json(found)
        return
    for phase in ("decode", "prefill", "train"):
        errors = [abs(p.predicted_s / p.seconds - 1) for p in found.points if p.phase == phase]
        say(f"{phase}: the cost model is within {max(errors):.0%} of {len(errors)} measurements")
    say(f"written: {write_to}; use it with baton plan --calibration {write_to}")
