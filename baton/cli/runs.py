"""The commands that read a run: `baton show`, `baton report`, `baton export` and `baton trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli.options import Json, RunPath, print_written
from baton.cli.options import show as print_record
from baton.console import out, print_json
from baton.errors import UserError
from baton.records.run_directory import RunDirectory, Source


def show(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="Train step; default: the last recorded one.")] = None,
    source: Annotated[
        Source,
        typer.Option(
            "--from",
            help="The batch of the step; the sampled or greedy responses of the evaluation after the step; or the "
            "batch that `baton train --skip-batch` removed.",
        ),
    ] = "batch",
    group: Annotated[int | None, typer.Option(help="Show only the group with this id.")] = None,
    order: Annotated[
        Literal["best", "worst", "longest"] | None,
        typer.Option("--sort", help="Sort by reward (best or worst first), or by response length (longest first)."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Show only trajectories of this task.")] = None,
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


def report(
    run: RunPath,
    html: Annotated[bool, typer.Option("--html", help="Write an HTML page with charts and examples.")] = False,
    write_to: Annotated[
        Path | None, typer.Option("--out", help="With --html: file of the page; default: RUN/report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Summarise a run, in numbers or as one self-contained HTML page."""

    if write_to is not None and not html:
        raise UserError("--out needs --html, because it names the file of the HTML page")
    opened = RunDirectory.open(run)
    if not html:
        from baton.run.summary import summarise
        from baton.views.terminal.report import print_report

        print_record(summarise(opened), print_report, as_json=as_json)
        return
    from baton.views.pages.report import write_page

    path = write_to or run / "report.html"
    write_page(opened, path)
    if as_json:
        print_json({"page": str(path)})
    else:
        print_written(path)


def export(
    run: RunPath,
    to: Annotated[Path, typer.Argument(help="Directory to write, empty or absent.")],
    step: Annotated[int | None, typer.Option(help="Train step of the checkpoint; default: the newest.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: the dtype of the model with which the run started."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's model as a Hugging Face directory, with merged adapters and a model card."""
    from baton.run.export import export_run

    path = export_run(run, to, step=step, dtype=dtype)
    if as_json:
        print_json({"model": str(path)})
    else:
        print_written(path)


def trace(
    run: RunPath,
    write_to: Annotated[
        Path | None, typer.Option("--out", help="Trace file to write; default: RUN/trace.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's timeline of generation, training and transfers for ui.perfetto.dev or chrome://tracing."""
    from baton.files import check_output, write_whole
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
