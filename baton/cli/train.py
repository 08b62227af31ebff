"""The command `baton train`: a run before the terminal, and how it is asked to stop."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from baton.cli.options import Json, Overrides, RecipePath
from baton.console import err, out, print_json, say
from baton.errors import UserError
from baton.stop import Stopped, StopRequest

Placed = Annotated[
    Path | None, typer.Option("--plan", help="With --ray: the plan to carry out, as baton plan --out wrote it.")
]
Cluster = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="Ray cluster to place it on: HOST:PORT, or auto.")
]


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's latest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin again, removing a run of this name.")] = False,
    skip_batch: Annotated[
        int | None,
        typer.Option("--skip-batch", metavar="STEP", min=1, help="With --resume: leave a step's recorded batch out."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, data, model and memory, print what it needs, end.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="With --dry-run: print all keys that it resolves to.")] = False,
    serve: Annotated[
        str | None, typer.Option("--serve", metavar="HOST:PORT", help="Let workers from elsewhere join here.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Generate in so many worker processes on this machine.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve beyond this machine without TLS: all can be read on the way.")
    ] = False,
    plan: Placed = None,
    ray: Cluster = None,
    as_json: Json = False,
) -> None:
    """Train a model with reinforcement learning, as a recipe says.

    With --plan and --ray trainer ranks and workers are placed on a cluster and looked after; this machine has the hub.
    Writes runs/NAME/ with metrics, every trajectory and checkpoints; ends with a report. Ctrl-C or SIGTERM writes a
    checkpoint and stops, at once or, in a train step, after it: --resume goes on from there.
    """
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe

    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other: go on with the run, or begin it again")
    if skip_batch is not None and not resume:
        raise UserError("--skip-batch leaves out a recorded batch of a run that goes on: give --resume with it")
    if (plan is None) != (ray is None):
        raise UserError("--plan and --ray belong together: what to place where, and on which cluster")
    of_swarm = {"serve": serve, "workers": workers, "insecure": insecure or None}
    given = [f"swarm.{key}={json.dumps(value)}" for key, value in of_swarm.items() if value is not None]

    def load(more: Sequence[str]) -> Recipe:
        return load_recipe(Recipe, recipe, [*given, *(overrides or ()), *more])

    loaded = load(())
    if dry_run:
        _print_dry_run(loaded, is_here=plan is None, keys=keys, as_json=as_json)
        return

    def run(observer: Any, stop: StopRequest) -> Any:
        if skip_batch is not None:
            from baton.run.resume import skip_batch as leave_out

            leave_out(loaded.run.path, skip_batch, observer.said)
        if plan is not None and ray is not None:
            from baton.cluster.ray.run import RayRun, train_on_ray

            return train_on_ray(RayRun(load, plan, ray, resume, overwrite), observer, stop)
        with stop.interrupting():
            from baton.run.assemble import build_loop

            loop = build_loop(loaded, observer, resume=resume, overwrite=overwrite, stop=stop)
        try:
            loop.train()
        finally:
            loop.close()
        return loop

    _train(run, loaded.run.steps, as_json)


def _train(run: Callable[[Any, StopRequest], Any], steps: int, as_json: bool) -> None:
    """Have a loop run before the terminal, and report on it."""
    from baton.views.summary import summarise
    from baton.views.terminal.progress import TerminalObserver
    from baton.views.terminal.report import print_report

    out.ends_when_closed = False
    stop = StopRequest(say)
    console = err if as_json else out
    try:
        with TerminalObserver(console, steps) as observer, stop:
            loop = run(observer, stop)
    except Stopped:
        console.print("stopped before the first step; begin again with the same command and --resume")
        raise typer.Exit(_exit_code(stop)) from None
    report = summarise(loop.run)
    loop.run.write_report(msgspec.to_builtins(report))
    if as_json:
        print_json(report)
    else:
        print_report(out, report)
    if not loop.is_complete:
        console.print(
            f"stopped after step {loop.state.step} of {steps}; go on with the same command and --resume",
        )
        raise typer.Exit(_exit_code(stop))


def _exit_code(stop: StopRequest) -> int:
    """Exit code that tells the supervisor that sent SIGTERM that the run is not complete."""
    return 128 + signal.SIGTERM if stop.signal == signal.SIGTERM else 0


def _print_dry_run(recipe: Any, *, is_here: bool, keys: bool, as_json: bool) -> None:
    from baton.run.dry_run import footprint
    from baton.views.terminal.report import print_dry_run

    needs = footprint(recipe, is_here=is_here)
    if as_json:
        print_json({"recipe": recipe.model_dump(mode="json"), "needs": msgspec.to_builtins(needs)})
    else:
        print_dry_run(out, recipe, needs, keys=keys)
