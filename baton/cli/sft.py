"""The command `baton sft`: run a supervised warm start."""

from __future__ import annotations

from baton.cli.options import Json, Overrides, Overwrite, RecipePath
from baton.console import err, out, print_json


def sft(
    recipe: RecipePath,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on demonstrations, or train a new model from scratch, before reinforcement learning.

    The demonstrations are generated from tasks ([demonstrations]), or read from a JSONL file with prompt and completion
    in each line (data = "...").
    """
    from baton.sft import sft as warm_start

    out.ends_when_closed = False
    report = warm_start(recipe, overrides or (), overwrite=overwrite, console=err if as_json else out)
    if as_json:
        print_json(report)
