"""The command `baton profile`: measure this device for the cost model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, Overrides, RecipePath
from baton.console import err, out, print_json


def profile(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU type in the catalogue; default: the type of this device.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Train steps of the run that is measured.")] = 16,
    write_to: Annotated[Path, typer.Option("--out", help="Calibration file to write.")] = Path("calibration.toml"),
    as_json: Json = False,
    as_load: Annotated[
        bool, typer.Option("--as-load", hidden=True, help="Generate until killed, as background load of a measurement.")
    ] = False,
) -> None:
    """Measure decoding, prefill, training and a short run on this device, and write a calibration file.

    Uses the recipe's model, engine and trainer; takes about a minute for the quickstart. The file is for
    `baton plan --calibration`, and for the predictions of a run.
    """
    from baton.profile.engine import keep_busy
    from baton.profile.measure import profile as measure
    from baton.profile.measure import write_calibration
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe

    loaded = load_recipe(Recipe, recipe, overrides or ())
    if as_load:
        keep_busy(loaded)

    say = (err if as_json else out).print
    companion = [sys.executable, "-m", "baton", "profile", str(recipe), *(overrides or ()), "--as-load"]
    found = measure(loaded, gpu, say, companion, num_steps=steps)
    write_calibration(found, write_to)
    if as_json:
        print_json(found)
        return
    for phase in ("decode", "prefill", "train"):
        errors = [abs(p.predicted_s / p.seconds - 1) for p in found.points if p.phase == phase]
        say(f"{phase}: the cost model is within {max(errors):.0%} of {len(errors)} measurements")
    say(f"written: {write_to}; use it with baton plan --calibration {write_to}")
