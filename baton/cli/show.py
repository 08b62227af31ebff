"""The command `baton show`: print the trajectories of a train step."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.options import Json, RunPath
from baton.console import out, print_json
from baton.errors import UserError


def show(
    run: RunPath,
    step: Annotated[int | None, typer.Option("--step", help="Train step; default: the last.")] = None,
    skipped: Annotated[
        bool, typer.Option("--skipped", help="Show the batch that `baton train --skip-batch` skipped.")
    ] = False,
    group: Annotated[int | None, typer.Option("--group", help="Show only the group with this id.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Longest response first.")] = False,
    task: Annotated[str | None, typer.Option("--task", help="Show only trajectories of this task.")] = None,
    correct: Annotated[
        bool | None, typer.Option("--correct/--wrong", help="Show only correct or only wrong trajectories.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Maximum number of trajectories.")] = 8,
    as_json: Json = False,
) -> None:
    """Show the trajectories of a train step: prompt, response, answer, reward."""
    from baton.views.terminal.trajectories import ORDERS, print_trajectories, read_trajectories

    chosen = [name for name, is_on in zip(ORDERS, (best, worst, longest), strict=True) if is_on]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other: give one order")
    order = chosen[0] if chosen else None
    found = read_trajectories(
        run, step, group=group, task=task, is_correct=correct, order=order, limit=limit, skipped=skipped
    )
    if as_json:
        print_json([reading.shown for reading in found])
    else:
        print_trajectories(out, found)
