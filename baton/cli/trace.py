"""The command `baton trace`: a run's spans for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, RunPath
from baton.console import out, print_json
from baton.errors import UserError
from baton.files import write_whole
from baton.records.run_directory import RunDirectory
from baton.records.trace import chrome_trace, read_trace


def trace(
    run: RunPath,
    to: Annotated[
        Path | None, typer.Option("--out", help="Where the trace goes; the default is RUN/trace.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write who did what when in a run, for ui.perfetto.dev or chrome://tracing."""
    spans = read_trace(RunDirectory.open(run).path)
    if not spans:
        raise UserError(f"{run} has no trace: the run has not made a step yet, or its recipe says log.trace = false")
    path = to or run / "trace.json"
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{path} is no place for a trace: allowed is a file in a directory that exists")
    write_whole(path, chrome_trace(spans))
    if as_json:
        print_json({"trace": str(path), "spans": len(spans)})
    else:
        out.print(f"{len(spans):,} spans: {path}; open it at https://ui.perfetto.dev", soft_wrap=True)
