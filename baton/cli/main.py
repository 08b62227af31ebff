"""The `baton` command."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

# before torch is imported. A thread that waits spins for some microseconds, then sleeps: sleeping at once (`passive`)
# makes a train step on two threads twice as long, and spinning on would starve the engines' processes
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import typer
from rich.text import Text

import baton
from baton.cli.cluster import cluster_app
from baton.cli.options import Commands, Json, Overrides, RecipePath, RunPath
from baton.cli.plan import plan as plan_command
from baton.cli.plan import profile
from baton.cli.simulate import simulate
from baton.cli.swarm import relay, status, worker
from baton.cli.token import token_app
from baton.cli.trace import trace
from baton.cli.train import train
from baton.console import LogFormatter, err, out, print_json
from baton.errors import BatonError, UserError
from baton.files import STORAGE_ERRORS

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes the brackets in "[rollout]" for markup, and drops them
    help="Reinforcement learning of language models on whatever hardware you have. Begin with: baton train "
    "recipes/quickstart.toml",
)
app.command()(train)


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2, another failure is 1."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.getLogger("baton").addHandler(handler)
    try:
        app(standalone_mode=True)
    except UserError as error:
        _fail("error", error, 2)
    except BatonError as error:
        _fail(type(error).__name__, error, 1)
    except Exception as error:  # noqa: BLE001  # an error that nobody expected may quote text from outside too
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            _fail("StorageFault", error, 1)
        err.print("".join(traceback.format_exception(error)), end="", soft_wrap=True)
        sys.exit(1)


def _fail(name: str, error: Exception, code: int) -> NoReturn:
    err.print(Text.assemble((f"{name}:", "bold red"), f" {error}"), soft_wrap=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(baton.__version__)
        raise typer.Exit


@app.command()
def sft(
    recipe: RecipePath,
    overrides: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin again, removing a run of this name and its output.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on demonstrations, or make one from nothing: a warm start for reinforcement learning.

    The demonstrations are generated ([demonstrations]) or a JSONL file with prompt and completion (data = "...").
    """
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import WarmStart

    loaded = load_recipe(WarmStart, recipe, overrides or ())
    from baton.run.sft import warm_start
    from baton.views.terminal.report import print_evaluations

    out.ends_when_closed = False
    console = err if as_json else out
    result = warm_start(loaded, console, overwrite=overwrite)
    if result.evaluations:
        print_evaluations(console, result.evaluations)
    console.print(f"the model: {result.output}", soft_wrap=True)
    console.print(f"the run: {loaded.run.path}", soft_wrap=True)
    if as_json:
        print_json(result)


