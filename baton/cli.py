"""The `baton` command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

# before torch is imported. A thread that waits spins for some microseconds, then sleeps: sleeping at once (`passive`)
# makes a train step on two threads twice as long, and spinning on would starve the engines' processes
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import msgspec
import typer
from rich.console import Console

import baton
from baton.child_commands import engine, rank
from baton.cluster_command import cluster_app
from baton.errors import BatonError, UserError
from baton.plan_command import plan as plan_command
from baton.plan_command import profile
from baton.simulate_command import simulate
from baton.swarm_commands import relay, status, worker
from baton.token_command import token_app
from baton.trace_command import trace
from baton.train_command import run_training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Reinforcement learning of language models on whatever hardware you have. Begin with: "
    "[bold]baton train recipes/quickstart.toml[/bold]",
)
out = Console()
err = Console(stderr=True)

RecipePath = Annotated[Path, typer.Argument(help="TOML file; recipes/ holds some to begin with.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as trainer.lr=3e-6 run.seed=7.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text for people.")]


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2, another failure is 1."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        err.print(f"[bold red]error:[/bold red] {_escaped(error)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except BatonError as error:
        err.print(f"[bold red]{type(error).__name__}:[/bold red] {_escaped(error)}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(baton.__version__, highlight=False)
        raise typer.Exit


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's latest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin again, removing a run of this name.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print what it resolves to and needs; start nothing.")
    ] = False,
    serve: Annotated[
        str | None, typer.Option("--serve", metavar="HOST:PORT", help="Let workers from elsewhere join here.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Generate in so many worker processes on this machine.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve beyond this machine without TLS: all can be read on the way.")
    ] = False,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="With --ray: the plan to carry out, as baton plan --out wrote it.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="Ray cluster to place it on: HOST:PORT, or auto.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model with reinforcement learning, as a recipe says.

    With --plan and --ray trainer ranks and workers are placed on a cluster and looked after; this machine has the hub.
    Writes runs/NAME/ with metrics, every trajectory and checkpoints; ends with a report. Ctrl-C finishes the step,
    writes a checkpoint and stops: --resume goes on from there.
    """
    from baton.config import Recipe, load_recipe

    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: go on with the run, or begin it again")
    if (plan is None) != (ray is None):
        raise UserError("--plan and --ray belong together: what to place where, and on which cluster")
    of_swarm = {"serve": serve, "workers": workers, "insecure": insecure or None}
    given = [f"swarm.{key}={json.dumps(value)}" for key, value in of_swarm.items() if value is not None]

    def load(more: Sequence[str]) -> Recipe:
        return load_recipe(Recipe, recipe, [*given, *(overrides or ()), *more])

    if dry_run:
        _print_dry_run(load(()), as_json)
        return

    where = None if plan is None or ray is None else (plan, ray)
    run_training(load, where, resume=resume, overwrite=overwrite, as_json=as_json)


@app.command()
def sft(recipe: RecipePath, overrides: Overrides = None, as_json: Json = False) -> None:
    """Fine-tune a model on demonstrations, or make one from nothing: a warm start for reinforcement learning.

    The demonstrations are generated ([demonstrations]) or a JSONL file with prompt and completion (data = "...").
    """
    from baton.config import WarmStart, load_recipe

    loaded = load_recipe(WarmStart, recipe, overrides or ())
    from baton.warmstart import warm_start

    result = warm_start(loaded, err if as_json else out)
    if as_json:
        _print_json(result)


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
    from baton.build import evaluate_model
    from baton.report import print_evaluations

    results = evaluate_model(
        model, recipe, num_prompts=num_prompts, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k
    )
    if as_json:
        _print_json(results)
    else:
        print_evaluations(out, results)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run's directory, such as runs/quickstart.")],
    step: Annotated[int | None, typer.Option("--step", help="Train step; the default is the last one.")] = None,
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
    from baton.show import ORDERS, print_trajectories, read_trajectories

    chosen = [name for name, is_on in zip(ORDERS, (best, worst, longest), strict=True) if is_on]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other: give one order")
    order = chosen[0] if chosen else None
    found = read_trajectories(run, step, group=group, task=task, is_correct=correct, order=order, limit=limit)
    if as_json:
        _print_json([reading.shown for reading in found])
    else:
        print_trajectories(out, found)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's directory, such as runs/quickstart.")],
    html: Annotated[bool, typer.Option("--html", help="Write a page with curves and examples.")] = False,
    page: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="Where the page goes; the default is RUN/report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a run achieved so far, in numbers or as one self-contained HTML page."""
    from baton.report import print_report, summarise
    from baton.runs import RunDirectory

    if page is not None and not html:
        raise UserError(f"{page} would be the place of a page: ask for one with --html")
    opened = RunDirectory.open(run)
    if html:
        from baton.report.page import write_page

        path = page or run / "report.html"
        write_page(opened, path)
        if as_json:
            _print_json({"page": str(path)})
        else:
            out.print(f"the page: {path}", highlight=False, markup=False, soft_wrap=True)
    elif as_json:
        _print_json(summarise(opened))
    else:
        print_report(out, summarise(opened))


@app.command()
def keys(
    section: Annotated[str | None, typer.Argument(help="Only this section, such as rollout.")] = None,
    as_json: Json = False,
) -> None:
    """List every key of a recipe with its default and meaning."""
    from baton.keys import print_keys, recipe_keys

    found = recipe_keys(section)
    if as_json:
        _print_json(found)
    else:
        print_keys(out, found)


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="Only this task, with its parameters.")] = None,
    as_json: Json = False,
) -> None:
    """List the tasks that come with reasoning-gym, each with an example."""
    from baton.tasks.listing import list_tasks, print_tasks

    listed = list_tasks(name)
    if as_json:
        _print_json(listed)
    else:
        print_tasks(out, listed)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(help="Only this one, with the value of every key.")] = None,
    as_json: Json = False,
) -> None:
    """List the algorithms that a recipe may name, with their papers and what each sets."""
    from baton.algorithms import list_algorithms, print_algorithms

    found = list_algorithms(name)
    if as_json:
        _print_json(found)
    else:
        print_algorithms(out, found)


bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine, with a recipe's model and settings.")
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
    from baton.bench.printed import print_bench
    from baton.bench.start import bench_rollout
    from baton.config import Recipe, load_recipe

    wanted = load_recipe(Recipe, recipe, overrides or [])
    names = [mode.strip() for mode in modes.split(",") if mode.strip()]
    result = bench_rollout(wanted, names, tail=tail, between=between, within=within, steps=steps, flat=flat)
    if as_json:
        _print_json(result)
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
app.command(hidden=True)(engine)
app.command(hidden=True)(rank)


def _print_dry_run(recipe: Any, as_json: bool) -> None:
    from baton.footprint import footprint
    from baton.report import print_dry_run

    needs = footprint(recipe)
    if as_json:
        _print_json({"recipe": recipe.model_dump(mode="json"), "needs": msgspec.to_builtins(needs)})
    else:
        print_dry_run(out, recipe, needs)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def _escaped(error: BaseException) -> str:
    return str(error).replace("[", r"\[")
