"""The commands that train (`baton train`, `baton sft`), and `baton preview`, which samples before training."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from baton.cli.options import Json, Overrides, Overwrite, RecipePath
from baton.console import err, out, print_json, say
from baton.errors import UserError
from baton.stop import Stopped, StopRequest

if TYPE_CHECKING:
    from baton.api import Start
    from baton.recipe.recipe import Recipe


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's latest checkpoint.")] = False,
    overwrite: Overwrite = False,
    skip_batch: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", min=1, help="With --resume: discard the recorded batch of this step and generate another."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check recipe, data, model and memory without starting the run.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="With --dry-run: print the resolved recipe.")] = False,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Listen on this address for workers on other machines (`baton worker`)."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Number of worker processes to start on this machine; they generate.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without TLS; the traffic can be intercepted.")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan, written by `baton plan --out`: executed with --ray, otherwise compared with the run."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to run on: HOST:PORT or auto.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model with reinforcement learning, as a recipe describes.

    Writes metrics, all trajectories and checkpoints to runs/NAME/, and prints a report at the end. Ctrl-C or SIGTERM
    stops the run: it completes a train step that is running and writes a checkpoint, from which --resume continues.
    With --plan and --ray, trainer ranks and workers run on the Ray cluster, and this machine runs the hub. With --plan
    alone, the report compares the run with the plan's predictions.
    """
    from baton.recipe.load import key_and_value, load_recipe
    from baton.recipe.recipe import Recipe

    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: either continue the run, or replace it")
    if skip_batch is not None and not resume:
        raise UserError("--skip-batch needs --resume: it discards a recorded batch of an existing run")
    if plan is None and ray is not None:
        raise UserError("--ray needs --plan: give the plan to execute, written by `baton plan --out`")
    options = {"swarm.serve": serve, "swarm.workers": workers, "swarm.insecure": insecure or None}
    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    for key, value in map(key_and_value, overrides or ()):
        option = options.get(key)
        if option is not None and option != value:
            name = key.partition(".")[2]
            raise UserError(f"{key}={value} contradicts --{name}, which sets {json.dumps(option)}; remove one of them")

    def load(more: Sequence[str]) -> Recipe:
        return load_recipe(Recipe, recipe, [*given, *(overrides or ()), *more])

    loaded = load(())
    console = err if as_json else out
    planned = None
    if plan is not None:
        from baton.cluster.plan_check import check_plan, check_reward_places
        from baton.specs.plan import read_plan

        planned = read_plan(plan)
        if ray is None:
            console.print(f"{plan} is not executed without --ray; the report compares its predictions with the run")
        else:
            check_reward_places(planned, loaded, plan)
        if ray is None or dry_run:
            for note in check_plan(planned, loaded, plan):
                console.print(note)
    if dry_run:
        _dry_run(loaded, is_here=ray is None, keys=keys, as_json=as_json)
        return
    if skip_batch is not None:
        from baton.run.resume import skip_batch as discard

        discard(loaded.run.path, skip_batch, console.print)
    start: Start
    if plan is not None and ray is not None:
        from baton.cluster.ray.run import RayRun, train_on_ray

        start = partial(train_on_ray, RayRun(load, plan, ray, resume, overwrite))
    else:
        from baton.api import predictions_for
        from baton.run.assemble import train_here

        predictions = predictions_for(loaded, planned, str(plan))
        start = partial(train_here, loaded, resume=resume, overwrite=overwrite, predictions=predictions)
    _run(start, loaded, as_json)


def _run(start: Start, recipe: Recipe, as_json: bool) -> None:
    """Run until the run is complete or a signal arrives, and print the report."""
    from baton.api import execute
    from baton.records.run_lock import RunLock
    from baton.views.terminal.report import print_report

    out.ends_when_closed = False
    stop = StopRequest(say)
    console = err if as_json else out
    try:
        report = execute(start, stop, console, recipe)
    except Stopped:
        console.print("stopped before the first step; to start again, add --resume to the same command")
        raise typer.Exit(128 + (stop.signal or signal.SIGINT)) from None
    if as_json:
        print_json(report)
    else:
        print_report(out, report)
    if RunLock.status(recipe.run.path) != "finished":
        step = f"step {report.steps} of {report.num_steps}"
        console.print(f"stopped after {step}; to continue, add --resume to the same command")
        # with the exit code 143, a supervisor restarts the run
        raise typer.Exit(128 + signal.SIGTERM if stop.signal == signal.SIGTERM else 0)


def _dry_run(recipe: Recipe, *, is_here: bool, keys: bool, as_json: bool) -> None:
    from baton.run.dry_run import footprint
    from baton.views.terminal.report import print_dry_run

    needs = footprint(recipe, is_here=is_here)
    if as_json:
        print_json({"recipe": recipe.model_dump(mode="json"), "needs": msgspec.to_builtins(needs)})
    else:
        print_dry_run(out, recipe, needs, keys=keys)


def sft(recipe: RecipePath, overrides: Overrides = None, overwrite: Overwrite = False, as_json: Json = False) -> None:
    """Fine-tune a model on demonstrations, or train a new model from scratch, before reinforcement learning.

    The demonstrations are generated from tasks ([demonstrations]), or read from a JSONL file with prompt and completion
    in each line (data = "...").
    """
    from baton.sft import sft as warm_start

    out.ends_when_closed = False
    report = warm_start(recipe, overrides or (), overwrite=overwrite, console=err if as_json else out)
    if as_json:
        print_json(report)


def preview(
    recipe: RecipePath,
    overrides: Overrides = None,
    num_prompts: Annotated[
        int, typer.Option("-n", "--num-prompts", min=1, help="Number of prompts; each has four responses.")
    ] = 4,
    as_json: Json = False,
) -> None:
    """Sample and score a few responses before any training, and report problems.

    Problems are printed as warnings. Warnings do not change the exit code, because a few responses cannot prove a
    problem. With --json, the output has the list `warnings` for scripts.
    """
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.run.preview import preview as make_preview
    from baton.views.terminal.trajectories import print_preview

    found = make_preview(load_recipe(Recipe, recipe, overrides or ()), num_prompts)
    if as_json:
        samples = [reading.shown for reading in found.responses]
        print_json({"samples": samples, "findings": found.findings, "warnings": found.warnings})
    else:
        print_preview(out, found)