@app.command(name="eval")
def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A run's directory (its latest checkpoint), a checkpoint, or any model directory.")
    ],
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Recipe with tasks and answer format; the default is the run's own.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("-n", "--num-prompts", min=1, help="Distinct held-out prompts.")
    ] = None,
    samples: Annotated[int, typer.Option("-k", "--samples", min=1, help="Responses per prompt: k of pass@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k likeliest tokens; 0 takes all.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure a checkpoint's accuracy and pass@k on held-out prompts, with 95 % intervals."""
    from baton.run.assemble import evaluate_model
    from baton.views.terminal.report import print_evaluations

    results = evaluate_model(
        model, recipe, num_prompts=num_prompts, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k
    )
    if as_json:
        print_json(results)
    else:
        print_evaluations(out, results)


@app.command()
def show(
    run: RunPath,
    step: Annotated[int | None, typer.Option("--step", help="Train step; the default is the last one.")] = None,
    skipped: Annotated[
        bool, typer.Option("--skipped", help="The batch of the step that train --skip-batch left out.")
    ] = False,
    group: Annotated[int | None, typer.Option("--group", help="Only the group of this id.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Longest response first.")] = False,
    task: Annotated[str | None, typer.Option("--task", help="Only trajectories of the task of this name.")] = None,
    correct: Annotated[
        bool | None, typer.Option("--correct/--wrong", help="Only correct ones, or only wrong ones.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many trajectories.")] = 8,
    as_json: Json = False,
) -> None:
    """Read the trajectories of a train step: prompt, response, answer, reward."""
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


@app.command()
def report(
    run: RunPath,
    html: Annotated[bool, typer.Option("--html", help="Write a page with curves and examples.")] = False,
    page: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="Where the page goes; the default is RUN/report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a run achieved so far, in numbers or as one self-contained HTML page."""
    from baton.records.run_directory import RunDirectory
    from baton.views.summary import summarise
    from baton.views.terminal.report import print_report

    if page is not None and not html:
        raise UserError(f"{page} would be the place of a page: ask for one with --html")
    opened = RunDirectory.open(run)
    if html:
        from baton.views.pages.report import write_page

        path = page or run / "report.html"
        write_page(opened, path)
        if as_json:
            print_json({"page": str(path)})
        else:
            out.print(f"the page: {path}", soft_wrap=True)
    elif as_json:
        print_json(summarise(opened))
    else:
        print_report(out, summarise(opened))


@app.command()
def keys(
    section: Annotated[str | None, typer.Argument(help="Only this section, such as rollout.")] = None,
    as_json: Json = False,
) -> None:
    """List every key of a recipe with its default and meaning."""
    from baton.recipe.keys import recipe_keys
    from baton.views.terminal.keys import print_keys

    found = recipe_keys(section)
    if as_json:
        print_json(found)
    else:
        print_keys(out, found)


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="Only this task, with its parameters.")] = None,
    as_json: Json = False,
) -> None:
    """List the tasks that come with reasoning-gym, each with an example."""
    from baton.tasks.listing import list_tasks
    from baton.views.terminal.tasks import print_tasks

    listed = list_tasks(name)
    if as_json:
        print_json(listed)
    else:
        print_tasks(out, listed)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Only this one, with the value of every key.")] = None,
    as_json: Json = False,
) -> None:
    """List the algorithms that a recipe may name, with their papers and what each sets."""
    from baton.recipe.presets import list_algorithms
    from baton.views.terminal.algorithms import print_algorithms

    found = list_algorithms(name)
    if as_json:
        print_json(found)
    else:
        print_algorithms(out, found)


bench_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Measure this machine, with a recipe's model and settings."
)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def _bench() -> None:
    """A group of commands, though it holds one."""


@bench_app.command("rollout")
def rollout(
    recipe: Annotated[Path, typer.Option("--recipe", help="Whose model, engine, tasks and [rollout] are measured.")],
    modes: Annotated[str, typer.Option(help="Modes to compare, with commas between.")] = "sync,partial,async",
    tail: Annotated[float, typer.Option(min=1.5, help="Longest response ÷ mean; rollout.max_new_tokens is it.")] = 6.0,
    between: Annotated[float, typer.Option(min=0, help="Spread of the log length between groups.")] = 0.6,
    within: Annotated[float, typer.Option(min=0, help="Spread of the log length within a group.")] = 0.6,
    steps: Annotated[int, typer.Option(min=1, help="Batches of each mode that are counted.")] = 12,
    flat: Annotated[
        bool, typer.Option("--flat", help="Not on the engine, but where a step's time does not depend on its width.")
    ] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Compare the modes of [rollout] on this machine: responses of scripted lengths, the modes taking turns."""
    from baton.profile.bench_recipe import bench_rollout
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.views.terminal.bench import print_bench

    wanted = load_recipe(Recipe, recipe, overrides or [])
    names = [mode.strip() for mode in modes.split(",") if mode.strip()]
    result = bench_rollout(wanted, names, tail=tail, between=between, within=within, steps=steps, flat=flat)
    if as_json:
        print_json(result)
    else:
        print_bench(out, result)


app.command(name="plan")(plan_command)
app.command()(profile)
app.command()(simulate)
app.command()(trace)
app.command()(worker)
app.command()(relay)
app.command()(status)
app.add_typer(token_app, name="token")
app.add_typer(cluster_app, name="cluster")


@app.command(hidden=True)
def engine(descriptor: Annotated[int, typer.Argument(help="File descriptor of the socket to the parent.")]) -> None:
    """Serve a parent process as its engine; started by `baton train`, not by people."""
    from baton.rollout.processes.engine_process import serve

    serve(descriptor)


@app.command(hidden=True)
def rank(descriptor: Annotated[int, typer.Argument(help="File descriptor of the socket to the parent.")]) -> None:
    """Serve a parent process as a rank of its trainer; started by `baton train`, not by people."""
    from baton.trainer.parallel.rank_process import serve

    serve(descriptor)
