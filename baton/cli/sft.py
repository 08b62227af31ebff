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
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import WarmStart

    loaded = load_recipe(WarmStart, recipe, overrides or ())
    from baton.run.sft import warm_start
    from baton.views.terminal.progress import SftProgress
    from baton.views.terminal.report import print_warm_start

    out.ends_when_closed = False
    console = err if as_json else out
    with SftProgress(console, loaded.sft.steps) as observer:
        result = warm_start(loaded, observer, overwrite=overwrite)
    print_warm_start(console, result, loaded.run.path)
    if as_json:
        print_json(result)
