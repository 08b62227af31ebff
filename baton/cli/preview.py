"""The command `baton preview`: sample a few responses before a training."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import Json, Overrides, RecipePath
from baton.console import out, print_json


def preview(
    recipe: RecipePath,
    overrides: Overrides = None,
    num_prompts: Annotated[
        int, typer.Option("-n", "--num-prompts", min=1, help="Number of prompts; each has four responses.")
    ] = 4,
    as_json: Json = False,
) -> None:
    """Sample and score a few responses before any training, and report problems.

    Problems are printed as warnings. They do not change the exit code, because a few responses cannot prove a problem.
    A script reads the list `warnings` of the output of --json.
    """
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.run.preview import preview as make_preview
    from baton.views.terminal.trajectories import print_preview

    found = make_preview(load_recipe(Recipe, recipe, overrides or ()), num_prompts)
    if as_json:
        samples = [reading.shown for reading in found.responses]
        print_json({"samples": samples, "findings": found.findings, "warnings": found.warnings})
    else:
        print_preview(out, found)
