"""The command `baton export`: write a run's model for other software."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, RunPath, print_written
from baton.console import print_json


def export(
    run: RunPath,
    to: Annotated[Path, typer.Argument(help="Directory to write, empty or absent.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option("--step", help="Train step of the checkpoint; default: the newest.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16; default: the dtype of the model with which the run started.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's model as a Hugging Face directory, with adapters merged and a model card."""
    from baton.run.export import export_run

    path = export_run(run, to, step=step, dtype=dtype)
    if as_json:
        print_json({"model": str(path)})
    else:
        print_written(path)
