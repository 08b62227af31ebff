"""The commands that list what a recipe may contain: `baton keys`, `baton tasks` and `baton algorithms`."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import Json, show


def keys(
    section: Annotated[str | None, typer.Argument(help="List only this section, such as rollout.")] = None,
    as_json: Json = False,
) -> None:
    """List every key of a recipe with its default and meaning."""
    from baton.recipe.keys import recipe_keys
    from baton.views.terminal.lists import print_keys

    show(recipe_keys(section), print_keys, as_json=as_json)


def tasks(
    name: Annotated[str | None, typer.Argument(help="Show only this task, with its parameters.")] = None,
    as_json: Json = False,
) -> None:
    """List the generated tasks, each with an example."""
    from baton.tasks.gym import list_tasks
    from baton.views.terminal.lists import print_tasks

    show(list_tasks(name), print_tasks, as_json=as_json)


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Show only this algorithm, with the values of all keys.")] = None,
    as_json: Json = False,
) -> None:
    """List the algorithm presets with their papers and settings."""
    from baton.recipe.presets import list_algorithms
    from baton.views.terminal.lists import print_algorithms

    show(list_algorithms(name), print_algorithms, as_json=as_json)
