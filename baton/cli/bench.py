"""The command group `baton bench`: comparisons on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import Commands, Json, Overrides, RecipePath, show

bench_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Measure this machine with a recipe's model and settings."
)


@bench_app.callback()
def _bench() -> None:
    """Make `bench` a group: without a callback, typer would turn its only command into `baton bench` itself."""


@bench_app.command("rollout")
def rollout(
    recipe: RecipePath,
    overrides: Overrides = None,
    modes: Annotated[str, typer.Option(help="Modes to compare, separated by commas.")] = "sync,partial,async",
    tail: Annotated[float, typer.Option(min=1.5, help="Ratio of the longest response to the mean response.")] = 6.0,
    between: Annotated[float, typer.Option(min=0, help="Standard deviation of log(length) between groups.")] = 0.6,
    within: Annotated[float, typer.Option(min=0, help="Standard deviation of log(length) within a group.")] = 0.6,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured batches of each mode.")] = 12,
    flat: Annotated[
        bool, typer.Option("--flat", help="Run no engine; assume that step time is independent of batch size.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the throughput of the rollout modes on this machine, with random response lengths."""
    from baton.profile.bench_recipe import bench_rollout
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.views.terminal.bench import print_bench

    loaded = load_recipe(Recipe, recipe, overrides or ())
    names = [mode.strip() for mode in modes.split(",") if mode.strip()]
    result = bench_rollout(loaded, names, tail=tail, between=between, within=within, steps=steps, flat=flat)
    show(result, print_bench, as_json=as_json)
