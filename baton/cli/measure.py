"""The commands that measure: `baton eval` a checkpoint, `baton profile` and the group `baton bench` this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, Overrides, RecipePath, command_group, show
from baton.console import err, out, print_json


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="A run's directory (its latest checkpoint is used), a checkpoint or a model directory."),
    ],
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe with tasks and answer format; default: the run's recipe.")
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-prompts",
            min=1,
            help="Number of held-out prompts, or maximum number of prompts of each test set.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "-k",
            "--samples",
            min=1,
            help="Responses per prompt (k of pass@k); default: the number that the test set states, or 1.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Cumulative probability for nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k most likely tokens; 0 disables.")] = 0,
    write_to: Annotated[
        Path | None,
        typer.Option("--out", help="Write every response with prompt, answer and reward to this file, as JSON lines."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a checkpoint's accuracy, pass@k and reward on test sets or held-out prompts, with 95 % intervals."""
    from baton.files import check_output
    from baton.run.assemble import evaluate_recipe, evaluated_model
    from baton.types import SamplingParams
    from baton.views.terminal.report import print_evaluations

    if write_to is not None:
        check_output(write_to)
    tasks, model_path = evaluated_model(model, recipe)
    sampling = SamplingParams(0, temperature, top_p, top_k)
    results = evaluate_recipe(tasks, model_path, sampling, num_prompts=num_prompts, samples=samples, write_to=write_to)
    show(results, print_evaluations, as_json=as_json)


def profile(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU type in the catalogue; default: the type of this device.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Train steps of the run that is measured.")] = 16,
    write_to: Annotated[Path, typer.Option("--out", help="Calibration file to write.")] = Path("calibration.toml"),
    as_json: Json = False,
    as_load: Annotated[
        bool, typer.Option("--as-load", hidden=True, help="Generate until killed, as background load of a measurement.")
    ] = False,
) -> None:
    """Measure decoding, prefill, training and a short run on this device, and write a calibration file.

    Uses the recipe's model, engine and trainer; takes about a minute for the quickstart. The calibration file is used
    by `baton plan --calibration` and by the predictions of a run.
    """
    from baton.files import check_output
    from baton.profile.engine import keep_busy
    from baton.profile.measure import profile as measure
    from baton.profile.measure import write_calibration
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe

    loaded = load_recipe(Recipe, recipe, overrides or ())
    if as_load:
        keep_busy(loaded)

    check_output(write_to)
    say = (err if as_json else out).print
    companion = [sys.executable, "-m", "baton", "profile", str(recipe), *(overrides or ()), "--as-load"]
    found = measure(loaded, gpu, say, companion, num_steps=steps)
    write_calibration(found, write_to)
    if as_json:
        print_json(found)
        return
    for phase in ("decode", "prefill", "train"):
        errors = [abs(p.predicted_s / p.seconds - 1) for p in found.points if p.phase == phase]
        say(f"{phase}: the cost model is within {max(errors):.0%} of {len(errors)} measurements")
    say(f"written: {write_to}; use it with baton plan --calibration {write_to}")


bench_app = command_group("Measure this machine with a recipe's model and settings.")


@bench_app.command("rollout")
def rollout(
    recipe: RecipePath,
    overrides: Overrides = None,
    modes: Annotated[str, typer.Option(help="Modes to compare, separated by commas.")] = "sync,partial,async",
    tail: Annotated[float, typer.Option(min=1.5, help="Ratio of the longest response to the mean response.")] = 6.0,
    between: Annotated[float, typer.Option(min=0, help="Standard deviation of log(length) between groups.")] = 0.6,
    within: Annotated[float, typer.Option(min=0, help="Standard deviation of log(length) within a group.")] = 0.6,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured batches of each mode.")] = 12,
    flat: Annotated[
        bool, typer.Option("--flat", help="Run no engine; assume that step time is independent of batch size.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare the throughput of the rollout modes on this machine, with random response lengths."""
    from baton.profile.bench_recipe import bench_rollout
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.views.terminal.bench import print_bench

    loaded = load_recipe(Recipe, recipe, overrides or ())
    names = [mode.strip() for mode in modes.split(",") if mode.strip()]
    result = bench_rollout(loaded, names, tail=tail, between=between, within=within, steps=steps, flat=flat)
    show(result, print_bench, as_json=as_json)
