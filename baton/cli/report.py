"""The command `baton report`: summarise a run, or write its HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, RunPath, print_written, show
from baton.console import print_json
from baton.errors import UserError


def report(
    run: RunPath,
    html: Annotated[bool, typer.Option("--html", help="Write an HTML page with charts and examples.")] = False,
    write_to: Annotated[
        Path | None, typer.Option("--out", help="With --html: file of the page; default: RUN/report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Summarise a run, in numbers or as one self-contained HTML page."""
    from baton.records.run_directory import RunDirectory

    if write_to is not None and not html:
        raise UserError("--out needs --html, because it names the file of the HTML page")
    opened = RunDirectory.open(run)
    if not html:
        from baton.run.summary import summarise
        from baton.views.terminal.report import print_report

        show(summarise(opened), print_report, as_json=as_json)
        return
    from baton.views.pages.report import write_page

    path = write_to or run / "report.html"
    write_page(opened, path)
    if as_json:
        print_json({"page": str(path)})
    else:
        print_written(path)
