"""The command `baton trace`: write a run's spans for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, RunPath
from baton.console import out, print_json


def trace(
    run: RunPath,
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Trace file to write; default: RUN/trace.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's timeline of generation, training and transfers for ui.perfetto.dev or chrome://tracing."""
    from baton.errors import UserError
    from baton.files import check_output, write_whole
    from baton.records.run_directory import RunDirectory
    from baton.records.trace import chrome_trace, read_trace

    spans = read_trace(RunDirectory.open(run).path)
    if not spans:
        raise UserError(f"{run} has no trace: it has no train step yet, or its recipe sets log.trace = false")
    path = write_to or run / "trace.json"
    check_output(path)
    write_whole(path, chrome_trace(spans))
    if as_json:
        print_json({"trace": str(path), "spans": len(spans)})
    else:
        out.print(f"{len(spans):,} spans: {path}; open it at https://ui.perfetto.dev")
