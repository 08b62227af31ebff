"""The command `baton show`: print recorded trajectories."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from baton.cli.options import Json, RunPath
from baton.console import out, print_json
from baton.records.run_directory import Source


def show(
    run: RunPath,
    step: Annotated[int | None, typer.Option("--step", help="Train step; default: the last recorded one.")] = None,
    source: Annotated[
        Source,
        typer.Option(
            "--from",
            help="The batch of the step; the sampled or greedy responses of the evaluation after the step; or the "
            "batch that `baton train --skip-batch` removed.",
        ),
    ] = "batch",
    group: Annotated[int | None, typer.Option("--group", help="Show only the group with this id.")] = None,
    order: Annotated[
        Literal["best", "worst", "longest"] | None,
        typer.Option("--sort", help="Sort by reward (best or worst first), or by response length (longest first)."),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Show only trajectories of this task.")] = None,
    correct: Annotated[
        bool | None, typer.Option("--correct/--wrong", help="Show only correct or only wrong trajectories.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Maximum number of trajectories.")] = 8,
    as_json: Json = False,
) -> None:
    """Show recorded trajectories of a train step or an evaluation: prompt, response, answer, reward."""
    from baton.run.trajectories import read_trajectories
    from baton.views.terminal.trajectories import print_trajectories

    found = read_trajectories(
        run, step, group=group, task=task, is_correct=correct, order=order, limit=limit, source=source
    )
    if as_json:
        print_json([reading.shown for reading in found])
    else:
        print_trajectories(out, found)
