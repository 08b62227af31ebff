"""The command `baton eval`: measure the accuracy of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import Json, show


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="A run's directory (its latest checkpoint is used), a checkpoint or a model directory."),
    ],
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Recipe with tasks and answer format; default: the run's recipe.")
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
