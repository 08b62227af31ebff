"""Part of the Python API: `baton.sft.sft` runs a supervised warm start, as the command `baton sft` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.console import Console, out
from baton.recipe.load import load_recipe
from baton.recipe.recipe import WarmStart
from baton.views.terminal.progress import SftProgress
from baton.views.terminal.report import print_warm_start

if TYPE_CHECKING:
    from baton.run.sft import WarmStartReport


def sft(
    recipe: str | Path,
    config: Mapping[str, Any] | Sequence[str] = (),
    *,
    overwrite: bool = False,
    console: Console = out,
) -> WarmStartReport:
    """Fine-tune a model on demonstrations, or train a new model, and return losses and held-out evaluations.

    Prints progress. The model is written to the recipe's `output`.

    Args:
        recipe: recipe file of a warm start, or the name of a shipped recipe.
        config: keys of the recipe to change, such as `{"sft.steps": 100}`.
        overwrite: whether an existing run and output are replaced.
        console: console on which progress is printed.

    Raises UserError for an invalid recipe or data, before anything is written.
    """
    loaded = load_recipe(WarmStart, Path(recipe), config)
    from baton.run.sft import warm_start

    with SftProgress(console, loaded.sft.steps) as observer:
        report = warm_start(loaded, observer, overwrite=overwrite)
    print_warm_start(console, report, loaded.run.path)
    return report
